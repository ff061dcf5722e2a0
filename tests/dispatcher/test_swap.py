"""KV that gives way: to a file and back, to another turn's use, or away for good when files fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from backends.kv_shape import KvShape
from backends.simulated import TimingProfile
from orchestrator.dispatcher import Dispatcher
from orchestrator.turns import Tier, TurnState
from tests.dispatcher.harness import PERMANENT, Swarm, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

BATCH, BACKGROUND, NORMAL, FOREGROUND = 0, 20, 50, 100
LONG = "x" * 600 + " [len=150]"
SLOW_PREFILL = TimingProfile(base_step_s=0.002, prefill_tokens_per_s=2_000)


@asynccontextmanager
async def one_spare(
    redis: Redis,
    url: str,
    folder: Path,
    *,
    engine_slots: int = 2,
    resume_reprefills: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Swarm, Dispatcher]]:
    """One decode slot, and so few engine slots that paused KV is soon in the way."""
    async with swarm(
        redis,
        url,
        n_slots=engine_slots,
        slot_save_path=folder,
        kv_bytes_per_token=1000,
        profile=SLOW_PREFILL,
        resume_reprefills=resume_reprefills,
    ) as s:
        backend = s.backend(save_path=folder, kv=KvShape(1000), swap_tag="b")
        dispatcher = s.dispatcher(backend=backend, decode_slots=1, **{"swap_budget": 1 << 30, **options})
        await s.start(dispatcher)
        yield s, dispatcher


async def stacked(s: Swarm) -> tuple[str, str, str]:
    """Three turns of rising class, each of which preempts the one before: the first has to give way."""
    turns = []
    for name, priority in (("a", BATCH), ("b", BACKGROUND), ("c", NORMAL)):
        turns.append(await s.submit(name + LONG, priority, agent=name))
        await s.until_tokens(turns[-1], 20)
    return turns[0], turns[1], turns[2]


async def all_done(s: Swarm, **turns: str) -> None:
    """Each turn ended with the whole text; asked last, as the reference takes a slot of the engine's."""
    for turn in turns.values():
        await s.until_end(turn)
    for name, turn in turns.items():
        await s.check_done(turn, name + LONG)


