"""The files of saved slots: their names, and whether one is still what the engine wrote.

The engine takes a file name without a folder, so all backends that share a folder share one level of
names: ``swarm-TAG-KEY.kv``, and ``.kv.tmp`` until the save is known to be whole. The tag is written
without dashes, so that no tag's files look like another's. Nothing here blocks the event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from backends.protocol import SwapFailed

T = TypeVar("T")

SUFFIX, TEMPORARY = ".kv", ".kv.tmp"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[^A-Za-z0-9]", re.ASCII)
_MOST_TAG = 80


@dataclass(frozen=True, slots=True)
class FileId:
    """What a file looked like: whoever cuts, replaces or writes it changes one of these."""

    size: int
    mtime_ns: int
    inode: int


class SwapFiles:
    """One backend's files in a folder that the engine and this process both reach."""

    def __init__(self, folder: Path, tag: str) -> None:
        """`tag` may be any text. Raises ValueError when it is empty."""
        self._folder = folder
        # Bytes outside letters and digits become _XX, so different tags stay different.
        spelled = _PLAIN.sub(lambda found: "".join(f"_{byte:02X}" for byte in found[0].encode()), tag)
        if not spelled:
            raise ValueError("a swap tag must not be empty")
        if len(spelled) > _MOST_TAG:  # file names are bounded
            spelled = f"{spelled[: _MOST_TAG - 34]}__{sha256(tag.encode()).hexdigest()[:32]}"
        self._prefix = f"swarm-{spelled}-"

    def name(self, key: str) -> str:
        """The name, without folder, of the whole file. Raises ValueError for a key that is no plain name."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a saved file")
        return f"{self._prefix}{key}{SUFFIX}"

    def temporary_name(self, key: str) -> str:
        """The name that the engine writes to. Raises ValueError for a key that is no plain name."""
        return self.name(key).removesuffix(SUFFIX) + TEMPORARY

    async def reachable(self) -> bool:
        """Whether this process can list and change the folder."""
        return await _in_thread(
            lambda: self._folder.is_dir() and os.access(self._folder, os.R_OK | os.W_OK | os.X_OK)
        )

    def space(self) -> int:
        """Free bytes of the folder's file system, 0 when that cannot be told."""
        try:
            room = os.statvfs(self._folder)
        except OSError:
            return 0
        return room.f_bavail * room.f_frsize

    async def keep(self, key: str, written: int) -> FileId:
        """Give a whole file its name. Raises SwapFailed unless it has the `written` bytes."""
        source, target = self._folder / self.temporary_name(key), self._folder / self.name(key)

        def keep() -> FileId:
            found = _identify(source)
            if found is None:
                raise SwapFailed("the engine saved a slot to a folder that is not the configured one")
            if found.size != written:
                raise SwapFailed(
                    f"a saved slot has {found.size} bytes instead of {written}: the swap folder is full"
                )
            try:
                source.rename(target)
            except OSError as error:
                raise SwapFailed(f"a saved slot cannot be renamed: {error.strerror}") from None
            return found

        return await _in_thread(keep)

    async def check(self, key: str, expected: FileId) -> None:
        """Raise SwapFailed unless the file is the one that was kept."""
        found = await _in_thread(lambda: _identify(self._folder / self.name(key)))
        if found is None:
            raise SwapFailed("a saved slot's file is gone")
        if found != expected:
            raise SwapFailed("a saved slot's file was changed after it was saved")

    async def size(self, key: str) -> int | None:
        """Bytes of a file that is not kept yet, None when there is none."""
        found = await _in_thread(lambda: _identify(self._folder / self.temporary_name(key)))
        return None if found is None else found.size

    async def remove(self, key: str) -> None:
        """Remove the key's files, whole or not, if there are any."""
        names = (self.temporary_name(key), self.name(key))
        await _in_thread(lambda: sum(_unlink(self._folder / name) for name in names))

    async def clear(self) -> int:
        """Remove all files of this tag; how many there were."""

        def clear() -> int:
            try:
                with os.scandir(self._folder) as entries:
                    left = [Path(entry.path) for entry in entries if self._is_ours(entry.name)]
            except OSError:
                return 0
            return sum(_unlink(path) for path in left)

        return await _in_thread(clear)

    def _is_ours(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.endswith((SUFFIX, TEMPORARY))


def _identify(path: Path) -> FileId | None:
    """None for what is no regular file, too: a link may lead anywhere."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return FileId(found.st_size, found.st_mtime_ns, found.st_ino)


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


async def _in_thread(function: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(function)
