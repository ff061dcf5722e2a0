"""The whole service on a simulated engine: a client that leaves ends its turn within a step, always."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from redis.asyncio import Redis

from backends.simulated import Fault, SimulatedConfig, SimulatedEngine, TimingProfile, serve_simulated
from orchestrator.broker import Broker
from orchestrator.turns import FINAL_STATES, TurnState
from tests.e2e.conftest import Swarm, serve_swarm, swarm_config
from tests.gateway.harness import PERMANENT_KEYS, chat, read_stream

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
BOUND_S = 20.0
# A step, or a batch of a prefill, takes long beside all that the service does between two of them.
PROFILE = TimingProfile(base_step_s=0.25, prefill_tokens_per_s=256, n_batch=64)
CONFIG = SimulatedConfig(n_slots=3, n_ctx=3 * 4096, profile=PROFILE, eos_probability=0)
TEXT = "go [len=500]"
LONG_TEXT = "x" * 600 + " [len=500]"  # long enough to be worth a file
LONG_PROMPT = "x" * 3000


@dataclass(frozen=True)
class Client:
    """Somebody who waits for the reply to a turn."""

    turn: str
    scope: anyio.CancelScope

    def leave(self) -> None:
        """Close the connection."""
        self.scope.cancel()


class World:
    """A service with one decode slot, its engine, and clients."""

    def __init__(
        self, swarm: Swarm, engine: SimulatedEngine, redis: Redis, tasks: anyio.abc.TaskGroup
    ) -> None:
        self.engine = engine
        self.broker = Broker(redis)
        self._swarm = swarm
        self._tasks = tasks
        self._clients: list[Client] = []

    async def ask(self, agent: str = "worker", text: str = TEXT, *, stream: bool = True) -> Client:
        """A client whose turn has reached the queue."""
        known = await self._turns()
        scope = anyio.CancelScope()

        async def wait_for_reply() -> None:
            body = chat(messages=[{"role": "user", "content": text}], stream=stream, max_tokens=500)
            headers = {"X-Swarm-Agent": agent}
            with scope:
                async with self._swarm.http.stream("POST", CHAT, json=body, headers=headers) as response:
                    await read_stream(response)

        self._tasks.start_soon(wait_for_reply)
        new: set[str] = set()

        async def arrived() -> bool:
            new.update(await self._turns() - known)
            return bool(new)

        await self.steps_until(arrived)
        self._clients.append(Client(new.pop(), scope))
        return self._clients[-1]

    def all_leave(self) -> None:
        for client in self._clients:
            client.leave()

    async def empty(self) -> bool:
        return not await self._turns()

    async def _turns(self) -> set[str]:
        """All turns that have not ended."""
        owned = await self.broker.owned("default", "local")
        waiting = await self.broker.waiting("default", 100)
        return {*waiting, *(record.request.id for record in owned)}

    async def steps_until(self, condition: Callable[[], Awaitable[bool]]) -> int:
        """Wait until it holds. Returns how many steps the engine completed meanwhile."""
        before = self.engine.stats().steps
        with anyio.fail_after(BOUND_S):
            while not await condition():  # noqa: ASYNC110
                await anyio.sleep(0.002)
        return self.engine.stats().steps - before

    async def steps_until_state(self, client: Client, *states: TurnState) -> int:
        async def reached() -> bool:
            standing = await self.broker.standing("default", client.turn)
            return standing is not None and standing[0] in states

        return await self.steps_until(reached)

    async def steps_until_idle(self) -> int:
        async def idle() -> bool:
            return not self.engine.stats().running and not self.engine.stats().queued

        return await self.steps_until(idle)

    async def until_tokens(self, client: Client, count: int) -> None:
        async def enough() -> bool:
            log = await self.broker.log("default", client.turn)
            return sum(line.startswith(b'["d"') for line in log) >= count

        await self.steps_until(enough)

    async def until_fault(self) -> None:
        async def fired() -> bool:
            return any(fault["fired"] for fault in self.engine.faults.snapshot())

        await self.steps_until(fired)


@asynccontextmanager
async def world(
    redis: Redis, valkey_url: str, config: SimulatedConfig = CONFIG, **backend: Any
) -> AsyncIterator[World]:
    engine = SimulatedEngine(config)
    async with serve_simulated(engine) as url:
        text = swarm_config(valkey_url, url, decode_slots=1, **backend)
        async with serve_swarm(text) as swarm, anyio.create_task_group() as tasks:
            here = World(swarm, engine, redis, tasks)
            yield here
            here.all_leave()
            await here.steps_until_idle()
            await here.steps_until(here.empty)


def within_a_step(steps: int) -> bool:
    """The step under way ends, and one more may begin before the engine has heard of it."""
    return steps <= 2


@pytest.mark.parametrize("stream", [True, False])
async def test_while_it_decodes(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with world(redis, valkey_url) as w:
        client = await w.ask(stream=stream)
        await w.until_tokens(client, 3)
        client.leave()
        assert within_a_step(await w.steps_until_idle())
        await w.steps_until_state(client, TurnState.CANCELLED)
        assert w.engine.stats().disconnects == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_during_its_prefill(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with world(redis, valkey_url) as w:
        client = await w.ask(text=LONG_PROMPT, stream=stream)
        await w.steps_until_state(client, TurnState.RUNNING)
        client.leave()
        assert within_a_step(await w.steps_until_idle())
        await w.steps_until_state(client, TurnState.CANCELLED)
        stats = w.engine.stats()
        assert 0 < stats.tokens_prefilled < len(LONG_PROMPT) / 2
        assert stats.tokens_generated == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_while_it_waits(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with world(redis, valkey_url) as w:
        await w.until_tokens(await w.ask(), 1)
        client = await w.ask(stream=stream)
        assert await w.broker.waiting("default", 10) == [client.turn]
        client.leave()
        assert within_a_step(await w.steps_until_state(client, TurnState.CANCELLED))
        assert await w.broker.waiting("default", 10) == []


@pytest.mark.parametrize("stream", [True, False])
async def test_while_it_is_paused(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with world(redis, valkey_url) as w:
        client = await w.ask(stream=stream)
        await w.until_tokens(client, 2)
        other = await w.ask("editor")
        await w.until_tokens(other, 1)
        await w.steps_until_state(client, TurnState.PAUSED)
        client.leave()
        assert within_a_step(await w.steps_until_state(client, TurnState.CANCELLED))
        standing = await w.broker.standing("default", other.turn)
        assert standing is not None and standing[0] is TurnState.RUNNING


@pytest.mark.parametrize("kind", ["slow_save", "slow_restore"])
async def test_in_the_middle_of_a_swap(redis: Redis, valkey_url: str, tmp_path: Path, kind: str) -> None:
    slow = Fault(kind, delay_s=1.0)  # type: ignore[arg-type]
    profile = TimingProfile(base_step_s=0.02, prefill_tokens_per_s=2_000)
    config = replace(CONFIG, n_slots=2, profile=profile, slot_save_path=tmp_path, kv_bytes_per_token=1000)
    options = {"save_path": str(tmp_path), "kv_bytes_per_token": 1000, "swap_budget": "1GiB"}
    async with world(redis, valkey_url, config, **options) as w:
        first = await w.ask("drudge", LONG_TEXT)
        await w.until_tokens(first, 5)
        second = await w.ask("worker", LONG_TEXT)
        await w.until_tokens(second, 5)
        w.engine.faults.add([slow])
        # There are slots for two: the first turn's KV has to give way.
        third = await w.ask("helper", LONG_TEXT)
        if kind == "slow_restore":
            await w.until_tokens(third, 5)
            third.leave()
            await w.steps_until_state(third, TurnState.CANCELLED)
            second.leave()
        await w.until_fault()
        standing = await w.broker.standing("default", first.turn)
        assert standing is not None and standing[0] not in FINAL_STATES
        first.leave()
        # The copy itself cannot be interrupted; no step is made for the turn after it.
        assert within_a_step(await w.steps_until_state(first, TurnState.CANCELLED))
