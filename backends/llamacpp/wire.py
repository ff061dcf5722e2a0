"""Bytes to events: server-sent events and error bodies of llama.cpp's server.

What the engine sends is not trusted: a line may be cut anywhere, be no JSON, or be very long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import orjson

from backends.protocol import BackendError, EngineRefused, EngineUnavailable

MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = "[DONE]"

# What a request can raise. aiohttp's own come through where httpx has no counterpart: an answer that is
# no HTTP at all, for one.
TRANSPORT_ERRORS = (httpx.HTTPError, aiohttp.ClientError, OSError)


class EngineUnreachable(EngineUnavailable):
    """Nobody listens at the engine's address."""


class SseParser:
    """Splits a byte stream into events: a dict for each JSON payload, a str for comments and DONE.

    Comments come as ``": text"``. Raises EngineUnavailable on a payload that is not JSON, or too long.
    """

    __slots__ = ("_rest", "_rest_bytes")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | str]:
        """Take the next bytes; yield the events that are now complete."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._keep(data)
            return
        if self._rest:
            head = b"".join(self._rest) + head
            self._rest.clear()
            self._rest_bytes = 0
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
        self._rest.append(unfinished)
        self._rest_bytes += len(unfinished)
        if self._rest_bytes > MAX_EVENT_BYTES:
            raise EngineUnavailable("the engine sent an event that never ends")


def _payload(raw: bytes) -> dict[str, Any] | str:
    if raw == b"[DONE]":
        return DONE
    try:
        event = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise EngineUnavailable("the engine sent an event that is not JSON") from None
    if not isinstance(event, dict):
        raise EngineUnavailable("the engine sent an event that is not a JSON object")
    return event


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
            message = " ".join(str(error.get("message") or message).split())[:500]
            kind = str(error.get("type") or "")
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
