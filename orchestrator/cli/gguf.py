"""What a GGUF file says about the memory its model needs, read from the file's header only.

The format: magic `GGUF`, version, counts of tensors and of key-value pairs, then the pairs. The keys of the
architecture come before the tokenizer's long lists, so reading stops as soon as everything is known.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_TEXT = 1 << 20
_MAX_ITEMS = 1 << 24
_MAX_KEYS = 10_000
_F16_BYTES = 2


class NotGguf(Exception):
    """The file is no GGUF file; the message is the rest of a sentence that names it."""


@dataclass(frozen=True)
class GgufModel:
    """`kv_bytes_per_token` with 16-bit KV in every layer; None where the header does not say enough."""

    architecture: str | None
    training_context: int | None
    kv_bytes_per_token: int | None


def read_gguf(path: Path) -> GgufModel:
    """Raises NotGguf, OSError."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise NotGguf("is not a GGUF file")
        try:
            return _model(_pairs(file))
        except (struct.error, ValueError, KeyError, UnicodeDecodeError):
            raise NotGguf("is a damaged GGUF file") from None


def _pairs(file: BinaryIO) -> dict[str, Any]:
    version, _tensors, count = _unpack(file, "<IQQ")
    if version not in (2, 3) or count > _MAX_KEYS:
        raise ValueError("unknown version")
    pairs: dict[str, Any] = {}
    for _ in range(count):
        key = _text(file)
        pairs[key] = _value(file, _unpack(file, "<I")[0])
        if key.startswith("tokenizer."):
            break
    return pairs


def _model(pairs: dict[str, Any]) -> GgufModel:
    architecture = pairs.get("general.architecture")
    layers, heads, kv_heads, width, key, value, context = (
        pairs.get(f"{architecture}.{name}")
        for name in (
            *("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length"),
            *("attention.key_length", "attention.value_length", "context_length"),
        )
    )
    kv_heads = heads if kv_heads is None else kv_heads
    if isinstance(width, int) and isinstance(heads, int) and heads:
        key = width // heads if key is None else key
        value = width // heads if value is None else value
    kv_bytes = None
    # Some architectures have a number of heads for each layer; those are left alone.
    if all(isinstance(number, int) for number in (layers, kv_heads, key, value)):
        kv_bytes = int(layers or 0) * int(kv_heads or 0) * (int(key or 0) + int(value or 0)) * _F16_BYTES
    return GgufModel(
        architecture=architecture if isinstance(architecture, str) else None,
        training_context=context if isinstance(context, int) else None,
        kv_bytes_per_token=kv_bytes,
    )


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        item, count = _unpack(file, "<IQ")
        if count > _MAX_ITEMS:
            raise ValueError("a list that is too long")
        # Lists are passed over: none of them is needed.
        for _ in range(count):
            _value(file, item)
        return None
    return _unpack(file, "<" + _SCALARS[kind])[0]


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _MAX_TEXT:
        raise ValueError("a text that is too long")
    raw = file.read(length)
    if len(raw) != length:
        raise ValueError("the file ends early")
    return raw.decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
