"""Output on its way to Redis: what all turns produced since the last flush goes in one call.

An idle outbox forwards at once. A busy one batches: all lanes' tokens of one decode step arrive within a
millisecond or two, so after a flush the next waits that long, unless something is to be said that a
client waits for: a turn's first token, that it started, paused, or ended. Entries are numbered, so a call
that is repeated after a broken connection appends nothing twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio

from orchestrator.broker import LogAppend
from orchestrator.dispatcher.turn_run import TurnRun

MAX_ENTRIES = 1_000
COALESCE_S = 0.002

_FIRST_ENTRIES = 2
_DELTA_HEAD = b'["d"'


class Outbox:
    """Collects entries of many turns and appends them together."""

    def __init__(self, append: Callable[[list[LogAppend]], Awaitable[list[int]]]) -> None:
        """`append` writes to Redis, repeating until it succeeds or the lease is lost."""
        self._append = append
        self._dirty: dict[str, TurnRun] = {}
        self._wake = anyio.Event()
        self._urgent = anyio.Event()

    def put(self, run: TurnRun) -> None:
        """The turn has new entries."""
        self._dirty[run.id] = run
        self._wake.set()
        entries = run.entries
        if len(entries) <= _FIRST_ENTRIES or not entries[-1].startswith(_DELTA_HEAD):
            self._urgent.set()

    async def settle(self, run: TurnRun) -> None:
        """Wait until all the turn's entries are in Redis."""
        while run.flushed < len(run.entries):
            run.settled = anyio.Event()
            self.put(run)
            await run.settled.wait()

    async def run(self) -> None:
        """Flush until cancelled."""
        flushed_at = 0.0
        while True:
            await self._wake.wait()
            await anyio.lowlevel.checkpoint()  # what this round of the loop has read still joins
            rest_s = flushed_at + COALESCE_S - time.monotonic()
            if rest_s > 0 and not self._urgent.is_set():
                with anyio.move_on_after(rest_s):
                    await self._urgent.wait()
            self._wake, self._urgent = anyio.Event(), anyio.Event()
            flushed_at = time.monotonic()
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
