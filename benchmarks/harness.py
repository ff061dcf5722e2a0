"""The processes that a bench measures, each an async context manager: engines and the service.

Every process is the bench's own child with files in a folder of its own, is waited for with a bound, and is
gone when the context ends, whatever ended it.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.to_thread
import httpx
import orjson
import yaml

from backends.managed import EngineSettings, KvLayout, ManagedEngine
from backends.simulated import ScriptedReply

MODEL = "smollm2-135m"
START_BOUND_S = 120.0
STOP_BOUND_S = 20.0
_POLL_S = 0.05
_TAIL_BYTES = 4096
_ROOT = Path(__file__).resolve().parent.parent
_Arguments = TypeVarTuple("_Arguments")
_Found = TypeVar("_Found")
_STOCK_ENGINE = Path(__file__).with_name("stock_engine.py")
_ADDRESS = re.compile(r"http://[\w.\[\]:-]+:\d+")


class BenchError(Exception):
    """A bench cannot go on; the message is one line."""


def run_async(measure: Callable[[Unpack[_Arguments]], Awaitable[_Found]], *args: *_Arguments) -> _Found:
    """Run a bench's coroutine to its result.

    SIGTERM stops it as Ctrl-C does, with its child processes, and raises BenchError. An error in one of its
    tasks is raised as itself, not as a group.
    """
    found: list[_Found] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(_cancel_at_sigterm, tasks.cancel_scope)
            found.append(await measure(*args))
            tasks.cancel_scope.cancel()

    try:
        anyio.run(main, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        raise _first_of(group) from None
    if not found:
        raise BenchError("stopped by SIGTERM")
    return found[0]


async def _cancel_at_sigterm(
    scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True)
class EngineShape:
    """How the real engine of a bench runs: the same numbers for a bare engine and for the service's.

    `slot_context` tokens hold one turn's prompt and reply; the engine rounds it up to a multiple of 256.
    `pool_tokens` is what all slots of a unified layout share; None: as if each had its own.
    """

    decode_slots: int = 8
    engine_slots: int = 12
    slot_context: int = 2304
    batch_tokens: int = 16
    threads: int | None = None
    nice: int = 0
    model: str = MODEL
    kv_layout: KvLayout = "split"
    pool_tokens: int | None = None

    def context(self, slots: int) -> int:
        """Tokens over all of so many slots."""
        return self.pool_tokens or slots * self.slot_context

    def settings(
        self, engine_slots: int | None = None, *, stock_cache_mib: int | None = None
    ) -> EngineSettings:
        """For an engine of its own, with another number of slots if given.

        `stock_cache_mib`: run it with llama-server's own choices about idle KV and a host-memory cache of
        that size (`--cache-ram`), instead of leaving KV to the service.
        """
        slots = engine_slots or self.engine_slots
        command: tuple[str, ...] | None = None
        if stock_cache_mib is not None:
            options = ("--cache-ram", str(stock_cache_mib), "--cache-idle-slots")
            command = (sys.executable, "-P", str(_STOCK_ENGINE), *options)
        return EngineSettings(
            model=self.model,
            decode_slots=min(self.decode_slots, slots),
            engine_slots=slots,
            context=self.context(slots),
            kv_layout=self.kv_layout,
            batch_tokens=self.batch_tokens,
            # A command of the user's chooses for itself.
            threads=self.threads or (max(1, (os.cpu_count() or 1) - 1) if command else None),
            nice=self.nice,
            command=command,
        )

    def managed(self) -> dict[str, Any]:
        """The same as the `managed` part of a backend in the service's configuration."""
        managed = {
            "model": self.model,
            "decode_slots": self.decode_slots,
            "engine_slots": self.engine_slots,
            "context": self.context(self.engine_slots),
            "kv_layout": self.kv_layout,
            "batch_tokens": self.batch_tokens,
            "nice": self.nice,
        }
        return managed if self.threads is None else managed | {"threads": self.threads}

    def external(self, engine: ManagedEngine) -> dict[str, Any]:
        """A backend of the service's configuration for an engine that the bench runs and also talks to."""
        return {
            "name": "bench",
            "kind": "llama.cpp",
            "url": engine.url,
            "save_path": str(engine.save_path),
            "decode_slots": self.decode_slots,
            "kv_layout": self.kv_layout,
            "batch_tokens": self.batch_tokens,
        }


@asynccontextmanager
async def real_engine(
    shape: EngineShape, engine_slots: int | None = None, *, stock_cache_mib: int | None = None
) -> AsyncIterator[ManagedEngine]:
    """The bare llama.cpp server with nothing in front of it. Raises ManagedEngineError."""
    settings = shape.settings(engine_slots, stock_cache_mib=stock_cache_mib)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with ManagedEngine(settings, Path(folder), name="bench") as engine:
            yield engine


def json_client(url: str) -> httpx.AsyncClient:
    """For `ask`. Connections are not kept: llama.cpp closes them without a word after a while."""
    return httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=httpx.Timeout(300.0), headers={"Connection": "close"}
    )


