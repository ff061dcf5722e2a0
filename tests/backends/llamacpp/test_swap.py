"""Slots to files and back on a simulated engine that does it right, wrong, slowly, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends.kv_shape import KvShape
from backends.llamacpp import LlamaCppBackend, LlamaCppOptions, swap
from backends.llamacpp.swap_files import SwapFiles
from backends.protocol import EngineUnavailable, Finished, RestoredKv, SwapFailed
from backends.simulated import Fault, SimulatedConfig, SimulatedEngine, serve_simulated
from tests.backends.llamacpp.harness import STEP, Recorder, Rig, chat, raw_server, rig

BODY = chat("Tell me about files [len=60]")
PER_TOKEN = 1000


def config(folder: Path, **more: Any) -> SimulatedConfig:
    return SimulatedConfig(
        **{
            "profile": STEP,
            "n_ctx": 16_384,
            "slot_save_path": folder,
            "kv_bytes_per_token": PER_TOKEN,
            "multibyte_rate": 0.3,
            **more,
        }
    )


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass
class Saved:
    """An engine whose slot 0 was filled and saved under the key `a`."""

    rig: Rig
    folder: Path
    kv_tokens: int

    @property
    def backend(self) -> LlamaCppBackend:
        return self.rig.backend

    @property
    def path(self) -> Path:
        return self.folder / "swarm-local-a.kv"

    async def refused(self, match: str, slot: int = 1) -> None:
        """Restoring fails in one line that names no path, and leaves the slot empty."""
        end = await self.backend.generation("chat", BODY, 5).run(slot, Recorder())
        assert end.kv_tokens
        with pytest.raises(SwapFailed, match=match) as raised:
            await self.backend.restore("a", slot)
        assert "/" not in str(raised.value)
        assert "\n" not in str(raised.value)
        assert self.rig.engine.stats().resident_kv_tokens == self.kv_tokens, "slot 0 only"


@asynccontextmanager
async def saved(folder: Path, *faults: Fault, **options: Any) -> AsyncIterator[Saved]:
    folder = folder / "kv"
    folder.mkdir()
    async with rig(config(folder), save_path=folder, swap_tag="local", **options) as r:
        end, _ = await r.whole(BODY)
        kv = await r.backend.save(0, "a")
        assert kv.kv_tokens == end.kv_tokens
        r.engine.faults.add(faults)
        yield Saved(r, folder, kv.kv_tokens)


async def test_a_slot_goes_to_a_file_and_comes_back_in_any_slot(tmp_path: Path) -> None:
    async with saved(tmp_path) as s:
        size = s.path.stat().st_size
        assert size == pytest.approx(s.kv_tokens * PER_TOKEN, abs=200)
        await s.backend.erase(0)
        for slot in (3, 0):
            assert await s.backend.restore("a", slot) == RestoredKv(s.kv_tokens, 0.0)
        assert s.rig.engine.stats().resident_kv_tokens == 2 * s.kv_tokens
        kv = await s.backend.save(3, "b")
        assert (kv.kv_tokens, kv.file_bytes) == (s.kv_tokens, size)
        assert listed(s.folder) == ["swarm-local-a.kv", "swarm-local-b.kv"]
        for _ in range(2):
            await s.backend.forget("a")
            assert listed(s.folder) == ["swarm-local-b.kv"]
        with pytest.raises(SwapFailed, match=r"^nothing is saved under this key$"):
            await s.backend.restore("a", 1)
        await s.backend.save(0, "a")
        with pytest.raises(ValueError, match="in use"):
            await s.backend.save(0, "a")
        assert await s.backend.clear_swap() == 2
        assert listed(s.folder) == []
        assert s.backend.swap_space() > 0


async def test_another_process_finds_nothing_under_the_keys_and_clears_the_files(tmp_path: Path) -> None:
    async with saved(tmp_path) as s:
        other = LlamaCppBackend(s.rig.url, s.backend._options)
        try:
            await other.describe()
            with pytest.raises(SwapFailed, match="nothing is saved"):
                await other.restore("a", 1)
            assert await other.clear_swap() == 1
        finally:
            await other.aclose()


# What goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "match"),
    [("save_fails", r"could not save slot 0: Unable to save slot$"), ("save_short", "swap folder is full$")],
)
async def test_a_full_disk_leaves_no_file(tmp_path: Path, fault: Any, match: str) -> None:
    async with saved(tmp_path, Fault(fault)) as s:
        with pytest.raises(SwapFailed, match=match):
            await s.backend.save(0, "b")
        assert listed(s.folder) == ["swarm-local-a.kv"]
        assert (await s.backend.save(0, "b")).kv_tokens == s.kv_tokens, "the next one may work"


@pytest.mark.parametrize(
    ("fault", "match"),
    [("restore_fails", "could not restore slot 1: Unable to"), ("restore_short", r"restored \d+ tokens of")],
)
async def test_a_restore_that_fails_leaves_an_empty_slot(tmp_path: Path, fault: Any, match: str) -> None:
    async with saved(tmp_path, Fault(fault)) as s:
        await s.refused(match)
        assert (await s.backend.restore("a", 1)).kv_tokens == s.kv_tokens


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def replace(path: Path) -> None:
    """As large as before, and readable for the engine: the worst that could be restored."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "match"), [(cut, "was changed"), (replace, "was changed"), (Path.unlink, "file is gone")]
)
async def test_the_engine_does_not_get_a_file_that_was_touched(
    tmp_path: Path, spoil: Any, match: str
) -> None:
    async with saved(tmp_path) as s:
        spoil(s.path)
        s.rig.engine.faults.add([fault := Fault("restore_fails", times=None)])
        await s.refused(match)
        [shown] = s.rig.engine.faults.snapshot()
        assert (shown["kind"], shown["seen"]) == (fault.kind, 0), "the engine was not asked"


