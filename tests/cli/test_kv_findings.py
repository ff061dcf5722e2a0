"""What the doctor says about KV, memory and the swap folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.kv_shape import KvShape
from backends.managed import EngineSettings
from orchestrator.cli import kv_findings
from orchestrator.cli.findings import Finding
from orchestrator.cli.kv_findings import (
    allocated,
    file_system,
    free_bytes,
    measured_kv,
    model_findings,
    running_kv,
    shape_text,
    swap_finding,
)
from orchestrator.config import Backend
from orchestrator.config.schema import ManagedEngine
from orchestrator.service import engine_settings
from tests.backends.gguf_file import LLAMA_8B, Number, write_gguf

GIB = 1 << 30
WINDOWED: dict[str, Number] = dict(LLAMA_8B) | {"attention.sliding_window": 1024}
RECURRENT: dict[str, Number] = {
    "block_count": 24,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 1536,
    "ssm.state_size": 16,
}


def managed(path: Path, *, kv_bytes_per_token: int | None = None, **changes: Any) -> Backend:
    engine = ManagedEngine(model=str(path), **changes)
    return Backend(name="mine", managed=engine, kv_bytes_per_token=kv_bytes_per_token)


def external(**changes: Any) -> Backend:
    return Backend(name="mine", url="http://127.0.0.1:9", **changes)


def findings(backend: Backend, path: Path) -> dict[str, Finding]:
    found = model_findings(backend, engine_settings(backend), path)
    return {finding.what.removeprefix("mine "): finding for finding in found}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", "llama", LLAMA_8B)


@pytest.fixture
def enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_findings, "available_memory", lambda: 1 << 40)


# KV -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("enough")
def test_kv_by_the_model_file_and_the_cache_types(model: Path) -> None:
    found = findings(managed(model), model)
    assert found["KV"].text == "131,072 B a token, from the model file (f16)"
    assert {finding.level for finding in found.values()} == {"ok"}
    mixed = findings(managed(model, cache_type_k="q8_0"), model)["KV"]
    assert mixed.text == "100,352 B a token, from the model file (q8_0/f16)"


@pytest.mark.usefixtures("enough")
def test_kv_that_the_file_does_not_tell(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "new.gguf", "nonesuch", LLAMA_8B)
    found = findings(managed(path), path)
    assert found["KV"].level == "warn"
    assert found["KV"].text == "bytes unknown: the layers of architecture nonesuch are not known here"
    assert "--deep" in str(found["KV"].remedy)
    assert "besides its KV" in found["memory"].text
    given = findings(managed(path, kv_bytes_per_token=1000), path)
    assert (given["KV"].level, given["KV"].text) == ("ok", "1,000 B a token, as configured")


@pytest.mark.usefixtures("enough")
@pytest.mark.parametrize(("given", "expected"), [(131_072, "ok"), (131_100, "ok"), (65_536, "warn")])
def test_configured_kv_against_the_model_file(model: Path, given: int, expected: str) -> None:
    found = findings(managed(model, kv_bytes_per_token=given), model)
    assert found["KV"].level == expected
    assert ("as configured, but 131,072 B" in found["KV"].text) == (expected == "warn")


def test_kv_of_an_engine_that_runs() -> None:
    assert running_kv(external(kv_bytes_per_token=5000)).text == "5,000 B a token, as configured"
    assert "measured by a save" in running_kv(external(save_path=Path("/dev/shm"))).text
    assert running_kv(external()).level == "warn"


def test_kv_by_saves() -> None:
    """Of 1 and 4 tokens: SmolLM2's 23,040 B a token, 16 B of cells and 500 of the file's head."""
    sizes = [23_056 + 500, 4 * 23_056 + 500]
    assert measured_kv(external(), sizes).text == "23,056 B a token, by a save"
    assert measured_kv(external(kv_bytes_per_token=23_040), sizes).level == "ok"
    wrong = measured_kv(external(kv_bytes_per_token=46_080), sizes)
    assert (wrong.level, wrong.remedy) == ("warn", "correct backends[].kv_bytes_per_token")
    state = measured_kv(external(), [(3 << 20) + 100, (3 << 20) + 400])
    assert state.text == "100 B a token and 3.00 MiB a turn, by a save"


@pytest.mark.parametrize("sizes", [[None, 5], [5, None], [7, 7]])
def test_saves_that_say_nothing(sizes: list[int | None]) -> None:
    assert measured_kv(external(), sizes).level == "warn"


def test_shapes_as_text() -> None:
    assert shape_text(KvShape(23_040)) == "23,040 B a token"
    assert shape_text(KvShape(10, 20, 512)) == "10 B a token and 20 B a token of the last 512"
    assert shape_text(KvShape(0, fixed_bytes=3 << 20)) == "3.00 MiB a turn"


# Memory and resume --------------------------------------------------------------------------------


def test_memory_counts_the_cache_type(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_findings, "available_memory", lambda: 3 * GIB)
    f16 = findings(managed(model, context=24_576), model)["memory"]
    assert (f16.level, "3.00 GiB of it KV" in f16.text) == ("fail", True)
    assert "q8_0" in str(f16.remedy)
    q8 = findings(managed(model, context=24_576, cache_type_k="q8_0", cache_type_v="q8_0"), model)["memory"]
    assert (q8.level, "1.59 GiB of it KV" in q8.text) == ("ok", True)
    gpu = findings(managed(model, context=24_576, gpu_layers=99), model)["memory"]
    assert gpu.level == "warn", "it may be in the GPU's memory"


def test_each_slot_has_its_share() -> None:
    settings = EngineSettings(model="m.gguf", decode_slots=2, engine_slots=4, context=4096)
    assert allocated(KvShape(100), settings) == 409_600
    assert allocated(KvShape(0, 100, 512, 7), settings) == 4 * (51_200 + 7)


@pytest.mark.usefixtures("enough")
@pytest.mark.parametrize(
    ("architecture", "keys", "said", "remedy"),
    [
        ("gemma3", WINDOWED, "sliding-window layers", "--swa-full"),
        ("mamba", RECURRENT, "recurrent layers", "tokens_reevaluated"),
    ],
)
def test_models_that_cannot_go_back(
    tmp_path: Path, architecture: str, keys: Mapping[str, Number], said: str, remedy: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture, keys)
    found = findings(managed(path), path)["resume"]
    assert (found.level, said in found.text, remedy in str(found.remedy)) == ("warn", True, True)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "big-00001-of-00002.gguf", "llama", LLAMA_8B)
    found = findings(managed(path), path)["model"]
    assert found.level == "fail"
    assert "big-00002-of-00002.gguf cannot be read" in found.text


# Swap ---------------------------------------------------------------------------------------------


def on(monkeypatch: pytest.MonkeyPatch, kind: str | None, free: int | None) -> None:
    """Every folder is on a file system of this kind with so much room."""
    monkeypatch.setattr(kv_findings, "file_system", lambda folder: kind)
    monkeypatch.setattr(kv_findings, "free_bytes", lambda folder: free)


@pytest.mark.parametrize(
    ("kind", "free", "budget", "level", "said"),
    [
        ("tmpfs", 8 * GIB, None, "ok", "8.00 GiB free, in memory"),
        ("tmpfs", 8 * GIB, 9 * GIB, "warn", "less than the swap_budget"),
        ("tmpfs", 100 << 20, None, "warn", "hardly a turn fits"),
        ("ext4", 80 * GIB, None, "warn", "on a disk (ext4)"),
        (None, 80 * GIB, None, "ok", "80.0 GiB free"),
        (None, None, None, "warn", "cannot be used"),
        ("ext4", 80 * GIB, 0, "ok", "off (swap_budget: 0)"),
    ],
)
def test_swap_folder(
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    free: int | None,
    budget: int | None,
    level: str,
    said: str,
) -> None:
    on(monkeypatch, kind, free)
    backend = external(save_path=Path("/srv/kv"), swap_budget=budget)
    found = swap_finding(backend, Path("/state"))
    assert (found.level, said in found.text) == (level, True), found


def test_swap_without_a_folder(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    assert swap_finding(external(), Path("/state")).text.startswith("off (no save_path)")
    on(monkeypatch, "tmpfs", 2 * GIB)
    assert swap_finding(managed(model), Path("/state")).text.startswith("/dev/shm (private folder in it)")
    on(monkeypatch, "ext4", 100 << 20)
    assert swap_finding(managed(model), Path("/state")).text.startswith("/state (private folder in it)")


def test_file_systems_by_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "with blank"
    inner.mkdir()
    lines = ["/dev/sda / ext4 rw 0 0", f"none {str(inner).replace(' ', chr(92) + '040')} tmpfs rw 0 0"]
    mounts.write_text("\n".join(lines) + "\n")
    assert file_system(inner / "not yet made", mounts) == "tmpfs"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "nothing") is None
    mounts.write_text("garbage\n")
    assert file_system(tmp_path, mounts) is None


def test_free_bytes_of_a_folder_that_will_be_made(tmp_path: Path) -> None:
    assert (free_bytes(tmp_path / "one" / "two") or 0) > 0
    (tmp_path / "file").write_text("x")
    assert free_bytes(tmp_path / "file") is None
