"""What a dispatcher writes to the broker, under its lease and until it is written.

The books of one turn are written in order, under its lock. Redis may be away for a while: every script
is safe to repeat, so a call is repeated until it is answered or the lease is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
import structlog
from redis.exceptions import RedisError

from orchestrator.broker import Broker, Lease, LogAppend, timeline_entry
from orchestrator.dispatcher.outbox import Outbox
from orchestrator.dispatcher.turn_run import TurnRun
from orchestrator.turns import IllegalTransition, TurnState

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


async def persistently(call: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat a broker call until Redis answers."""
    pause_s = 0.05
    while True:
        try:
            return await call()
        except (RedisError, OSError) as error:
            _log.warning("broker unreachable; trying again", error=str(error), pause_s=pause_s)
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)


class Books:
    """Records, timelines and output logs of the turns that one lease owns. All methods raise Deposed."""

    def __init__(self, broker: Broker, lease: Lease) -> None:
        self._broker = broker
        self._lease = lease
        self._outbox = Outbox(self._append)
        self.put = self._outbox.put
        self.run = self._outbox.run

    async def _append(self, appends: list[LogAppend]) -> list[int]:
        return await persistently(lambda: self._broker.append(self._lease, appends))

    async def advance(
        self,
        run: TurnRun,
        state: TurnState,
        entry: bytes,
        fields: Mapping[str, str | int | float] | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> None:
        """Move a turn's record on; its transitions are written in the order of the calls."""

        def step() -> Awaitable[None]:
            return self._broker.advance(self._lease, run.id, state, entry, fields=fields, counters=counters)

        async with run.books:
            try:
                await persistently(step)
            except IllegalTransition as error:
                _log.warning("a turn's record disagrees", turn=run.id, error=str(error))
                await self._mend(run, state)
                try:
                    await persistently(step)
                except IllegalTransition:
                    _log.error("a turn's record cannot be mended", turn=run.id)

    async def _mend(self, run: TurnRun, target: TurnState) -> None:
        """Lead a record from where it is to where `target` may follow.

        A Redis that came back from its file has forgotten up to a second of what it had accepted, and a
        former owner may have been cut off between the log's end and the record's.
        """
        await persistently(lambda: self._broker.claim(self._lease, run.id))
        if target in (TurnState.PAUSED, TurnState.DONE):
            entry = timeline_entry("mended")
            with contextlib.suppress(IllegalTransition):
                await persistently(
                    lambda: self._broker.advance(self._lease, run.id, TurnState.RUNNING, entry)
                )

    async def close(
        self,
        run: TurnRun,
        state: TurnState,
        entry: bytes,
        fields: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Let all output reach Redis first: a log without its end would look like a crash."""
        await self._outbox.settle(run)
        totals: dict[str, str | int | float] = {
            "prompt_tokens": run.prompt_tokens,
            "tokens_generated": run.n_tokens,
            "tokens_reevaluated": run.reevaluated,
            "preemptions": run.preemptions,
        }
        await self.advance(run, state, entry, {**totals, **(fields or {})}, {f"turns_{state.value}": 1})

    async def note(
        self, run: TurnRun, state: TurnState, entry: bytes, fields: Mapping[str, str] | None = None
    ) -> None:
        """Write a line into the timeline of a turn that is in `state` and stays there."""
        async with run.books:
            await persistently(lambda: self._broker.note(self._lease, run.id, state, entry, fields))
