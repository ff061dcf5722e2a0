"""Bytes to events, and every error to one of two."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import aiohttp
import httpx
import orjson
import pytest
from aiohttp.client_reqrep import ConnectionKey
from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp import wire
from backends.llamacpp.wire import (
    TRANSPORT_ERRORS,
    EngineUnreachable,
    SseParser,
    error_of,
    unavailable,
)
from backends.protocol import EngineRefused, EngineUnavailable

STREAM = (
    b': ping\n\ndata: {"content":"a\xc3\xa9"}\r\n\r\nevent: message\ndata:{"b":[1,2]}\n\n'
    b':preempted\n\nerror: {"code":500,"message":"x"}\n\ndata: {"error":{"code":400}}\n\n'
    b"id: 7\n\ndata: [DONE]\n\n"
)
EVENTS: list[dict[str, Any] | str] = [
    ": ping",
    {"content": "aé"},
    {"b": [1, 2]},
    ": preempted",
    {"error": {"code": 500, "message": "x"}},
    {"error": {"code": 400}},
    "[DONE]",
]


def parse(*chunks: bytes) -> list[dict[str, Any] | str]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_a_stream_may_be_cut_at_any_byte() -> None:
    assert parse(STREAM) == EVENTS
    for at in range(len(STREAM) + 1):
        assert parse(STREAM[:at], STREAM[at:]) == EVENTS
    assert parse(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == EVENTS


JSON = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(
    events=st.lists(JSON | st.just(wire.DONE), max_size=6),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_whatever_is_sent_arrives_however_it_is_cut(
    events: list[dict[str, Any] | str], newline: bytes, cuts: list[int]
) -> None:
    payloads = [event.encode() if isinstance(event, str) else orjson.dumps(event) for event in events]
    raw = b"".join(b"data: " + payload + newline * 2 for payload in payloads)
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    assert parse(*pieces) == events


@pytest.mark.parametrize(
    "payload",
    [
        b"data: {\n",
        b"data: nonsense\n",
        b"data: [1]\n",
        b"data: 7\n",
        b"data: null\n",
        b'data: {"a":"\xff\xfe"}\n',
        b"data:\n",
        b"error: {\n",
        b"error: 3\n",
    ],
)
def test_a_payload_that_is_no_json_object_is_the_engines_fault(payload: bytes) -> None:
    with pytest.raises(EngineUnavailable, match=r"^the engine sent an event that is not"):
        parse(payload)


def test_a_line_may_be_long_but_not_endless() -> None:
    long = orjson.dumps({"content": "x" * (wire.MAX_EVENT_BYTES - 100)})
    raw = b"data: " + long + b"\n\n"
    [event] = parse(*(raw[at : at + 16384] for at in range(0, len(raw), 16384)))
    assert isinstance(event, dict)
    assert len(event["content"]) == wire.MAX_EVENT_BYTES - 100
    parser = SseParser()
    with pytest.raises(EngineUnavailable, match="never ends"):
        for _ in range(wire.MAX_EVENT_BYTES // 2**20 + 1):
            list(parser.feed(b"x" * 2**20))


OF_NO_REQUEST = {401, 403, 404, 408, 429}


@pytest.mark.parametrize("status", range(100, 600))
def test_every_http_status_is_one_of_two_errors(status: int) -> None:
    error = error_of(status, b"")
    refused = 400 <= status < 500 and status not in OF_NO_REQUEST
    assert type(error) is (EngineRefused if refused else EngineUnavailable)
    assert str(error) == f"the engine answered HTTP {status}"
    if isinstance(error, EngineRefused):
        assert (error.status, error.kind) == (status, "invalid_request_error")


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 429, 500, 503, None, "rate_limit"])
def test_an_error_event_is_classed_by_its_own_code(code: Any) -> None:
    error = error_of(200, orjson.dumps({"error": {"code": code, "message": "m", "type": "t"}}))
    refused = isinstance(code, int) and 400 <= code < 500 and code not in OF_NO_REQUEST
    assert type(error) is (EngineRefused if refused else EngineUnavailable)
    assert str(error) == "m"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too\\nlong  by\\tfar"}}', "too long by far"),
        (b'{"message":"bare"}', "bare"),
        (b'{"error":{"message":""}}', "the engine answered HTTP 400"),
        (b'{"error":"just text"}', "the engine answered HTTP 400"),
        (b"[1]", "the engine answered HTTP 400"),
        (b"<html>http://host:1/path</html>", "the engine answered HTTP 400"),
        (b"\xff\xfe", "the engine answered HTTP 400"),
        (b"", "the engine answered HTTP 400"),
        (orjson.dumps({"error": {"message": "y" * 5000}}), "y" * 500),
    ],
)
def test_a_message_is_one_bounded_line(body: bytes, message: str) -> None:
    assert str(error_of(400, body)) == message


def test_the_kind_of_a_refusal_is_the_engines() -> None:
    error = error_of(400, b'{"error":{"message":"m","type":"exceed_context_size_error"}}')
    assert isinstance(error, EngineRefused)
    assert error.kind == "exceed_context_size_error"


SECRET = "http://10.1.2.3:8080/secret/path"


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


HTTPX_ERRORS = sorted(
    (kind for kind in subclasses(httpx.HTTPError) if kind.__module__ == "httpx"),
    key=lambda kind: kind.__name__,
)


def httpx_error(kind: type[Exception]) -> Exception:
    if kind is httpx.HTTPStatusError:
        request = httpx.Request("GET", SECRET)
        return httpx.HTTPStatusError(SECRET, request=request, response=httpx.Response(500, request=request))
    return kind(SECRET)


@pytest.mark.parametrize("kind", HTTPX_ERRORS, ids=lambda kind: kind.__name__)
def test_every_transport_error_is_named_without_host_or_path(kind: type[Exception]) -> None:
    error = httpx_error(kind)
    assert isinstance(error, TRANSPORT_ERRORS)
    mapped = unavailable(error)
    assert isinstance(mapped, EngineUnavailable)
    if issubclass(kind, httpx.TimeoutException) and kind is not httpx.ConnectTimeout:
        expected = "the engine did not answer in time"
    elif kind is httpx.ConnectError:
        expected = "the engine cannot be reached"
    else:
        expected = "the engine broke the connection off"
    assert str(mapped) == expected
    assert isinstance(mapped, EngineUnreachable) == (kind is httpx.ConnectError)


@pytest.mark.parametrize(
    ("cause", "unreachable"),
    [
        (aiohttp.ConnectionTimeoutError(SECRET), True),
        (
            aiohttp.ClientConnectorError(ConnectionKey("h", 1, False, True, None, None, None), OSError(1)),
            True,
        ),
        (aiohttp.ServerDisconnectedError(SECRET), False),
        (aiohttp.ClientOSError(SECRET), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_its_cause_tells_what_a_connect_timeout_was(cause: Exception, unreachable: bool) -> None:
    error = httpx.ConnectTimeout(SECRET)
    error.__cause__ = cause
    assert isinstance(unavailable(error), EngineUnreachable) == unreachable


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, SECRET),
        ConnectionResetError(SECRET),
        TimeoutError(SECRET),
        aiohttp.ClientPayloadError(SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_below_http_are_the_engines_too(error: Exception) -> None:
    assert isinstance(error, TRANSPORT_ERRORS)
    assert str(unavailable(error)) == "the engine broke the connection off"


def test_a_cancellation_is_no_transport_error() -> None:
    assert not issubclass(asyncio.CancelledError, TRANSPORT_ERRORS)
