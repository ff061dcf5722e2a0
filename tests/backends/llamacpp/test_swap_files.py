"""Names and safety of saved files, without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.llamacpp.swap_files import SwapFiles
from backends.protocol import SwapFailed


def save(files: SwapFiles, folder: Path, key: str, content: bytes = b"kv") -> Path:
    """What the engine does."""
    path = folder / files.temporary_name(key)
    path.write_bytes(content)
    return path


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_file_is_temporary_until_it_is_known_to_be_whole(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path, "local")
    save(files, tmp_path, "t3f2a-17")
    assert listed(tmp_path) == ["swarm-local-t3f2a-17.kv.tmp"]
    kept = await files.keep("t3f2a-17", 2)
    assert listed(tmp_path) == ["swarm-local-t3f2a-17.kv"] == [files.name("t3f2a-17")]
    await files.check("t3f2a-17", kept)


async def test_a_short_file_is_not_kept(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path, "local")
    save(files, tmp_path, "a")
    with pytest.raises(SwapFailed, match=r"^a saved slot has 2 bytes instead of 3: the swap folder is full$"):
        await files.keep("a", 3)


@pytest.mark.parametrize("to", ["/dev/full", "elsewhere", "folder"])
async def test_what_is_no_regular_file_is_not_kept(tmp_path: Path, to: str) -> None:
    """The size of a link's target is not that of a file of ours."""
    (tmp_path / "elsewhere").write_bytes(b"kv")
    (tmp_path / "folder").mkdir()
    files = SwapFiles(tmp_path, "local")
    (tmp_path / files.temporary_name("a")).symlink_to(tmp_path / to)
    assert await files.size("a") is None
    with pytest.raises(SwapFailed, match="not the configured one"):
        await files.keep("a", 2)


def cut(path: Path) -> None:
    path.write_bytes(b"k")


def rewrite(path: Path) -> None:
    found = path.stat()
    path.write_bytes(b"vk")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


def replace(path: Path) -> None:
    """Same size and time: only the inode tells."""
    found = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"vk")
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.rename(path)


def link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("spoil", [cut, rewrite, replace, link, Path.unlink])
async def test_a_file_that_was_touched_is_refused(tmp_path: Path, spoil: object) -> None:
    files = SwapFiles(tmp_path, "local")
    save(files, tmp_path, "a")
    kept = await files.keep("a", 2)
    spoil(tmp_path / files.name("a"))  # type: ignore[operator]
    with pytest.raises(SwapFailed, match=r"changed after it was saved|file is gone") as raised:
        await files.check("a", kept)
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize("key", ["", "../a", "a/b", "a\\b", ".a", "a\0", "a\n", "ä", "a b", "a" * 101])
def test_a_key_is_a_plain_name(tmp_path: Path, key: str) -> None:
    for name in (SwapFiles(tmp_path, "local").name, SwapFiles(tmp_path, "local").temporary_name):
        with pytest.raises(ValueError, match="is no key of a saved file"):
            name(key)


def test_a_tag_is_any_text_but_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        SwapFiles(tmp_path, "")
    names = {SwapFiles(tmp_path, tag).temporary_name("k" * 100) for tag in ("x" * 80, "x" * 81, "ä" * 500)}
    assert len(names) == 3
    assert max(map(len, names)) <= 255


TAGS = [
    "local",
    "local-2",
    "local_2",
    "local_2D2",
    "local-",
    "Local",
    "lo/cal",
    "lo cal",
    "löcal",
    "ö" * 99,
    "ö" * 98,
]


async def test_clearing_takes_one_backends_files_and_nobody_elses(tmp_path: Path) -> None:
    for number, tag in enumerate(TAGS):
        files = SwapFiles(tmp_path, tag)
        for key in ("2-a", "a.kv"):
            save(files, tmp_path, key)
            await files.keep(key, 2)
        save(files, tmp_path, f"half-{number}")
    foreign = ["swarm-local.kv", "swarm-local-a.txt", "x-swarm-local-a.kv", "a.kv", "swarm-local-a.kv.tmp2"]
    for name in foreign:
        (tmp_path / name).touch()
    (tmp_path / "swarm-local-folder.kv").mkdir()
    assert len(listed(tmp_path)) == 3 * len(TAGS) + len(foreign) + 1, "no two tags share a name"
    for left, tag in reversed(list(enumerate(TAGS))):
        assert await SwapFiles(tmp_path, tag).clear() == 3
        assert len(listed(tmp_path)) == 3 * left + len(foreign) + 1
    assert listed(tmp_path) == sorted([*foreign, "swarm-local-folder.kv"])
    assert await SwapFiles(tmp_path, "local").clear() == 0


async def test_removing_what_is_not_there(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path, "local")
    save(files, tmp_path, "a")
    await files.keep("a", 2)
    save(files, tmp_path, "a")
    for _ in range(2):
        await files.remove("a")
        assert listed(tmp_path) == []


async def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path / "gone", "local")
    assert not await files.reachable()
    assert files.space() == 0
    assert await files.clear() == 0
    await files.remove("a")
    assert await SwapFiles(tmp_path, "local").reachable()
    assert SwapFiles(tmp_path, "local").space() > 0
