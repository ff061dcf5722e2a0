"""The three tiers on the real engine: what gives way comes back exactly, and the books are the engine's."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from backends.llamacpp.swap_files import SwapFiles
from backends.managed import ManagedEngine
from tests.e2e.conftest import Streamed, Swarm, serve_swarm, swarm_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

STACK = ("drudge", "worker", "helper", "editor")
REPLY_TOKENS = 60


def body(name: str) -> dict[str, Any]:
    """About 420 tokens of prompt, different from the first on."""
    lines = " ".join(f"{name} {number}: a fox sees a crow." for number in range(40))
    return {
        "messages": [{"role": "user", "content": f"{lines} Go on."}],
        "ignore_eos": True,
        "max_tokens": REPLY_TOKENS,
    }


@pytest.fixture
def folder(engine: ManagedEngine) -> Path:
    assert engine.save_path is not None
    return engine.save_path


@pytest.fixture(name="clean_engine")
async def clean_engine_fixture(engine_url: str) -> None:
    await erase_all(engine_url)


async def erase_all(engine_url: str) -> None:
    """No KV of another test: a prompt that is cached is evaluated in other batches, and so rounded."""
    async with httpx.AsyncClient(base_url=engine_url) as http:
        for slot in range(6):
            await http.post(f"/slots/{slot}?action=erase", json={})


@asynccontextmanager
async def swarm_with_room_for(
    turns: float, valkey_url: str, engine_url: str, folder: Path, **backend: Any
) -> AsyncIterator[Swarm]:
    """One decode slot, and a KV budget of so many turns of this module."""
    tokens = int(turns * 600)
    text = swarm_config(
        valkey_url,
        engine_url,
        decode_slots=1,
        **{"save_path": str(folder), "kv_bytes_per_token": 23_040, "kv_budget": tokens * 23_040, **backend},
    )
    async with serve_swarm(text) as swarm:
        yield swarm


async def run_alone(swarm: Swarm) -> dict[str, str]:
    """What each agent's turn says when nobody interrupts it."""
    return {agent: (await swarm.stream(body(agent), agent=agent)).text for agent in STACK}


async def run_stacked(swarm: Swarm) -> dict[str, Streamed]:
    """Each turn is preempted by the next once it has some tokens; all come to their end."""
    turns = {agent: Streamed() for agent in STACK}
    async with anyio.create_task_group() as tasks:
        for agent in STACK:
            going = anyio.Event()

            def on_chunk(seen: Streamed, going: anyio.Event = going) -> None:
                if seen.chunks >= 15:
                    going.set()

            async def run(agent: str = agent, on_chunk: Any = on_chunk) -> None:
                await swarm.stream(body(agent), agent=agent, seen=turns[agent], on_chunk=on_chunk)

            tasks.start_soon(run)
            with anyio.fail_after(60):
                await going.wait()
    return turns


async def tiers_of(swarm: Swarm, turns: dict[str, Streamed]) -> dict[str, list[str]]:
    """From which tiers each turn was resumed."""
    return {
        agent: [line["tier"] for line in await swarm.timeline(seen.id) if line["event"] == "resumed"]
        for agent, seen in turns.items()
    }


@pytest.mark.usefixtures("clean_engine", "redis")
async def test_a_swapped_turn_goes_on_exactly(valkey_url: str, engine_url: str, folder: Path) -> None:
    async with swarm_with_room_for(6, valkey_url, engine_url, folder) as swarm:
        alone = await run_alone(swarm)
    await erase_all(engine_url)
    async with swarm_with_room_for(2.3, valkey_url, engine_url, folder) as swarm:
        turns = await run_stacked(swarm)
        tiers = await tiers_of(swarm, turns)
        for agent, seen in turns.items():
            assert seen.error is None and seen.finish_reason == "length"
            assert seen.usage is not None and seen.usage["completion_tokens"] == REPLY_TOKENS
            assert seen.text == alone[agent], (agent, tiers[agent])
            record = await swarm.record(seen.id)
            assert record["tokens_reevaluated"] <= 2 * len(tiers[agent])
        assert tiers["drudge"] == ["swapped"], "the first to be preempted is the first to give way"
        state = await swarm.state()
        assert state["swap"]["restores"] >= 1 and state["swap"]["failures"] == 0
        assert state["costs"]["restore_s_per_1k_tokens"] > 0
        assert state["costs"]["prefill_tokens_per_s"] > 0


