"""The tap changes nothing and misses nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.gateway import serve
from tests.clients.tap import Tap, tap

BOUND_S = 10.0


@asynccontextmanager
async def tapped(app: Starlette) -> AsyncIterator[tuple[Tap, httpx.AsyncClient]]:
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, app, "127.0.0.1", 0))
        async with (
            tap(port) as one,
            httpx.AsyncClient(base_url=one.url, timeout=BOUND_S, trust_env=False) as client,
        ):
            yield one, client
        tasks.cancel_scope.cancel()


async def echo(request: Request) -> Response:
    body = await request.json()
    return JSONResponse({"echo": body}, 404 if body.get("lost") else 200)


async def test_requests_on_one_connection_are_told_apart() -> None:
    async with tapped(Starlette(routes=[Route("/echo", echo, methods=["POST"])])) as (one, client):
        for number in range(3):
            reply = await client.post(f"/echo?n={number}", json={"n": number, "lost": number == 1})
            assert reply.json() == {"echo": {"n": number, "lost": number == 1}}
    assert [exchange.path for exchange in one.exchanges] == ["/echo?n=0", "/echo?n=1", "/echo?n=2"]
    assert [exchange.body["n"] for exchange in one.exchanges] == [0, 1, 2]
    assert [exchange.status for exchange in one.exchanges] == [200, 404, 200]
    assert [exchange.endpoint for exchange in one.exchanges] == ["/echo"] * 3
    assert all(exchange.whole for exchange in one.exchanges)
    assert not any(exchange.streamed for exchange in one.exchanges)


async def test_a_stream_passes_while_it_is_made_and_its_client_may_leave() -> None:
    first_read, left = anyio.Event(), anyio.Event()

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b": started\n\ndata: one\n\n"
            await first_read.wait()
            yield b"data: two\n\n"
            await anyio.sleep(BOUND_S)
        finally:
            left.set()

    async def stream(request: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    with anyio.fail_after(BOUND_S):
        async with tapped(Starlette(routes=[Route("/stream", stream)])) as (one, client):
            async with client.stream("GET", "/stream") as reply:
                pieces = reply.aiter_raw()
                assert b"one" in await anext(pieces)
                first_read.set()
                assert b"two" in await anext(pieces)
            await left.wait()
    [exchange] = one.exchanges
    assert exchange.streamed
    assert not exchange.whole
    assert exchange.comments == ["started"]
    assert exchange.data == ["one", "two"]