def do_harm(folder: Path, harm: str) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        path.unlink()
        if harm == "truncated":
            path.write_bytes(content[: len(content) // 2])
        elif harm == "another's":
            path.write_bytes(b"\0" * len(content))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_kv_that_is_in_the_way_is_swapped_and_comes_back(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with one_spare(redis, valkey_url, tmp_path) as (s, dispatcher):
        a, b, c = await stacked(s)
        assert (await s.record(a)).tier == Tier.SWAPPED
        assert len(names(tmp_path)) >= 1
        await all_done(s, c=c, b=b, a=a)
        story = await s.events(a)
        assert [event for event in story if event in ("swapped", "restored", "resumed")] == [
            "swapped",
            "restored",
            "resumed",
        ]
        record = await s.record(a)
        assert record.tokens_reevaluated <= 2
        resumed = [line for line in await s.broker.timeline("p", a) if line["event"] == "resumed"]
        assert resumed[0]["tier"] == "swapped"
        view = dispatcher._scheduler.view(0.0)
        assert view.swap.restores >= 1 and view.swap.failures == 0
        assert view.swap.turns == 0, "a file outlived its turn"


async def test_without_a_budget_it_is_dropped(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with one_spare(redis, valkey_url, tmp_path, swap_budget=0) as (s, _):
        a, b, c = await stacked(s)
        assert (await s.record(a)).tier == Tier.DROPPED
        await all_done(s, c=c, b=b, a=a)
        assert names(tmp_path) == []
        assert (await s.record(a)).tokens_reevaluated > 100


async def test_a_budget_for_one_file_swaps_one_and_drops_the_other(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with one_spare(redis, valkey_url, tmp_path, swap_budget=300_000) as (s, dispatcher):
        turns = []
        for name, priority in (("a", BATCH), ("b", BACKGROUND), ("c", NORMAL), ("d", FOREGROUND)):
            turns.append(await s.submit(name + LONG, priority, agent=name))
            await s.until_tokens(turns[-1], 20)
        tiers = [(await s.record(turn)).tier for turn in turns[:3]]
        assert sorted(map(str, tiers)) == ["dropped", "resident", "swapped"]
        await all_done(s, **dict(zip("abcd", turns, strict=True)))
        assert dispatcher._scheduler.view().swap.used_bytes <= 300_000


@pytest.mark.parametrize("harm", ["deleted", "truncated", "another's"])
async def test_a_file_that_came_to_harm_costs_a_recompute(
    redis: Redis, valkey_url: str, tmp_path: Path, harm: str
) -> None:
    async with one_spare(redis, valkey_url, tmp_path) as (s, dispatcher):
        a, b, c = await stacked(s)
        assert (await s.record(a)).tier == Tier.SWAPPED
        do_harm(tmp_path, harm)
        await all_done(s, c=c, b=b, a=a)
        assert "swap_failed" in await s.events(a)
        assert (await s.record(a)).tokens_reevaluated > 100
        assert dispatcher._scheduler.view().swap.failures >= 1


async def test_a_folder_that_takes_nothing_costs_recomputes(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    async with one_spare(redis, valkey_url, folder) as (s, dispatcher):
        folder.rmdir()
        a, b, c = await stacked(s)
        assert (await s.record(a)).tier == Tier.DROPPED
        await all_done(s, c=c, b=b, a=a)
        assert "swap_failed" in await s.events(a)
        view = dispatcher._scheduler.view(0.0)
        assert view.swap.failures >= 1 and view.swap.used_bytes == 0


async def test_an_earlier_owners_files_are_removed_at_the_start(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    (tmp_path / "swarm-b-s9-1.kv").write_bytes(b"old")
    (tmp_path / "swarm-b-s9-2.kv.tmp").write_bytes(b"old")
    (tmp_path / "somebody-elses").write_bytes(b"keep")
    async with one_spare(redis, valkey_url, tmp_path):
        assert names(tmp_path) == ["somebody-elses"]


async def test_a_cancelled_swapped_turn_leaves_idle_cache(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with one_spare(redis, valkey_url, tmp_path) as (s, dispatcher):
        a, b, c = await stacked(s)
        await s.broker.cancel("p", a)
        await s.until_state(a, TurnState.CANCELLED)
        await all_done(s, c=c, b=b)
        assert dispatcher._scheduler.view().swap.turns == 0
        again = await s.submit("a" + LONG, BATCH, agent="a")
        await s.check_done(again, "a" + LONG)
        started = next(line for line in await s.broker.timeline("p", again) if line["event"] == "started")
        assert started["cached_tokens"] > 100, "its agent's KV was in a file"


async def test_an_agents_next_turn_goes_on_from_its_last_wherever_that_is(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """More agents than slots: each next turn finds its last one's KV in its slot or in a file."""
    agents = "abcdef"
    async with one_spare(redis, valkey_url, tmp_path, engine_slots=3) as (s, dispatcher):
        cached: dict[str, list[int]] = {name: [] for name in agents}
        for round_ in range(3):
            for name in agents:
                text = (name + "y" * 700) * (round_ + 1) + " [len=5]"
                turn = await s.submit(text, BACKGROUND, agent=name)
                await s.until_end(turn)
                usage = (await s.log(turn))[-1][2]
                cached[name].append(usage["prompt_tokens_details"]["cached_tokens"])
        # The last message is one text, so what it shares with its predecessor are whole blocks of it.
        for name in agents:
            assert cached[name][0] < 100
            assert cached[name][1] > 100 and cached[name][2] > cached[name][1], cached
        assert dispatcher._scheduler.view().swap.restores > 0


async def test_files_are_kept_while_the_engine_is_away(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    async with one_spare(redis, valkey_url, tmp_path) as (s, dispatcher):
        a, b, c = await stacked(s)
        await dispatcher._engine_lost()
        await until(lambda: dispatcher.healthy)
        await all_done(s, c=c, b=b, a=a)
        assert "restored" in await s.events(a)


async def test_an_engine_that_evaluates_everything_again_is_found_out(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """Neither its slots nor its files are of use to a resume: after two tries of each, neither is kept."""
    async with one_spare(redis, valkey_url, tmp_path, resume_reprefills=True) as (s, dispatcher):
        low = await s.submit("low" + LONG.replace("150", "400"), BATCH, 500, agent="low")
        for number in range(4):
            await s.until_tokens(low, 20 * (number + 1))
            high = await s.submit(f"h{number} [len=40]", NORMAL, agent="high")
            await s.until_end(high)
        await s.until_tokens(low, 100)
        view = dispatcher._scheduler.view()
        assert view.costs.resident_reevaluated == 1.0
        lines = await s.broker.timeline("p", low)
        tiers = [line["tier"] for line in lines if line["event"] == "resumed"]
        assert tiers[:2] == ["resident", "resident"]
        assert "swapped" in tiers[2:], "the next tier is tried: nobody knows yet that it is no better"
        await s.until_end(low)
        await s.check_done(low, "low" + LONG.replace("150", "400"), 500)
