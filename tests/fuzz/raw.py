"""Requests as bytes on sockets: sent whole or in pieces, by clients that wait, half-close or leave.

Then either a complete reply comes or the connection is closed. A client that has half-closed its side gets
that within `BOUND_S`, or it hangs.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress

import anyio
import anyio.abc

from tests.fuzz.oracle import problem_of
from tests.fuzz.raw_requests import Request, make
from tests.fuzz.tally import Tally

BOUND_S = 15.0
#: How long a request that may be unfinished is waited with, before its side is closed.
PATIENCE_S = 1.5


class RawFuzz:
    """Requests to one port, several at a time."""

    def __init__(self, port: int, tally: Tally, first_seed: int) -> None:
        self._port = port
        self._tally = tally
        self._seed = first_seed

    async def run(self, count: int, workers: int = 8) -> None:
        """So many requests."""
        seeds = iter(range(self._seed, self._seed + count))
        self._seed += count

        async def work() -> None:
            for number in seeds:
                await self.one(number)

        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(work)

    async def one(self, number: int) -> None:
        """The request of one seed."""
        rng = random.Random(number)
        request = make(rng)
        endpoint = f"raw {request.endpoint}"
        began = time.monotonic()
        try:
            with anyio.fail_after(BOUND_S):
                reply = await self._exchange(rng, request.data())
        except TimeoutError:
            self._tally.reply(endpoint, 0, time.monotonic() - began)
            self._tally.problem("hung", (number, request))
            return
        status, problem = look_at(request, reply)
        self._tally.reply(endpoint, status, time.monotonic() - began)
        if problem is not None:
            self._tally.problem(problem, (number, request, reply[:300]))

    async def _exchange(self, rng: random.Random, data: bytes) -> bytes:
        """Send it; what comes back until a reply is complete or the connection is closed."""
        got = b""
        style = rng.random()
        async with await anyio.connect_tcp("127.0.0.1", self._port) as stream:
            with suppress(anyio.BrokenResourceError):  # a request may be answered before it was sent
                await _send(stream, rng, data, style)
                if style > 0.97:  # leaves at once
                    return got
                if style > 0.9:
                    await stream.send_eof()
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                with anyio.move_on_after(PATIENCE_S):
                    while not is_complete(got):
                        got += await stream.receive()
                    return got
                await stream.send_eof()
                while not is_complete(got):
                    got += await stream.receive()
        return got


async def _send(stream: anyio.abc.SocketStream, rng: random.Random, data: bytes, style: float) -> None:
    if style > 0.5:
        await stream.send(data)
        return
    while data:
        size = rng.choice([1, 10, 1000, 100_000])
        await stream.send(data[:size])
        data = data[size:]
        if size > 1:
            await anyio.sleep(0.001)


def split(reply: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a reply's bytes; status 0 for none."""
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) < 2 or not words[1].isdigit():
        return 0, {}, b""
    status = int(words[1])
    if status == 100:
        return split(body)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, body


def is_complete(reply: bytes) -> bool:
    """Whether a whole reply is there."""
    status, headers, body = split(reply)
    if not status or b"\r\n\r\n" not in reply:
        return False
    if "content-length" in headers:
        return len(body) >= int(headers["content-length"])
    return "chunked" not in headers.get("transfer-encoding", "") or body.endswith(b"0\r\n\r\n")


def look_at(request: Request, reply: bytes) -> tuple[int, str | None]:
    """The reply's status, and what is wrong with it."""
    status, headers, body = split(reply)
    if not status or not is_complete(reply):
        return status, "status 500" if status == 500 else None
    if "chunked" in headers.get("transfer-encoding", ""):
        body = _dechunked(body)
    elif len(body) > int(headers.get("content-length", "0")):
        return status, "bytes after the reply"
    # The path as it was sent, unless that is what was changed.
    path = "" if "other_path" in request.done else request.path.decode("latin-1")
    problem = problem_of(path, status, headers, body, request.method.decode("latin-1"))
    if path == "" and problem is not None and problem.endswith("in another API's shape"):
        problem = None
    return status, problem


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        line, _, body = body.partition(b"\r\n")
        size = int(line, 16)
        whole, body = whole + body[:size], body[size + 2 :]
    return whole


# Whoever holds a connection and says no more -----------------------------------------------------------

HOLDING: dict[str, bytes] = {
    "nothing": b"",
    "half a line": b"GET /heal",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx: y",
    "half a body": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "half a chunk": b"POST /api/chat HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
    "an answered body": b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
}


async def hold(port: int, tally: Tally, bound_s: float) -> None:
    """Open each of these and wait: the service ends them by itself, within the bound."""

    async def one(name: str, data: bytes) -> None:
        began = time.monotonic()
        got = b""
        with anyio.move_on_after(bound_s) as scope, suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                if data:
                    await stream.send(data)
                while True:
                    got += await stream.receive()
        took_s = time.monotonic() - began
        tally.reply(f"held: {name}", split(got)[0], took_s)
        if scope.cancelled_caught:
            tally.problem("hung", ("held", name, got))

    async with anyio.create_task_group() as tasks:
        for name, data in HOLDING.items():
            tasks.start_soon(one, name, data)
