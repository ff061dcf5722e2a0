"""Bulk turns among others: they yield between batches, hold little, and take nobody's KV."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import orjson
import pytest
from redis.asyncio import Redis

from backends.protocol import KvLayout
from backends.simulated import TimingProfile
from orchestrator.turns import TurnRequest, TurnSize, TurnState
from tests.dispatcher.harness import PERMANENT, POOL, Swarm, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

SLOW = TimingProfile(base_step_s=0.002, prefill_tokens_per_s=5000)
TEXTS = [f"input {number} {'word ' * 60}" for number in range(40)]
RESERVE = 2048

_numbers = itertools.count(1)


async def submit(world: Swarm, inputs: list[str], agent: str = "indexer") -> str:
    """Put an embeddings turn into the queue."""
    turn = f"bulk{next(_numbers)}"
    request = TurnRequest(
        id=turn,
        pool=POOL,
        agent=agent,
        priority=0,
        priority_class="batch",
        api="embeddings",
        model="m",
        body=orjson.dumps({"input": inputs}),
        stream=False,
        size=TurnSize(RESERVE, 0, False),
        gateway="gw",
        created=0.0,
    )
    await world.broker.submit(request, max_waiting=100)
    return turn


async def vectors(world: Swarm, turn: str) -> list[str]:
    return [vector for entry in await world.log(turn) if entry[0] == "d" for vector in entry[1]["embeddings"]]


async def check_done(world: Swarm, turn: str, inputs: list[str]) -> None:
    record = await world.until_end(turn)
    assert record.state is TurnState.DONE, record
    found = await vectors(world, turn)
    assert len(found) == len(inputs)
    assert len(set(found)) == len(set(inputs)), "each input once, in its place"
    whole = await submit(world, inputs)
    await world.until_end(whole)
    assert await vectors(world, whole) == found


async def test_a_bulk_turn_yields_to_a_foreground_turn_and_goes_on(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, embeddings=True, profile=SLOW) as world:
        await world.start(dispatcher := world.dispatcher(decode_slots=1))
        turn = await submit(world, TEXTS)
        await world.until_tokens(turn, 2)
        done_before = len(await vectors(world, turn))
        front = await world.submit("[len=20] hello", priority=100)
        await world.check_done(front, "[len=20] hello")
        assert len(await vectors(world, turn)) < len(TEXTS)
        await check_done(world, turn, TEXTS)
        record = await world.record(turn)
        assert record.preemptions == 1
        assert record.tokens_reevaluated == 0
        assert done_before > 1
        marks = [mark for mark in await world.marks(turn) if mark in ("started", "paused", "resumed", "stop")]
        assert marks == ["started", "paused", "resumed", "stop"]
        assert dispatcher.healthy


async def test_the_books_are_right_under_a_shared_budget(redis: Redis, valkey_url: str) -> None:
    budget = 8192
    async with swarm(
        redis, valkey_url, embeddings=True, profile=SLOW, kv_unified=True, n_ctx=budget
    ) as world:
        backend = world.backend(kv_layout=KvLayout.UNIFIED)
        await world.start(dispatcher := world.dispatcher(backend=backend, decode_slots=2))
        charged: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while True:
                    view = dispatcher._scheduler.view()
                    charged.append(view.kv_tokens_charged)
                    assert sum(slot.kv_tokens for slot in view.slots) <= view.kv_tokens_charged <= budget
                    await anyio.sleep(0.001)

            tasks.start_soon(watch)
            bulk = [await submit(world, TEXTS) for _ in range(2)]
            await world.until_tokens(bulk[0], 1)
            front = await world.submit("[len=30] hello", priority=100)
            await world.check_done(front, "[len=30] hello")
            for turn in bulk:
                assert (await world.until_end(turn)).state is TurnState.DONE
                assert len(await vectors(world, turn)) == len(TEXTS)
            tasks.cancel_scope.cancel()
        assert max(charged) >= 2 * RESERVE
        view = dispatcher._scheduler.view()
        assert all(slot.agent != "indexer" for slot in view.slots), "a bulk turn leaves nothing to go on from"


async def test_a_paused_turn_finds_its_kv_after_a_bulk_turn_in_the_next_slot(
    redis: Redis, valkey_url: str
) -> None:
    async with swarm(redis, valkey_url, embeddings=True, profile=SLOW, n_slots=2, eos_probability=0) as world:
        await world.start(world.dispatcher(decode_slots=1))
        paused = await world.submit("[len=400] hello", priority=20, max_tokens=500)
        await world.until_tokens(paused, 20)
        await world.broker.tell(POOL, paused, "hold")
        await world.until_state(paused, TurnState.PAUSED)
        turn = await submit(world, TEXTS[:10])
        await check_done(world, turn, TEXTS[:10])
        await world.broker.tell(POOL, paused, "release")
        await world.check_done(paused, "[len=400] hello", 500)
        assert (await world.record(paused)).tokens_reevaluated <= 2


async def test_an_agents_idle_cache_is_not_taken_for_what_a_bulk_turn_goes_on_from(
    redis: Redis, valkey_url: str
) -> None:
    async with swarm(redis, valkey_url, embeddings=True) as world:
        await world.start(dispatcher := world.dispatcher(decode_slots=1))
        first = await world.submit("[len=9] " + "word " * 80, agent="worker")
        await world.until_end(first)
        turn = await submit(world, ["a", "b"], agent="worker")
        await world.until_end(turn)
        [kept] = [slot for slot in dispatcher._scheduler.view().slots if slot.agent == "worker"]
        assert kept.kv_tokens > 80


async def test_a_new_owner_goes_on_after_what_is_in_the_log(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, embeddings=True, profile=SLOW) as world:
        stop = await world.start(world.dispatcher("one"))
        turn = await submit(world, TEXTS)
        await world.until_tokens(turn, 2)
        await stop()
        told = len(await vectors(world, turn))
        assert 0 < told < len(TEXTS)
        requests = world.engine.stats().tokens_prefilled
        await world.start(world.dispatcher("two"))
        await world.until_end(turn)
        again = world.engine.stats().tokens_prefilled - requests
        assert again < sum(map(len, TEXTS)) // 4 * (len(TEXTS) - told + 12) // len(TEXTS) * 2
        await check_done(world, turn, TEXTS)


async def test_a_bulk_turn_can_be_cancelled(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, embeddings=True, profile=SLOW) as world:
        await world.start(dispatcher := world.dispatcher())
        turn = await submit(world, TEXTS)
        await world.until_tokens(turn, 1)
        await world.broker.cancel(POOL, turn)
        assert (await world.until_end(turn)).state is TurnState.CANCELLED
        await world.until_idle()
        await until(lambda: dispatcher._scheduler.view().decoding == 0)


@pytest.mark.parametrize("body", [b"{}", b'{"input": 5}'])
async def test_a_stored_body_that_cannot_be_read_fails_its_turn(
    redis: Redis, valkey_url: str, body: bytes
) -> None:
    async with swarm(redis, valkey_url, embeddings=True) as world:
        await world.start(world.dispatcher())
        fields: dict[str, Any] = orjson.loads(body)
        request = TurnRequest(
            id="odd",
            pool=POOL,
            agent="a",
            priority=0,
            priority_class="batch",
            api="embeddings",
            model="m",
            body=orjson.dumps(fields),
            stream=False,
            size=TurnSize(10, 0, False),
            gateway="gw",
            created=0.0,
        )
        await world.broker.submit(request, max_waiting=10)
        assert (await world.until_end("odd")).state is TurnState.FAILED
