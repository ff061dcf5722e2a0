"""An engine that is not to be trusted: a real one's bytes, but for what it lies about.

A relay before the simulated engine. Requests go there and answers come back as they are, unless there is a
lie about what was asked: then other bytes are sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.abc
import orjson

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import BackendError
from backends.simulated import SimulatedConfig, SimulatedEngine, serve_simulated
from tests.backends.llamacpp.harness import STEP, Recorder

TEXT = "Tell me more [len=20]"
MAX_TOKENS = 40
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
HTML = b"<!DOCTYPE html><html><body>Bad Gateway</body></html>"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
# What the transport and the sockets between may hold of an answer that nobody wants any more.
ON_THE_WAY_BYTES = 8 << 20
NUMBERS: list[Any] = [-1, -(1 << 62), 1 << 31, 1 << 62, 1e300, 1.5, True]
STRANGE: list[Any] = [None, 7, "x", [], [7], ["x"], {}, {"a": 1}]

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PIECE_BYTES = 1 << 16
SEND_BOUND_S = 10.0


def answer(body: object, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    """A whole answer with this JSON, or these bytes."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(raw), raw)


def events(*bodies: object) -> bytes:
    """An answer with events of these JSONs, or these bytes; it ends with its connection."""
    return EVENTS + b"".join(
        body if isinstance(body, bytes) else b"data: %b\n\n" % orjson.dumps(body) for body in bodies
    )


def body_of(reply: bytes) -> bytes:
    """An answer's body, its chunks put together."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return body
    whole = b""
    while body:
        line, _, body = body.partition(b"\r\n")
        size = int(line, 16)
        whole, body = whole + body[:size], body[size + 2 :]
    return whole


@dataclass
class Lie:
    """What is sent for requests whose first line contains `about`, so many times (None: always).

    `twist` makes an answer of the engine's own. `said` is sent first, then `repeated` for as long as it is
    taken; and if the lie `stays`, the connection is left open.
    """

    about: bytes
    said: bytes = b""
    twist: Callable[[bytes], bytes] | None = None
    repeated: bytes = b""
    stays: bool = False
    times: int | None = 1
    told: int = 0

    def is_about(self, line: bytes) -> bool:
        """Whether it is told now."""
        return self.about in line and (self.times is None or self.told < self.times)


@dataclass
class Liar:
    """The relay. `sent`: bytes of lies that were taken; `asked`: the first lines of all requests."""

    url: str
    lies: list[Lie] = field(default_factory=list)
    sent: int = 0
    asked: list[bytes] = field(default_factory=list)

    async def tell(
        self, lie: Lie, client: anyio.abc.SocketStream, truth: Callable[[], Awaitable[bytes]]
    ) -> None:
        """Answer with a lie; returns or raises when the client has left."""
        lie.told += 1
        await self._send(client, lie.said if lie.twist is None else lie.twist(await truth()))
        while lie.repeated:
            await self._send(client, lie.repeated)
        while lie.stays:
            await client.receive()

    async def _send(self, client: anyio.abc.SocketStream, data: bytes) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            with anyio.fail_after(SEND_BOUND_S):
                await client.send(piece)
            self.sent += len(piece)


@asynccontextmanager
async def liar(upstream: str) -> AsyncIterator[Liar]:
    """Serve the relay before the engine at `upstream`."""
    host, _, port = upstream.removeprefix("http://").partition(":")
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    found = Liar(f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}")

    async def truth(request: bytes) -> bytes:
        whole = b""
        async with await anyio.connect_tcp(host, int(port)) as engine:
            await engine.send(request)
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    whole += await engine.receive()
        return whole

    async def serve(client: anyio.abc.SocketStream) -> None:
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            async with client:
                request = await _request(client)
                line = request.partition(b"\r\n")[0]
                found.asked.append(line)
                lie = next((lie for lie in found.lies if lie.is_about(line)), None)
                if lie is not None:
                    await found.tell(lie, client, partial(truth, request))
                    return
                async with await anyio.connect_tcp(host, int(port)) as engine:
                    await engine.send(request)
                    await _relay(engine, client)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield found
        tasks.cancel_scope.cancel()


async def _request(client: anyio.abc.SocketStream) -> bytes:
    """One whole request, changed so that the engine closes the connection after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await client.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    lines = []
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
        if name.lower() != b"connection":
            lines.append(line)
    while len(body) < length:
        body += await client.receive()
    return b"\r\n".join([*lines, b"connection: close", b"", b""]) + body


async def _relay(engine: anyio.abc.SocketStream, client: anyio.abc.SocketStream) -> None:
    """Everything from the engine to the client, until either leaves."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await client.receive()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                await client.send(await engine.receive())
        tasks.cancel_scope.cancel()


def place(body: Any, field: str, value: Any) -> None:
    """Set what is there; nothing is made for it."""
    *way, last = field.split(".")
    for name in way:
        body = body[int(name)] if isinstance(body, list) and body else body
        body = body.get(name) if isinstance(body, dict) else body
    if isinstance(body, dict) and last in body:
        body[last] = value
    elif isinstance(body, list) and body:
        body[int(last)] = value


@asynccontextmanager
async def lying_engine(
    config: SimulatedConfig | None = None, **options: Any
) -> AsyncIterator[tuple[Liar, LlamaCppBackend]]:
    """An adapter of an engine that lies when told to, and that was described before."""
    engine = SimulatedEngine(config or SimulatedConfig(profile=STEP))
    async with serve_simulated(engine) as url, liar(url) as lying:
        backend = LlamaCppBackend(
            lying.url, LlamaCppOptions(**{"piece_tokens": 0, "batch_tokens": 64, "silence_s": 1.0, **options})
        )
        try:
            await backend.describe()
            yield lying, backend
        finally:
            with anyio.CancelScope(shield=True):
                await backend.aclose()


async def run(backend: LlamaCppBackend, body: dict[str, Any], slot: int = 0) -> tuple[Recorder, Any]:
    """A turn's one segment: what it told, and its end or its error."""
    generation = backend.generation("chat", body, MAX_TOKENS)
    sink = Recorder(generation)
    with anyio.fail_after(20):
        try:
            end: Any = await generation.run(slot, sink)
        except BackendError as error:
            end = error
    return sink, end
