"""The HTTP server's start and end."""

from __future__ import annotations

import socket
from functools import partial

import anyio
import httpx
import pytest
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from orchestrator.broker import Broker, OutputReader
from orchestrator.gateway import create_app, serve
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    GATEWAY,
    PERMANENT_KEYS,
    FakeEngines,
    chat,
    data_of,
    make_config,
    read_stream,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


async def test_it_serves_until_cancelled() -> None:
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, app, "127.0.0.1", 0))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).status_code == 204
        told = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert anyio.current_time() - told < 3
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_localhost_is_one_port() -> None:
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, app, "localhost", 0))
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 204
        tasks.cancel_scope.cancel()


async def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        await serve(app, "127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("stream", [True, False])
async def test_its_end_ends_turns_and_tells_clients(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("orchestrator.gateway.server.GRACE_S", 0.1)
    broker = Broker(redis)
    async with (
        Redis.from_url(valkey_url, socket_timeout=None) as subscriber,
        anyio.create_task_group() as all_,
    ):
        reader = OutputReader(broker, subscriber, GATEWAY)
        await all_.start(reader.run)
        application = create_app(make_config(header_wait_s=0), broker, reader, GATEWAY, FakeEngines())
        async with (
            httpx.AsyncClient(timeout=5) as client,
            anyio.create_task_group() as clients,
            anyio.create_task_group() as servers,
        ):
            port: int = await servers.start(partial(serve, application, "127.0.0.1", 0))
            got: list[tuple[int, bytes]] = []

            async def ask() -> None:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with client.stream("POST", url, json=chat(stream=stream)) as response:
                    got.append((response.status_code, await read_stream(response)))

            clients.start_soon(ask)
            _, [queued] = await broker.events("default", "0-0", 4000)
            servers.cancel_scope.cancel()
        all_.cancel_scope.cancel()
    [(status, body)] = got
    assert status == (200 if stream else 503)
    assert b'"code":"stopping"' in body
    if stream:
        assert data_of(body)[-1]["error"]["code"] == "stopping"
    record = await broker.record("default", queued.turn)
    assert record is not None and record.state is TurnState.CANCELLED
