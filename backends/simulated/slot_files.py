"""Files of saved slots: a magic line, a JSON header, the token ids, and a hole.

A real file holds the KV itself. The simulated engine's KV is a function of the tokens, so the ids are enough
to restore it, and the header is enough to tell a truncated or foreign file. The hole gives the file the size
that the KV would have, and takes no room on the disk.
"""

import sys
from array import array
from pathlib import Path
from zlib import crc32

import orjson

from backends.simulated.events import ApiError

_MAGIC = b"SIMULATED-SLOT 1\n"
_MOST_HEADER = 4096
UNREADABLE = "Unable to restore slot: No available space in KV cache or invalid slot save file"


def slot_file(directory: Path | None, filename: str) -> Path:
    """Path of a saved slot. Raises ApiError 501 without a directory, 400 for a name that is not a plain
    file name."""
    if directory is None:
        raise ApiError(
            501,
            "This server does not support slots action. Start it with `--slot-save-path`",
            "not_supported_error",
        )
    if not filename or filename in (".", "..") or Path(filename).name != filename or "\0" in filename:
        raise ApiError(400, "Invalid filename")
    return directory / filename


def write_slot(path: Path, model: str, tokens: list[int], kv_bytes: int) -> int:
    """Writes the file and returns its size in bytes: that of the head, and of the KV if it is larger than
    the ids. Raises ApiError 500 if that fails."""
    body = _ids(tokens)
    head, size = b"", 0
    while len(head) + max(len(body), kv_bytes) != size:  # the head names the size, and has one itself
        size = len(head) + max(len(body), kv_bytes)
        fields = {"model": model, "n_tokens": len(tokens), "crc32": crc32(body), "size": size}
        head = _MAGIC + orjson.dumps(fields) + b"\n"
    try:
        with path.open("wb") as file:
            file.write(head + body)
            file.truncate(size)
    except OSError as error:
        raise ApiError(500, f"Unable to save slot: {error.strerror}", "server_error") from error
    return size


def read_slot(path: Path, model: str) -> tuple[list[int], int]:
    """The saved tokens and the file's size in bytes. Raises ApiError 400 for a missing, truncated or foreign
    file, or one of another model."""
    try:
        with path.open("rb") as file:
            if file.readline(len(_MAGIC)) != _MAGIC:
                raise ValueError
            header = orjson.loads(file.readline(_MOST_HEADER))
            ids = array("I")
            body = file.read(header["n_tokens"] * ids.itemsize)
            size = path.stat().st_size
        if header["model"] != model or header["crc32"] != crc32(body) or header["size"] != size:
            raise ValueError
        ids.frombytes(body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ApiError(400, UNREADABLE) from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist(), size


def _ids(tokens: list[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
