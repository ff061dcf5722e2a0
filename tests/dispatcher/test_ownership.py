"""One owner a backend, and what the next one finds when it goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.broker import (
    Broker,
    Lease,
    LogAppend,
    delta_entry,
    end_entry,
    error_entry,
    status_entry,
    timeline_entry,
)
from orchestrator.dispatcher.turn_run import replay
from orchestrator.turns import FINAL_STATES, TurnState
from tests.broker.harness import PATHS
from tests.dispatcher.harness import BACKEND, KEYS, PERMANENT, POOL, Swarm, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

ways = pytest.mark.parametrize("native_park", [False, True], ids=["closing", "parking"])
LONG = "Long [len=150]"


class Gated(Broker):
    """A broker that cannot be reached where `shut` says so; what it is asked is lost."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.shut: Callable[[str, Any], bool] = lambda _name, _what: False

    def _check(self, name: str, what: Any = None) -> None:
        if self.shut(name, what):
            raise RedisConnectionError("the gate is shut")

    async def advance(self, lease: Lease, turn: str, target: TurnState, *args: Any, **fields: Any) -> None:
        self._check("advance", target)
        await super().advance(lease, turn, target, *args, **fields)

    async def append(self, lease: Lease, appends: Any) -> list[int]:
        self._check("append")
        return await super().append(lease, appends)

    async def release(self, lease: Lease) -> None:
        self._check("release")
        await super().release(lease)


async def lose_lease(s: Swarm) -> None:
    """The lease of an owner that has vanished runs out."""
    await s.redis.pexpire(KEYS.lease(BACKEND), 1)


