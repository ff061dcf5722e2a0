"""A gateway to test: real broker, real server where bytes matter, and a scripted dispatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
from redis.asyncio import Redis
from starlette.applications import Starlette

from backends.kv_shape import KvShape
from backends.protocol import BackendError, EngineInfo, KvLayout
from orchestrator.broker import (
    Broker,
    Lease,
    LogAppend,
    OutputReader,
    PoolEvent,
    TurnRecord,
    delta_entry,
    end_entry,
    error_entry,
    status_entry,
    timeline_entry,
)
from orchestrator.config import Config, parse_config
from orchestrator.gateway import create_app, serve
from orchestrator.turns import TurnState

GATEWAY = "gw-test"
BOUND_S = 10.0
PERMANENT_KEYS = ("swarm:*:seq", "swarm:*:events", "swarm:*:recent", "swarm:*:counters", "swarm:*:fence")

CONFIG = """
server: {{keepalive_s: {keepalive_s}, header_wait_s: {header_wait_s}, max_body_bytes: 1048576}}
backends:
  - {{name: local, url: "http://127.0.0.1:1", model: tiny, decode_slots: 2}}
  - {{name: big, pool: large, url: "http://127.0.0.1:2", decode_slots: 1}}
policy: {{max_waiting: {max_waiting}}}
agents:
  editor: {{priority: foreground, max_turn_tokens: 100}}
  indexer: {{priority: background, max_turn_tokens: 1000}}
