"""Turns whose KV is moved: what a slot holds is told exactly, and goes on in another slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends.protocol import Cut, Finished
from backends.simulated import SimulatedConfig, TimingProfile
from tests.backends.llamacpp.harness import STEP, Rig, chat, finish, rig

LENGTH = 60
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "tokens": lambda text: chat(f"{text} [len={LENGTH}]"),
    "chat parser": lambda text: chat(f"{text} [len={LENGTH}]", tools=TOOLS),
}
SLOW_PREFILL = TimingProfile(base_step_s=0.001, prefill_tokens_per_s=20_000, n_batch=64)
BATCH = 64

kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("pieces", [0, 128], ids=["whole", "pieces"])


def config(folder: Path, **more: Any) -> SimulatedConfig:
    return SimulatedConfig(
        **{
            "profile": STEP,
            "n_ctx": 16_384,
            "slot_save_path": folder,
            "kv_bytes_per_token": 1000,
            "multibyte_rate": 0.3,
            **more,
        }
    )


async def moved(r: Rig, end: Cut, source: int, target: int, key: str = "a") -> int:
    """Take a turn's KV out of one slot and into another; how much it was."""
    saved = await r.backend.save(source, key)
    assert saved.kv_tokens == end.kv_tokens
    await r.backend.erase(source)
    restored = await r.backend.restore(key, target)
    await r.backend.forget(key)
    assert restored.kv_tokens == saved.kv_tokens
    return restored.kv_tokens


@kinds
@sizes
async def test_a_turn_goes_on_exactly_in_another_slot(tmp_path: Path, kind: str, pieces: int) -> None:
    body = KINDS[kind]("Tell me more")
    async with rig(config(tmp_path), save_path=tmp_path, piece_tokens=pieces) as r:
        whole = await r.whole(body)
        await r.backend.erase(0)
        for at in range(1, LENGTH, 4):
            generation, sink = r.generation(body, cut_at=[at])
            cut = await generation.run(0, sink)
            assert isinstance(cut, Cut)
            assert cut.resident
            generation.restored(2, await moved(r, cut, 0, 2))
            end, _ = await finish(generation, sink, [2])
            assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
            prompt, cached = sink.starts[1]
            assert prompt - cached <= 2
            await r.backend.erase(2)


@kinds
@sizes
async def test_a_turn_that_is_moved_at_every_cut(tmp_path: Path, kind: str, pieces: int) -> None:
    body = KINDS[kind]("Tell me more")
    async with rig(config(tmp_path), save_path=tmp_path, piece_tokens=pieces) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body, cut_at=list(range(2, LENGTH, 5)))
        slot, cuts = 0, 0
        with anyio.fail_after(20):
            while isinstance(end := await generation.run(slot, sink), Cut):
                target = (slot + 1) % 4
                generation.restored(target, await moved(r, end, slot, target, f"k-{cuts}"))
                slot, cuts = target, cuts + 1
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
        assert cuts > 5
        assert all(prompt - cached <= 2 for prompt, cached in sink.starts[1:])


@kinds
@sizes
async def test_a_turn_that_is_moved_during_prefill(tmp_path: Path, kind: str, pieces: int) -> None:
    body = KINDS[kind]("Read this:" + " word" * 1000)
    async with rig(
        config(tmp_path, profile=SLOW_PREFILL), save_path=tmp_path, piece_tokens=pieces, batch_tokens=BATCH
    ) as r:
        whole = await r.whole(body)
        await r.backend.erase(0)
        before = r.engine.stats().tokens_prefilled
        generation, sink = r.generation(body)
        sink.on_started = generation.preempt
        cut = await generation.run(0, sink)
        assert isinstance(cut, Cut)
        assert cut.kv_tokens < sink.starts[0][0]
        sink.on_started = None
        held = await moved(r, cut, 0, 3)
        assert held > 0
        generation.restored(3, held)
        end, _ = await finish(generation, sink, [3])
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
        assert sink.starts[1][1] == held, "all of it was found"
        assert r.engine.stats().tokens_prefilled - before == sink.starts[0][0], "nothing was evaluated twice"


async def test_a_restore_of_which_nothing_is_used_still_gives_the_same_reply(tmp_path: Path) -> None:
    body = KINDS["tokens"]("Tell me more")
    async with rig(config(tmp_path, resume_reprefills=True), save_path=tmp_path) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body, cut_at=[20])
        cut = await generation.run(0, sink)
        assert isinstance(cut, Cut)
        generation.restored(1, await moved(r, cut, 0, 1))
        end, _ = await finish(generation, sink, [1])
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
        assert sink.starts[1][1] == 0


async def test_a_prompt_brought_in_by_pieces_is_known_in_the_slot_it_is_moved_to(tmp_path: Path) -> None:
    """Else the next turn's first piece would cut the KV off at its own end."""
    body = chat("Read this:" + " word" * 1000 + " [len=10]")
    async with rig(config(tmp_path), save_path=tmp_path, piece_tokens=128) as r:
        end, sink = await r.whole(body)
        saved = await r.backend.save(0, "a")
        assert saved.kv_tokens == end.kv_tokens
        await r.backend.erase(0)
        assert 0 not in r.backend.pieces_in_slot
        await r.backend.restore("a", 1)
        follow_up = {**body, "messages": [*body["messages"], {"role": "assistant", "content": sink.text}]}
        before = r.engine.stats().tokens_prefilled
        generation, second = r.generation({**follow_up, "add_generation_prompt": True})
        await generation.run(1, second)
        evaluated = r.engine.stats().tokens_prefilled - before
        assert evaluated < 128, f"{evaluated} tokens were evaluated again"


# What a slot holds -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("limit", [1, 7, 500])
async def test_the_end_tells_what_the_slot_holds(tmp_path: Path, kind: str, limit: int) -> None:
    body = KINDS[kind]("Tell me more")
    async with rig(config(tmp_path), save_path=tmp_path) as r:
        for cut_at in ([], [3, 20]):
            generation, sink = r.generation(body, limit, cut_at=list(cut_at))
            end, _ = await finish(generation, sink)
            assert isinstance(end, Finished)
            assert (await r.backend.save(0, f"k-{len(cut_at)}")).kv_tokens == end.kv_tokens
            assert (await r.backend.slots())[0].kv_tokens == end.kv_tokens


@kinds
async def test_a_stop_string_ends_with_an_exact_figure(tmp_path: Path, kind: str) -> None:
    body = KINDS[kind]("Tell me more")
    async with rig(config(tmp_path), save_path=tmp_path) as r:
        _, told = await r.whole(body)
        end, _ = await r.whole({**body, "stop": told.text[60:66]})
        assert (await r.backend.save(0, "a")).kv_tokens == end.kv_tokens


async def test_a_cut_before_the_start_does_not_count_what_another_turn_left(tmp_path: Path) -> None:
    async with rig(config(tmp_path, n_slots=1), save_path=tmp_path) as r:
        await r.whole(KINDS["tokens"]("Something else"))
        generation, sink = r.generation(KINDS["tokens"]("Tell me more"))
        async with anyio.create_task_group() as tasks:
            other, others = r.generation(chat("Long [len=3000]"), 3000)
            running = anyio.Event()
            others.on_started = running.set
            tasks.start_soon(other.run, 0, others)
            await running.wait()

            async def queued() -> None:
                cut = await generation.run(0, sink)
                assert isinstance(cut, Cut)
                assert (cut.kv_tokens, sink.starts) == (0, [])
                tasks.cancel_scope.cancel()

            tasks.start_soon(queued)
            while r.engine.stats().queued != 1:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            generation.preempt()
