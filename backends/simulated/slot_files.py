"""Files of saved slots: a magic line, a JSON header, then the token ids.

A real file holds the KV itself. The simulated engine's KV is a function of the tokens, so the ids are enough
to restore it, and the header is enough to tell a truncated or foreign file.
"""

import sys
from array import array
from pathlib import Path
from zlib import crc32

import orjson

from backends.simulated.events import ApiError

_MAGIC = b"SIMULATED-SLOT 1\n"
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


def write_slot(path: Path, model: str, tokens: list[int]) -> int:
    """Writes the file and returns its size in bytes. Raises ApiError 500 if that fails."""
    body = _ids(tokens)
    header = orjson.dumps({"model": model, "n_tokens": len(tokens), "crc32": crc32(body)})
    try:
        return path.write_bytes(_MAGIC + header + b"\n" + body)
    except OSError as error:
        raise ApiError(500, f"Unable to save slot: {error.strerror}", "server_error") from error


def read_slot(path: Path, model: str) -> tuple[list[int], int]:
    """The saved tokens and the file's size in bytes. Raises ApiError 400 for a missing, truncated or foreign
    file, or one of another model."""
    try:
        raw = path.read_bytes()
        if not raw.startswith(_MAGIC):
            raise ValueError
        header_line, body = raw[len(_MAGIC) :].split(b"\n", 1)
        header = orjson.loads(header_line)
        if header["model"] != model or header["crc32"] != crc32(body):
            raise ValueError
        ids = array("I")
        ids.frombytes(body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ApiError(400, UNREADABLE) from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist(), len(raw)


def _ids(tokens: list[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
