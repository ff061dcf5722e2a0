"""Redis or the engine fails in the middle: nothing lost, nothing twice, and no turn tried for ever."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest
from redis.asyncio import Redis

from backends.llamacpp import LlamaCppBackend
from backends.protocol import (
    Cut,
    EngineInfo,
    EngineUnavailable,
    Finished,
    Generation,
    KvLayout,
    ReplySoFar,
    Sink,
)
from backends.simulated import Fault
from orchestrator.broker import PoolEvent, timeline_entry
from orchestrator.dispatcher.dispatcher import MAX_FAILURES, TICK_S
from orchestrator.turns import TurnState
from tests.dispatcher.harness import BACKEND, KEYS, PERMANENT, POOL, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

LONG = "Long [len=150]"


# Redis -----------------------------------------------------------------------------------------------


async def test_connections_that_are_killed_lose_nothing(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher())
        turns = [await s.submit(LONG) for _ in range(3)]
        for count in (5, 40, 80, 120):
            await s.until_tokens(turns[0], count)
            await redis.client_kill_filter(_type="normal", skipme=True)
            if count == 40:
                turns.append(await s.submit(LONG, 100))
        for turn in turns:
            await s.check_done(turn, LONG)
        assert await s.broker.owned(POOL, BACKEND) == []


async def test_a_redis_that_pauses_loses_nothing(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher())
        low = await s.submit(LONG)
        await s.until_tokens(low, 5)
        await redis.client_pause(2500, all=True)
        await s.check_done(low, LONG)
        high = await s.submit("High [len=5]", 100)
        await s.check_done(high, "High [len=5]")
        assert "interrupted" not in await s.events(low)


@pytest.mark.parametrize("loss", ["all", "the end"])
async def test_a_log_that_lost_entries_is_written_again(redis: Redis, valkey_url: str, loss: str) -> None:
    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher())
        turn = await s.submit(LONG)
        for count in (10, 60, 110):
            await s.until_tokens(turn, count)
            if loss == "all":
                await redis.delete(KEYS.log(turn))
            else:
                await redis.ltrim(KEYS.log(turn), 0, -8)
        await s.check_done(turn, LONG)
        assert await redis.ttl(KEYS.log(turn)) > 0


@pytest.mark.parametrize("present", ["queued", "claimed", "paused"])
async def test_a_record_that_fell_back_is_led_along(redis: Redis, valkey_url: str, present: str) -> None:
    """Redis came back from its file without the last second: the turn's end still reaches its record."""
    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher())
        turn = await s.submit(LONG)
        await s.until_tokens(turn, 10)
        await redis.hset(KEYS.turn(turn), "state", present)
        if present == "queued":
            await redis.hdel(KEYS.turn(turn), "backend")
            await redis.srem(KEYS.owned(BACKEND), turn)
            await redis.zadd(KEYS.queue, {turn: 5.0})
        await s.check_done(turn, LONG)
        assert await redis.zcard(KEYS.queue) == 0
        assert await s.broker.owned(POOL, BACKEND) == []
        assert "mended" in await s.events(turn)


