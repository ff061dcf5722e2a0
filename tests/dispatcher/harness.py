"""Dispatchers on a simulated engine and a real broker, and wrappers that break one of them at a gate."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import orjson
from redis.asyncio import Redis

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import Backend
from backends.simulated import SimulatedConfig, SimulatedEngine, TimingProfile, serve_simulated
from orchestrator.broker import Broker, TurnRecord
from orchestrator.broker import keys as k
from orchestrator.dispatcher import Dispatcher, DispatcherOptions
from orchestrator.turns import FINAL_STATES, TurnRequest, TurnSize, TurnState

POOL = "p"
BACKEND = "b"
KEYS = k.Keys(POOL)
BOUND_S = 20.0
STEP = TimingProfile(base_step_s=0.002)
PERMANENT = ("swarm:*:seq", "swarm:*:events", "swarm:*:recent", "swarm:*:counters", "swarm:*:fence")

_numbers = itertools.count(1)


class Swarm:
    """One engine, its pool in Redis, and whatever dispatchers a test starts."""

    def __init__(
        self, redis: Redis, url: str, engine: SimulatedEngine, engine_url: str, tasks: anyio.abc.TaskGroup
    ) -> None:
        self.redis = redis
        self.engine = engine
        self.broker = Broker(redis)
        self._url = url
        self.engine_url = engine_url
        self._tasks = tasks
        self._clients: list[Redis] = []
        self._backends: list[LlamaCppBackend] = []

    def backend(
        self, kind: type[LlamaCppBackend] = LlamaCppBackend, url: str | None = None, **options: Any
    ) -> LlamaCppBackend:
        """An adapter of the engine, or of what is at another address."""
        backend = kind(
            url or self.engine_url, LlamaCppOptions(**{"piece_tokens": 0, "batch_tokens": 64, **options})
        )
        self._backends.append(backend)
        return backend

    def client(self, timeout_s: float | None = 2.0) -> Redis:
        """A connection pool of its own."""
        client: Redis = Redis.from_url(self._url, socket_timeout=timeout_s)
        self._clients.append(client)
        return client

    def dispatcher(
        self,
        owner: str = "one",
        backend: Backend | None = None,
        broker: Broker | None = None,
        **options: Any,
    ) -> Dispatcher:
        """A dispatcher that does not run yet."""
        return Dispatcher(
            DispatcherOptions(
                **{
                    "pool": POOL,
                    "name": BACKEND,
                    "kind": "llama.cpp",
                    "decode_slots": 2,
                    "preemption": True,
                    "min_run_s": 0.0,
                    "max_preemptions": 50,
                    "aging_s": 60.0,
                    "priorities": (0, 20, 50, 100),
                    **options,
                }
            ),
            backend or self.backend(),
            broker or Broker(self.client()),
            Broker(self.client(None)),
            owner,
        )

    async def start(self, dispatcher: Dispatcher, *, wait: bool = True) -> Callable[[], Awaitable[None]]:
        """Run a dispatcher until the block ends, or until what is returned is called."""
        scope = anyio.CancelScope()
        ended = anyio.Event()

        async def run() -> None:
            try:
                with scope:
                    await dispatcher.run()
            finally:
                ended.set()

        async def stop() -> None:
            scope.cancel()
            with anyio.fail_after(BOUND_S):
                await ended.wait()

        self._tasks.start_soon(run)
        if wait:
            await until(lambda: dispatcher.healthy)
        return stop

    async def submit(
        self,
        text: str,
        priority: int = 20,
        max_tokens: int = 200,
        *,
        size: TurnSize | None = None,
        body: bytes | None = None,
        **fields: Any,
    ) -> str:
        """Put a greedy chat turn into the queue."""
        turn = f"turn{next(_numbers)}"
        messages = [{"role": "user", "content": text}]
        request = TurnRequest(
            id=turn,
            pool=POOL,
            agent=fields.pop("agent", "worker"),
            priority=priority,
            priority_class=str(priority),
            api="chat",
            model="m",
            body=body
            if body is not None
            else orjson.dumps({"messages": messages, "temperature": 0, **fields}),
            stream=True,
            size=size or TurnSize(len(text) + 50, max_tokens, False),
            gateway="gw",
            created=0.0,
        )
        await self.broker.submit(request, max_waiting=10_000)
        return turn

    async def reference(self, text: str, max_tokens: int = 200) -> str:
        """What the engine says to it without interruption."""
        backend = self.backend()
        await backend.describe()
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        said: list[str] = []

        class Sink:
            def started(self, prompt_tokens: int, cached_tokens: int) -> None:
                pass

            def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
                said.append(part["content"])

        await backend.generation("chat", body, max_tokens).run(self.engine.config.n_slots - 1, Sink())
        return "".join(said)

    async def record(self, turn: str) -> TurnRecord:
        record = await self.broker.record(POOL, turn)
        assert record is not None
        return record

    async def until_state(self, turn: str, *states: TurnState) -> TurnRecord:
        """Return the record once it says one of the states."""
        with anyio.fail_after(BOUND_S):
            while True:
                record = await self.record(turn)
                if record.state in states:
                    return record
                await anyio.sleep(0.005)

    async def until_end(self, turn: str) -> TurnRecord:
        return await self.until_state(turn, *FINAL_STATES)

    async def until_tokens(self, turn: str, count: int) -> None:
        """Return once the turn's log has that many deltas."""
        with anyio.fail_after(BOUND_S):
            while sum(entry[0] == "d" for entry in await self.log(turn)) < count:  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def log(self, turn: str) -> list[Any]:
        return [orjson.loads(line) for line in await self.broker.log(POOL, turn)]

    async def text(self, turn: str) -> str:
        """What a client has read."""
        return "".join(entry[1].get("content", "") for entry in await self.log(turn) if entry[0] == "d")

    async def marks(self, turn: str) -> list[str]:
        """The log's status entries and its end."""
        return [entry[1] for entry in await self.log(turn) if entry[0] in "sex"]

    async def events(self, turn: str) -> list[str]:
        return [line["event"] for line in await self.broker.timeline(POOL, turn)]

    async def until_idle(self) -> None:
        """Return once the engine decodes nothing."""
        await until(lambda: not self.engine.stats().running and not self.engine.stats().queued)

    async def check_done(self, turn: str, text: str, max_tokens: int = 200) -> None:
        """The turn ended well: its text, its counts, and one end in its log."""
        record = await self.until_end(turn)
        log = await self.log(turn)
        assert record.state is TurnState.DONE, (record, log[-1])
        whole = await self.reference(text, max_tokens)
        assert await self.text(turn) == whole
        assert [entry[0] for entry in log].count("e") == 1
        _, reason, usage = log[-1]
        assert record.finish_reason == reason
        assert usage["completion_tokens"] == record.tokens_generated
        assert usage["prompt_tokens"] == record.prompt_tokens > 0
        told = sum(entry[2] for entry in log if entry[0] == "d")
        assert 0 <= usage["completion_tokens"] - told <= 1, "at most the end token comes without text"

    async def aclose(self) -> None:
        for backend in self._backends:
            await backend.aclose()
        for client in self._clients:
            await client.aclose()


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    with anyio.fail_after(BOUND_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.002)


@asynccontextmanager
async def swarm(redis: Redis, url: str, **config: Any) -> AsyncIterator[Swarm]:
    """An engine and an empty pool."""
    engine = SimulatedEngine(SimulatedConfig(**{"profile": STEP, "n_ctx": 32_768, **config}))
    failure: Exception | None = None
    async with serve_simulated(engine) as engine_url:
        async with anyio.create_task_group() as tasks:
            world = Swarm(redis, url, engine, engine_url, tasks)
            try:
                yield world
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await world.aclose()
    if failure is not None:
        raise failure
