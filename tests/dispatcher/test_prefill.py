"""Long prompts on the simulated engine: who asks again, and who asks for little beside them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from redis.asyncio import Redis

from backends.simulated import TimingProfile
from orchestrator.dispatcher import Dispatcher
from orchestrator.scheduler import Progressed
from orchestrator.turns import TurnState
from tests.dispatcher.harness import PERMANENT, POOL, Swarm, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

#: An engine that takes a second for 2,000 tokens, in batches of 64.
SLOW: dict[str, Any] = {"profile": TimingProfile(base_step_s=0.002, prefill_tokens_per_s=2_000, n_batch=64)}
PROMPT = "Read " + "and " * 3_000 + "[len=5]"


async def started(s: Swarm, turn: str) -> dict[str, Any]:
    """The timeline's entry."""
    [entry] = [line for line in await s.broker.timeline(POOL, turn) if line["event"] == "started"]
    return dict(entry)


async def evaluated(dispatcher: Dispatcher, turn: str, tokens: int) -> None:
    """Return once the engine has said that it has so many tokens of the turn's prompt."""
    await until(lambda: turn in dispatcher._runs and dispatcher._runs[turn].kv_tokens >= tokens)


@pytest.mark.parametrize("native_park", [False, True], ids=["closing", "parking"])
async def test_who_gives_up_and_asks_again_goes_on_from_there(
    redis: Redis, valkey_url: str, native_park: bool
) -> None:
    async with swarm(redis, valkey_url, n_slots=4, native_park=native_park, **SLOW) as s:
        dispatcher = s.dispatcher(decode_slots=3)
        await s.start(dispatcher)
        turn = await s.submit(PROMPT)
        await evaluated(dispatcher, turn, 800)
        await s.broker.cancel(POOL, turn)
        again = await s.submit(PROMPT)
        await s.check_done(again, PROMPT)
        first, second = await started(s, turn), await started(s, again)
        assert second["slot"] == first["slot"]
        assert second["cached_tokens"] >= 800
        assert (await s.record(turn)).state is TurnState.CANCELLED


async def test_the_cancel_tells_how_much_was_evaluated(redis: Redis, valkey_url: str) -> None:
    """Not the whole prompt: somebody who waits for it would choose it over what has more."""
    async with swarm(redis, valkey_url, n_slots=4, **SLOW) as s:
        dispatcher = s.dispatcher()
        await s.start(dispatcher)
        turn = await s.submit(PROMPT)
        await evaluated(dispatcher, turn, 800)
        dispatcher._report_progress()
        [running] = [view for view in dispatcher._scheduler.view().owned if view.id == turn]
        assert 800 <= running.kv_tokens < 2_000
        assert any(isinstance(event, Progressed) for _, event in dispatcher._scheduler._grown.values())
        await s.broker.cancel(POOL, turn)
        await s.until_end(turn)
        slot = dispatcher._scheduler.view().slots[(await started(s, turn))["slot"]]
        assert 800 <= slot.kv_tokens < 2_000


async def test_a_short_prompt_does_not_wait_for_its_agents_long_one(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=4, **SLOW) as s:
        dispatcher = s.dispatcher(decode_slots=3)
        await s.start(dispatcher)
        big = await s.submit(PROMPT, agent="coder")
        await evaluated(dispatcher, big, 300)
        title = await s.submit("Title [len=5]", agent="coder")
        await s.until_end(title)
        assert dispatcher._runs[big].kv_tokens < 2_000, "it ended long before"
        await s.check_done(big, PROMPT)
        await s.check_done(title, "Title [len=5]")
        assert await s.events(big) == ["queued", "claimed", "started", "paused", "resumed", "done"]
        [paused] = [line for line in await s.broker.timeline(POOL, big) if line["event"] == "paused"]
        assert paused["by"] == title
        assert (await s.record(big)).tokens_reevaluated <= 64
        assert (await s.record(title)).preemptions == 0


async def test_both_at_once(redis: Redis, valkey_url: str) -> None:
    async with swarm(redis, valkey_url, n_slots=4, **SLOW) as s:
        dispatcher = s.dispatcher(decode_slots=3)
        await s.start(dispatcher)
        with anyio.fail_after(20):
            big = await s.submit(PROMPT, agent="coder")
            title = await s.submit("Title [len=5]", agent="coder")
            await s.until_end(title)
            assert dispatcher._runs[big].kv_tokens < 2_000, "it ended long before"
            await s.check_done(big, PROMPT)
            await s.check_done(title, "Title [len=5]")
