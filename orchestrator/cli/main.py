"""The command line's root."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Annotated

import typer

from orchestrator import __version__
from orchestrator.cli import bench, config, demo, doctor, explain, key, plan, ps, simulate, trace, turns, up

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for group in (up, demo, ps, turns, explain, config, key, plan, simulate, doctor, trace, bench):
    group.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run a swarm of coding agents on one local engine; the one in front of you never waits."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="replace")
    app(prog_name="swarm")
