"""Saved slots on the real engine: exact figures, exact resumes in other slots, and what goes wrong."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.managed import ManagedEngine
from backends.protocol import Cut, Finished, Generation, SwapFailed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BATCH = 64
TEXT = " ".join(f"Line {number}: the fox sees a crow." for number in range(60))
STORY = {"messages": [{"role": "user", "content": "Tell a story about a fox."}], "temperature": 0}
KINDS: dict[str, dict[str, Any]] = {"tokens": {}, "chat parser": {"logprobs": True}}


@dataclass
class Sink:
    """Puts a reply together; preempts at `cut_at` deltas, or at the start."""

    generation: Generation | None = None
    cut_at: int | None = None
    text: str = ""
    deltas: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.starts.append((prompt_tokens, cached_tokens))
        self._cut_when(0)

    def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
        self.text += part.get("content") or ""
        self.deltas += 1
        self._cut_when(self.deltas)

    def _cut_when(self, reached: int) -> None:
        if self.cut_at is not None and reached >= self.cut_at:
            self.cut_at = None
            assert self.generation is not None
            self.generation.preempt()


def turn(
    backend: LlamaCppBackend, body: dict[str, Any], limit: int = 80, cut_at: int | None = None
) -> tuple[Generation, Sink]:
    generation = backend.generation("chat", body, limit)
    return generation, Sink(generation, cut_at)


@pytest.fixture
async def backend(engine: ManagedEngine) -> AsyncIterator[LlamaCppBackend]:
    """An adapter of the session's engine with empty slots; it leaves no file."""
    tag = f"e2e-{secrets.token_hex(4)}"
    options = LlamaCppOptions(
        batch_tokens=BATCH, piece_tokens=0, save_path=engine.save_path, swap_tag=tag, model="small"
    )
    backend = LlamaCppBackend(engine.url, options)
    # Other tests share the folder: one that may not look into it leaves what the engine wrote for it.
    before = set(engine.save_path.iterdir())
    info = await backend.describe()
    assert info.swap
    for slot in range(info.engine_slots):
        await backend.erase(slot)
    yield backend
    await backend.clear_swap()
    left = set(engine.save_path.iterdir()) - before
    await backend.aclose()
    assert not left


_numbers = itertools.count()


async def agree(backend: LlamaCppBackend, slot: int, kv_tokens: int) -> None:
    """The figure is what a save finds in the slot."""
    key = f"agree-{next(_numbers)}"
    saved = await backend.save(slot, key)
    await backend.forget(key)
    assert saved.kv_tokens == kv_tokens
    assert (await backend.slots())[slot].kv_tokens in (kv_tokens, None)


async def move(backend: LlamaCppBackend, generation: Generation, cut: Cut, source: int, target: int) -> None:
    """Swap the turn out of one slot and into another."""
    key = f"move-{next(_numbers)}"
    saved = await backend.save(source, key)
    assert saved.kv_tokens == cut.kv_tokens
    await backend.erase(source)
    restored = await backend.restore(key, target)
    await backend.forget(key)
    assert restored.kv_tokens == saved.kv_tokens
    generation.restored(target, restored.kv_tokens)