async def test_a_slot_that_cannot_be_saved(tmp_path: Path) -> None:
    async with saved(tmp_path) as s:
        for slot, match in ((1, "slot 1 holds nothing to save"), (9, "no slot 9")):
            with pytest.raises(SwapFailed, match=match):
                await s.backend.save(slot, "b")
        generation, sink = s.rig.generation(chat("Long [len=2000]"), 2000)
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            sink.on_started = running.set
            tasks.start_soon(generation.run, 2, sink)
            await running.wait()
            with anyio.fail_after(5), pytest.raises(SwapFailed, match="slot 2 is still decoding"):
                await s.backend.save(2, "b")
            tasks.cancel_scope.cancel()
        assert listed(s.folder) == ["swarm-local-a.kv"]


async def test_without_room_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saved(tmp_path) as s:
        need = s.kv_tokens * PER_TOKEN
        monkeypatch.setattr(SwapFiles, "space", lambda self: need)
        s.rig.engine.faults.add([Fault("save_fails", times=None)])
        with pytest.raises(SwapFailed, match=rf"has {need} bytes free, and the slot needs \d+$"):
            await s.backend.save(0, "b")
        assert s.rig.engine.faults.snapshot()[0]["seen"] == 0
        s.rig.engine.faults.clear()
        monkeypatch.setattr(SwapFiles, "space", lambda self: 2 * need)
        await s.backend.save(0, "b")


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("second", ["one", "two"])
async def test_an_engine_that_was_replaced(tmp_path: Path, second: str, described: bool) -> None:
    """A file outlives its engine, but is of no use to one with another model, noticed or not."""
    async with serve_simulated(config(tmp_path, model_alias="one")) as url:
        options = LlamaCppOptions(piece_tokens=0, save_path=tmp_path)
        backend = LlamaCppBackend(url, options)
        await backend.describe()
        generation = backend.generation("chat", BODY, 100)
        assert isinstance(end := await generation.run(0, Recorder()), Finished)
        await backend.save(0, "a")
    try:
        with pytest.raises(EngineUnavailable):
            await backend.restore("a", 0)
        engine = SimulatedEngine(config(tmp_path, model_alias=second))
        async with serve_simulated(engine, port=int(url.rpartition(":")[2])):
            if described:
                assert (await backend.describe()).model == second
            if second == "one":
                assert (await backend.restore("a", 1)).kv_tokens == end.kv_tokens
                return
            engine.faults.add([Fault("restore_fails")])
            with pytest.raises(SwapFailed, match=r"^the engine runs another model than when"):
                await backend.restore("a", 1)
            assert engine.faults.snapshot()[0]["seen"] == 0
    finally:
        await backend.aclose()


