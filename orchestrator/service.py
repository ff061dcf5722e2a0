"""The service: what `swarm up` runs. Wires broker, engines, dispatchers and gateway into one process."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from backends.gguf import NotGguf, read_model
from backends.kv_shape import KvShape
from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.managed import EngineSettings, ManagedEngine, ManagedEngineError
from backends.managed.settings import EngineSettingsError, model_path
from backends.model_shape import KvUnknown
from backends.protocol import Backend, EngineInfo, KvLayout
from orchestrator.broker import Broker, OutputReader
from orchestrator.broker.embedded import EmbeddedValkey, EmbeddedValkeyError
from orchestrator.broker.pool import PatientPool
from orchestrator.config import Backend as BackendConfig
from orchestrator.config import Config, exposure_problem
from orchestrator.dispatcher import Dispatcher, DispatcherOptions, published_engine
from orchestrator.gateway.app import create_app
from orchestrator.gateway.server import serve

COMMAND_TIMEOUT_S = 5.0
COMMAND_CONNECTIONS = 32
RESTART_PAUSE_S = 1.0
CLOSE_BOUND_S = 5.0

_log = structlog.get_logger(__name__)


class ServiceError(Exception):
    """The service cannot start; the message is one line and says what to do."""


@dataclass(frozen=True, slots=True)
class _Hosted:
    """One configured backend and what runs it here."""

    config: BackendConfig
    backend: Backend
    dispatcher: Dispatcher


class PoolEngines:
    """The gateway's view of the engines: a pool is what the largest of its described engines is."""

    def __init__(self, hosted: list[_Hosted], broker: Broker) -> None:
        self._hosted = hosted
        self._broker = broker

    def info(self, pool: str) -> EngineInfo | None:
        """What the pool's engine is; None before it was first reached, or while others own it."""
        return _largest(hosted.dispatcher.info for hosted in self._of(pool))

    async def described(self, pool: str) -> EngineInfo | None:
        """As `info`, else as its owner elsewhere publishes it. Raises RedisError."""
        info = self.info(pool)
        if info is not None:
            return info
        states = [await self._broker.backend_state(pool, hosted.config.name) for hosted in self._of(pool)]
        return _largest(published_engine(state or {}) for state in states)

    async def count_tokens(self, pool: str, api: str, body: dict[str, Any]) -> int:
        """A prompt's exact length. Raises EngineRefused, EngineUnavailable."""
        hosted = self._of(pool)
        described = [one for one in hosted if one.dispatcher.info is not None]
        return await (described or hosted)[0].backend.count_tokens(api, body)

    def _of(self, pool: str) -> list[_Hosted]:
        return [hosted for hosted in self._hosted if hosted.config.pool == pool]


def _largest(engines: Iterable[EngineInfo | None]) -> EngineInfo | None:
    known = [info for info in engines if info is not None]
    return max(known, key=lambda info: min(info.slot_context, info.kv_budget_tokens), default=None)


@asynccontextmanager
async def _redis(config: Config, tasks: anyio.abc.TaskGroup) -> AsyncIterator[tuple[Redis, Redis]]:
    """A client for commands and one for reads that block."""
    async with AsyncExitStack() as stack:
        url = config.redis.url
        if config.redis.embedded:
            valkey = await stack.enter_async_context(EmbeddedValkey(config.redis.state_dir))
            tasks.start_soon(_keep_valkey, valkey)
            url = valkey.url
        pool: PatientPool = PatientPool.from_url(
            url, max_connections=COMMAND_CONNECTIONS, socket_timeout=COMMAND_TIMEOUT_S
        )
        commands: Redis = Redis.from_pool(pool)
        blocking: Redis = Redis.from_url(url, socket_timeout=None)
        stack.push_async_callback(_shielded, commands.aclose)
        stack.push_async_callback(_shielded, blocking.aclose)
        try:
            await commands.ping()
        except (RedisError, OSError) as error:
            raise ServiceError(f"redis.url: the server does not answer: {error}") from None
        yield commands, blocking


async def _shielded(close: Callable[[], Awaitable[None]]) -> None:
    """Close even while being cancelled, within a bound."""
    with anyio.move_on_after(CLOSE_BOUND_S, shield=True):
        await close()


async def _keep_valkey(valkey: EmbeddedValkey) -> None:
    while True:
        await valkey.wait()
        _log.error("embedded Valkey ended; restarting it")
        try:
            await valkey.restart()
        except EmbeddedValkeyError as error:
            _log.error("embedded Valkey does not start", error=str(error))
            await anyio.sleep(RESTART_PAUSE_S)