@ways
async def test_another_takes_over_where_one_was_cut_off(
    redis: Redis, valkey_url: str, native_park: bool
) -> None:
    """At a random place: in the queue, in prefill, while it runs, while it is paused, at its end."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    async with swarm(redis, valkey_url, native_park=native_park, multibyte_rate=0.3) as s:
        turns = {await s.submit(f"Turn {number} [len=150]", 20 * (number % 2)): number for number in range(4)}
        for life in range(4):
            broker = Gated(s.client())
            stop = await s.start(s.dispatcher(f"owner{life}", broker=broker))
            await anyio.sleep(chance.uniform(0.02, 0.15))
            if life % 2:
                broker.shut = lambda _name, _what: True
            await stop()
            await s.until_idle()
            await lose_lease(s)
        await s.start(s.dispatcher("last"))
        for turn, number in turns.items():
            await s.check_done(turn, f"Turn {number} [len=150]")
        assert await s.broker.owned(POOL, BACKEND) == []
        await s.until_idle()


async def test_a_turn_whose_log_ended_but_whose_record_did_not(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        broker = Gated(s.client())
        broker.shut = lambda name, what: name == "advance" and what in FINAL_STATES
        stop = await s.start(s.dispatcher(broker=broker))
        turn = await s.submit("Hello [len=20]")
        with anyio.fail_after(10):
            while (await s.marks(turn))[-1:] != ["stop"]:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        await stop()
        assert (await s.record(turn)).state is TurnState.RUNNING
        requests = s.engine.stats().requests
        await s.start(s.dispatcher("two"))
        assert (await s.until_end(turn)).tokens_generated == 21
        assert s.engine.stats().requests == requests
        await s.check_done(turn, "Hello [len=20]")
        [done] = [line for line in await s.broker.timeline(POOL, turn) if line["event"] == "done"]
        assert done["recovered"]


ENDS = {
    TurnState.DONE: end_entry("stop", 7, 3, 0),
    TurnState.FAILED: error_entry(502, "the engine failed", "engine_error"),
    TurnState.CANCELLED: error_entry(499, "the turn was cancelled", "cancelled", "cancelled"),
}


@pytest.mark.parametrize("state", [TurnState.CLAIMED, TurnState.RUNNING, TurnState.PAUSED])
@pytest.mark.parametrize("end", ENDS)
async def test_whatever_ended_in_its_log_ends_in_its_record(
    redis: Redis, valkey_url: str, state: TurnState, end: TurnState
) -> None:
    async with swarm(redis, valkey_url) as s:
        lease = await s.broker.acquire(POOL, BACKEND, "gone", 60_000)
        assert lease is not None
        turn = await s.submit("Hello [len=20]")
        await s.broker.claim(lease, turn)
        for step in PATHS[state][1:]:
            await s.broker.advance(lease, turn, step, timeline_entry(step.value))
        log = [delta_entry({"content": "a"}, 3, []), ENDS[end]]
        await s.broker.append(lease, [LogAppend(turn, "gw", 0, log)])
        await s.broker.release(lease)
        dispatcher = s.dispatcher()
        await s.start(dispatcher)
        record = await s.until_end(turn)
        assert record.state is end
        assert record.tokens_generated == 3
        assert record.error == ("the engine failed" if end is TurnState.FAILED else None)
        assert record.finish_reason == ("stop" if end is TurnState.DONE else None)
        assert await s.broker.log(POOL, turn) == log
        assert await s.broker.owned(POOL, BACKEND) == []
        assert not dispatcher._runs


async def test_usage_is_right_when_only_the_log_tells_of_the_first_segment(
    redis: Redis, valkey_url: str
) -> None:
    async with swarm(redis, valkey_url) as s:
        broker = Gated(s.client())
        broker.shut = lambda name, what: name in ("advance", "release")
        stop = await s.start(s.dispatcher(broker=broker))
        turn = await s.submit(LONG)
        await s.until_tokens(turn, 10)
        await stop()
        record = await s.record(turn)
        assert (record.state, record.prompt_tokens) == (TurnState.CLAIMED, 0)
        await lose_lease(s)
        await s.start(s.dispatcher("two"))
        await s.check_done(turn, LONG)
        assert (await s.marks(turn)).count("started") == 1


@pytest.mark.parametrize("body", [b"{", b"[]"])
async def test_an_unreadable_turn_does_not_stop_its_next_owner(
    redis: Redis, valkey_url: str, body: bytes
) -> None:
    async with swarm(redis, valkey_url) as s:
        lease = await s.broker.acquire(POOL, BACKEND, "gone", 60_000)
        assert lease is not None
        turn = await s.submit("x", body=body)
        await s.broker.claim(lease, turn)
        await s.broker.release(lease)
        await s.start(s.dispatcher())
        assert (await s.until_end(turn)).state is TurnState.FAILED


@pytest.mark.parametrize("asked", ["cancel", "hold"])
async def test_what_was_asked_while_nobody_owned_the_backend(
    redis: Redis, valkey_url: str, asked: str
) -> None:
    async with swarm(redis, valkey_url) as s:
        stop = await s.start(s.dispatcher())
        turn = await s.submit(LONG)
        await s.until_tokens(turn, 5)
        await stop()
        if asked == "cancel":
            await s.broker.cancel(POOL, turn)
        else:
            await s.broker.tell(POOL, turn, "hold")
        requests = s.engine.stats().requests
        await s.start(s.dispatcher("two"))
        other = await s.submit("Other [len=5]", 0)
        await s.check_done(other, "Other [len=5]")
        if asked == "cancel":
            assert (await s.until_end(turn)).state is TurnState.CANCELLED
            assert s.engine.stats().requests == requests + 2
        else:
            assert (await s.record(turn)).state is TurnState.PAUSED
            await s.broker.tell(POOL, turn, "release")
            await s.check_done(turn, LONG)


@ways
async def test_of_two_one_owns_and_the_deposed_one_changes_nothing(
    redis: Redis, valkey_url: str, native_park: bool
) -> None:
    async with swarm(redis, valkey_url, native_park=native_park) as s:
        one, two = s.dispatcher("one", decode_slots=1), s.dispatcher("two", decode_slots=1)
        await s.start(one)
        await s.start(two, wait=False)
        held = await s.submit("Held [len=60]", 50)
        await s.until_tokens(held, 5)
        await s.broker.tell(POOL, held, "hold")
        await s.until_state(held, TurnState.PAUSED)
        turn = await s.submit("Long [len=300]", max_tokens=400)
        await s.until_tokens(turn, 10)
        assert not two.healthy
        assert await redis.get(KEYS.lease(BACKEND)) == b"1:one"

        await redis.delete(KEYS.lease(BACKEND))
        assert await s.broker.acquire(POOL, BACKEND, "two", 6000) is not None
        await until(lambda: not one.healthy)
        before = await redis.dump(KEYS.turn(turn)), await s.broker.log(POOL, turn)
        if not two.healthy:
            await s.until_idle()
            if not two.healthy:
                assert before == (await redis.dump(KEYS.turn(turn)), await s.broker.log(POOL, turn))
        await until(lambda: two.healthy)
        await s.check_done(turn, "Long [len=300]", 400)
        assert "interrupted" in await s.events(turn)
        assert not one.healthy
        await s.broker.tell(POOL, held, "release")
        await s.check_done(held, "Held [len=60]")
        await s.until_idle()


@pytest.mark.parametrize("fate", ["gone", "overwritten"])
async def test_an_owner_that_was_deposed_may_own_again(redis: Redis, valkey_url: str, fate: str) -> None:
    async with swarm(redis, valkey_url) as s:
        dispatcher = s.dispatcher()
        await s.start(dispatcher)
        turn = await s.submit(LONG)
        await s.until_tokens(turn, 10)
        if fate == "gone":
            await redis.delete(KEYS.lease(BACKEND))
        else:
            await redis.set(KEYS.lease(BACKEND), "77:somebody", px=300)
        await until(lambda: not dispatcher.healthy)
        await s.check_done(turn, LONG)
        assert (await s.events(turn)).count("interrupted") == 1
        assert await s.broker.owned(POOL, BACKEND) == []


async def test_a_lease_that_cannot_be_given_back_is_no_failure(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        broker = Gated(s.client())
        stop = await s.start(s.dispatcher(broker=broker))
        broker.shut = lambda name, _what: name == "release"
        await stop()
        assert await redis.get(KEYS.lease(BACKEND)) == b"1:one"


def test_a_log_read_back() -> None:
    log = [
        status_entry("started", prompt_tokens=9, cached_tokens=4),
        delta_entry({"content": "a"}, 1, [5]),
        status_entry("paused"),
        delta_entry({"content": "bc"}, 2, [6, 7]),
    ]
    told = replay(log)
    assert (told.prompt_tokens, told.cached_tokens, told.ended) == (9, 4, None)
    assert (told.so_far.tokens, told.so_far.n_tokens) == ([5, 6, 7], 3)
    told = replay([*log, delta_entry({"content": "d"}, 2, [8]), ENDS[TurnState.DONE]])
    assert (told.so_far.tokens, told.so_far.n_tokens) == (None, 5)
    assert told.ended is not None
    assert replay([]).so_far.tokens == []
