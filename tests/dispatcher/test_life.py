"""Turns under one dispatcher: order, preemption, an operator's commands, cancels, and what is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis

from backends.llamacpp import LlamaCppBackend
from backends.protocol import Generation, KvLayout, ReplySoFar
from backends.simulated import TimingProfile
from orchestrator.broker import PoolEvent
from orchestrator.dispatcher import Dispatcher
from orchestrator.turns import TurnSize, TurnState
from tests.dispatcher.harness import BACKEND, PERMANENT, POOL, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

ways = pytest.mark.parametrize("native_park", [False, True], ids=["closing", "parking"])


async def test_a_turn_from_queue_to_done(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, multibyte_rate=0.3) as s:
        await s.start(s.dispatcher())
        turn = await s.submit("Hello [len=40]")
        await s.check_done(turn, "Hello [len=40]")
        assert await s.events(turn) == ["queued", "claimed", "started", "done"]
        assert await s.marks(turn) == ["started", "stop"]
        times = [line["t"] for line in await s.broker.timeline(POOL, turn)]
        assert times == sorted(times)
        record = await s.record(turn)
        assert (record.backend, record.preemptions, record.tokens_reevaluated) == (BACKEND, 0, 0)
        assert await s.broker.owned(POOL, BACKEND) == []
        assert await s.broker.counters(POOL) == {"turns_done": 1}
        state = None
        with anyio.fail_after(5):
            while state is None or state["slots"][0]["turn"] is not None:
                state = await s.broker.backend_state(POOL, BACKEND)
                await anyio.sleep(0.01)
        assert state["healthy"]


async def test_equals_run_in_the_order_they_came(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        turns = [await s.submit(f"Turn {number} [len=5]") for number in range(6)]
        await s.start(s.dispatcher(decode_slots=1))
        turns += [await s.submit(f"Turn {number} [len=5]") for number in range(6, 9)]
        began = []
        for number, turn in enumerate(turns):
            await s.check_done(turn, f"Turn {number} [len=5]")
            [started] = [
                line["t"] for line in await s.broker.timeline(POOL, turn) if line["event"] == "started"
            ]
            began.append(started)
        assert began == sorted(began)


async def test_the_important_run_first(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        turns = {priority: await s.submit("Hi [len=5]", priority) for priority in (0, 50, 20, 100)}
        await s.start(s.dispatcher(decode_slots=1))
        began = {}
        for priority, turn in turns.items():
            await s.until_end(turn)
            [began[priority]] = [
                line["t"] for line in await s.broker.timeline(POOL, turn) if line["event"] == "started"
            ]
        assert sorted(began, key=lambda priority: began[priority]) == [100, 50, 20, 0]


@ways
async def test_a_turn_is_preempted_and_goes_on(redis: Redis, valkey_url: str, native_park: bool) -> None:
    async with swarm(redis, valkey_url, native_park=native_park, multibyte_rate=0.2) as s:
        await s.start(s.dispatcher(decode_slots=1))
        low = await s.submit("Long [len=120]")
        await s.until_tokens(low, 5)
        highs = []
        for number in range(3):
            high = await s.submit(f"Urgent {number} [len=8]", 100)
            await s.until_end(high)
            highs.append(high)
        for number, high in enumerate(highs):
            await s.check_done(high, f"Urgent {number} [len=8]")
        await s.check_done(low, "Long [len=120]")
        events = await s.events(low)
        assert events[:3] == ["queued", "claimed", "started"]
        assert events[3:-1] == ["paused", "resumed"] * ((len(events) - 4) // 2)
        assert await s.marks(low) == ["started", *events[3:-1], "stop"]
        pauses = [line for line in await s.broker.timeline(POOL, low) if line["event"] == "paused"]
        assert {line["by"] for line in pauses} <= set(highs)
        assert len(pauses) == (await s.record(low)).preemptions >= 1
        counters = await s.broker.counters(POOL)
        assert counters["preemptions"] == counters["resumes"] == len(pauses)
        assert counters["tokens_reevaluated"] <= 2 * len(pauses)
        await s.until_idle()


async def test_the_rest_of_a_prompt_that_was_cut_is_not_evaluated_again(
    redis: Redis, valkey_url: str
) -> None:
    slow = TimingProfile(base_step_s=0.002, prefill_tokens_per_s=2_000)
    async with swarm(redis, valkey_url, profile=slow) as s:
        await s.start(s.dispatcher(decode_slots=1))
        prompt = "Read " + "and " * 1500 + "[len=5]"
        turn = await s.submit(prompt)
        await s.until_state(turn, TurnState.RUNNING)
        await s.check_done(await s.submit("Urgent [len=5]", 100), "Urgent [len=5]")
        await s.check_done(turn, prompt, 200)
        [resumed] = [line for line in await s.broker.timeline(POOL, turn) if line["event"] == "resumed"]
        assert resumed["cached_tokens"] < 1000 < (await s.record(turn)).prompt_tokens
        assert resumed["tokens_reevaluated"] <= 64, "at most the batch that was under way"


@ways
async def test_an_operator_holds_and_releases(redis: Redis, valkey_url: str, native_park: bool) -> None:
    async with swarm(redis, valkey_url, native_park=native_park) as s:
        await s.start(s.dispatcher(decode_slots=1))
        turn = await s.submit("Long [len=100]")
        for count in (5, 20, 40):
            await s.until_tokens(turn, count)
            assert await s.broker.tell(POOL, turn, "hold") is TurnState.RUNNING
            await s.until_state(turn, TurnState.PAUSED)
            other = await s.submit("Other [len=3]", 0)
            await s.check_done(other, "Other [len=3]")
            assert (await s.record(turn)).state is TurnState.PAUSED
            assert await s.broker.tell(POOL, turn, "release") is TurnState.PAUSED
            await s.until_state(turn, TurnState.RUNNING)
        await s.check_done(turn, "Long [len=100]")
        assert (await s.events(turn)).count("paused") == 3


@ways
@pytest.mark.parametrize("state", ["queued", "running", "paused", "held", "placed again"])
async def test_a_cancel_in_every_state(redis: Redis, valkey_url: str, native_park: bool, state: str) -> None:
    async with swarm(redis, valkey_url, native_park=native_park) as s:
        await s.start(s.dispatcher(decode_slots=1))
        if state == "queued":
            await s.until_tokens(await s.submit("Long [len=150]"), 3)
        turn = await s.submit("Victim [len=2000]", max_tokens=2000)
        if state != "queued":
            await s.until_tokens(turn, 3)
        other = None
        if state == "paused":
            other = await s.submit("Urgent [len=60]", 100)
            await s.until_state(turn, TurnState.PAUSED)
        elif state in ("held", "placed again"):
            await s.broker.tell(POOL, turn, "hold")
            await s.until_state(turn, TurnState.PAUSED)
            if state == "placed again":
                await s.broker.tell(POOL, turn, "release")
        await s.broker.cancel(POOL, turn)
        record = await s.until_end(turn)
        assert record.state is TurnState.CANCELLED
        entry = (await s.log(turn))[-1]
        assert (entry[0], entry[1], entry[2]["code"]) == ("x", 499, "cancelled")
        assert record.tokens_generated < 100
        if other is not None:
            await s.check_done(other, "Urgent [len=60]")
        after = await s.submit("After [len=5]")
        await s.check_done(after, "After [len=5]")
        assert (await s.broker.counters(POOL))["turns_cancelled"] == 1
        assert await s.broker.owned(POOL, BACKEND) == []
        await s.until_idle()


async def test_a_cancel_between_a_start_and_its_first_step(redis: Redis, valkey_url: str) -> None:
    dispatchers: list[Dispatcher] = []

    class Cancelling(LlamaCppBackend):
        """Lets a cancel be handled right after the turn's Start, before the segment's task has begun."""

        def generation(
            self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
        ) -> Generation:
            [turn] = dispatchers[0]._runs
            asyncio.get_running_loop().call_soon(dispatchers[0]._on_pool_event, PoolEvent("cancel", turn))
            return super().generation(api, body, max_tokens, so_far)

    async with swarm(redis, valkey_url) as s:
        dispatchers.append(s.dispatcher(backend=s.backend(Cancelling)))
        await s.start(dispatchers[0])
        turn = await s.submit("Long [len=1000]", max_tokens=1000)
        record = await s.until_end(turn)
        assert (record.state, record.tokens_generated) == (TurnState.CANCELLED, 0)
        assert s.engine.stats().requests == 0


async def test_a_dropped_turn_says_so_and_is_recomputed(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=2, n_ctx=16_384) as s:
        await s.start(s.dispatcher(decode_slots=2))
        lows = [await s.submit(f"Low {number} [len=150]") for number in range(2)]
        for low in lows:
            await s.until_tokens(low, 5)
        highs = [await s.submit(f"High {number} [len=30]", 100) for number in range(2)]
        for number in range(2):
            await s.check_done(highs[number], f"High {number} [len=30]")
            await s.check_done(lows[number], f"Low {number} [len=150]")
        for low in lows:
            events = await s.events(low)
            assert events == ["queued", "claimed", "started", "paused", "dropped", "resumed", "done"]
            assert (await s.record(low)).tokens_reevaluated > 10


async def test_three_turns_that_do_not_fit_one_pool_of_kv_all_complete(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=4, n_ctx=6144, kv_unified=True) as s:
        backend = s.backend(kv_layout=KvLayout.UNIFIED)
        await s.start(s.dispatcher(backend=backend, decode_slots=3))
        text = "Read:" + " and" * 1475
        prompts = [f"{text} {number} [len=900]" for number in range(3)]
        turns = []
        for prompt in prompts:
            body = {"messages": [{"role": "user", "content": prompt}]}
            size = TurnSize(await backend.count_tokens("chat", body), 900, True)
            assert 1490 <= size.prompt_tokens <= 1510
            turns.append(await s.submit(prompt, size=size))
        with anyio.fail_after(30):
            for turn in turns:
                record = await s.until_end(turn)
                assert (record.state, record.tokens_generated) == (TurnState.DONE, 900)
                assert record.preemptions == 0
        assert s.engine.stats().pool_exhaustions == 0
        assert s.engine.stats().max_concurrent_decode == 2


async def test_what_cannot_be_read_fails_alone(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher())
        bad = [await s.submit("x", body=body) for body in (b"{", b"[]", b'{"messages": 7}', b"{}")]
        good = await s.submit("Good [len=5]")
        for turn in bad:
            record = await s.until_end(turn)
            assert record.state is TurnState.FAILED
            [entry] = [entry for entry in await s.log(turn) if entry[0] == "x"]
            assert entry[1] in (400, 500)
        await s.check_done(good, "Good [len=5]")


async def test_many_turns_leave_nothing_behind(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=6) as s:
        dispatcher = s.dispatcher(decode_slots=4)
        await s.start(dispatcher)
        turns = [
            (await s.submit(f"Turn {number} [len={5 + number % 30}]", (0, 20, 50, 100)[number % 4]), number)
            for number in range(40)
        ]
        for turn, number in turns:
            await s.check_done(turn, f"Turn {number} [len={5 + number % 30}]")
        await until(lambda: not dispatcher._runs)
        assert await s.broker.queue_depth(POOL, {"all": 20}) == {"all": 0}
        assert await s.broker.owned(POOL, BACKEND) == []
        view = dispatcher._scheduler.view()
        assert (view.owned, view.waiting, view.decoding) == ((), 0, 0)
        await s.until_idle()
