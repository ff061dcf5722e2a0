"""What a client may send, and how slowly: on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import orjson
import pytest
from anyio.abc import SocketStream
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from orchestrator.gateway import limits, serve
from orchestrator.gateway.body import read_body
from orchestrator.gateway.errors import ApiError, ClientGone
from orchestrator.gateway.limits import HEAD_BOUND_BYTES, HEADERS_BOUND, PIPELINE_BOUND
from tests.gateway.harness import BOUND_S, PERMANENT_KEYS, chat, service

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
Connect = Callable[[], Awaitable[SocketStream]]


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads nothing; ``/hold`` is answered only when the client is gone."""
    if scope["path"] == "/hold":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def server() -> AsyncIterator[Connect]:
    """A server, and a way to connect to it; its connections are closed at the end."""
    open_: list[SocketStream] = []
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, answer, "127.0.0.1", 0))

        async def connect() -> SocketStream:
            open_.append(await anyio.connect_tcp("127.0.0.1", port))
            return open_[-1]

        yield connect
        for stream in open_:
            await stream.aclose()
        tasks.cancel_scope.cancel()


async def rest(stream: SocketStream) -> bytes:
    """All until the server closes."""
    got = b""
    with anyio.fail_after(BOUND_S):
        while True:
            try:
                got += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return got


async def until(stream: SocketStream, mark: bytes) -> bytes:
    """All up to a mark."""
    got = b""
    with anyio.fail_after(BOUND_S):
        while mark not in got:
            got += await stream.receive()
    return got


def check(reply: bytes, status: int, code: str) -> None:
    """One whole error reply, in the API's shape, that says that the connection is closed."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = orjson.loads(body)["error"]
    assert error["code"] == code
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "head",
    [
        GET[:-2] + b"x: " + b"a" * HEAD_BOUND_BYTES + b"\r\n\r\n",
        GET[:-2] + b"x" * HEAD_BOUND_BYTES + b": a\r\n\r\n",
        GET.replace(b"/ ", b"/" + b"a" * HEAD_BOUND_BYTES + b" "),
        GET[:-2] + (b"x: " + b"a" * 1000 + b"\r\n") * 40 + b"\r\n",
        GET[:-2] + b"x: a\r\n" * HEADERS_BOUND + b"\r\n",
    ],
    ids=["value", "name", "path", "sum", "number"],
)
async def test_a_head_may_not_be_large(head: bytes) -> None:
    async with server() as connect:
        stream = await connect()
        await stream.send(head)
        check(await rest(stream), 431, "headers_too_large")


async def test_a_head_may_be_as_large_as_clients_make_it() -> None:
    many, long = b"x: a\r\n" * (HEADERS_BOUND - 2), b"y: " + b"b" * (HEAD_BOUND_BYTES - 4096) + b"\r\n"
    head = GET[:-2] + many + long + b"\r\n"
    async with server() as connect:
        stream = await connect()
        for at in range(0, len(head), 1500):
            await stream.send(head[at : at + 1500])
        assert (await until(stream, b"ok")).startswith(b"HTTP/1.1 200 ")
        await stream.send(head + head)
        assert (await until(stream, b"ok")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("start", [b"x: ", b"x", b""], ids=["value", "name", "method"])
async def test_a_line_that_never_ends_is_not_kept(start: bytes) -> None:
    async with server() as connect:
        stream = await connect()
        sent = 0
        try:
            await stream.send((GET[:-2] if start else b"GET /") + start)
            for _ in range(1000):
                await stream.send(b"a" * 4096)
                sent += 4096
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        # The kernel's buffers on both sides take some megabytes before this side notices.
        assert b"431" in await rest(stream) or sent < 4096 * 1000


async def test_a_trailer_that_never_ends_is_not_kept() -> None:
    async with server() as connect:
        stream = await connect()
        await stream.send(POST.replace(b"/ ", b"/hold ") + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ")
        sent = 0
        with pytest.raises((anyio.BrokenResourceError, anyio.ClosedResourceError)):
            for _ in range(10_000):
                await stream.send(b"a" * 4096)
                sent += 4096
        assert sent < 4096 * 10_000


@pytest.mark.parametrize(
    "text", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", GET[:-2] + b"no colon\r\n\r\n"]
)
async def test_what_is_no_http_is_400_in_the_apis_shape(text: bytes) -> None:
    async with server() as connect:
        stream = await connect()
        await stream.send(text)
        check(await rest(stream), 400, "bad_http")


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"0\r\nx: " + b"y" * HEAD_BOUND_BYTES + b"\r\n\r\n"], ids=["chunk", "trailer"]
)
async def test_an_answered_request_gets_no_second_reply(body: bytes) -> None:
    """It would be taken for the answer to the next one."""
    async with server() as connect:
        stream = await connect()
        await stream.send(POST + b"transfer-encoding: chunked\r\n\r\n")
        await until(stream, b"ok")
        await stream.send(body)
        assert await rest(stream) == b""


async def test_requests_cannot_be_piled_up() -> None:
    async with server() as connect:
        stream = await connect()
        await stream.send(GET.replace(b"/ ", b"/hold ") + GET * (PIPELINE_BOUND + 1))
        check(await rest(stream), 400, "bad_http")
        stream = await connect()
        await stream.send(GET * (PIPELINE_BOUND // 2))
        got = b""
        while got.count(b"ok") < PIPELINE_BOUND // 2:
            got += await until(stream, b"ok")


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_BOUND_S", 0.1)
    async with server() as connect:
        assert await rest(await connect()) == b""


@pytest.mark.parametrize("first", [b"", GET], ids=["new", "kept alive"])
async def test_a_head_may_not_dribble(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(limits, "HEAD_BOUND_S", 1.0)
    async with server() as connect:
        stream = await connect()
        if first:
            await stream.send(first)
            await until(stream, b"ok")
        async with anyio.create_task_group() as tasks:

            async def dribble() -> None:
                with anyio.move_on_after(BOUND_S):
                    try:
                        for byte in GET[:-2] + b"x: " + b"a" * 10_000:
                            await stream.send(bytes([byte]))
                            await anyio.sleep(0.01)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return

            tasks.start_soon(dribble)
            check(await rest(stream), 408, "head_timeout")
            tasks.cancel_scope.cancel()


async def test_blank_lines_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no request, but uvicorn's own timer ends with any byte."""
    monkeypatch.setattr(limits, "HEAD_BOUND_S", 1.0)
    async with server() as connect:
        stream = await connect()
        await stream.send(GET)
        await until(stream, b"ok")
        await stream.send(b"\r\n")
        assert await rest(stream) == b""


