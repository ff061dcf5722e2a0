"""`swarm config`: the configuration file, without starting anything."""

from __future__ import annotations

from pathlib import Path

import typer

from orchestrator.cli.common import ConfigOption, fail, load
from orchestrator.cli.figures import plural
from orchestrator.config import exposure_problem


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    group = typer.Typer(no_args_is_help=True, help="Look at the configuration.")
    app.add_typer(group, name="config")

    @group.callback()
    def _group() -> None:
        """Look at the configuration."""

    @group.command()
    def check(config: ConfigOption = Path("config.yaml")) -> None:
        """Say whether the file is valid; each mistake is one line on standard error, exit code 2."""
        settings = load(config)
        problem = exposure_problem(settings)
        if problem is not None:
            fail(f"{config}: {problem}")
        backends, agents = plural(len(settings.backends), "backend"), plural(len(settings.agents), "agent")
        typer.echo(f"{config} is valid: {backends}, {agents}")
