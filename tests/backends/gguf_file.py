"""GGUF files without weights, written by the official package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy

Number = int | bool | Sequence[int] | Sequence[bool]

#: An 8B model of the Llama kind: 32 layers, 8 KV heads of 128 elements.
LLAMA_8B: Mapping[str, Number] = {
    "block_count": 32,
    "context_length": 131_072,
    "embedding_length": 4096,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
}


def write_gguf(
    path: Path, architecture: str, keys: Mapping[str, Number], *, after: Mapping[str, Number] | None = None
) -> Path:
    """A model of `architecture` with these of its keys; those of `after` stand behind the tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("made up")
    _add(writer, architecture, keys)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(3000)])
    writer.add_token_scores([0.5] * 3000)
    writer.add_token_merges([f"a{number} b" for number in range(2000)])
    writer.add_bos_token_id(1)
    _add(writer, architecture, after or {})
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, architecture: str, keys: Mapping[str, Number]) -> None:
    for name, value in keys.items():
        key = f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, list(value))