async def test_a_long_reply_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_BOUND_S", 0.5)
    monkeypatch.setattr(limits, "UNREAD_BOUND_S", 0.5)
    async with server() as connect:
        stream = await connect()
        await stream.send(GET.replace(b"/ ", b"/hold "))
        with anyio.move_on_after(1.2):
            raise AssertionError(await rest(stream))


async def test_a_body_that_nobody_wants_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_BOUND_S", 0.2)
    async with server() as connect:
        stream = await connect()
        await stream.send(POST + b"content-length: 1000000\r\n\r\nstart")
        assert (await until(stream, b"ok")).startswith(b"HTTP/1.1 200 ")
        assert await rest(stream) == b""


async def test_a_body_that_comes_late_leaves_the_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_BOUND_S", 1.0)
    async with server() as connect:
        stream = await connect()
        await stream.send(POST + b"content-length: 200000\r\n\r\n")
        await until(stream, b"ok")
        await stream.send(b"a" * 200_000)
        await anyio.sleep(1.3)
        await stream.send(GET)
        assert (await until(stream, b"ok")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.keys_without_ttl(*PERMANENT_KEYS)
async def test_a_body_may_not_dribble(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.gateway.body.BODY_BOUND_S", 0.2)
    async with (
        service(redis, valkey_url) as swarm,
        await anyio.connect_tcp("127.0.0.1", swarm.port) as stream,
    ):
        body = orjson.dumps(chat())
        head = POST.replace(b"/ ", b"/v1/chat/completions ") + b"content-length: %d\r\n\r\n" % len(body)
        await stream.send(head + body[:-1])
        reply = await until(stream, b"}}")
        assert await swarm.turn_keys() == []
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert orjson.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def receiver(*parts: bytes, end: str = "http.request") -> Receive:
    """A body in these parts, then the end of the request or of the connection."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": end, "body": b"", "more_body": False})

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    return receive


async def test_a_body_in_single_bytes_is_the_same_body() -> None:
    body = bytes(range(256)) * 4
    assert await read_body({}, receiver(*(bytes([byte]) for byte in body)), 1024) == body
    assert await read_body({}, receiver(), 10) == b""
    with pytest.raises(ApiError, match="larger than 1,023 bytes"):
        await read_body({}, receiver(*(bytes([byte]) for byte in body)), 1023)
    with pytest.raises(ClientGone):
        await read_body({}, receiver(b"x", end="http.disconnect"), 10)
