"""The engine process from the outside: start, wait until it serves, notice its end, restart, stop.

The address is chosen once and stays: a restarted engine is the same backend. The engine leads a process
group of its own, so that a command line which is a script is stopped with what it started, and Ctrl-C in
the terminal reaches the service only. When the service dies without stopping it, the watcher of
``backends/managed/launch.py`` ends it.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import anyio.to_thread
import httpx

from backends.managed.save_folder import make_save_folder
from backends.managed.settings import (
    EngineSettings,
    EngineSettingsError,
    embedded_command,
    llama_server_command,
)

_HEALTH_POLL_S = 0.05
_LAUNCH_SCRIPT = Path(__file__).with_name("launch.py")
_TAIL_BYTES = 16_384
_TROUBLE = re.compile(r"\b(?:error|failed|cannot|unable|invalid)\b", re.IGNORECASE)
# llama.cpp's "0.00.005.502 E srv          init: ": its time, level and place say nothing to a user.
_LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] (?:\S+\s+)?(?=\S)")


class ManagedEngineError(Exception):
    """The engine did not start; the message is one line with the engine's own last words."""


class ManagedEngine:
    """An async context manager around one engine process.

    Entering returns when the engine answers ``GET /health`` with 200, which includes loading the model:
    ``start_timeout_s`` bounds it, and ``progress`` is called with the seconds waited about every half
    second. ``stop_timeout_s`` bounds the wait between SIGTERM and SIGKILL. ``name`` tells the engines of one
    state folder apart: the log is ``engine-NAME.log``, the one of the run before it ``engine-NAME.log.1``.
    """

    def __init__(
        self,
        settings: EngineSettings,
        state_dir: Path,
        *,
        name: str = "local",
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 5.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.settings = settings
        self.state_dir = state_dir.absolute()
        self.log_path = self.state_dir / f"engine-{name}.log"
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._progress = progress
        self._changing = anyio.Lock()
        self._process: anyio.abc.Process | None = None
        self._save_path: Path | None = None
        self._argv: list[str] = []
        self._host = "127.0.0.1"
        self._port = 0

    @property
    def url(self) -> str:
        """Where the engine serves; the same over restarts."""
        return f"http://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The engine's process id; another one after a restart. Raises ManagedEngineError if not started."""
        if self._process is None:
            raise ManagedEngineError("the engine is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists; it may still be loading, or hang."""
        return self._process is not None and self._process.returncode is None

    @property
    def save_path(self) -> Path:
        """The folder of saved KV. The engine never deletes from it; whoever saves also unlinks.

        It survives a restart: what was saved before a crash can be restored after it.
        """
        if self._save_path is None:
            raise ManagedEngineError("the engine is not running")
        return self._save_path

    async def __aenter__(self) -> Self:
        """Start the engine. Raises ManagedEngineError."""
        try:
            await anyio.to_thread.run_sync(self._prepare)
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the engine, bounded by the stop timeout, also while being cancelled."""
        await self._close()

    async def wait(self) -> int:
        """Return the exit code (negative: the signal) when the current process has ended.

        For a supervisor that then calls ``restart``. Raises ManagedEngineError if it was never started.
        """
        if self._process is None:
            raise ManagedEngineError("the engine is not running")
        return await self._process.wait()

    async def restart(self) -> None:
        """Stop the engine if it still runs, and start it at the same address. Raises ManagedEngineError.

        The KV in its slots is gone; what was saved is not. After a failure it may be called again.
        """
        async with self._changing:
            with anyio.CancelScope(shield=True):
                await self._stop()
            await self._start()

    # Start ----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            save_path = self._make_save_path()
        except OSError as error:
            raise ManagedEngineError(f"engine {self._name}: {error.strerror}: {error.filename}") from error
        try:
            if self.settings.command is None:
                self._port = _free_port()
                self._argv = embedded_command(self.settings, self._port, save_path)
            else:
                self._argv, self._host, self._port = llama_server_command(
                    self.settings, _free_port(), save_path
                )
        except EngineSettingsError as error:
            raise ManagedEngineError(f"engine {self._name}: {error}") from error

    def _make_save_path(self) -> Path:
        if self.settings.save_path is not None:
            self._save_path = self.settings.save_path.absolute()
            self._save_path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self._save_path
        self._save_path = make_save_folder(self.state_dir)
        return self._save_path

    async def _start(self) -> None:
        order = {
            "argv": self._argv,
            "nice": self.settings.nice,
            "remove": None if self.settings.save_path is not None else str(self.save_path),
        }
        log = await anyio.to_thread.run_sync(self._new_log)
        try:
            self._process = await anyio.open_process(
                [sys.executable, "-I", "-S", str(_LAUNCH_SCRIPT), json.dumps(order)],
                # Nothing is ever written: its end is what the watcher waits for.
                stdin=-1,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise ManagedEngineError(f"engine {self._name}: cannot start: {error.strerror}") from error
        finally:
            os.close(log)
        if await self._serves():
            return
        code = self._process.returncode
        with anyio.CancelScope(shield=True):
            await self._stop()
        what = f"gave no answer within {self._start_timeout_s:g} s" if code is None else "did not start"
        if self.settings.model:
            what = f"{what} with model {self.settings.model}"
        ended = "" if code is None else f" (exit code {code})"
        said = await anyio.to_thread.run_sync(self._last_words)
        raise ManagedEngineError(f"engine {self._name} {what}: {said}{ended}; log: {self.log_path}")

    def _new_log(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            self.log_path.replace(f"{self.log_path}.1")
        return os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    async def _serves(self) -> bool:
        """Wait for health; False when the process ended or the time is over."""
        assert self._process is not None
        healthy = False
        async with anyio.create_task_group() as tasks:

            async def until_healthy() -> None:
                nonlocal healthy
                with anyio.move_on_after(self._start_timeout_s):
                    await self._poll_health()
                    healthy = True
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_healthy)
            await self._process.wait()
            tasks.cancel_scope.cancel()
        return healthy and self._process.returncode is None

    async def _poll_health(self) -> None:
        started_s = anyio.current_time()
        told_s = started_s
        # A proxy of the environment's has no business between the service and its own child.
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                now_s = anyio.current_time()
                if self._progress is not None and now_s - told_s >= 0.5:
                    told_s = now_s
                    self._progress(now_s - started_s)
                await anyio.sleep(_HEALTH_POLL_S)

    def _last_words(self) -> str:
        """The first line that says what went wrong near the log's end, else the last line."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if not lines:
            return "it said nothing"
        line = next((line for line in lines if _TROUBLE.search(line)), lines[-1])
        return _LOG_PREFIX.sub("", line)[:400]

    # Stop -----------------------------------------------------------------------------------------

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._stop()
            if self.settings.save_path is None and self._save_path is not None:
                await anyio.to_thread.run_sync(lambda path: shutil.rmtree(path, True), self._save_path)
            self._save_path = None

    async def _stop(self) -> None:
        """SIGTERM, and SIGKILL after the bound; then nothing of the process group is left."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with anyio.move_on_after(self._stop_timeout_s):
                await process.wait()
        # Also after a normal end: a script that was killed may have left its llama-server on the port.
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()
        self._process = None


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
