"""What the commands share: reading the configuration, errors in one line, logging."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
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


def set_up_logging(verbose: bool) -> None:
    """Log to standard error: readable on a terminal, JSON lines elsewhere."""
    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not terminal),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Log JSON lines to a file, this program's and its libraries': for commands that own the terminal.

    Raises OSError.
    """
    with path.open("w") as file:
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
            logger_factory=structlog.PrintLoggerFactory(file),
            cache_logger_on_first_use=False,
        )
        handler = logging.StreamHandler(file)
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
            structlog.reset_defaults()


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
