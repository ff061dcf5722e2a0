"""A turn's output log as the gateway reads it: through outages of the broker, until its last entry."""

from __future__ import annotations

import time

import anyio
import structlog
from redis.exceptions import RedisError

from orchestrator.broker import END, ERROR, Broker, Entry, TurnStream
from orchestrator.turns import FINAL_STATES, TurnState

RETRY_S = 0.2
# A broker that restarts and reads its append-only file is back well before this.
OUTAGE_BOUND_S = 60.0
# A turn that says nothing for so long may have said something that nobody heard.
SILENCE_CHECK_S = 10.0
# How often the log of a turn is read whose output is announced to another gateway.
UNHEARD_POLL_S = 0.5

_log = structlog.get_logger(__name__)


def _lost(message: str) -> Entry:
    return _error(503, message, "server_error", "turn_lost")


def _error(status: int, message: str, kind: str, code: str) -> Entry:
    return [ERROR, status, {"message": message, "type": kind, "param": None, "code": code}]


def _missing_end(state: TurnState, error: str | None) -> Entry:
    """The end of a turn whose owner recorded one but could not write it to the log."""
    if state is TurnState.CANCELLED:
        return _error(499, "the turn was cancelled", "cancelled", "cancelled")
    if state is TurnState.FAILED:
        return _error(500, error or "the turn failed", "server_error", "turn_failed")
    return _lost("this turn ended without an end of its output")


class Output:
    """The entries of one turn, in order, each once. `over` once the last one was handed out."""

    def __init__(self, broker: Broker, stream: TurnStream, pool: str, *, heard: bool = True) -> None:
        """`heard`: whether this gateway is the one that the turn's output is announced to."""
        self._broker = broker
        self._stream = stream
        self._pool = pool
        self._heard = heard
        self._failing_since: float | None = None
        self._checked_at = time.monotonic()
        self._ended_unseen = False
        self.over = False

    async def next(self, timeout_s: float | None = None) -> list[Entry]:
        """The next entries; an empty list when none came within `timeout_s`, or `SILENCE_CHECK_S`.

        A turn that can no longer end is given an error entry as its end: one whose record is gone, one that
        ended without an end in its log, or any after a long outage of the broker.
        """
        if timeout_s is None:
            timeout_s = SILENCE_CHECK_S
        try:
            entries = await self._stream.next(timeout_s if self._heard else min(timeout_s, UNHEARD_POLL_S))
            if not entries and time.monotonic() - self._checked_at >= SILENCE_CHECK_S:
                entries = await self._check()
            self._failing_since = None
        except (RedisError, OSError) as error:
            entries = await self._outage(error)
        if entries and entries[-1][0] in (END, ERROR):
            self.over = True
        return entries

    async def _check(self) -> list[Entry]:
        standing = await self._broker.standing(self._pool, self._stream.turn)
        self._checked_at = time.monotonic()
        if standing is None:
            return [_lost("the broker no longer knows this turn")]
        state, error = standing
        # The end is written to the log before the state, so a final state means that it is there by now.
        if state in FINAL_STATES:
            if self._ended_unseen:
                return [_missing_end(state, error)]
            self._ended_unseen = True
            self._stream.suspect()
        return []

    async def _outage(self, error: Exception) -> list[Entry]:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            _log.warning("output not readable; trying again", turn=self._stream.turn, error=str(error))
        elif now - self._failing_since > OUTAGE_BOUND_S:
            return [_lost("the broker does not answer")]
        self._stream.suspect()
        await anyio.sleep(RETRY_S)
        return []
