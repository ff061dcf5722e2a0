"""The streaming client against replies of both servers, cut at every byte, and against bad servers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import client
from agents.client import MalformedReply, ReplyParser, TurnResult, stream_chat

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Swarm-Turn: t-1\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def delta(text: str | None, finish: str | None = None, **fields: Any) -> bytes:
    part = {} if text is None else {"content": text}
    return event(choices=[{"index": 0, "delta": part, "finish_reason": finish}], **fields)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 12},
    },
    timings={"cache_n": 12, "prompt_n": 9, "prompt_ms": 4.5},
)
FROM_SERVICE = (
    b": waiting\n\n",
    b": started\n\n",
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]),
    delta("He"),
    delta("llo"),
    b": keep-alive\n\n",
    delta(" \u00e9\U0001f600"),
    delta(None, "length"),
    USAGE,
    b"data: [DONE]\n\n",
)
FROM_LLAMA_CPP = (
    delta(None, prompt_progress={"total": 21, "cache": 12, "processed": 12, "time_ms": 0}),
    delta(None, prompt_progress={"total": 21, "cache": 12, "processed": 21, "time_ms": 4}),
    *FROM_SERVICE[3:5],
    *FROM_SERVICE[6:],
)
FROM_COMPLETION = (
    event(content="He", stop=False),
    event(content="llo", stop=False),
    event(content=" \u00e9\U0001f600", stop=False),
    event(content="", stop=True, stop_type="limit", timings={"predicted_n": 3}),
)


def chunked(events: Sequence[bytes]) -> bytes:
    return CHUNKED + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def until_closed(events: Sequence[bytes]) -> bytes:
    return HEAD + b"\r\n" + b"".join(events)


def with_length(events: Sequence[bytes]) -> bytes:
    body = b"".join(events)
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def parse(pieces: Sequence[bytes]) -> TurnResult:
    result = TurnResult(sent=0.0)
    parser = ReplyParser(result)
    for moment, piece in enumerate(pieces, 1):
        parser.feed(piece, float(moment))
    parser.close(float(len(pieces) + 1))
    return result


def check_hello(result: TurnResult) -> None:
    assert result.error is None
    assert result.text == "Hello \u00e9\U0001f600"
    assert (result.tokens, result.pieces) == (3, 3)
    assert result.status == 200
    assert result.turn_id == "t-1"
    assert result.finish_reason in ("length", "limit")


FRAMINGS = [chunked, until_closed, with_length]
REPLIES = [FROM_SERVICE, FROM_LLAMA_CPP, FROM_COMPLETION]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("reply", REPLIES, ids=["service", "llama.cpp", "completion"])
def test_a_reply_cut_in_two_at_any_byte(
    framing: Callable[[Sequence[bytes]], bytes], reply: list[bytes]
) -> None:
    whole = framing(reply)
    for cut in range(len(whole) + 1):
        check_hello(parse([whole[:cut], whole[cut:]]))


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("reply", REPLIES, ids=["service", "llama.cpp", "completion"])
def test_a_reply_byte_by_byte(framing: Callable[[Sequence[bytes]], bytes], reply: list[bytes]) -> None:
    whole = framing(reply)
    check_hello(parse([whole[at : at + 1] for at in range(len(whole))]))


@given(st.lists(st.integers(0, 2000)), st.sampled_from(REPLIES), st.sampled_from(FRAMINGS))
def test_a_reply_cut_anywhere(
    cuts: list[int], reply: Sequence[bytes], framing: Callable[[Sequence[bytes]], bytes]
) -> None:
    whole = framing(reply)
    edges = [0, *sorted(cuts), len(whole)]
    check_hello(parse([whole[a:b] for a, b in pairwise(edges)]))


def test_the_service_tells_the_start_by_a_comment() -> None:
    result = parse([CHUNKED, *map(chunk, FROM_SERVICE), b"0\r\n\r\n"])
    assert (result.started, result.first_token, result.last_token) == (3.0, 5.0, 8.0)
    assert [comment for _, comment in result.comments] == ["waiting", "started", "keep-alive"]
    assert (result.wait_s, result.ttft_s) == (3.0, 5.0)
    assert list(result.times) == [5.0, 6.0, 8.0]


def test_llama_cpp_tells_the_start_by_its_first_progress() -> None:
    result = parse([CHUNKED, *map(chunk, FROM_LLAMA_CPP), b"0\r\n\r\n"])
    assert (result.started, result.first_token) == (2.0, 4.0)
    assert (result.prompt_tokens, result.cached_tokens) == (21, 12)
    assert result.timings == {"cache_n": 12, "prompt_n": 9, "prompt_ms": 4.5}


def test_without_a_sign_of_the_start_there_is_no_wait() -> None:
    result = parse([chunked([delta("a"), delta(None, "stop"), b"data: [DONE]\n\n"])])
    assert (result.started, result.wait_s) == (None, None)
    assert (result.error, result.tokens) == (None, 1)


def test_tool_calls_and_reasoning_are_pieces() -> None:
    call = {"index": 0, "function": {"arguments": "{}"}}
    parts: list[dict[str, Any]] = [{"reasoning_content": "hm"}, {"tool_calls": [call]}, {"content": ""}]
    events = [event(choices=[{"index": 0, "delta": part}]) for part in parts]
    result = parse([chunked([*events, delta(None, "tool_calls"), b"data: [DONE]\n\n"])])
    assert (result.pieces, result.text, result.finish_reason) == (2, "hm", "tool_calls")


def test_a_whole_reply() -> None:
    message = {"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop", "index": 0}
    body = orjson.dumps({"choices": [message], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    result = parse([head, body])
    assert (result.error, result.text, result.tokens, result.finish_reason) == (None, "Hello", 4, "stop")


def test_an_informational_reply_goes_first() -> None:
    check_hello(parse([b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(FROM_SERVICE)]))


ERRORS = [
    (b'{"error": {"message": "no such\\nmodel", "code": 404}}', 404, "HTTP 404: no such model"),
    (b'{"error": "busy"}', 503, "HTTP 503: busy"),
    (b"<h1>Bad gateway</h1>", 502, "HTTP 502: <h1>Bad gateway</h1>"),
    (b"", 500, "HTTP 500: no message"),
    (b"{}", 400, "HTTP 400: no message"),
    (b"[]", 400, "HTTP 400: no message"),
]


@pytest.mark.parametrize(("body", "status", "message"), ERRORS)
@pytest.mark.parametrize("sized", [True, False])
def test_an_error_reply(body: bytes, status: int, message: str, sized: bool) -> None:
    length = b"Content-Length: %d\r\n" % len(body) if sized else b""
    whole = b"HTTP/1.1 %d Oh\r\nContent-Type: application/json\r\n%s\r\n%s" % (status, length, body)
    for cut in range(len(whole) + 1):
        result = parse([whole[:cut], whole[cut:]])
        assert (result.status, result.error) == (status, message)


@pytest.mark.parametrize("body", [b'{"choices": [[]]}', b'{"usage": {"prompt_tokens": null}}'])
def test_a_whole_reply_of_another_shape(body: bytes) -> None:
    result = parse([b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", body])
    assert "JSON of another shape" in (result.error or "")


def test_an_error_in_the_stream() -> None:
    message = "Context size has been exceeded."
    for line in (
        event(error={"message": message, "code": 500}),
        b'error: {"message": "%s"}\n\n' % message.encode(),
    ):
        result = parse([chunked([delta("a"), line])])
        assert (result.error, result.pieces) == (message, 1)


MALFORMED = [
    (b"SMTP ready\r\n\r\n", "not an HTTP reply"),
    (b"HTTP/1.1 OK\r\n\r\n", "not an HTTP reply"),
    (CHUNKED + b"zz\r\n", "chunk size"),
    (CHUNKED + b"-5\r\n", "chunk size"),
    (CHUNKED + b"fffffffff\r\n", "chunk size"),
    (CHUNKED + b"2\r\nabcd\r\n", "longer than its size"),
    (HEAD + b"Content-Length: many\r\n\r\n", "content-length"),
    (chunked([b"data: {half\n\n"]), "not JSON"),
    (b"HTTP/1.1 200 OK\r\n" + b"x" * (client.MAX_HEAD_BYTES + 1), "headers over"),
    (CHUNKED + b"1" * (client.MAX_HEAD_BYTES + 1), "chunk's size is missing"),
    (HEAD + b"\r\ndata: " + b"x" * client.MAX_LINE_BYTES, "line over"),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (client.MAX_PLAIN_BYTES + 1), "reply over"),
]


@pytest.mark.parametrize(("reply", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_reply(reply: bytes, message: str) -> None:
    with pytest.raises(MalformedReply, match=message):
        ReplyParser(TurnResult()).feed(reply, 1.0)


@given(st.binary(max_size=400), st.sampled_from([b"", HEAD + b"\r\n", CHUNKED]))
def test_garbage_is_malformed_or_an_error_and_nothing_else(garbage: bytes, head: bytes) -> None:
    result = TurnResult()
    parser = ReplyParser(result)
    try:
        parser.feed(head + garbage, 1.0)
    except MalformedReply:
        return
    parser.close(2.0)
    assert result.error is not None


@pytest.mark.parametrize("reply", [FROM_SERVICE, FROM_LLAMA_CPP])
def test_a_reply_that_breaks_off_is_an_error_with_what_came(reply: list[bytes]) -> None:
    whole = chunked(reply)
    for cut in range(len(whole) - len(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")):
        result = parse([whole[:cut]])
        assert result.error == "the server closed the connection before the end of the reply"
        assert result.text == "Hello \u00e9\U0001f600"[: len(result.text)]


# Over a socket ------------------------------------------------------------------------------------


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that answers each connection with a script; every connection is closed at the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")
            )
            await script(head + await reader.readexactly(length), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


def answer(*pieces: bytes) -> Script:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


async def test_a_turn_over_a_socket_byte_by_byte() -> None:
    whole = chunked(FROM_SERVICE)
    async with scripted(answer(*(whole[at : at + 1] for at in range(len(whole))))) as url:
        result = await stream_chat(url, {})
    check_hello(result)
    assert result.sent is not None
    assert result.started is not None
    assert result.first_token is not None
    assert result.ended is not None
    assert result.sent < result.started <= result.first_token <= result.ended
    assert not result.aborted


async def test_the_request_is_whole() -> None:
    requests: list[bytes] = []

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(chunked(FROM_SERVICE))

    async with scripted(script) as url:
        await stream_chat(f"{url}/prefix/", {"a": "\u00e9"}, {"X-Swarm-Agent": "editor"}, path="/completion")
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /prefix/completion HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Swarm-Agent: editor" in head
    assert orjson.loads(body) == {"a": "\u00e9"}


async def test_the_end_of_the_reply_is_enough_though_the_connection_stays() -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"".join(map(chunk, FROM_SERVICE)))
        await writer.drain()
        await asyncio.sleep(30)

    with anyio.fail_after(5):
        async with scripted(script) as url:
            check_hello(await stream_chat(url, {}))


async def test_a_turn_is_closed_after_so_many_tokens() -> None:
    gone = asyncio.Event()

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        try:
            while True:
                writer.write(chunk(delta("a")))
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            gone.set()

    with anyio.fail_after(5):
        async with scripted(script) as url:
            result = await stream_chat(url, {}, abort_after=3)
            await gone.wait()
    assert (result.aborted, result.error) == (True, None)
    assert result.tokens == result.pieces >= 3
    assert result.text == "a" * result.pieces


async def test_progress_is_told_while_the_reply_arrives() -> None:
    seen: list[int] = []
    async with scripted(answer(CHUNKED, *map(chunk, FROM_SERVICE), b"0\r\n\r\n")) as url:
        await stream_chat(url, {}, on_progress=lambda result: seen.append(result.pieces))
    assert seen == sorted(seen)
    assert seen[-1] == 3


async def test_a_cancelled_turn_keeps_what_it_got_and_is_no_error() -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(delta("a")))
        await writer.drain()
        await asyncio.sleep(30)

    result = TurnResult()
    async with scripted(script) as url, anyio.create_task_group() as tasks:

        def progressed(so_far: TurnResult) -> None:
            if so_far.pieces:
                tasks.cancel_scope.cancel()

        await stream_chat(url, {}, into=result, on_progress=progressed)
    assert (result.text, result.error, result.aborted) == ("a", None, True)


async def test_a_server_that_closes_without_a_word() -> None:
    async with scripted(answer()) as url:
        result = await stream_chat(url, {})
    assert result.error == "the server closed the connection before the end of the reply"


async def test_a_server_that_sends_no_end() -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    with anyio.fail_after(5):
        async with scripted(script) as url:
            result = await stream_chat(url, {}, timeout_s=0.05)
    assert result.error == "no end of the reply within 0.05 s"


async def test_a_server_that_is_not_there() -> None:
    async with scripted(answer()) as url:
        pass
    result = await stream_chat(url, {})
    assert (result.error or "").startswith("connection failed: ")
    assert result.ended is not None


@pytest.mark.parametrize(
    ("reply", "message"),
    [(b"SMTP\r\n\r\n", "not an HTTP reply"), (chunked([b'data: {"choices": [[]]}\n\n']), "another shape")],
)
async def test_a_malformed_reply_ends_the_turn_with_an_error(reply: bytes, message: str) -> None:
    with anyio.fail_after(5):
        async with scripted(answer(reply)) as url:
            result = await stream_chat(url, {})
    assert message in (result.error or "")


@pytest.mark.parametrize("url", ["https://localhost:1", "localhost:8700", "http://"])
async def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http:// address"):
        await stream_chat(url, {})