# The engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disconnect", "http_500", "truncated_sse", "html_error", "invalid_utf8"])
async def test_a_turn_survives_what_passes(redis: Redis, valkey_url: str, kind: Any) -> None:
    faults = (Fault(kind, after_tokens=0, times=2), Fault(kind, after_tokens=7, times=3))
    async with swarm(redis, valkey_url) as s:
        s.engine.faults.add(faults)
        await s.start(s.dispatcher())
        turn = await s.submit(LONG)
        record = await s.until_end(turn)
        s.engine.faults.clear()
        assert record.state is TurnState.DONE
        await s.check_done(turn, LONG)
        marks = await s.marks(turn)
        assert marks == ["started", *["paused", "resumed"] * (len(marks) // 2 - 1), "stop"]


async def test_a_turn_that_never_gets_a_token_fails_with_502(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        s.engine.faults.add([Fault("http_500", match="cursed", times=None)])
        await s.start(s.dispatcher())
        turn, other = await s.submit("cursed"), await s.submit("fine [len=10]")
        record = await s.until_end(turn)
        assert record.state is TurnState.FAILED
        entry = (await s.log(turn))[-1]
        assert (entry[0], entry[1], entry[2]["type"]) == ("x", 502, "engine_error")
        assert f"failed {MAX_FAILURES} times" in entry[2]["message"]
        [fault] = s.engine.faults.snapshot()
        assert fault["fired"] == MAX_FAILURES
        await s.check_done(other, "fine [len=10]")
        assert (await s.broker.counters(POOL))["turns_failed"] == 1


class Hopeless(Generation):
    """Is picked up each time, and broken off before its first token, `reached` tokens into its prompt."""

    reached = 0

    def __init__(self) -> None:
        self.runs = 0

    @property
    def evaluated_tokens(self) -> int:
        return self.reached

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        self.runs += 1
        sink.started(1_000, 0)
        await anyio.lowlevel.checkpoint()
        raise EngineUnavailable("Context size has been exceeded.")

    def preempt(self) -> None:
        pass

    def restored(self, slot: int, kv_tokens: int) -> None:
        pass

    async def discard(self) -> None:
        pass


class GetsOn(Hopeless):
    """Each time evaluates some more of its prompt, or a further input, before it is broken off."""

    def __init__(self, *, says: bool) -> None:
        super().__init__()
        self._says = says

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        self.runs += 1
        sink.started(1_000, self.reached)
        if self._says:
            sink.delta({"embeddings": [[0.0]]}, 0, [])
        else:
            self.reached += 64
        await anyio.lowlevel.checkpoint()
        if self.runs <= 3 * MAX_FAILURES:
            raise EngineUnavailable("slot 1 still decodes 30 s after it was stopped")
        return Finished("stop", 0, 0)


async def end_of(redis: Redis, valkey_url: str, generation: Generation) -> TurnState:
    """What becomes of a turn that is generated so."""

    class Cursed(LlamaCppBackend):
        def generation(
            self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
        ) -> Generation:
            return generation

    async with swarm(redis, valkey_url) as s:
        await s.start(s.dispatcher(backend=s.backend(Cursed)))
        return (await s.until_end(await s.submit("x"))).state


@pytest.mark.parametrize("reached", [0, 640])
async def test_being_picked_up_is_no_progress(redis: Redis, valkey_url: str, reached: int) -> None:
    hopeless = Hopeless()
    hopeless.reached = reached
    assert await end_of(redis, valkey_url, hopeless) is TurnState.FAILED
    assert hopeless.runs == MAX_FAILURES


@pytest.mark.parametrize("says", [False, True], ids=["evaluates", "says"])
async def test_a_prompt_or_an_input_further_is_progress(redis: Redis, valkey_url: str, says: bool) -> None:
    gets_on = GetsOn(says=says)
    assert await end_of(redis, valkey_url, gets_on) is TurnState.DONE
    assert gets_on.runs == 3 * MAX_FAILURES + 1


async def test_progress_counts_even_when_it_is_small(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, multibyte_rate=0.0) as s:
        s.engine.faults.add([Fault("disconnect", after_tokens=3, times=4 * MAX_FAILURES)])
        await s.start(s.dispatcher())
        turn = await s.submit(LONG)
        await s.until_end(turn)
        s.engine.faults.clear()
        await s.check_done(turn, LONG)
        assert (await s.events(turn)).count("interrupted") >= 3 * MAX_FAILURES


async def test_a_refusal_has_the_engines_status(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=4, n_ctx=1024) as s:
        await s.start(s.dispatcher())
        turn = await s.submit("word " * 300)
        record = await s.until_end(turn)
        assert record.state is TurnState.FAILED
        entry = (await s.log(turn))[-1]
        assert entry[:2] == ["x", 400]
        assert entry[2]["code"] == "context_length_exceeded"
        assert record.error == entry[2]["message"]


async def test_an_engine_that_is_gone_for_a_while(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        dispatcher = s.dispatcher()
        await s.start(dispatcher)
        turn = await s.submit(LONG)
        await s.until_tokens(turn, 10)
        s.engine.faults.add([Fault("disconnect", after_tokens=0), Fault("refuse", times=None)])
        await s.broker.tell(POOL, turn, "hold")
        await until(lambda: not dispatcher.healthy)
        waiting = await s.submit("Waiting [len=5]", 100)
        await s.broker.tell(POOL, turn, "release")
        await anyio.sleep(0.1)
        assert (await s.record(waiting)).state is TurnState.QUEUED
        s.engine.faults.clear()
        await s.check_done(waiting, "Waiting [len=5]")
        await s.check_done(turn, LONG)


async def test_an_engine_that_comes_back_as_another_is_learned_anew(redis: Redis, valkey_url: str) -> None:
    class Shrinking(LlamaCppBackend):
        """The second description has fewer slots."""

        described = 0

        async def describe(self) -> EngineInfo:
            info = await super().describe()
            self.described += 1
            return info if self.described == 1 else replace(info, engine_slots=2)

    async with swarm(redis, valkey_url, n_slots=6) as s:
        dispatcher = s.dispatcher(backend=s.backend(Shrinking), decode_slots=4)
        await s.start(dispatcher)
        turns = [await s.submit(LONG) for _ in range(4)]
        for turn in turns:
            await s.until_tokens(turn, 5)
        assert len(dispatcher._scheduler.view().slots) == 6
        await dispatcher._engine_lost()
        await until(lambda: len(dispatcher._scheduler.view().slots) == 2)
        for turn in turns:
            await s.check_done(turn, LONG)


async def test_a_turn_left_behind_that_no_longer_fits_fails(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_ctx=600, kv_unified=True) as s:
        lease = await s.broker.acquire(POOL, BACKEND, "gone", 60_000)
        assert lease is not None
        turn = await s.submit("Big", max_tokens=700)
        await s.broker.claim(lease, turn)
        await s.broker.advance(lease, turn, TurnState.RUNNING, timeline_entry("started"))
        await s.broker.release(lease)
        await s.start(s.dispatcher(backend=s.backend(kv_layout=KvLayout.UNIFIED)))
        record = await s.until_end(turn)
        assert record.state is TurnState.FAILED
        assert record.error is not None
        assert record.error == "the turn may need 753 tokens of KV; the engine has 600"
        assert (await s.log(turn))[-1][1] == 502


@pytest.mark.parametrize("room", [599, 752, 753])
async def test_a_waiting_turn_that_fits_nowhere_fails(redis: Redis, valkey_url: str, room: int) -> None:
    """It was sized by another engine than there is now; nobody would ever claim it."""
    async with swarm(redis, valkey_url, n_ctx=600, kv_unified=True) as s:
        turn = await s.submit("Big", max_tokens=700)
        other = await s.backend(kv_layout=KvLayout.UNIFIED).describe()
        published = {"engine": asdict(replace(other, kv_budget_tokens=room))}
        await s.broker.publish_state(POOL, "larger", orjson.dumps(published))
        unified = s.backend(kv_layout=KvLayout.UNIFIED)
        await s.start(s.dispatcher(backend=unified, others=("never seen", "larger")))
        if room < 753:
            record = await s.until_end(turn)
            assert record.error == "the turn may need 753 tokens of KV; the engine has 600"
            kind, status, error = (await s.log(turn))[-1]
            assert (kind, status, error["code"]) == ("x", 400, "context_length_exceeded")
        else:
            await anyio.sleep(2.5 * TICK_S)
            assert (await s.record(turn)).state is TurnState.QUEUED
            await s.broker.cancel(POOL, turn)
        small = await s.submit("Hello [len=5]")
        await s.check_done(small, "Hello [len=5]")


async def test_an_unknown_event_is_passed_over(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url) as s:
        dispatcher = s.dispatcher()
        await s.start(dispatcher)
        for kind in ("strange", "cancel", "hold", "release", "withdrawn"):
            dispatcher._on_pool_event(PoolEvent(kind, "nobody"))
        turn = await s.submit("Hello [len=5]")
        await s.check_done(turn, "Hello [len=5]")
