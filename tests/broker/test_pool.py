"""A burst of commands waits for connections instead of failing."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.broker.pool import PatientPool


async def test_a_burst_waits_its_turn(redis: Redis, valkey_url: str) -> None:
    before = len(await redis.client_list())
    pool = PatientPool.from_url(valkey_url, max_connections=3)
    client: Any = Redis.from_pool(pool)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(client.incr, "n")
        assert await redis.getdel("n") == b"100"
        assert len(await redis.client_list()) <= before + 3
        with anyio.move_on_after(0.05) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(client.blpop, ["nothing"], 5)
        assert scope.cancelled_caught
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(client.ping)
        assert pool._places.value == 3
    finally:
        await client.aclose()


async def test_a_server_that_is_gone_costs_no_place() -> None:
    pool = PatientPool.from_url("redis://127.0.0.1:1", max_connections=2)
    client: Any = Redis.from_pool(pool)
    try:
        for _ in range(5):
            with anyio.fail_after(10), pytest.raises((RedisConnectionError, OSError)):
                await client.ping()
        assert pool._places.value == 2
    finally:
        await client.aclose()