@pytest.mark.usefixtures("clean_engine", "redis")
async def test_a_dropped_turn_is_recomputed(valkey_url: str, engine_url: str, folder: Path) -> None:
    async with swarm_with_room_for(2.3, valkey_url, engine_url, folder, swap_budget=0) as swarm:
        turns = await run_stacked(swarm)
        tiers = await tiers_of(swarm, turns)
        for seen in turns.values():
            assert seen.error is None
            assert seen.usage is not None and seen.usage["completion_tokens"] == REPLY_TOKENS
        assert tiers["drudge"] == ["dropped"]


@pytest.mark.usefixtures("clean_engine", "redis")
async def test_the_books_are_the_engines(valkey_url: str, engine_url: str, folder: Path) -> None:
    """What the ledger says of each slot at rest, paused or idle, is what the engine says."""
    compared = 0
    async with (
        swarm_with_room_for(3.2, valkey_url, engine_url, folder) as swarm,
        httpx.AsyncClient(base_url=engine_url) as engine,
    ):
        turns: dict[str, Streamed] = {}

        async def run() -> None:
            turns.update(await run_stacked(swarm))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while len(turns) < len(STACK):
                before = await swarm.state()
                slots = (await engine.get("/slots")).json()
                after, looked = before, time.time()
                while after["at"] <= looked:
                    await anyio.sleep(0.05)
                    after = await swarm.state()
                for ours, later, theirs in zip(before["slots"], after["slots"], slots, strict=True):
                    at_rest = ours == later and ours["state"] in ("paused", "idle")
                    if at_rest and "n_prompt_tokens" in theirs:
                        assert ours["kv_tokens"] == theirs["n_prompt_tokens"], (ours, theirs)
                        compared += 1
                for state in (before, after):
                    kv = state["kv"]
                    assert sum(kv["owners"].values()) == kv["charged_tokens"] <= kv["budget_tokens"]
    assert compared > 10


@pytest.mark.usefixtures("clean_engine", "redis")
@pytest.mark.parametrize("harm", ["full", "gone", "deleted", "truncated", "another model's"])
async def test_swap_that_fails_loses_nothing(
    valkey_url: str, engine_url: str, folder: Path, harm: str
) -> None:
    async with swarm_with_room_for(2.3, valkey_url, engine_url, folder) as swarm:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go_on_harming, folder, harm)
            turns = await run_stacked(swarm)
            tasks.cancel_scope.cancel()
        if harm == "gone":
            folder.mkdir()  # noqa: ASYNC240
        for seen in turns.values():
            assert seen.error is None
            assert seen.usage is not None and seen.usage["completion_tokens"] == REPLY_TOKENS
        tiers = await tiers_of(swarm, turns)
        assert tiers["drudge"] == ["dropped"]
        events = [line["event"] for line in await swarm.timeline(turns["drudge"].id)]
        assert "swap_failed" in events
        assert (await swarm.state())["swap"]["failures"] >= 1


async def go_on_harming(folder: Path, harm: str) -> None:
    """Until cancelled: a file is there for some milliseconds only before it is needed again."""
    while True:
        do_harm(folder, harm)
        await anyio.sleep(0.002)


def do_harm(folder: Path, harm: str) -> None:
    """A full disk: what is about to be written is where nothing can be."""
    if harm == "gone":
        shutil.rmtree(folder, ignore_errors=True)
    elif harm == "full":
        files = SwapFiles(folder, "default/local")
        for fence, number in product(range(1, 4), range(1, 20)):
            link = folder / files.temporary_name(f"s{fence}-{number}")
            if not link.is_symlink():
                link.symlink_to("/dev/full")
    else:
        for path in folder.glob("*.kv"):
            content = path.read_bytes()
            path.unlink()
            if harm == "truncated":
                path.write_bytes(content[: len(content) // 2])
            elif harm == "another model's":
                path.write_bytes(content[:4] + b"\1" * (len(content) - 4))