default_agent: editor
"""

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def make_config(keepalive_s: float = 10.0, header_wait_s: float = 1.0, max_waiting: int = 100) -> Config:
    """The config of most tests: two pools, two agents without keys."""
    return parse_config(
        CONFIG.format(keepalive_s=keepalive_s, header_wait_s=header_wait_s, max_waiting=max_waiting)
    )


def make_info(context: int = 2048, slots: int = 4, layout: KvLayout = KvLayout.SPLIT) -> EngineInfo:
    """An engine with one context a slot, or one for all."""
    budget = context * slots if layout is KvLayout.SPLIT else context
    return EngineInfo(
        model="/models/folder/engine-model.gguf",
        engine_slots=slots,
        slot_context=context,
        kv_layout=layout,
        kv_budget_tokens=budget,
        kv=KvShape(100),
        batch_tokens=64,
        native_park=False,
        swap=True,
        reasoning_template=False,
    )


@dataclass
class FakeEngines:
    """Engines as told: `count` is what the next count says, or raises."""

    infos: dict[str, EngineInfo] = field(default_factory=lambda: {"default": make_info()})
    count: int | BackendError = 10
    counted: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def info(self, pool: str) -> EngineInfo | None:
        return self.infos.get(pool)

    async def described(self, pool: str) -> EngineInfo | None:
        return self.info(pool)

    async def count_tokens(self, pool: str, api: str, body: dict[str, Any]) -> int:
        self.counted.append((pool, api))
        self.bodies.append(body)
        if isinstance(self.count, BackendError):
            raise self.count
        return self.count


class Taken:
    """One turn that the scripted dispatcher has claimed."""

    def __init__(self, broker: Broker, lease: Lease, record: TurnRecord) -> None:
        self._broker = broker
        self._lease = lease
        self.record = record
        self.id = record.request.id
        self.written = 0

    async def write(self, *entries: bytes, gateway: str = GATEWAY) -> None:
        """Append entries as one message; to another `gateway` means that ours hears nothing of them."""
        append = LogAppend(self.id, gateway, self.written, entries)
        [self.written] = await self._broker.append(self._lease, [append])

    async def become(self, state: TurnState, **counters: int) -> None:
        await self._broker.advance(
            self._lease, self.id, state, timeline_entry(state.value), counters=counters
        )

    async def start(self) -> None:
        await self.become(TurnState.RUNNING)
        await self.write(status_entry("started", slot=0))

    async def pause(self) -> None:
        await self.become(TurnState.PAUSED, preemptions=1)
        await self.write(status_entry("paused"))

    async def resume(self) -> None:
        await self.become(TurnState.RUNNING, resumes=1)
        await self.write(status_entry("resumed"))

    async def say(self, *texts: str) -> None:
        name = "content" if self.record.request.api == "chat" else "text"
        await self.write(*(delta_entry({name: text}, 1, [7]) for text in texts))

    async def finish(self, reason: str = "stop", tokens: int = 3) -> None:
        await self.write(end_entry(reason, 5, tokens, 2))
        await self.become(TurnState.DONE, turns_done=1)

    async def fail(self, status: int = 503, message: str = "engine lost") -> None:
        await self.write(error_entry(status, message, "server_error", "engine_unavailable"))
        await self.become(TurnState.FAILED, turns_failed=1)


class Dispatcher:
    """Owns a backend and does what the test says."""

    def __init__(self, broker: Broker, lease: Lease) -> None:
        self._broker = broker
        self._lease = lease
        self._position = "0-0"
        self._events: list[PoolEvent] = []

    async def event(self, kind: str) -> PoolEvent:
        """The next event of a kind; others stay for later."""
        with anyio.fail_after(BOUND_S):
            while True:
                for event in self._events:
                    if event.kind == kind:
                        self._events.remove(event)
                        return event
                self._position, events = await self._broker.events(self._lease.pool, self._position, 1000)
                self._events += events

    async def take(self) -> Taken:
        """Claim the next turn."""
        event = await self.event("queued")
        record = await self._broker.claim(self._lease, event.turn)
        assert record is not None
        return Taken(self._broker, self._lease, record)


@dataclass
class Service:
    """A gateway and everything around it."""

    app: Starlette
    broker: Broker
    reader: OutputReader
    engines: FakeEngines
    dispatcher: Dispatcher
    client: httpx.AsyncClient
    redis: Redis
    port: int

    async def turn_keys(self) -> list[bytes]:
        """What Redis has of turns."""
        return [key async for key in self.redis.scan_iter("swarm:*:turn:*")]

    async def until_state(self, turn: str, state: TurnState, pool: str = "default") -> None:
        """Return when the turn is in the state."""
        with anyio.fail_after(BOUND_S):
            while True:
                record = await self.broker.record(pool, turn)
                if record is not None and record.state is state:
                    return
                await anyio.sleep(0.005)


@asynccontextmanager
async def service(
    redis: Redis, url: str, *, config: Config | None = None, engines: FakeEngines | None = None
) -> AsyncIterator[Service]:
    """A gateway behind the real HTTP server, on a free loopback port."""
    config = config or make_config()
    engines = engines or FakeEngines()
    broker = Broker(redis)
    lease = await broker.acquire("default", "local", "test", 60_000)
    assert lease is not None
    async with Redis.from_url(url, socket_timeout=None) as subscriber, anyio.create_task_group() as tasks:
        reader = OutputReader(broker, subscriber, GATEWAY)
        await tasks.start(reader.run)
        app = create_app(config, broker, reader, GATEWAY, engines)
        port: int = await tasks.start(partial(serve, app, "127.0.0.1", 0))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=BOUND_S) as client:
            dispatcher = Dispatcher(broker, lease)
            yield Service(app, broker, reader, engines, dispatcher, client, redis, port)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def application(
    redis: Redis, *, config: Config | None = None, engines: FakeEngines | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway without a server and without output: for requests that are answered at once."""
    broker = Broker(redis)
    reader = OutputReader(broker, redis, GATEWAY)
    app = create_app(config or make_config(), broker, reader, GATEWAY, engines or FakeEngines())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=BOUND_S) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {**CHAT, **fields}


async def read_stream(response: httpx.Response) -> bytes:
    """All of a stream's body."""
    return b"".join([piece async for piece in response.aiter_raw()])


async def read_until(pieces: AsyncIterator[bytes], mark: bytes) -> bytes:
    """The stream's bytes up to and including the piece that contains the mark."""
    got = b""
    with anyio.fail_after(BOUND_S):
        while mark not in got:
            got += await anext(pieces)
    return got


def data_of(stream: bytes) -> list[Any]:
    """The stream's JSON events; its [DONE] is checked and left out."""
    lines = [line for line in stream.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def text_of(stream: bytes) -> str:
    """The content of a chat stream."""
    choices = [choice for event in data_of(stream) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