async def ask(
    client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """One JSON request and its answer. Raises BenchError, which names the request, on any other outcome."""
    try:
        reply = await client.request(method, path, json=None if body is None else dict(body))
    except httpx.HTTPError as error:
        raise BenchError(f"{method} {path}: {str(error) or type(error).__name__}") from None
    if reply.is_error:
        raise BenchError(f"{method} {path}: HTTP {reply.status_code}: {reply.text[:200]}")
    try:
        return reply.json()
    except ValueError:
        raise BenchError(f"{method} {path}: the answer is not JSON") from None


async def empty_slots(engine: httpx.AsyncClient) -> None:
    """Erase whatever the engine's slots hold. Raises BenchError."""
    for slot in await ask(engine, "GET", "/slots"):
        await ask(engine, "POST", f"/slots/{slot['id']}?action=erase", {})


@asynccontextmanager
async def simulated_engine(
    slots: int,
    *,
    profile: str = "reference",
    slot_context: int = 2304,
    scripts: Sequence[ScriptedReply] = (),
) -> AsyncIterator[str]:
    """The address of a simulated engine in a process of its own. Raises BenchError."""
    argv = ["-m", "backends.simulated", "--port", "0", "--slots", str(slots), "--profile", profile]
    argv += ["--ctx", str(slots * slot_context), "--eos-probability", "0"]
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        if scripts:
            path = Path(folder) / "scripts.json"
            path.write_bytes(orjson.dumps([asdict(script) for script in scripts]))
            argv += ["--scripts", str(path)]
        async with _child("the simulated engine", argv, Path(folder)) as child:
            url = await child.announced()
            await child.answers(f"{url}/health")
            yield url


@dataclass(frozen=True)
class Service:
    """A running service. `state_dir` holds the embedded Valkey's files, `log_path` what it has said."""

    base_url: str
    pid: int
    state_dir: Path
    log_path: Path


@asynccontextmanager
async def running_service(config: Mapping[str, Any]) -> AsyncIterator[Service]:
    """The whole service as a child process with this configuration, once `GET /healthz` says 200.

    `server.port` and `redis` are filled in where the configuration leaves them out: a free port, and an
    embedded server in a folder that goes away with the context. Raises BenchError with the service's last
    line when it ends or does not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        server = {"host": "127.0.0.1", "port": free_port()} | dict(config.get("server", {}))
        redis = dict(config.get("redis", {"url": "embedded", "state_dir": str(folder / "state")}))
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump({**config, "server": server, "redis": redis}, sort_keys=False))
        argv = ["-m", "orchestrator.cli", "up", "-c", str(path)]
        async with _child("the service", argv, folder) as child:
            url = f"http://{server['host']}:{server['port']}"
            await child.answers(f"{url}/healthz")
            yield Service(url, child.pid, Path(redis.get("state_dir", folder)), child.log_path)


@asynccontextmanager
async def service(config: Mapping[str, Any]) -> AsyncIterator[str]:
    """As `running_service`, for those who need the address only."""
    async with running_service(config) as running:
        yield running.base_url


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class _Child:
    """A Python child process whose output goes to a file."""

    def __init__(self, what: str, process: anyio.abc.Process, log_path: Path) -> None:
        self._what = what
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._log_path

    async def announced(self) -> str:
        """The first address that the process prints."""
        with anyio.move_on_after(START_BOUND_S):
            while True:
                self._check_alive()
                if found := _ADDRESS.search(await anyio.Path(self._log_path).read_text(errors="replace")):
                    return found[0]
                await anyio.sleep(_POLL_S)
        raise self._failed(f"told no address within {START_BOUND_S:g} s")

    async def answers(self, url: str) -> None:
        """Return when the address gives 200."""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            with anyio.move_on_after(START_BOUND_S):
                while True:
                    self._check_alive()
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(url)).status_code == 200:
                            return
                    await anyio.sleep(_POLL_S)
        raise self._failed(f"was not ready within {START_BOUND_S:g} s")

    def _check_alive(self) -> None:
        if (code := self._process.returncode) is not None:
            raise self._failed(f"ended with exit code {code}")

    def _failed(self, how: str) -> BenchError:
        with self._log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").split("\n") if line.strip()]
        return BenchError(f"{self._what} {how}: {lines[-1].strip() if lines else 'it said nothing'}")

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after the bound."""
        for number, bound_s in ((signal.SIGTERM, STOP_BOUND_S), (signal.SIGKILL, STOP_BOUND_S)):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with anyio.move_on_after(bound_s):
                await self._process.wait()
                break


@asynccontextmanager
async def _child(what: str, argv: Sequence[str], folder: Path) -> AsyncIterator[_Child]:
    log_path = folder / "output.log"
    with log_path.open("wb") as log:
        process = await anyio.open_process(
            [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_ROOT
        )
    child = _Child(what, process, log_path)
    try:
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.stop()
            await process.aclose()
