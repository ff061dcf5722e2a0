"""`swarm up`: the service itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import anyio
import typer
import uvloop

from backends.managed import ManagedEngineError
from orchestrator.broker.embedded import EmbeddedValkeyError
from orchestrator.cli.common import ConfigOption, fail, load
from orchestrator.config import Config
from orchestrator.logs import logging_to
from orchestrator.service import ServiceError, run_service

STARTUP_ERRORS = (ServiceError, EmbeddedValkeyError, ManagedEngineError, OSError)


async def _serve(config: Config, ready: Callable[[int], None]) -> None:
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            ready(await tasks.start(run_service, config))
            async for _ in signals:
                tasks.cancel_scope.cancel()
                return


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def up(
        config: ConfigOption = Path("config.yaml"),
        verbose: Annotated[
            bool, typer.Option("--verbose", "-v", help="Log more, also parts of prompts in errors.")
        ] = False,
    ) -> None:
        """Start the service and serve until interrupted."""
        settings = load(config)

        def ready(port: int) -> None:
            typer.echo(f"swarm is up: http://{settings.server.host}:{port}/v1")

        try:
            with logging_to(sys.stderr, verbose=verbose):
                uvloop.run(_serve(settings, ready))
        except* STARTUP_ERRORS as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            fail(str(error))
