"""The private folder of an engine's saved KV: in memory where there is room, and never left behind.

Saved KV is private text, and as large as memory. The folder's name says whose it is, so that the next
start finds what a service and its watcher that were both killed have left.
"""

import os
import shutil
import tempfile
from pathlib import Path

# Below this much room a memory file system (64 MB in a container) is no place for saved KV.
SHM = Path("/dev/shm")
SHM_MIN_FREE_BYTES = 1 << 30


def make_save_folder(state_dir: Path) -> Path:
    """A new folder that only this user can read, in memory or in `state_dir`. Raises OSError."""
    prefix = f"swarm-kv-{os.getuid()}-"
    # First of all, and in both places: what was left may be what takes the room.
    for parent in (SHM, state_dir):
        _remove_left(parent, prefix)
    parent = SHM if _has_room(SHM) else state_dir
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))


def _remove_left(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{prefix}*"):
        owner = left.name.removeprefix(prefix).split("-")[0]
        if owner.isdigit() and not _process_lives(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _has_room(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize >= SHM_MIN_FREE_BYTES


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
