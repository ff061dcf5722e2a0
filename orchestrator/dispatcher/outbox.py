"""Output on its way to Redis: what all turns produced since the last flush goes in one call.

An idle outbox forwards at once; a busy one batches by itself, because everything that arrives while a
call is under way goes with the next. Entries are numbered, so a call that is repeated after a broken
connection appends nothing twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from orchestrator.broker import LogAppend
from orchestrator.dispatcher.turn_run import TurnRun

MAX_ENTRIES = 1_000


class Outbox:
    """Collects entries of many turns and appends them together."""

    def __init__(self, append: Callable[[list[LogAppend]], Awaitable[list[int]]]) -> None:
        """`append` writes to Redis, repeating until it succeeds or the lease is lost."""
        self._append = append
        self._dirty: dict[str, TurnRun] = {}
        self._wake = anyio.Event()

    def put(self, run: TurnRun) -> None:
        """The turn has new entries."""
        self._dirty[run.id] = run
        self._wake.set()

    async def settle(self, run: TurnRun) -> None:
        """Wait until all the turn's entries are in Redis."""
        while run.flushed < len(run.entries):
            run.settled = anyio.Event()
            self.put(run)
            await run.settled.wait()

    async def run(self) -> None:
        """Flush until cancelled."""
        while True:
            await self._wake.wait()
            await anyio.lowlevel.checkpoint()  # what this round of the loop has read still joins
            self._wake = anyio.Event()
            dirty, self._dirty = self._dirty, {}
            await self._flush(list(dirty.values()))

    async def _flush(self, runs: list[TurnRun]) -> None:
        appends = [
            LogAppend(run.id, run.channel, run.flushed, run.entries[run.flushed : run.flushed + MAX_ENTRIES])
            for run in runs
        ]
        for run, length in zip(runs, await self._append(appends), strict=True):
            run.flushed = length
            if length < len(run.entries):
                self.put(run)
            else:
                run.settled.set()