async def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    async with saved(tmp_path) as s:
        for asked in (1, 2):  # about its slots or its model first, then the action
            s.rig.engine.faults.add([Fault("refuse", nth_request=asked, times=None)])
            with pytest.raises(EngineUnavailable):
                await s.backend.save(0, "b")
            s.rig.engine.faults.clear()
            s.rig.engine.faults.add([Fault("refuse", nth_request=asked, times=None)])
            with pytest.raises(EngineUnavailable):
                await s.backend.restore("a", 1)
            s.rig.engine.faults.clear()
        assert listed(s.folder) == ["swarm-local-a.kv"]
        assert s.rig.engine.stats().resident_kv_tokens == s.kv_tokens


STRANGE = [
    (200, b"[]", SwapFailed, "unknown shape"),
    (200, b'{"n_saved": "many"}', SwapFailed, "unknown shape"),
    (200, b'{"n_saved": 5, "n_written": 7}', SwapFailed, "not the configured one"),
    (200, b"<html>", EngineUnavailable, "not JSON"),
    (501, b'{"error": {"message": "no slots action"}}', SwapFailed, "slot 0: no slots action$"),
    (500, b'{"error": {"message": "cannot open /secret/a.kv"}}', SwapFailed, "slot 0: HTTP 500$"),
    (503, b'{"error": {"message": "Loading model"}}', EngineUnavailable, "^Loading model$"),
]


@pytest.mark.parametrize(("status", "body", "kind", "match"), STRANGE)
async def test_strange_answers_to_a_save(
    tmp_path: Path, status: int, body: bytes, kind: type[Exception], match: str
) -> None:
    def answer(request: bytes) -> bytes:
        if request.startswith(b"GET /slots"):
            return reply(200, b'[{"id": 0, "n_ctx": 9, "is_processing": false}]')
        return reply(status, body)

    def reply(code: int, content: bytes) -> bytes:
        return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (code, len(content), content)

    async with raw_server(answer) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(save_path=tmp_path))
        try:
            with pytest.raises(kind, match=match):
                await backend.save(0, "a")
        finally:
            await backend.aclose()
    assert listed(tmp_path) == []


# Cancelled -------------------------------------------------------------------------------------------


async def test_a_cancelled_save_leaves_no_file(tmp_path: Path) -> None:
    async with saved(tmp_path, Fault("slow_save", delay_s=0.3)) as s:
        began = anyio.current_time()
        with anyio.move_on_after(0.05) as scope:
            await s.backend.save(0, "b")
        assert scope.cancelled_caught
        assert anyio.current_time() - began > 0.2, "the file is removed when the engine is done with it"
        assert listed(s.folder) == ["swarm-local-a.kv"]
        assert (await s.backend.save(0, "b")).kv_tokens == s.kv_tokens


async def test_a_cancelled_restore_leaves_an_empty_slot(tmp_path: Path) -> None:
    async with saved(tmp_path, Fault("slow_restore", delay_s=0.3)) as s:
        with anyio.move_on_after(0.05) as scope:
            await s.backend.restore("a", 1)
        assert scope.cancelled_caught
        assert s.rig.engine.stats().resident_kv_tokens == s.kv_tokens, "slot 0 only"
        assert (await s.backend.restore("a", 1)).kv_tokens == s.kv_tokens


