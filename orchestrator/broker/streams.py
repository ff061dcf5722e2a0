"""Reading output logs: one pub/sub connection a gateway process, gaps filled from the log by number.

A message may be lost (Redis restarted, the connection broke), so it is only a hint: each reader knows
the number of the entry it needs next and reads the log itself whenever a message does not start there
or none came for a while. A reader that falls behind keeps no backlog either: past `BACKLOG` entries
it drops what was pushed and returns to the log, of which it takes no more than that at a time. So what a
client costs that reads slowly, or not at all, is bounded, however long its turn's log is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from orchestrator.broker.broker import Broker
from orchestrator.broker.keys import gateway_channel

# The most entries of one turn in memory; over three seconds of a fast stream.
BACKLOG = 128
RECONNECT_S = 0.2

Entry = list[Any]

_log = structlog.get_logger(__name__)


class TurnStream:
    """The output of one turn, in order, each entry once."""

    def __init__(self, broker: Broker, pool: str, turn: str) -> None:
        """Starts at the log's first entry."""
        self._broker = broker
        self._pool = pool
        self.turn = turn
        self._next = 0
        self._pushed: deque[Entry] = deque()
        self._behind = False
        self._wake = anyio.Event()

    def push(self, start: int, entries: list[Entry]) -> None:
        """Take a message: entries from number `start` on."""
        have = self._next + len(self._pushed)
        if self._behind or start > have or len(self._pushed) + len(entries) > BACKLOG:
            self.suspect()
            return
        self._pushed.extend(entries[have - start :])
        self._wake.set()

    def suspect(self) -> None:
        """Something may have been missed: read the log next time."""
        self._behind = True
        self._pushed.clear()
        self._wake.set()

    async def next(self, timeout_s: float) -> list[Entry]:
        """The next entries, at most `BACKLOG`; an empty list when none came within `timeout_s`.

        Raises RedisError, OSError; call `suspect` then.
        """
        if not self._pushed and not self._behind:
            self._wake = anyio.Event()
            with anyio.move_on_after(timeout_s):
                await self._wake.wait()
        if self._behind or not self._pushed:
            self._behind = False
            raw = await self._broker.log(self._pool, self.turn, self._next, BACKLOG)
            if not self._pushed:
                self._pushed.extend(orjson.loads(line) for line in raw)
                # There may be more, which nobody will push again.
                self._behind = self._behind or len(raw) == BACKLOG
        entries = list(self._pushed)
        self._pushed.clear()
        self._next += len(entries)
        return entries


class OutputReader:
    """Hands each message on the gateway's channel to the stream it is for."""

    def __init__(self, broker: Broker, subscriber: Redis, gateway: str) -> None:
        """`subscriber` is a client without a socket timeout: it blocks for as long as nothing comes."""
        self._broker = broker
        self._subscriber = subscriber
        self._channel = gateway_channel(gateway)
        self._streams: dict[str, list[TurnStream]] = {}

    @asynccontextmanager
    async def open(self, pool: str, turn: str) -> AsyncIterator[TurnStream]:
        """Listen to one turn. Open before the turn is submitted, so that nothing is missed.

        One turn may have several readers, each of which gets all of it.
        """
        stream = TurnStream(self._broker, pool, turn)
        streams = self._streams.setdefault(turn, [])
        streams.append(stream)
        try:
            yield stream
        finally:
            streams.remove(stream)
            if not streams:
                del self._streams[turn]

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read the channel until cancelled; reconnects, and then lets every stream check its log."""
        started = False
        while True:
            try:
                async with self._subscriber.pubsub(ignore_subscribe_messages=False) as pubsub:
                    await pubsub.subscribe(self._channel)
                    async for message in pubsub.listen():
                        if message["type"] == "subscribe":
                            for streams in self._streams.values():
                                for stream in streams:
                                    stream.suspect()
                            if not started:
                                started = True
                                task_status.started()
                        elif message["type"] == "message":
                            self._hand_out(message["data"])
            except (RedisError, OSError) as error:
                _log.warning("output channel lost; reconnecting", error=str(error))
                await anyio.sleep(RECONNECT_S)

    def _hand_out(self, data: bytes) -> None:
        for turn, start, entries in orjson.loads(data):
            for stream in self._streams.get(turn, ()):
                stream.push(start, entries)
