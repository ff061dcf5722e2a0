"""200 clients on 64 decode slots: every token once and in order, and nothing left running."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio
import httpx
import orjson
import pytest
import redis.asyncio

from backends.simulated import SimulatedConfig, SimulatedEngine, TimingProfile, serve_simulated_in_thread
from tests.e2e.conftest import Streamed, Swarm, serve_swarm, swarm_config

pytestmark = [pytest.mark.timeout(120), pytest.mark.keys_without_ttl("swarm:{*}:*")]

CLIENTS = 200
DECODE_SLOTS = 64
ENGINE_SLOTS = 80
AGENTS = ("editor", "worker", "drudge")
ENGINE = SimulatedConfig(
    n_slots=ENGINE_SLOTS,
    n_ctx=ENGINE_SLOTS * 1024,
    profile=TimingProfile(base_step_s=0.06, prefill_tokens_per_s=100_000, n_batch=512),
    multibyte_rate=0.1,
)


def body_of(number: int, length: int) -> dict[str, Any]:
    text = f"Client {number} asks for something [len={length}]"
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "temperature": 0}


async def uninterrupted(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an engine of its own, without anything in between, answers."""
    engine = SimulatedConfig(n_slots=CLIENTS, n_ctx=CLIENTS * 1024, multibyte_rate=ENGINE.multibyte_rate)
    replies: list[dict[str, Any]] = [{} for _ in bodies]
    limits = httpx.Limits(max_connections=None)
    with serve_simulated_in_thread(engine) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

            async def ask(number: int) -> None:
                reply = await http.post("/v1/chat/completions", json=bodies[number])
                replies[number] = orjson.loads(reply.content)

            async with anyio.create_task_group() as tasks:
                for number in range(len(bodies)):
                    tasks.start_soon(ask, number)
    return replies


async def unlimited(swarm: Swarm) -> None:
    """Let the client open as many connections as there are streams."""
    await swarm.http.aclose()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    swarm.http = httpx.AsyncClient(base_url=swarm.url, timeout=120, limits=limits)


async def test_200_clients_of_three_priorities_get_every_token_once(
    valkey_url: str, redis: redis.asyncio.Redis
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    # The first turns last for as long as it takes all clients to come, on a slow machine too.
    lengths = [chance.randint(60 if number < DECODE_SLOTS else 5, 70) for number in range(CLIENTS)]
    bodies = [body_of(number, length) for number, length in enumerate(lengths)]
    wanted = await uninterrupted(bodies)
    seen = [Streamed() for _ in range(CLIENTS)]
    engine = SimulatedEngine(ENGINE)
    with serve_simulated_in_thread(engine) as url:
        config = swarm_config(valkey_url, url, decode_slots=DECODE_SLOTS)
        async with serve_swarm(config) as swarm:
            await unlimited(swarm)
            await swarm.stream(body_of(-1, 3), seen=Streamed())
            idle_tasks = len(asyncio.all_tasks())
            idle_connections = len(await redis.client_list())

            async def client(number: int, agent: str, after_s: float) -> None:
                await anyio.sleep(after_s)
                await swarm.stream(bodies[number], agent, seen[number])

            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    for number in range(CLIENTS):
                        # The lower classes first, so that the higher ones have somebody to preempt.
                        agent = AGENTS[2 - number * 3 // CLIENTS]
                        tasks.start_soon(client, number, agent, 0.002 * number)
            state = await settled(swarm)
            with anyio.fail_after(10):
                while len(asyncio.all_tasks()) > idle_tasks:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            connections = len(await redis.client_list())
        stats = engine.stats()

    for number in range(CLIENTS):
        [choice] = wanted[number]["choices"]
        assert seen[number].text == choice["message"]["content"], number
        assert seen[number].finish_reason == choice["finish_reason"]
        assert seen[number].error is None
        usage = seen[number].usage
        assert usage is not None
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == wanted[number]["usage"][name]
    assert state["counters"]["turns_done"] == CLIENTS + 1
    assert state["counters"].get("turns_failed", 0) == 0
    assert state["counters"]["preemptions"] == state["counters"]["resumes"] > 0
    assert state["queue"]["waiting"] == 0
    assert state["paused"] == []
    assert (stats.running, stats.queued, stats.pool_exhaustions) == (0, 0, 0)
    assert DECODE_SLOTS <= stats.max_concurrent_decode <= ENGINE_SLOTS
    assert connections <= idle_connections + CLIENTS
    assert {mark for one in seen for mark in one.marks} <= {"started", "paused", "resumed", "keep-alive"}


async def settled(swarm: Swarm) -> dict[str, Any]:
    """The service's state once no slot has a turn."""
    with anyio.fail_after(10):
        while True:
            state: dict[str, Any] = (await swarm.http.get("/swarm/state")).json()
            if all(slot["turn"] is None for backend in state["backends"] for slot in backend["slots"]):
                return state
            await anyio.sleep(0.02)
