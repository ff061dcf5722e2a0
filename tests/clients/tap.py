"""Reads along what goes between a client and the service, byte by byte, and changes none of it.

Each of the client's connections becomes one to the service: neither the pace of a stream nor who closes
first is different from what it would be without the tap.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httptools
import orjson
from anyio.abc import ByteStream, SocketAttribute

_HOST = "127.0.0.1"


@dataclass
class Exchange:
    """One request and what was answered to it so far."""

    method: str = ""
    path: str = ""
    sent: bytes = b""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    received: bytes = b""
    whole: bool = False
    """Whether the answer came to its end."""

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON object; empty if it has none."""
        try:
            body = orjson.loads(self.sent)
        except orjson.JSONDecodeError:
            return {}
        return body if isinstance(body, dict) else {}

    @property
    def endpoint(self) -> str:
        """The path without the query."""
        return self.path.partition("?")[0]

    @property
    def streamed(self) -> bool:
        """Whether the answer was a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def comments(self) -> list[str]:
        """The comments of a stream: `: paused` and the like."""
        lines = self.received.decode(errors="replace").split("\n")
        return [line[1:].strip() for line in lines if line.startswith(":")]

    @property
    def data(self) -> list[str]:
        """The data lines of a stream, each as it stands."""
        lines = self.received.decode(errors="replace").split("\n")
        return [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]


class _Requests:
    """What the client sends on one connection, request by request."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._all = exchanges
        self._parser = httptools.HttpRequestParser(self)
        self.open: list[Exchange] = []
        """Those whose answer has not begun, oldest first."""

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.open.append(Exchange())
        self._all.append(self.open[-1])

    def on_url(self, url: bytes) -> None:
        self.open[-1].path += url.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.open[-1].method = self._parser.get_method().decode()

    def on_body(self, body: bytes) -> None:
        self.open[-1].sent += body


class _Answers:
    """What the service answers on the same connection."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests
        self._parser = httptools.HttpResponseParser(self)
        self._at = Exchange()

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._at = self._requests.open.pop(0)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._at.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._at.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._at.received += body

    def on_message_complete(self) -> None:
        self._at.whole = True


@dataclass
class Tap:
    """A tap in front of a service on a loopback port."""

    url: str
    exchanges: list[Exchange]

    def refused(self) -> list[Exchange]:
        """What was answered with an error, or not at all."""
        return [one for one in self.exchanges if one.status is None or one.status >= 400]


@asynccontextmanager
async def tap(port: int) -> AsyncIterator[Tap]:
    """Stand in front of the service on `port`; what passes is in the tap's `exchanges`, oldest first."""
    exchanges: list[Exchange] = []

    async def relay(client: ByteStream) -> None:
        requests = _Requests(exchanges)
        async with (
            client,
            await anyio.connect_tcp(_HOST, port) as service,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_pump, client, service, requests)
            await _pump(service, client, _Answers(requests))
            tasks.cancel_scope.cancel()

    listener = await anyio.create_tcp_listener(local_host=_HOST)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, relay)
        yield Tap(f"http://{_HOST}:{listener.extra(SocketAttribute.local_port)}", exchanges)
        tasks.cancel_scope.cancel()


async def _pump(source: ByteStream, sink: ByteStream, reader: _Requests | _Answers) -> None:
    """Pass everything on, up to and including the end."""
    try:
        async for data in source:
            reader.feed(data)
            await sink.send(data)
        await sink.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        # One side is gone: the other one is closed by whoever opened both.
        await sink.aclose()
