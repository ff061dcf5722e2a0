"""Bytes to events: server-sent events and error bodies of llama.cpp's server.

What the engine sends is not trusted: a line may be cut anywhere, be no JSON, or be very long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import orjson

from backends.llamacpp.told import word
from backends.protocol import BackendError, EngineRefused, EngineUnavailable
from backends.scrub import scrub

MAX_EVENT_BYTES = 16 * 1024 * 1024
# Vectors of a batch as digits, or the ids of a prompt as large as a body may be.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
# orjson reads deeper than it writes, and what an event tells is written into a log.
WRITABLE_DEPTH = 254
DONE = "[DONE]"

# What a request can raise. aiohttp's own come through where httpx has no counterpart: an answer that is
# no HTTP at all, for one. The UnicodeError is a reason phrase's.
TRANSPORT_ERRORS = (httpx.HTTPError, aiohttp.ClientError, OSError, UnicodeError)


class EngineUnreachable(EngineUnavailable):
    """Nobody listens at the engine's address."""


class SseParser:
    """Splits a byte stream into events: a dict for each JSON payload, a str for comments and DONE.

    Comments come as ``": text"``. Raises EngineUnavailable on a payload that is not JSON, or too long.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        # Not a list of parts: a line in single bytes would take forty times its size.
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | str]:
        """Take the next bytes; yield the events that are now complete."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._keep(data)
            return
        if self._rest:
            head = bytes(self._rest) + head
            self._rest.clear()
        if tail:
            self._keep(tail)
        for line in head.split(b"\n"):
            line = line.rstrip(b"\r")
            if not line:
                continue
            if line.startswith(b"data:"):
                yield _payload(line[5:].strip())
            elif line.startswith(b":"):
                yield ": " + line[1:].strip().decode("utf-8", "replace")
            elif line.startswith(b"error:"):
                event = _payload(line[6:].strip())
                yield {"error": event} if isinstance(event, dict) and "error" not in event else event

    def _keep(self, unfinished: bytes) -> None:
        self._rest += unfinished
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EngineUnavailable("the engine sent an event that never ends")


def _payload(raw: bytes) -> dict[str, Any] | str:
    if raw == b"[DONE]":
        return DONE
    try:
        event = orjson.loads(raw)
        # A short one cannot be so deep: most are spared the counting.
        if len(raw) > 2 * WRITABLE_DEPTH and raw.count(b"{") + raw.count(b"[") > WRITABLE_DEPTH:
            orjson.dumps(event)
    except orjson.JSONDecodeError:
        raise EngineUnavailable("the engine sent an event that is not JSON") from None
    except orjson.JSONEncodeError:
        raise EngineUnavailable("the engine sent an event that is nested too deep") from None
    if not isinstance(event, dict):
        raise EngineUnavailable("the engine sent an event that is not a JSON object")
    return event


async def read_answer(response: httpx.Response) -> bytes:
    """An answer's bytes as they were sent: what is compressed is not unpacked, to whatever size.

    Raises EngineUnavailable when there are too many, and TRANSPORT_ERRORS.
    """
    assert isinstance(response.stream, httpx.AsyncByteStream)
    body = bytearray()
    async for chunk in response.stream:
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineUnavailable("the engine sent an answer that never ends")
    return bytes(body)


def read_json(body: bytes) -> Any:
    """An answer's JSON. Raises EngineUnavailable."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise EngineUnavailable("the engine's answer is not JSON") from None


def error_of(status: int, body: bytes) -> BackendError:
    """The error that an HTTP error reply, or an error event, stands for.

    A 4xx is the request's fault, except 401, 403, 404, 408 and 429, which no other request would
    change: those and everything else are the engine's.
    """
    message, kind, code = f"the engine answered HTTP {status}", "", None
    try:
        parsed = orjson.loads(body)
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if isinstance(error, dict):
            message = scrub(" ".join(str(error.get("message") or message).split())[:500])
            kind = word(error.get("type"), "")
            code = error.get("code")
    except orjson.JSONDecodeError:
        pass
    if status == 200 and isinstance(code, int):
        status = code
    if 400 <= status < 500 and status not in (401, 403, 404, 408, 429):
        return EngineRefused(status, message, kind or "invalid_request_error")
    return EngineUnavailable(message)


def unavailable(error: Exception) -> EngineUnavailable:
    """A transport error, named without host or path.

    The transport reports a refused connection, one not made in time and one that the engine closed
    unanswered all as a ConnectTimeout; its cause tells them apart.
    """
    if isinstance(error, httpx.ConnectError) or isinstance(error.__cause__, _UNREACHED):
        return EngineUnreachable("the engine cannot be reached")
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return EngineUnavailable("the engine did not answer in time")
    return EngineUnavailable("the engine broke the connection off")


_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
