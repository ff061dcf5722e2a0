"""The simulated engine as one object: its step loop, its faults and its HTTP application."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from starlette.types import ASGIApp

from backends.simulated.app import build_app
from backends.simulated.config import SimulatedConfig
from backends.simulated.faults import FaultBook
from backends.simulated.loop import EngineStats, StepLoop


class SimulatedEngine:
    """One engine. It generates only while `running()` is entered; `serve_simulated` does that itself."""

    def __init__(self, config: SimulatedConfig | None = None) -> None:
        self.config = config or SimulatedConfig()
        self.faults = FaultBook(self.config.faults)
        self._loop = StepLoop(self.config, self.faults)
        self.app: ASGIApp = build_app(self.config, self._loop, self.faults, self.running)
        """Runs the engine itself under an ASGI server that speaks the lifespan protocol."""

    def stats(self) -> EngineStats:
        """Counters since the start, and what is going on now."""
        return self._loop.stats()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Runs the step loop for the block. An error in the loop cancels the block; an error of the block
        comes out as it is."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._loop.run)
            try:
                yield
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
