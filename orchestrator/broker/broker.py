"""The broker: a pool's queue, turn records, output logs, events and leases in Redis.

Every transition is one Lua script behind a typed method. A backend's dispatcher writes under a
:class:`Lease`: each script compares the lease's fencing value first, so a deposed owner's write
changes nothing and raises :class:`Deposed`. Works on Redis 6.2+ and Valkey; the same code serves the
embedded server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

import orjson
from redis.asyncio import Redis

from orchestrator.broker import keys as k
from orchestrator.broker.records import LISTED_FIELDS, TurnRecord, error_entry, request_fields, timeline_entry
from orchestrator.turns import FINAL_STATES, IllegalTransition, TurnRequest, TurnState, sources_of

_LUA = files("orchestrator.broker") / "lua"
STATE_TTL_MS = 5_000
SNAPSHOT_BATCH = 500
# To read more at once would hold up everybody's streams.
RECORDS_LOT = 50


class Deposed(Exception):
    """This dispatcher no longer owns its backend; another one does."""


class QueueFull(Exception):
    """The pool's queue holds as many turns as the policy allows."""


class DuplicateTurn(Exception):
    """A turn with this id exists already."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Ownership of one backend. `value` is its fencing number and owner, as Redis holds it."""

    pool: str
    backend: str
    value: str


@dataclass(frozen=True, slots=True)
class LogAppend:
    """Entries for one turn's output log; `start` is the number of the first."""

    turn: str
    gateway: str
    start: int
    entries: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One entry of a pool's events stream: `kind` is queued, withdrawn, cancel, hold or release."""

    kind: str
    turn: str
    agent: str = ""
    priority: int = 0
    seq: int = 0
    kv_tokens: int = 0


