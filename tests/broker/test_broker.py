"""Every script: legal and illegal, repeated, fenced, bounded."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import (
    Broker,
    Deposed,
    DuplicateTurn,
    Lease,
    LogAppend,
    PoolEvent,
    QueueFull,
    delta_entry,
    timeline_entry,
)
from orchestrator.broker import keys as k
from orchestrator.turns import FINAL_STATES, TRANSITIONS, IllegalTransition, Kept, TurnState
from tests.broker.harness import (
    BACKEND,
    GATEWAY,
    PERMANENT,
    POOL,
    lease_of,
    make_request,
    state_of,
    turn_in,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT, "swarm:*:queue", "swarm:*:turns")

KEYS = k.Keys(POOL)
ALL = list(TurnState)
OWNED = (TurnState.CLAIMED, TurnState.RUNNING, TurnState.PAUSED)
PRIORITIES = {"foreground": 100, "normal": 50, "background": 20, "batch": 0}


@pytest.fixture
async def broker(redis: Redis) -> AsyncIterator[Broker]:
    yield Broker(redis, final_ttl_s=60)


@pytest.fixture
async def lease(broker: Broker) -> Lease:
    return await lease_of(broker)


async def dump(redis: Redis) -> dict[bytes, bytes]:
    """All data, without the times to live."""
    return {key: await redis.dump(key) or b"" async for key in redis.scan_iter()}


# Transitions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [state for state in ALL if state is not TurnState.QUEUED])
@pytest.mark.parametrize("source", ALL)
async def test_advance_follows_the_table(
    broker: Broker, lease: Lease, redis: Redis, source: TurnState, target: TurnState
) -> None:
    turn = await turn_in(broker, lease, source)
    before = await dump(redis)
    legal = target in TRANSITIONS[source]
    entry = timeline_entry("x")
    advance = broker.advance(lease, turn, target, entry, fields={"tier": "t"}, counters={"n": 2})
    if source is target:
        await advance
        assert await dump(redis) == before
    elif not legal:
        with pytest.raises(IllegalTransition, match=f"{source.value}, which does not lead to"):
            await advance
        assert await dump(redis) == before
    else:
        await advance
        record = await broker.record(POOL, turn)
        assert record is not None
        assert (record.state, record.tier) == (target, "t")
        assert (await broker.timeline(POOL, turn))[-1] == orjson.loads(entry)
        assert await broker.counters(POOL) == {"n": 2}
        again = await dump(redis)
        await broker.advance(lease, turn, target, entry, fields={"tier": "u"}, counters={"n": 2})
        assert await dump(redis) == again


async def test_advance_of_an_unknown_turn_is_illegal(broker: Broker, lease: Lease) -> None:
    with pytest.raises(IllegalTransition, match="is missing"):
        await broker.advance(lease, "nobody", TurnState.RUNNING, b"{}")


@pytest.mark.parametrize("final", sorted(FINAL_STATES))
async def test_an_ended_turn_expires_and_is_nobodys(
    broker: Broker, lease: Lease, redis: Redis, final: TurnState
) -> None:
    turn = await turn_in(broker, lease, TurnState.CLAIMED)
    await broker.append(lease, [LogAppend(turn, GATEWAY, 0, [b"[1]"])])
    assert await redis.ttl(KEYS.turn(turn)) > 3600
    if final is TurnState.DONE:
        await broker.advance(lease, turn, TurnState.RUNNING, b"{}")
    await broker.advance(lease, turn, final, b"{}")
    for key in (KEYS.turn(turn), KEYS.log(turn), KEYS.timeline(turn)):
        assert 0 < await redis.ttl(key) <= 60
    assert await broker.owned(POOL, BACKEND) == []
    assert await broker.recent(POOL, 5) == [turn]


async def test_many_records_are_read_without_their_prompts(broker: Broker, lease: Lease) -> None:
    turns = [await turn_in(broker, lease, state) for state in ALL] * 20
    listed = await broker.records(POOL, [*turns[:3], "nobody", *turns[3:]])
    assert len(listed) == len(turns)
    for turn, found in zip(turns, listed, strict=True):
        record = await broker.record(POOL, turn)
        assert record is not None
        assert found == replace(record, request=replace(record.request, body=b"{}"))


@pytest.mark.parametrize("source", ALL)
async def test_only_a_queued_turn_can_be_claimed(broker: Broker, lease: Lease, source: TurnState) -> None:
    turn = await turn_in(broker, lease, source)
    other = await broker.acquire(POOL, "other", "me", 60_000)
    assert other is not None
    record = await broker.claim(other, turn)
    if source is TurnState.QUEUED:
        assert record is not None
        assert (record.state, record.backend, record.request.id) == (TurnState.CLAIMED, "other", turn)
        again = await broker.claim(other, turn)
        assert again == record
        assert len(await broker.timeline(POOL, turn)) == 2
        assert [one.request.id for one in await broker.owned(POOL, "other")] == [turn]
    else:
        assert record is None
        assert await state_of(broker, turn) is source


async def test_a_claim_tells_the_pool(broker: Broker, lease: Lease) -> None:
    turn = await turn_in(broker, lease, TurnState.CLAIMED)
    await broker.claim(lease, turn)
    _, events = await broker.events(POOL, "0-0", 10)
    assert [(event.kind, event.turn) for event in events] == [("queued", turn), ("withdrawn", turn)]
    assert await broker.waiting(POOL, 5) == []


@pytest.mark.parametrize("source", ALL)
async def test_cancel_in_every_state(broker: Broker, lease: Lease, redis: Redis, source: TurnState) -> None:
    turn = await turn_in(broker, lease, source)
    position, _ = await broker.snapshot(POOL)
    assert await broker.cancel(POOL, turn) is source
    _, events = await broker.events(POOL, position, 1)
    record = await broker.record(POOL, turn)
    assert record is not None
    if source is TurnState.QUEUED:
        assert record.state is TurnState.CANCELLED
        assert [event.kind for event in events] == ["withdrawn"]
        [entry] = map(orjson.loads, await broker.log(POOL, turn))
        assert (entry[0], entry[1], entry[2]["code"]) == ("x", 499, "cancelled")
        assert await broker.waiting(POOL, 5) == []
        assert await broker.counters(POOL) == {"turns_cancelled": 1}
        for key in (KEYS.turn(turn), KEYS.log(turn), KEYS.timeline(turn)):
            assert 0 < await redis.ttl(key) <= 60
        assert await broker.cancel(POOL, turn) is TurnState.CANCELLED
        assert len(await broker.log(POOL, turn)) == 1
    else:
        assert record.state is source
        assert record.cancelling == (source in OWNED)
        assert events == ([PoolEvent("cancel", turn)] if source in OWNED else [])
        assert await broker.log(POOL, turn) == []


@pytest.mark.parametrize("source", ALL)
async def test_tell_in_every_state(broker: Broker, lease: Lease, source: TurnState) -> None:
    turn = await turn_in(broker, lease, source)
    position, _ = await broker.snapshot(POOL)
    for kind in ("hold", "release"):
        assert await broker.tell(POOL, turn, kind) is source
        record = await broker.record(POOL, turn)
        assert record is not None
        assert record.held == (kind == "hold" and source in OWNED)
    _, events = await broker.events(POOL, position, 1)
    assert [event.kind for event in events] == (["hold", "release"] if source in OWNED else [])


async def test_nobody_knows_an_unknown_turn(broker: Broker, lease: Lease, redis: Redis) -> None:
    before = await dump(redis)
    assert await broker.cancel(POOL, "nobody") is None
    assert await broker.tell(POOL, "nobody", "hold") is None
    assert await broker.record(POOL, "nobody") is None
    assert await broker.claim(lease, "nobody") is None
    assert not await broker.note(lease, "nobody", TurnState.PAUSED, b"{}")
    assert (await broker.timeline(POOL, "nobody"), await broker.log(POOL, "nobody")) == ([], [])
    assert await dump(redis) == before


@pytest.mark.parametrize("source", ALL)
async def test_a_note_needs_the_state_it_is_about(
    broker: Broker, lease: Lease, redis: Redis, source: TurnState
) -> None:
    turn = await turn_in(broker, lease, source)
    before = await dump(redis)
    entry = timeline_entry("dropped")
    fits = source is TurnState.PAUSED
    assert await broker.note(lease, turn, TurnState.PAUSED, entry, {"tier": "dropped"}) == fits
    if not fits:
        assert await dump(redis) == before
        return
    record = await broker.record(POOL, turn)
    assert record is not None
    assert (record.state, record.tier) == (TurnState.PAUSED, "dropped")
    again = await dump(redis)
    assert await broker.note(lease, turn, TurnState.PAUSED, entry, {"tier": "dropped"})
    assert await dump(redis) == again


# The queue -------------------------------------------------------------------------------------------


async def test_a_submitted_turn_is_there_whole(broker: Broker, redis: Redis) -> None:
    request = make_request(body=b'{"a": "\xc3\xa9"}', priority=50)
    assert await broker.submit(request, max_waiting=10) == 1
    record = await broker.record(POOL, request.id)
    assert record is not None
    assert (record.request, record.state, record.seq) == (request, TurnState.QUEUED, 1)
    assert (record.backend, record.tier, record.cancelling, record.held) == (None, None, False, False)
    position, waiting = await broker.snapshot(POOL)
    assert waiting == [PoolEvent("queued", request.id, "worker", 50, 1, 10)]
    assert (await broker.events(POOL, "0-0", 10)) == (position, waiting)
    assert [line["event"] for line in await broker.timeline(POOL, request.id)] == ["queued"]
    assert await redis.ttl(KEYS.turn(request.id)) > 3600


@pytest.mark.parametrize("asked", [b'{"messages":[]}', b'{"messages":[],"swarm_note":1}'])
async def test_a_turn_to_be_kept_has_its_request_once(broker: Broker, redis: Redis, asked: bytes) -> None:
    request = make_request(kept=Kept("/v1/messages", asked))
    await broker.submit(request, max_waiting=10)
    record = await broker.record(POOL, request.id)
    assert record is not None and record.request == request
    fields = await redis.hgetall(KEYS.turn(request.id))
    assert (b"kept_body" in fields) == (asked != request.body)


async def test_how_a_turn_stands(broker: Broker, lease: Lease) -> None:
    turn = await turn_in(broker, lease, TurnState.RUNNING)
    assert await broker.standing(POOL, turn) == (TurnState.RUNNING, None)
    await broker.advance(lease, turn, TurnState.FAILED, timeline_entry("failed"), fields={"error": "why"})
    assert await broker.standing(POOL, turn) == (TurnState.FAILED, "why")
    assert await broker.standing(POOL, "another") is None


async def test_a_turn_is_accepted_once(broker: Broker, redis: Redis) -> None:
    request = make_request()
    await broker.submit(request, max_waiting=10)
    before = await dump(redis)
    with pytest.raises(DuplicateTurn):
        await broker.submit(request, max_waiting=10)
    assert await dump(redis) == before


async def test_a_full_queue_takes_nothing(broker: Broker, lease: Lease, redis: Redis) -> None:
    first = make_request()
    await broker.submit(first, max_waiting=2)
    await broker.submit(make_request(), max_waiting=2)
    before = await dump(redis)
    with pytest.raises(QueueFull, match="2 turns wait already"):
        await broker.submit(make_request(), max_waiting=2)
    assert await dump(redis) == before
    await broker.claim(lease, first.id)
    await broker.submit(make_request(), max_waiting=2)


async def test_the_queue_is_ordered_by_priority_then_arrival(broker: Broker) -> None:
    wanted: dict[int, list[str]] = {priority: [] for priority in PRIORITIES.values()}
    for priority in (0, 100, 20, 50, 20, 100, 0, 50, 100):
        request = make_request(priority=priority)
        await broker.submit(request, max_waiting=100)
        wanted[priority].append(request.id)
    assert await broker.waiting(POOL, 100) == [*wanted[100], *wanted[50], *wanted[20], *wanted[0]]
    depth = await broker.queue_depth(POOL, PRIORITIES)
    assert depth == {"foreground": 3, "normal": 2, "background": 2, "batch": 2}
    _, waiting = await broker.snapshot(POOL)
    assert [event.turn for event in waiting] == await broker.waiting(POOL, 100)


async def test_the_order_is_exact_after_a_trillion_turns(broker: Broker, redis: Redis) -> None:
    await redis.set(KEYS.seq, 2**40 - 4)
    late = [make_request(priority=0) for _ in range(2)]
    early = make_request(priority=1)
    for request in (*late, early):
        await broker.submit(request, max_waiting=10)
    assert await broker.waiting(POOL, 5) == [early.id, late[0].id, late[1].id]
    assert await broker.queue_depth(POOL, {"low": 0, "lowest but one": 1}) == {"low": 2, "lowest but one": 1}


async def test_a_snapshot_reads_a_long_queue(broker: Broker) -> None:
    ids = []
    for _ in range(1203):
        request = make_request()
        ids.append(request.id)
        await broker.submit(request, max_waiting=10_000)
    _, waiting = await broker.snapshot(POOL)
    assert [event.turn for event in waiting] == ids


async def test_events_after_a_snapshot_miss_nothing(broker: Broker) -> None:
    position, waiting = await broker.snapshot(POOL)
    assert (position, waiting) == ("0-0", [])
    request = make_request()
    await broker.submit(request, max_waiting=10)
    position, events = await broker.events(POOL, position, 1000)
    assert [event.turn for event in events] == [request.id]
    assert await broker.events(POOL, position, 1) == (position, [])


async def test_the_ended_are_trimmed_to_the_newest(broker: Broker, lease: Lease, redis: Redis) -> None:
    old = {f"old{number}": float(number) for number in range(k.RECENT_LENGTH + 5)}
    await redis.zadd(KEYS.recent, old)
    turn = await turn_in(broker, lease, TurnState.DONE)
    queued = await turn_in(broker, lease, TurnState.QUEUED)
    await broker.cancel(POOL, queued)
    assert await redis.zcard(KEYS.recent) == k.RECENT_LENGTH
    assert await broker.recent(POOL, 3) == [queued, turn, f"old{k.RECENT_LENGTH + 4}"]


# The log ---------------------------------------------------------------------------------------------


def entries(start: int, stop: int) -> list[bytes]:
    return [delta_entry({"content": str(number)}, 1, [number]) for number in range(start, stop)]


async def test_an_append_can_be_repeated_whole_or_in_part(broker: Broker, lease: Lease, redis: Redis) -> None:
    turn = await turn_in(broker, lease, TurnState.RUNNING)
    whole = entries(0, 10)
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 0, whole[:4])]) == [4]
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 0, whole[:4])]) == [4]
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 2, whole[2:7])]) == [7]
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 7, [])]) == [7]
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 0, whole)]) == [10]
    assert await broker.log(POOL, turn) == whole
    assert await broker.log(POOL, turn, 8) == whole[8:]
    assert await redis.ttl(KEYS.log(turn)) > 3600


async def test_a_log_that_lost_entries_says_so(broker: Broker, lease: Lease, redis: Redis) -> None:
    turn = await turn_in(broker, lease, TurnState.RUNNING)
    whole = entries(0, 9)
    await broker.append(lease, [LogAppend(turn, GATEWAY, 0, whole[:6])])
    await redis.ltrim(KEYS.log(turn), 0, 3)
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 6, whole[6:])]) == [4]
    assert await broker.log(POOL, turn) == whole[:4]
    await redis.delete(KEYS.log(turn))
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 6, whole[6:])]) == [0]
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 0, whole)]) == [9]
    assert await redis.ttl(KEYS.log(turn)) > 3600


async def test_one_call_appends_to_many_logs_and_publishes_once_a_gateway(
    broker: Broker, lease: Lease, redis: Redis
) -> None:
    turns = [await turn_in(broker, lease, TurnState.RUNNING) for _ in range(3)]
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(k.gateway_channel("one"), k.gateway_channel("two"))
        gateways = ("one", "two", "one")
        lengths = await broker.append(
            lease, [LogAppend(*pair, 0, entries(0, 2)) for pair in zip(turns, gateways, strict=True)]
        )
        got: dict[bytes, Any] = {}
        while len(got) < 2:
            message = await pubsub.get_message(timeout=1)
            if message is not None:
                assert message["channel"] not in got
                got[message["channel"]] = orjson.loads(message["data"])
    assert lengths == [2, 2, 2]
    parsed = [orjson.loads(entry) for entry in entries(0, 2)]
    assert got == {
        b"swarm:gateway:one": [[turns[0], 0, parsed], [turns[2], 0, parsed]],
        b"swarm:gateway:two": [[turns[1], 0, parsed]],
    }


async def test_an_append_to_many_logs_takes_as_long_as_appends_to_each(
    broker: Broker, lease: Lease, redis: Redis
) -> None:
    entry = orjson.dumps(["d", "x" * 4000])
    numbers = itertools.count()

    async def usec(calls: int, logs: int) -> int:
        """What the server itself took, at the best of three times."""
        found = []
        for _ in range(3):
            await redis.config_resetstat()
            for _ in range(calls):
                appends = [LogAppend(f"t{next(numbers)}", GATEWAY, 0, [entry]) for _ in range(logs)]
                await broker.append(lease, appends)
            found.append((await redis.info("commandstats"))["cmdstat_evalsha"]["usec"])
        return int(min(found))

    await usec(1, 1)
    assert await usec(1, 1000) < 4 * await usec(20, 50)


async def test_a_thousand_entries_fit_one_call(broker: Broker, lease: Lease) -> None:
    turn = await turn_in(broker, lease, TurnState.RUNNING)
    assert await broker.append(lease, [LogAppend(turn, GATEWAY, 0, entries(0, 1000))]) == [1000]


# Leases ----------------------------------------------------------------------------------------------


async def test_one_owner_at_a_time(broker: Broker, redis: Redis) -> None:
    lease = await lease_of(broker, "me")
    assert lease.value == "1:me"
    assert await broker.acquire(POOL, BACKEND, "you", 1000) is None
    assert await broker.acquire(POOL, BACKEND, "e", 1000) is None
    await broker.renew(lease, 5000)
    assert 4000 < await redis.pttl(KEYS.lease(BACKEND)) <= 5000
    await broker.release(lease)
    await broker.release(lease)
    yours = await broker.acquire(POOL, BACKEND, "you", 60_000)
    assert yours is not None
    assert yours.value == "2:you"
    await broker.release(lease)
    await broker.renew(yours, 60_000)
    with pytest.raises(Deposed):
        await broker.renew(lease, 1000)


async def test_an_acquire_can_be_repeated(broker: Broker) -> None:
    """The first answer may be lost; only the number given last counts."""
    first = await lease_of(broker, "me:too")
    second = await lease_of(broker, "me:too")
    with pytest.raises(Deposed):
        await broker.renew(first, 1000)
    await broker.renew(second, 60_000)


@pytest.mark.parametrize("fate", ["gone", "taken"])
async def test_a_deposed_owner_changes_nothing(broker: Broker, lease: Lease, redis: Redis, fate: str) -> None:
    queued = await turn_in(broker, lease, TurnState.QUEUED)
    running = await turn_in(broker, lease, TurnState.RUNNING)
    paused = await turn_in(broker, lease, TurnState.PAUSED)
    if fate == "gone":
        await redis.delete(KEYS.lease(BACKEND))
    else:
        await redis.set(KEYS.lease(BACKEND), "99:you", px=60_000)
    before = await dump(redis)
    for call in (
        broker.claim(lease, queued),
        broker.advance(lease, running, TurnState.DONE, b"{}", counters={"n": 1}),
        broker.advance(lease, running, TurnState.RUNNING, b"{}"),
        broker.note(lease, paused, TurnState.PAUSED, b"{}"),
        broker.append(lease, [LogAppend(running, GATEWAY, 0, [b"[1]"])]),
        broker.renew(lease, 1000),
    ):
        with pytest.raises(Deposed, match="backend b"):
            await call
    await broker.release(lease)
    assert await dump(redis) == before


async def test_what_was_published_goes_with_the_lease(broker: Broker, lease: Lease) -> None:
    """It is not the next owner's engine, who may have another budget."""
    await broker.publish_state(POOL, BACKEND, b'{"healthy":true}')
    await broker.release(Lease(POOL, BACKEND, "0:somebody else"))
    assert await broker.backend_state(POOL, BACKEND) is not None
    await broker.release(lease)
    assert await broker.backend_state(POOL, BACKEND) is None


async def test_a_published_state_expires(broker: Broker, redis: Redis) -> None:
    assert await broker.backend_state(POOL, BACKEND) is None
    await broker.publish_state(POOL, BACKEND, b'{"a":1}')
    assert await broker.backend_state(POOL, BACKEND) == {"a": 1}
    assert 0 < await redis.pttl(KEYS.state(BACKEND)) <= 5000