async def _keep_engine(engine: ManagedEngine, name: str) -> None:
    while True:
        code = await engine.wait()
        _log.error("engine ended; restarting it", backend=name, exit_code=code)
        while True:
            try:
                await engine.restart()
                break
            except ManagedEngineError as error:
                _log.error("engine does not start", backend=name, error=str(error))
                await anyio.sleep(RESTART_PAUSE_S)


def engine_settings(config: BackendConfig) -> EngineSettings:
    """How a managed backend's engine is to run. Raises ValueError on numbers that cannot go together."""
    managed = config.managed
    assert managed is not None
    return EngineSettings(
        model=managed.model,
        decode_slots=managed.decode_slots,
        engine_slots=managed.engine_slots,
        context=managed.context,
        kv_layout=managed.kv_layout,
        batch_tokens=managed.batch_tokens,
        threads=managed.threads,
        nice=managed.nice,
        gpu_layers=managed.gpu_layers,
        cache_type_k=managed.cache_type_k,
        cache_type_v=managed.cache_type_v,
        save_path=config.save_path,
        command=managed.command,
    )


async def _engine(config: BackendConfig, state_dir: Path, stack: AsyncExitStack) -> ManagedEngine | None:
    if config.managed is None:
        return None
    engine = ManagedEngine(engine_settings(config), state_dir, name=config.name)
    return await stack.enter_async_context(engine)


def _options(config: BackendConfig, engine: ManagedEngine | None) -> LlamaCppOptions:
    return LlamaCppOptions(
        kv_layout=KvLayout(config.kv_layout) if config.kv_layout else None,
        batch_tokens=config.batch_tokens,
        piece_tokens=config.piece_tokens or 0,
        kv=_kv_shape(config),
        model=config.model,
        save_path=engine.save_path if engine is not None else config.save_path,
        swap_tag=f"{config.pool}/{config.name}",
    )


def _kv_shape(config: BackendConfig) -> KvShape | None:
    """Bytes of KV as configured, else as the model's file says; None: the engine has to be measured."""
    if config.kv_bytes_per_token is not None:
        return KvShape(config.kv_bytes_per_token)
    if config.managed is None:
        return None
    try:
        shape = read_model(model_path(config.managed.model))
        return shape.kv(config.managed.cache_type_k, config.managed.cache_type_v)
    except (NotGguf, KvUnknown, EngineSettingsError, OSError) as error:
        _log.warning("KV bytes are measured: the model file does not tell", error=str(error))
        return None


def _dispatcher_options(config: Config, backend: BackendConfig) -> DispatcherOptions:
    policy = config.policy
    return DispatcherOptions(
        pool=backend.pool,
        name=backend.name,
        kind=backend.kind,
        decode_slots=backend.decode_slots,
        preemption=policy.preemption,
        min_run_s=policy.min_run_s,
        max_preemptions=policy.max_preemptions,
        aging_s=policy.aging_s,
        priorities=tuple(sorted(config.priorities.values())),
        kv_budget_bytes=backend.kv_budget_bytes,
        swap_budget=backend.swap_budget,
        others=tuple(one.name for one in config.backends if one.pool == backend.pool and one is not backend),
    )


async def run_service(
    config: Config, *, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; reports the bound port once requests are answered.

    Engines that are configured by URL may come later. Raises ServiceError, EmbeddedValkeyError,
    ManagedEngineError when something that is ours to start cannot be started.
    """
    problem = exposure_problem(config)
    if problem is not None:
        raise ServiceError(problem)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        commands, blocking = await stack.enter_async_context(_redis(config, tasks))
        broker = Broker(commands, final_ttl_s=int(config.policy.turn_ttl_s))
        hosted = []
        for backend_config in config.backends:
            engine = await _engine(backend_config, config.redis.state_dir, stack)
            if engine is not None:
                tasks.start_soon(_keep_engine, engine, backend_config.name)
            url = engine.url if engine is not None else backend_config.url
            assert url is not None
            backend = LlamaCppBackend(url, _options(backend_config, engine))
            stack.push_async_callback(_shielded, backend.aclose)
            dispatcher = Dispatcher(
                _dispatcher_options(config, backend_config), backend, broker, Broker(blocking), owner
            )
            tasks.start_soon(dispatcher.run)
            hosted.append(_Hosted(backend_config, backend, dispatcher))
        reader = OutputReader(broker, blocking, owner)
        await tasks.start(reader.run)
        app = create_app(config, broker, reader, owner, PoolEngines(hosted, broker))
        port = await tasks.start(serve, app, config.server.host, config.server.port)
        task_status.started(port)
        try:
            await anyio.sleep_forever()
        finally:
            tasks.cancel_scope.cancel()
