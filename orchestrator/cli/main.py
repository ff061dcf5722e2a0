"""The command line's root."""

from __future__ import annotations

import typer

from orchestrator.cli import up

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
up.add_to(app)


@app.callback()
def _root() -> None:
    """Run a swarm of coding agents on one local engine; the one in front of you never waits."""


def main() -> None:
    """Run the command line."""
    app()