@pytest.mark.parametrize("pieces", [0, 128], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_turn_goes_on_exactly_in_another_slot(
    backend: LlamaCppBackend, kind: str, pieces: int
) -> None:
    backend.piece_tokens = pieces
    asked = f"{TEXT[:800]}\nTell a long story about the fox."
    body = {**STORY, **KINDS[kind], "messages": [{"role": "user", "content": asked}]}
    generation, whole = turn(backend, body, 50)
    end = await generation.run(0, whole)
    assert isinstance(end, Finished)
    await backend.erase(0)
    for number, cut_at in enumerate((1, 2, 17, 40)):
        source, target = number % 3, 3 + number % 3
        generation, sink = turn(backend, body, 50, cut_at)
        cut = await generation.run(source, sink)
        assert isinstance(cut, Cut)
        await move(backend, generation, cut, source, target)
        assert await generation.run(target, sink) == end
        assert sink.text == whole.text
        prompt, cached = sink.starts[1]
        assert prompt - cached == 1
        await backend.erase(target)


@pytest.mark.parametrize("pieces", [0, 128], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_turn_that_is_moved_during_prefill_is_not_evaluated_twice(
    backend: LlamaCppBackend, kind: str, pieces: int
) -> None:
    backend.piece_tokens = pieces
    body = {**STORY, **KINDS[kind], "messages": [{"role": "user", "content": TEXT}]}
    generation, whole = turn(backend, body, 30)
    end = await generation.run(0, whole)
    await backend.erase(0)
    generation, sink = turn(backend, body, 30, cut_at=0)
    cut = await generation.run(1, sink)
    assert isinstance(cut, Cut)
    assert cut.kv_tokens < sink.starts[0][0] // 2
    await agree(backend, 1, cut.kv_tokens)
    sink.cut_at = 0
    await move(backend, generation, cut, 1, 4)
    second = await generation.run(4, sink)
    assert isinstance(second, Cut)
    assert second.kv_tokens > cut.kv_tokens
    await move(backend, generation, second, 4, 2)
    assert await generation.run(2, sink) == end
    assert sink.text == whole.text
    assert [cached for _, cached in sink.starts] == [0, cut.kv_tokens, second.kv_tokens]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_slot_holds_is_told_exactly(backend: LlamaCppBackend, kind: str) -> None:
    body = {**STORY, **KINDS[kind]}
    hello = {**body, "messages": [{"role": "user", "content": "Say hi"}]}
    for request, limit in (
        (body, 1),
        (body, 40),
        (hello, 200),  # ends by itself
        ({**body, "stop": ["."]}, 200),
        ({**body, "stop": [" fox", "the fo"]}, 200),
    ):
        generation, sink = turn(backend, request, limit)
        end = await generation.run(0, sink)
        assert isinstance(end, Finished)
        assert (end.finish_reason == "length") == (limit < 200)
        await agree(backend, 0, end.kv_tokens)
    for cut_at in (1, 5, 20):
        generation, sink = turn(backend, body, 40, cut_at)
        for slot in (0, 0):
            cut = await generation.run(slot, sink)
            await agree(backend, slot, cut.kv_tokens)
        assert isinstance(cut, Finished)
    saved = await backend.save(0, "a")
    await backend.erase(0)
    assert (await backend.slots())[0].kv_tokens == 0
    await backend.restore("a", 0)
    await agree(backend, 0, saved.kv_tokens)


async def fill(backend: LlamaCppBackend, slot: int) -> int:
    generation, sink = turn(backend, STORY, 20)
    end = await generation.run(slot, sink)
    return end.kv_tokens


async def test_a_full_disk_leaves_no_file_and_the_slot_as_it_was(
    backend: LlamaCppBackend, engine: ManagedEngine
) -> None:
    held = await fill(backend, 0)
    assert backend._swap is not None
    name = backend._swap.files.temporary_name("a")
    (engine.save_path / name).symlink_to("/dev/full")
    with pytest.raises(SwapFailed, match="could not save slot 0: Unable to save slot"):
        await backend.save(0, "a")
    assert not list(engine.save_path.glob("swarm-e2e*"))
    await agree(backend, 0, held)


async def test_a_file_that_was_spoilt_is_refused_and_one_that_the_engine_refuses_leaves_nothing(
    backend: LlamaCppBackend, engine: ManagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(backend, 0)
    await fill(backend, 1)
    await backend.save(0, "a")
    assert backend._swap is not None
    path = engine.save_path / backend._swap.files.name("a")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SwapFailed, match="changed after it was saved"):
        await backend.restore("a", 1)
    assert (await backend.slots())[1].kv_tokens == 0
    await fill(backend, 1)

    async def unchecked(*_: object) -> None:
        """As if the file had been spoilt after the check."""

    monkeypatch.setattr(backend._swap.files, "check", unchecked)
    with pytest.raises(SwapFailed, match="could not restore slot 1: Unable to restore slot"):
        await backend.restore("a", 1)
    assert (await backend.slots())[1].kv_tokens == 0


async def test_a_cancelled_save_leaves_no_file(backend: LlamaCppBackend, engine: ManagedEngine) -> None:
    generation, sink = turn(backend, {**STORY, "messages": [{"role": "user", "content": TEXT}]}, 20)
    await generation.run(0, sink)
    for delay_s in (0.0, 0.001, 0.003, 0.006, 0.01):
        with anyio.move_on_after(delay_s):
            await backend.save(0, "a")
            await backend.forget("a")
    assert not list(engine.save_path.glob("swarm-e2e*"))


async def test_what_kv_takes_is_measured(backend: LlamaCppBackend) -> None:
    """30 layers, 3 heads of 64, keys and values, 2 bytes each; a file adds 16 bytes a token."""
    info = await backend.describe()
    assert info.kv is not None
    assert info.kv.token_bytes == 30 * 3 * 64 * 2 * 2 + 16
    assert info.kv.fixed_bytes < 1024
    held = await fill(backend, 0)
    assert (await backend.save(0, "a")).file_bytes == info.kv.bytes(held)
