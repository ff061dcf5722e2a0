"""Runs one client headless: a home of its own, an empty repository, nobody at the keyboard, no way out."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import anyio
from anyio.abc import ByteReceiveStream

from tests.clients.outside import Outside
from tests.clients.spec import INSTALLED, Client, Place

_KILL_BOUND_S = 10.0


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended. `exit_code` is None for one that had to be ended at its bound."""

    exit_code: int | None
    output: str
    """Standard output."""
    complaints: str
    """Standard error."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Room:
    """A client's folders for one run."""

    home: Path
    work: Path
    tmp: Path


async def prepare(client: Client, place: Place, folder: Path) -> Room:
    """Make its home with its configuration, and an empty git repository."""
    room = Room(folder / "home", folder / "work", folder / "tmp")
    for made in (room.home, room.work, room.tmp):
        made.mkdir(parents=True)
    for path, text in client.files.items():
        file = room.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(place.fill(text))
    identity = "[user]\nname = nobody\nemail = nobody@localhost\n[init]\ndefaultBranch = main\n"
    (room.home / ".gitconfig").write_text(identity)
    await anyio.run_process(["git", "init", "--quiet"], cwd=room.work, env=_environment(room))
    return room


async def run(client: Client, place: Place, room: Room, outside: Outside, bound_s: float) -> Ran:
    """Run the client to its end, or end it after `bound_s`."""
    environment = {**_environment(room), **outside.environment(), **client.variables(place)}
    *first, last = client.commands(place)
    try:
        for command in first:
            before = await _run(command, room, environment, bound_s)
            if before.exit_code != 0:
                return before
        return await _run(last, room, environment, bound_s)
    finally:
        _end_daemons(room.home)


async def _run(command: list[str], room: Room, environment: dict[str, str], bound_s: float) -> Ran:
    started = time.monotonic()
    output = bytearray()
    complaints = bytearray()
    # Its own process group: what it started is ended with it.
    process = await anyio.open_process(
        command, stdin=DEVNULL, cwd=room.work, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    exit_code = None
    try:
        with anyio.move_on_after(bound_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_gather, process.stdout, output)
                tasks.start_soon(_gather, process.stderr, complaints)
                exit_code = await process.wait()
                # What it left running may hold its output open.
                _end_group(process.pid)
    finally:
        _end_group(process.pid)
        with anyio.CancelScope(shield=True), anyio.move_on_after(_KILL_BOUND_S):
            await process.wait()
            await process.aclose()
    seconds = time.monotonic() - started
    return Ran(exit_code, output.decode(errors="replace"), complaints.decode(errors="replace"), seconds)


def _environment(room: Room) -> dict[str, str]:
    """What every client gets; nothing of this process's own, which may hold keys of real services."""
    home = str(room.home)
    return {
        "PATH": f"{INSTALLED / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
        "XDG_CACHE_HOME": f"{home}/.cache",
        "TMPDIR": str(room.tmp),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


async def _gather(stream: ByteReceiveStream, into: bytearray) -> None:
    async for piece in stream:
        into += piece


def _end_daemons(home: Path) -> None:
    """End what a client has left running in a session of its own: whatever has the run's home folder."""
    # Only Linux tells; with their `quiet` settings none of the ten leaves any.
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}\0".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