class Broker:
    """Typed access to what lives in Redis. One instance a process and server."""

    def __init__(self, redis: Redis, *, final_ttl_s: int = 600) -> None:
        """`final_ttl_s`: how long an ended turn's record and log can still be read."""
        self.redis: Any = redis
        self.final_ttl_s = final_ttl_s
        self._submit = self._script("submit")
        self._claim = self._script("claim")
        self._advance = self._script("advance")
        self._append = self._script("append")
        self._cancel = self._script("cancel")
        self._tell = self._script("tell")
        self._lease = self._script("lease")
        self._note = self._script("note")

    def _script(self, name: str) -> Any:
        return self.redis.register_script((_LUA / f"{name}.lua").read_text())

    # Gateway side ----------------------------------------------------------------------------------

    async def submit(self, request: TurnRequest, *, max_waiting: int) -> int:
        """Put a turn into its pool's queue and tell the pool. Returns its arrival number.

        Raises QueueFull or DuplicateTurn; nothing is stored then.
        """
        keys = k.Keys(request.pool)
        head = {
            "kind": "queued",
            "turn": request.id,
            "agent": request.agent,
            "priority": request.priority,
            "kv_tokens": request.size.kv_tokens,
        }
        seq = await self._submit(
            keys=[keys.turn(request.id), keys.timeline(request.id), keys.queue, keys.seq, keys.events],
            args=[
                request.id,
                max_waiting,
                k.queue_score(request.priority, 0),
                k.ACTIVE_TTL_S,
                k.EVENTS_LENGTH,
                orjson.dumps(head)[:-1],
                timeline_entry("queued", agent=request.agent, priority=request.priority_class),
                *request_fields(request),
            ],
        )
        if seq == 0:
            raise QueueFull(f"{max_waiting} turns wait already")
        if seq < 0:
            raise DuplicateTurn(request.id)
        return int(seq)

    async def cancel(self, pool: str, turn: str) -> TurnState | None:
        """Cancel a turn: at once when it waits, else by telling its owner.

        Returns the state it was in, None when there is no such turn.
        """
        keys = k.Keys(pool)
        state = await self._cancel(
            keys=[
                *(keys.turn(turn), keys.timeline(turn), keys.log(turn)),
                *(keys.queue, keys.events, keys.recent, keys.counters),
            ],
            args=[
                turn,
                self.final_ttl_s,
                time.time(),
                k.RECENT_LENGTH,
                k.EVENTS_LENGTH,
                timeline_entry("cancelled"),
                orjson.dumps({"kind": "withdrawn", "turn": turn}),
                orjson.dumps({"kind": "cancel", "turn": turn}),
                error_entry(499, "the turn was cancelled", "cancelled", "cancelled"),
                k.gateway_channel(""),
            ],
        )
        return TurnState(state.decode()) if state else None

    async def tell(self, pool: str, turn: str, kind: str) -> TurnState | None:
        """Tell the turn's owner `hold` or `release`. Returns the turn's state, None when unknown."""
        keys = k.Keys(pool)
        event = orjson.dumps({"kind": kind, "turn": turn})
        state = await self._tell(
            keys=[keys.turn(turn), keys.events], args=[k.EVENTS_LENGTH, event, int(kind == "hold")]
        )
        return TurnState(state.decode()) if state else None

    async def record(self, pool: str, turn: str) -> TurnRecord | None:
        """The turn's record, None when there is none (any more)."""
        fields = await self.redis.hgetall(k.Keys(pool).turn(turn))
        return TurnRecord.decode(fields) if fields else None

    async def records(self, pool: str, turns: Sequence[str]) -> list[TurnRecord]:
        """The records that there are of these turns, for a list: without their prompts, a lot at a time."""
        found = []
        for at in range(0, len(turns), RECORDS_LOT):
            pipe = self.redis.pipeline(transaction=False)
            for turn in turns[at : at + RECORDS_LOT]:
                pipe.hmget(k.Keys(pool).turn(turn), LISTED_FIELDS)
            for values in await pipe.execute():
                fields = {
                    name: value
                    for name, value in zip(LISTED_FIELDS, values, strict=True)
                    if value is not None
                }
                if fields:
                    found.append(TurnRecord.decode(fields))
        return found

    async def timeline(self, pool: str, turn: str) -> list[dict[str, Any]]:
        """What happened to the turn, oldest first."""
        lines = await self.redis.lrange(k.Keys(pool).timeline(turn), 0, -1)
        return [orjson.loads(line) for line in lines]

    async def standing(self, pool: str, turn: str) -> tuple[TurnState, str | None] | None:
        """A turn's state and error, without the rest of its record, which holds its prompt."""
        state, error = await self.redis.hmget(k.Keys(pool).turn(turn), "state", "error")
        return None if state is None else (TurnState(state.decode()), error.decode() if error else None)

    async def log(self, pool: str, turn: str, start: int = 0, count: int | None = None) -> list[bytes]:
        """The turn's output log from entry `start` on: all of it, or at most `count` entries."""
        stop = -1 if count is None else start + count - 1
        return cast(list[bytes], await self.redis.lrange(k.Keys(pool).log(turn), start, stop))

    async def recent(self, pool: str, count: int) -> list[str]:
        """The ids of the turns that ended last, newest first."""
        ids = await self.redis.zrevrange(k.Keys(pool).recent, 0, count - 1)
        return [turn.decode() for turn in ids]

    async def waiting(self, pool: str, count: int) -> list[str]:
        """The ids of the turns at the head of the queue."""
        ids = await self.redis.zrange(k.Keys(pool).queue, 0, count - 1)
        return [turn.decode() for turn in ids]

    async def queue_depth(self, pool: str, priorities: Mapping[str, int]) -> dict[str, int]:
        """How many turns wait, by priority class."""
        pipe = self.redis.pipeline(transaction=False)
        for priority in priorities.values():
            pipe.zcount(k.Keys(pool).queue, *k.queue_range(priority))
        return dict(zip(priorities, map(int, await pipe.execute()), strict=True))

    async def counters(self, pool: str) -> dict[str, int]:
        """The pool's counters since its first turn."""
        fields = await self.redis.hgetall(k.Keys(pool).counters)
        return {name.decode(): int(value) for name, value in fields.items()}

    async def backend_state(self, pool: str, backend: str) -> dict[str, Any] | None:
        """What the backend's dispatcher last published, None when that is older than a few seconds."""
        raw = await self.redis.get(k.Keys(pool).state(backend))
        return cast(dict[str, Any], orjson.loads(raw)) if raw else None

    # Dispatcher side -------------------------------------------------------------------------------

    async def acquire(self, pool: str, backend: str, owner: str, ttl_ms: int) -> Lease | None:
        """Become the backend's owner, None while somebody else is."""
        keys = k.Keys(pool)
        fence = await self._lease(
            keys=[keys.lease(backend), keys.fence(backend), keys.state(backend)],
            args=["acquire", owner, ttl_ms],
        )
        return Lease(pool, backend, f"{int(fence)}:{owner}") if fence else None

    async def renew(self, lease: Lease, ttl_ms: int) -> None:
        """Keep the lease. Raises Deposed when it is lost."""
        if not await self._lease_action(lease, "renew", ttl_ms):
            raise Deposed(f"backend {lease.backend}: the lease {lease.value} is lost")

    async def release(self, lease: Lease) -> None:
        """Give the lease back, if it is still ours, and withdraw what was published of the backend."""
        await self._lease_action(lease, "release", 0)

    async def _lease_action(self, lease: Lease, action: str, ttl_ms: int) -> bool:
        keys = k.Keys(lease.pool)
        held = await self._lease(
            keys=[keys.lease(lease.backend), keys.fence(lease.backend), keys.state(lease.backend)],
            args=[action, lease.value, ttl_ms],
        )
        return bool(held)

    async def snapshot(self, pool: str) -> tuple[str, list[PoolEvent]]:
        """The queue as `queued` events, and the events stream's position from before it was read."""
        keys = k.Keys(pool)
        newest = await self.redis.xrevrange(keys.events, count=1)
        position = newest[0][0].decode() if newest else "0-0"
        waiting: list[PoolEvent] = []
        turns = await self.redis.zrange(keys.queue, 0, -1)
        for first in range(0, len(turns), SNAPSHOT_BATCH):
            batch = [turn.decode() for turn in turns[first : first + SNAPSHOT_BATCH]]
            pipe = self.redis.pipeline(transaction=False)
            for turn in batch:
                pipe.hmget(keys.turn(turn), "agent", "priority", "seq", "size_prompt", "size_max")
            for turn, (agent, *numbers) in zip(batch, await pipe.execute(), strict=True):
                if agent is not None:
                    priority, seq, prompt, limit = map(int, numbers)
                    waiting.append(PoolEvent("queued", turn, agent.decode(), priority, seq, prompt + limit))
        return position, waiting

    async def events(self, pool: str, after: str, block_ms: int) -> tuple[str, list[PoolEvent]]:
        """Wait for the pool's next events. Needs a client whose socket timeout exceeds `block_ms`."""
        reply = await self.redis.xread({k.Keys(pool).events: after}, count=512, block=block_ms)
        if not reply:
            return after, []
        entries = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]
        events = [PoolEvent(**orjson.loads(fields[b"e"])) for _, fields in entries]
        return entries[-1][0].decode(), events

    async def owned(self, pool: str, backend: str) -> list[TurnRecord]:
        """The turns that belong to a backend, in order of arrival."""
        ids = await self.redis.smembers(k.Keys(pool).owned(backend))
        records = [await self.record(pool, turn.decode()) for turn in ids]
        return sorted((record for record in records if record is not None), key=lambda record: record.seq)

    async def claim(self, lease: Lease, turn: str) -> TurnRecord | None:
        """Take a turn out of the queue; None when it is not there. Raises Deposed."""
        keys = k.Keys(lease.pool)
        reply = await self._claim(
            keys=[
                *(keys.turn(turn), keys.timeline(turn), keys.queue, keys.events),
                *(keys.lease(lease.backend), keys.owned(lease.backend)),
            ],
            args=[
                turn,
                lease.value,
                lease.backend,
                k.EVENTS_LENGTH,
                orjson.dumps({"kind": "withdrawn", "turn": turn}),
                timeline_entry("claimed", backend=lease.backend),
            ],
        )
        if reply == b"deposed":
            raise Deposed(f"backend {lease.backend}: the lease {lease.value} is lost")
        return TurnRecord.decode(dict(zip(reply[::2], reply[1::2], strict=True))) if reply else None

    async def advance(
        self,
        lease: Lease,
        turn: str,
        target: TurnState,
        timeline: bytes,
        *,
        fields: Mapping[str, str | int | float] | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> None:
        """Move a turn to `target`, write its timeline line, set record fields and add to counters.

        Raises Deposed, or IllegalTransition when its present state does not lead there.
        """
        keys = k.Keys(lease.pool)
        counters = counters or {}
        reply = await self._advance(
            keys=[
                *(keys.turn(turn), keys.timeline(turn), keys.log(turn)),
                *(keys.lease(lease.backend), keys.owned(lease.backend), keys.recent, keys.counters),
            ],
            args=[
                turn,
                lease.value,
                target.value,
                ",".join(sources_of(target)),
                self.final_ttl_s if target in FINAL_STATES else 0,
                time.time(),
                k.RECENT_LENGTH,
                timeline,
                len(counters),
                *(item for pair in counters.items() for item in pair),
                *(item for pair in (fields or {}).items() for item in pair),
            ],
        )
        if reply == b"deposed":
            raise Deposed(f"backend {lease.backend}: the lease {lease.value} is lost")
        if reply != b"ok":
            raise IllegalTransition(f"turn {turn} is {reply.decode()}, which does not lead to {target.value}")

    async def note(
        self,
        lease: Lease,
        turn: str,
        state: TurnState,
        timeline: bytes,
        fields: Mapping[str, str | int | float] | None = None,
    ) -> bool:
        """Write a timeline line and record fields of a turn that is in `state`; False when it is not.

        Raises Deposed.
        """
        keys = k.Keys(lease.pool)
        reply = await self._note(
            keys=[keys.turn(turn), keys.timeline(turn), keys.lease(lease.backend)],
            args=[
                lease.value,
                state.value,
                timeline,
                *(item for pair in (fields or {}).items() for item in pair),
            ],
        )
        if reply == b"deposed":
            raise Deposed(f"backend {lease.backend}: the lease {lease.value} is lost")
        return bool(reply == b"ok")

    async def append(self, lease: Lease, appends: Iterable[LogAppend]) -> list[int]:
        """Append to several turns' logs at once; safe to repeat. Returns the logs' lengths.

        A length below its `start` says that the log lost entries: append again from there.
        Raises Deposed.
        """
        keys = k.Keys(lease.pool)
        names = [keys.lease(lease.backend)]
        args: list[str | bytes | int] = [lease.value, k.ACTIVE_TTL_S]
        for item in appends:
            names.append(keys.log(item.turn))
            args += [item.turn, k.gateway_channel(item.gateway), item.start, len(item.entries), *item.entries]
        reply = await self._append(keys=names, args=args)
        if reply == b"deposed":
            raise Deposed(f"backend {lease.backend}: the lease {lease.value} is lost")
        return cast(list[int], reply)

    async def publish_state(self, pool: str, backend: str, state: bytes) -> None:
        """Publish what `/swarm/state` shows of a backend; it expires when nobody repeats it."""
        await self.redis.set(k.Keys(pool).state(backend), state, px=STATE_TTL_MS)