@pytest.mark.parametrize("fault", ["slow_save", "slow_restore"])
async def test_a_cancelled_caller_does_not_wait_for_ever(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "CANCEL_BOUND_S", 0.1)
    async with saved(tmp_path, Fault(fault, delay_s=30)) as s:
        with anyio.fail_after(5):
            with anyio.move_on_after(0.05) as scope:
                await (s.backend.save(0, "b") if fault == "slow_save" else s.backend.restore("a", 1))
            assert scope.cancelled_caught
        assert listed(s.folder) == ["swarm-local-a.kv"]


# What the engine is ----------------------------------------------------------------------------------


async def test_where_slots_cannot_be_saved(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cases: list[tuple[dict[str, Any], Path | None]] = [
        ({}, None),
        ({}, tmp_path / "missing"),
        ({}, elsewhere),
        ({"slot_save_path": None}, tmp_path),
        ({"native_park": True}, tmp_path),
    ]
    for engine, folder in cases:
        async with rig(config(tmp_path, **engine), save_path=folder) as r:
            info = await r.backend.describe()
            assert not info.swap
            assert (info.kv is None) == (not engine.get("native_park"))
            await r.backend.forget("a")
            await r.backend.clear_swap()
            with pytest.raises(SwapFailed):
                await r.backend.save(0, "a")
            with pytest.raises(SwapFailed):
                await r.backend.restore("a", 0)
    assert listed(tmp_path) == ["elsewhere"]
    assert listed(elsewhere) == []


async def test_what_kv_takes_is_measured_once(tmp_path: Path) -> None:
    """Also the part that does not grow; a file's head counts as a part of that."""
    async with rig(config(tmp_path, kv_fixed_bytes=5_000_000), save_path=tmp_path) as r:
        before = r.engine.stats().requests
        assert before
        info = await r.backend.describe()
        assert info.swap
        assert info.kv is not None
        assert info.kv.token_bytes == PER_TOKEN
        assert info.kv.fixed_bytes == pytest.approx(5_000_000, abs=200)
        assert r.engine.stats().requests == before
        assert r.engine.stats().resident_kv_tokens == 0
    async with rig(config(tmp_path), save_path=tmp_path, kv=KvShape(7)) as r:
        assert (await r.backend.describe()).kv == KvShape(7)
        assert r.engine.stats().requests == 0
    assert listed(tmp_path) == []


@pytest.mark.parametrize("full", [3, 4])
async def test_measuring_leaves_in_the_slots_what_was_there(tmp_path: Path, full: int) -> None:
    async with rig(config(tmp_path)) as r:
        ids = await r.backend.tokenize("word " * 100)
        for slot in range(full):
            generation = r.backend.generation("completion", {"prompt": [*ids, slot + 300]}, 1)
            await generation.run(slot, Recorder())
        before = [slot.kv_tokens for slot in await r.backend.slots()]
        second = LlamaCppBackend(r.url, LlamaCppOptions(piece_tokens=0, save_path=tmp_path))
        try:
            info = await second.describe()
            assert info.kv is not None
            assert info.kv.token_bytes == PER_TOKEN
            assert [slot.kv_tokens or None for slot in await second.slots()] == before
            for slot in range(full):
                sink = Recorder()
                generation = second.generation("completion", {"prompt": [*ids, slot + 300]}, 1)
                await generation.run(slot, sink)
                assert sink.starts == [(len(ids) + 1, len(ids))]
        finally:
            await second.aclose()
    assert listed(tmp_path) == []


async def test_a_busy_engine_is_not_measured(tmp_path: Path) -> None:
    async with rig(config(tmp_path, n_slots=1)) as r:
        generation, sink = r.generation(chat("Long [len=2000]"), 2000)
        second = LlamaCppBackend(r.url, LlamaCppOptions(piece_tokens=0, save_path=tmp_path))
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            sink.on_started = running.set
            tasks.start_soon(generation.run, 0, sink)
            await running.wait()
            with anyio.fail_after(5):
                info = await second.describe()
            assert (info.kv, info.swap) == (None, True)
            tasks.cancel_scope.cancel()
        await r.until_idle()
        info = await second.describe()
        assert info.kv is not None
        await second.aclose()
