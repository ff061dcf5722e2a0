"""Connections whose client does not read, or is no longer there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc
import httpx
import orjson
import pytest
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from orchestrator.broker import delta_entry
from orchestrator.broker.streams import BACKLOG
from orchestrator.gateway import connections, serve
from orchestrator.gateway.connections import SEND_BUFFER_BYTES, TRANSPORT, HttpConnection
from orchestrator.turns import TurnState
from tests.gateway.harness import PERMANENT_KEYS, Service, Taken, chat, make_config, service

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

QUICK = make_config(header_wait_s=0)
TEXT = "x" * 4000


async def test_accepted_connections_probe_for_clients_that_are_gone() -> None:
    found: dict[str, int] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        accepted = scope[TRANSPORT].get_extra_info("socket")
        found["probes"] = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found["buffer"] = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for name in connections._TCP_OPTIONS:
            if hasattr(socket, name):
                found[name] = accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, app, "127.0.0.1", 0))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).status_code == 204
        tasks.cancel_scope.cancel()
    assert found.pop("probes")
    assert SEND_BUFFER_BYTES <= found.pop("buffer") <= 2 * SEND_BUFFER_BYTES
    assert {name: bool(value) for name, value in found.items() if name == "TCP_NODELAY"} == {
        "TCP_NODELAY": True
    }
    expected = {name: value for name, value in connections._TCP_OPTIONS.items() if name in found}
    assert {**found, "TCP_NODELAY": 1} == expected
    # Every way to notice that somebody is gone takes a minute at most.
    assert connections.PROBE_AFTER_S + connections.PROBES * connections.PROBE_EVERY_S <= 60


@asynccontextmanager
async def _asking(swarm: Service, *headers: bytes) -> AsyncIterator[anyio.abc.SocketStream]:
    """A client that sends a streaming request and so far reads nothing."""
    body = orjson.dumps(chat(stream=True))
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    async with await anyio.connect_tcp("127.0.0.1", swarm.port) as stream:
        await stream.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        yield stream


async def _write_much(turn: Taken, entries: int = 3000) -> None:
    """More than all buffers between the gateway and its client hold."""
    await turn.start()
    for _ in range(0, entries, 100):
        await turn.write(*(delta_entry({"content": TEXT}, 1, []) for _ in range(100)))


async def _nobody_reads(swarm: Service) -> None:
    with anyio.fail_after(10):
        while swarm.reader._streams:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_client_that_stops_reading_is_cut_off_and_its_turn_cancelled(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.watch.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("orchestrator.gateway.watch.STALL_S", 0.3)
    async with service(redis, valkey_url, config=QUICK) as swarm, _asking(swarm) as stream:
        turn = await swarm.dispatcher.take()
        await _write_much(turn)
        event = await swarm.dispatcher.event("cancel")
        assert event.turn == turn.id
        await _nobody_reads(swarm)
        with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(10):
            while True:
                await stream.receive(1 << 20)
        await turn.become(TurnState.CANCELLED)


async def test_what_is_held_for_a_client_that_does_not_read_is_bounded(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[asyncio.Transport] = []

    begin = HttpConnection.on_message_begin

    def watched(self: HttpConnection) -> None:
        made.append(self.transport)
        begin(self)

    monkeypatch.setattr(HttpConnection, "on_message_begin", watched)
    async with service(redis, valkey_url, config=QUICK) as swarm, _asking(swarm):
        turn = await swarm.dispatcher.take()
        await _write_much(turn)
        [connection] = made
        with anyio.fail_after(10):
            while not connection.get_write_buffer_size():  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.sleep(0.1)
        unsent = connection.get_write_buffer_size()
        [followed] = swarm.reader._streams[turn.id]
        # The high-water mark, and the one piece that went above it.
        assert unsent <= (64 << 10) + BACKLOG * (len(TEXT) + 400)
        assert len(followed._pushed) <= BACKLOG
        await turn.become(TurnState.CANCELLED)


async def test_a_client_that_reads_slowly_is_left_alone(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.watch.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("orchestrator.gateway.watch.STALL_S", 0.6)
    async with (
        service(redis, valkey_url, config=QUICK) as swarm,
        _asking(swarm) as stream,
        anyio.create_task_group() as tasks,
    ):
        turn = await swarm.dispatcher.take()
        tasks.start_soon(_write_much, turn)
        got = 0
        begin = anyio.current_time()
        with anyio.fail_after(30):
            while anyio.current_time() - begin < 2.0:  # several times the bound
                got += len(await stream.receive(1 << 19))
                await anyio.sleep(0.05)
            await turn.finish()
            end = b""
            while not end.endswith(b"0\r\n\r\n"):
                end = (end + await stream.receive(1 << 20))[-16:]
    assert got


async def test_a_turn_to_be_kept_outlives_a_client_that_does_not_read(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.watch.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("orchestrator.gateway.watch.STALL_S", 0.3)
    async with service(redis, valkey_url, config=QUICK) as swarm:
        async with _asking(swarm, b"X-Swarm-Detach: true"):
            turn = await swarm.dispatcher.take()
            await _write_much(turn)
            await _nobody_reads(swarm)
        await turn.finish()
        response = await swarm.client.get(f"/v1/turns/{turn.id}/output?stream=false")
        assert response.json()["choices"][0]["message"]["content"] == TEXT * 3000
        with pytest.raises(TimeoutError), anyio.fail_after(0.1):
            await swarm.dispatcher.event("cancel")
