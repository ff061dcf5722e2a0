"""What the commands share: reading the configuration, and errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from orchestrator.config import Config, ConfigError, load_config

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The swarm's configuration file.")]


def fail(message: str, code: int = 2) -> NoReturn:
    """Say what is wrong on standard error and leave with `code`."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


def load(path: Path) -> Config:
    """Read the configuration; each mistake is one line, exit code 2."""
    try:
        return load_config(path)
    except ConfigError as error:
        fail(str(error))


def root_cause(error: BaseException) -> BaseException:
    """The first of the errors that a task group wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def writable_json(path: Path | None) -> None:
    """Find out before a long run that its result could not be written; exit code 2."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        fail(f"--json: {path} cannot be written: {error.strerror or error}")
