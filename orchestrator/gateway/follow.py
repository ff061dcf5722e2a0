"""A turn's output log as the gateway reads it: through outages of the broker, until its last entry."""

from __future__ import annotations

from typing import Any

import anyio
import structlog
from redis.exceptions import RedisError

from orchestrator.broker import END, ERROR, Broker, Entry, TurnStream
from orchestrator.turns import FINAL_STATES

RETRY_S = 0.2
# A broker that restarts and reads its append-only file is back well before this.
OUTAGE_BOUND_S = 60.0
# How often a silent turn's record is looked at.
SILENCE_CHECK_S = 5.0

_log = structlog.get_logger(__name__)


def _lost(message: str) -> Entry:
    error = {"message": message, "type": "server_error", "param": None, "code": "turn_lost"}
    return [ERROR, 503, error]


class Output:
    """The entries of one turn, in order, each once. `over` once the last one was handed out."""

    def __init__(self, broker: Broker, stream: TurnStream, pool: str) -> None:
        self._broker = broker
        self._stream = stream
        self._pool = pool
        self._failing_since: float | None = None
        self._checked_at = anyio.current_time()
        self._ended_unseen = False
        self.over = False

    async def next(self, timeout_s: float) -> list[Entry]:
        """The next entries; an empty list when none came within about `timeout_s`.

        A turn that can no longer end is given an error entry as its end: one whose record is gone, one
        that ended without an end in its log, or any after a long outage of the broker.
        """
        try:
            entries = await self._stream.next(timeout_s)
            if not entries and anyio.current_time() - self._checked_at >= SILENCE_CHECK_S:
                entries = await self._check()
            self._failing_since = None
        except (RedisError, OSError) as error:
            entries = await self._outage(error)
        if entries and entries[-1][0] in (END, ERROR):
            self.over = True
        return entries

    async def _check(self) -> list[Any]:
        record = await self._broker.record(self._pool, self._stream.turn)
        self._checked_at = anyio.current_time()
        if record is None:
            return [_lost("the broker no longer knows this turn")]
        # The end is written to the log before the state, so a final state means that it is there by now.
        if record.state in FINAL_STATES:
            if self._ended_unseen:
                return [_lost("this turn ended without an end of its output")]
            self._ended_unseen = True
            self._stream.suspect()
        return []

    async def _outage(self, error: Exception) -> list[Entry]:
        now = anyio.current_time()
        if self._failing_since is None:
            self._failing_since = now
            _log.warning("output not readable; trying again", turn=self._stream.turn, error=str(error))
        elif now - self._failing_since > OUTAGE_BOUND_S:
            return [_lost("the broker does not answer")]
        self._stream.suspect()
        await anyio.sleep(RETRY_S)
        return []
