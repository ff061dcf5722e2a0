"""Memory needs from a GGUF header."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from orchestrator.cli.gguf import GgufModel, NotGguf, read_gguf

SMOLLM2 = {
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(numbers: dict[str, int], *, version: int = 3) -> bytes:
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs += [text(key) + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs.append(text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"))
    pairs.append(text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"))
    pairs.append(b"never read")
    return b"GGUF" + struct.pack("<IQQ", version, 272, len(pairs)) + b"".join(pairs)


def test_kv_bytes_follow_from_layers_and_heads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(SMOLLM2))
    assert read_gguf(path) == GgufModel("llama", 8192, 23_040)


def test_explicit_head_sizes_count(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {"llama.attention.key_length": 128, "llama.attention.value_length": 64}
    path.write_bytes(header(SMOLLM2 | sizes))
    assert read_gguf(path).kv_bytes_per_token == 30 * 3 * (128 + 64) * 2


def test_missing_keys_leave_it_open(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header({"llama.context_length": 10}))
    assert read_gguf(path) == GgufModel("llama", 10, None)


@pytest.mark.parametrize("raw", [b"", b"GG", b"not a model at all", b"\0" * 64])
def test_other_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(NotGguf, match="is not a GGUF file"):
        read_gguf(path)


def test_cut_off_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = header(SMOLLM2)
    for length in range(4, whole.index(b"tokenizer"), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(NotGguf, match="is a damaged GGUF file"):
            read_gguf(path)


def test_unknown_version(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(SMOLLM2, version=9))
    with pytest.raises(NotGguf, match="damaged"):
        read_gguf(path)
