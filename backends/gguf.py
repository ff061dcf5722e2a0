"""Reads a GGUF file's header: the key-value pairs in front of the tensors, and nothing else.

The format: magic `GGUF`, version, counts of tensors and of pairs, then the pairs. All of them are walked,
not only those before the tokenizer's: a key that was overridden when the file was quantised stands at the
end. The tokenizer's lists are stepped over without making an object of any item.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from io import FileIO
from pathlib import Path
from typing import Any

from backends.model_keys import Value, model_shape
from backends.model_shape import ModelShape

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
#: Bounds that no real file comes near, so that a damaged one is refused and not followed.
_MAX_TEXT = 1 << 24
_MAX_ITEMS = 1 << 26
_MAX_PAIRS = 100_000
#: Lists up to this length are kept: one value a layer, never a vocabulary.
_KEPT_ITEMS = 2048
_CHUNK_BYTES = 1 << 20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class NotGguf(Exception):
    """The file is no GGUF file that can be read; the message is the rest of a sentence that names it."""


def read_model(path: Path) -> ModelShape:
    """What the model in this file keeps of a sequence. Raises NotGguf, OSError."""
    return model_shape(read_header(path))


def read_header(path: Path) -> dict[str, Value]:
    """Its key-value pairs but for long lists. Raises NotGguf, OSError."""
    with open(path, "rb", buffering=0, opener=_regular_file) as file:
        if file.read(4) != b"GGUF":
            raise NotGguf("is not a GGUF file")
        try:
            return _Header(file).pairs()
        except (struct.error, ValueError, KeyError, UnicodeDecodeError):
            raise NotGguf("is a damaged GGUF file") from None


def model_bytes(path: Path) -> int:
    """Size of the model's files: this one, or all parts of a model that is split. Raises OSError."""
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return path.stat().st_size
    stem, _, total = split.groups()
    parts = [path.with_name(f"{stem}-{part:05d}-of-{total}.gguf") for part in range(1, int(total) + 1)]
    return sum(part.stat().st_size for part in parts)


def _regular_file(path: str, flags: int) -> int:
    """Opens it without waiting for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotGguf("is not a regular file")
    return descriptor


class _Header:
    """A window on the file that moves on; its methods raise struct.error where the file ends early."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._buffer = b""
        self._at = 0

    def pairs(self) -> dict[str, Value]:
        version, _tensors, count = self._unpack("<IQQ")
        if version not in _VERSIONS or count > _MAX_PAIRS:
            raise ValueError
        pairs: dict[str, Value] = {}
        for _ in range(count):
            key, kind = self._text(), self._unpack("<I")[0]
            if (value := self._value(kind)) is not None:
                pairs[key] = value
        return pairs

    def _value(self, kind: int) -> Value | None:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            value: Value = self._unpack("<" + _SCALARS[kind])[0]
            return value
        item, count = self._unpack("<IQ")
        if count > _MAX_ITEMS:
            raise ValueError
        if item == _STRING:
            self._skip_texts(count)
            return None
        layout = _SCALARS[item]
        if count <= _KEPT_ITEMS:
            return self._unpack(f"<{count}{layout}")
        self._skip(count * struct.calcsize("<" + layout))
        return None

    def _text(self) -> str:
        (length,) = self._unpack("<Q")
        if length > _MAX_TEXT:
            raise ValueError
        raw: bytes = self._unpack(f"{length}s")[0]
        return raw.decode()

    def _skip_texts(self, count: int) -> None:
        """The hot loop: a vocabulary has a quarter of a million of them, its merges twice as many."""
        length_at = struct.Struct("<Q").unpack_from
        while count:
            buffer, at = self._buffer, self._at
            end = len(buffer) - 8
            while count and at <= end:
                at += 8 + length_at(buffer, at)[0]
                count -= 1
            self._skip(at - self._at)
            if count:
                self._need(8)

    def _skip(self, n_bytes: int) -> None:
        self._at += n_bytes
        if (beyond := self._at - len(self._buffer)) > 0:
            here = self._file.seek(0, 1)
            if here + beyond > self._file.seek(0, 2):
                raise struct.error
            self._file.seek(here + beyond)
            self._buffer, self._at = b"", 0

    def _need(self, n_bytes: int) -> None:
        """At least so many bytes from here on in the buffer."""
        if (missing := n_bytes - (len(self._buffer) - self._at)) > 0:
            more = self._file.read(max(missing, _CHUNK_BYTES))
            self._buffer, self._at = self._buffer[self._at :] + more, 0
            if len(more) < missing:
                raise struct.error

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        self._need(size)
        at, self._at = self._at, self._at + size
        return struct.unpack_from(layout, self._buffer, at)
