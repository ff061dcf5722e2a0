"""Engines that lie: whatever they say, the turn ends or goes on, and the next one is served."""

from __future__ import annotations

import copy
import gzip
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from structlog.testing import capture_logs

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.llamacpp.wire import MAX_ANSWER_BYTES, MAX_EVENT_BYTES, SseParser
from backends.protocol import BackendError, EngineUnavailable, Finished
from orchestrator.broker import delta_entry
from orchestrator.turns import TurnState
from tests.backends.llamacpp.harness import STEP, Recorder, chat
from tests.backends.llamacpp.liar import (
    CHUNKED,
    EVENTS,
    HTML,
    MAX_TOKENS,
    NUMBERS,
    ON_THE_WAY_BYTES,
    STRANGE,
    TEXT,
    TOOLS,
    Lie,
    answer,
    body_of,
    events,
    liar,
    lying_engine,
    place,
    run,
)
from tests.dispatcher.harness import PERMANENT, swarm, until


@dataclass(frozen=True)
class Way:
    """One of the two ways that a turn is run: its endpoint, the fields of its events, and three tokens."""

    about: bytes
    body: dict[str, Any]
    fields: tuple[str, ...]
    events: list[dict[str, Any]]


SEEN = {"prompt_progress": {"total": 6, "cache": 2, "processed": 6, "time_ms": 1}}
PROGRESS = ("prompt_progress", *(f"prompt_progress.{name}" for name in ("total", "processed", "cache")))
WAYS = {
    "tokens": Way(
        b"POST /completion",
        chat(TEXT),
        (
            *("content", "tokens", "tokens_predicted", "tokens_cached", "stop", "stop_type", "stopping_word"),
            *PROGRESS,
        ),
        [
            {"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, **SEEN},
            *(
                {"content": text, "tokens": [7], "stop": False, "tokens_predicted": number}
                for number, text in enumerate("abc", 1)
            ),
            {
                **{"content": "", "tokens": [], "stop": True, "stop_type": "limit"},
                **{"tokens_predicted": 3, "tokens_cached": 8},
            },
        ],
    ),
    "chat": Way(
        b"POST /v1/chat/completions",
        chat(TEXT, tools=TOOLS, stop=["###"]),
        (
            *(
                "choices",
                "choices.0",
                "choices.0.delta",
                "choices.0.delta.content",
                "choices.0.finish_reason",
            ),
            *("timings", "timings.predicted_n", "usage", "usage.completion_tokens", "usage.prompt_tokens"),
            *("__verbose", "__verbose.stopping_word"),
            *PROGRESS,
        ),
        [
            {"choices": [], **SEEN},
            *(
                {"choices": [{"index": 0, "delta": {"content": text}}], "timings": {"predicted_n": number}}
                for number, text in enumerate("abc", 1)
            ),
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
                "__verbose": {"stopping_word": ""},
            },
            {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 6}},
        ],
    ),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


# What may be said ---------------------------------------------------------------------------------------


def then(*said: bytes, keep: bool = False) -> Callable[[bytes], bytes]:
    """The true stream's first three events, then something else; `keep`: then the rest of it."""

    def twist(reply: bytes) -> bytes:
        lines = body_of(reply).split(b"\n\n")
        return EVENTS + b"\n\n".join([*lines[:3], b"".join(said), *(lines[3:] if keep else ())])

    return twist


def put(field: str, value: Any, at: slice) -> Callable[[bytes], bytes]:
    """The field of the true stream's events has another value, in some of them."""

    def twist(reply: bytes) -> bytes:
        payloads = [line[6:] for line in body_of(reply).split(b"\n\n") if line.startswith(b"data: {")]
        bodies = [orjson.loads(payload) for payload in payloads]
        for body in bodies[at]:
            place(body, field, value)
        return events(*bodies)

    return twist


def stream_of(reply: bytes) -> bytes:
    """The true events as they are."""
    return EVENTS + body_of(reply)


# `about` is the endpoint of the turn, whichever it is.
STREAMS: dict[str, Lie] = {
    "nothing": Lie(b""),
    "head only": Lie(b"", EVENTS),
    "half a head": Lie(b"", b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "cut in a line": Lie(b"", twist=then(b'data: {"content":"ab')),
    "cut in a character": Lie(b"", twist=then(b'data: {"content":"\xc3')),
    "cut between events": Lie(b"", twist=then()),
    "invalid UTF-8": Lie(b"", twist=then(b'data: {"content":"\xff\xfe"}', keep=True)),
    "NUL": Lie(b"", twist=then(b"data: \0\0", keep=True)),
    "no JSON": Lie(b"", twist=then(b"data: {content: 1}", keep=True)),
    "no object": Lie(b"", twist=then(b"data: [1, 2]", keep=True)),
    "null": Lie(b"", twist=then(b"data: null", keep=True)),
    "deep": Lie(b"", twist=then(b"data: " + b"[" * 5000, keep=True)),
    "too deep to be written": Lie(
        b"",
        twist=then(
            b'data: {"choices":[{"delta":{"tool_calls":[{"x":%b}]}}]}' % (b"[" * 260 + b"]" * 260), keep=True
        ),
    ),
    "an error": Lie(b"", twist=then(b'data: {"error": {"code": 500}}', keep=True)),
    "an error in a strange shape": Lie(b"", twist=then(b'data: {"error": [7]}', keep=True)),
    "an error of a strange code": Lie(
        b"", twist=then(b'error: {"code": 1e300, "message": ["x"]}', keep=True)
    ),
    "only comments": Lie(b"", EVENTS + b": hm\n\n" * 10),
    "DONE at once": Lie(b"", EVENTS + b"data: [DONE]\n\n"),
    "HTML": Lie(b"", answer(HTML)),
    "HTML 404": Lie(b"", answer(HTML, b"404 Not Found")),
    "HTML 502": Lie(b"", answer(HTML, b"502 Bad Gateway")),
    "HTML in the middle": Lie(b"", twist=then(HTML)),
    "a strange status": Lie(b"", answer(b"", b"999 What")),
    "a reason that is no text": Lie(b"", answer(b"{}", b"500 \xff\xfe")),
    "a reason that is no text, of a success": Lie(b"", answer(b"{}", b"200 \xff\xfe")),
    "no content": Lie(b"", b"HTTP/1.1 204 No Content\r\n\r\n"),
    "packed": Lie(b"", answer(gzip.compress(b"data: {}\n\n"), headers=b"content-encoding: gzip\r\n")),
    "a bad chunk": Lie(b"", CHUNKED + b"xyz\r\n"),
    "a huge chunk": Lie(b"", CHUNKED + b"f" * 30 + b"\r\nab"),
    "two ends": Lie(b"", twist=lambda reply: EVENTS + body_of(reply) * 2),
    "more after the end": Lie(b"", twist=lambda reply: stream_of(reply) + b'data: {"content": 5}\n\n'),
    "a giant line": Lie(b"", EVENTS + b"data: ", repeated=b"a" * (1 << 20)),
    "a giant comment": Lie(b"", EVENTS + b": ", repeated=b"a" * (1 << 20)),
    "a giant error page": Lie(b"", b"HTTP/1.1 502 Bad\r\n\r\n", repeated=b"<p>" * (1 << 18)),
    "comments without end": Lie(b"", EVENTS, repeated=b": hm\n\n" * (1 << 16)),
    "no engine": Lie(b"", b"SSH-2.0-OpenSSH_9\r\n"),
}
#: What is said of one field: in all events, or in the last only.
FIELD_LIES = [(value, at) for value in (*NUMBERS, *STRANGE) for at in (slice(None), slice(-1, None))]


# One turn, at the adapter -------------------------------------------------------------------------------


class Unsocketed(LlamaCppBackend):
    """An adapter of an engine without sockets, whose every turn says the same."""

    def __init__(self) -> None:
        super().__init__("http://engine", LlamaCppOptions(piece_tokens=0, batch_tokens=64))
        transport = httpx.MockTransport(self._answer)
        self._client = httpx.AsyncClient(base_url="http://engine", transport=transport)
        self.said = b""

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answers = {
            "/props": {"model_alias": "m"},
            "/slots": [{"id": 0, "n_ctx": 256, "is_processing": False}],
            "/apply-template": {"prompt": "Tell me"},
        }
        known = answers.get(request.url.path)
        return httpx.Response(200, content=self.said if known is None else orjson.dumps(known))


# One for all: each has two TLS contexts, which take longer to make than a turn.
_unsocketed = cache(Unsocketed)


async def engine_saying(*said: object) -> LlamaCppBackend:
    """An adapter of an engine whose turns consist of these events."""
    backend = _unsocketed()
    backend.said = body_of(events(*said))
    if backend._info is None:
        await backend.describe()
    return backend


def check(sink: Recorder, end: Any, context: int) -> None:
    """Whatever was said, what was made of it can be believed in."""
    assert all(0 <= prompt <= context and 0 <= cached <= prompt for prompt, cached in sink.starts)
    assert all(count >= 0 for count in sink.counts)
    assert sink.n_tokens <= MAX_TOKENS
    for part, count, ids in zip(sink.parts, sink.counts, sink.ids, strict=True):
        assert all(type(token) is int and token >= 0 for token in ids)
        assert all(isinstance(part.get(name) or "", str) for name in ("content", "reasoning_content"))
        orjson.loads(delta_entry(part, count, ids))
    if isinstance(end, BackendError):
        assert "\n" not in str(end)
        assert len(str(end)) < 600
        assert "127.0.0.1" not in str(end)
    else:
        assert isinstance(end, Finished)
        assert isinstance(end.finish_reason, str)
        assert sink.n_tokens <= end.completion_tokens <= MAX_TOKENS
        assert 0 <= end.kv_tokens <= context
        assert end.stop_sequence is None, "it is none of those that were asked for"


@ways
async def test_no_field_of_a_stream_is_believed(way: Way) -> None:
    for field in way.fields:
        for value, at in FIELD_LIES:
            said = copy.deepcopy(way.events)
            for event in said[at]:
                place(event, field, value)
            backend = await engine_saying(*said)
            sink, end = await run(backend, way.body)
            check(sink, end, backend.slot_context)


@ways
async def test_the_truth_is_believed(way: Way) -> None:
    sink, end = await run(await engine_saying(*way.events), way.body)
    assert end == Finished("length", 3, 8)
    assert (sink.text, sink.starts, sink.n_tokens) == ("abc", [(6, 2)], 3)


ANYTHING = st.sampled_from([*NUMBERS, *STRANGE]) | st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@ways
@settings(deadline=None, max_examples=200)
@given(data=st.data())
async def test_any_stream_of_events(way: Way, data: st.DataObject) -> None:
    """A true stream in which events are changed, moved, repeated and left out."""
    said: list[Any] = copy.deepcopy(way.events)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(said) - 1))
        match data.draw(st.sampled_from(["change", "change", "move", "repeat", "drop", "bytes"])):
            case "change":
                place(said[at], data.draw(st.sampled_from(way.fields)), data.draw(ANYTHING))
            case "move":
                said.insert(data.draw(st.integers(0, len(said) - 1)), said.pop(at))
            case "repeat":
                said.insert(at, copy.deepcopy(said[at]))
            case "drop" if len(said) > 1:
                del said[at]
            case _:
                said[at] = data.draw(st.binary(max_size=20))
    backend = await engine_saying(*said)
    sink, end = await run(backend, way.body)
    check(sink, end, backend.slot_context)


TOOL_CALLS: list[Any] = [
    5,
    [5],
    [{"index": -1}],
    [{"index": "0", "function": {"name": "read"}}],
    [{"index": 1 << 62, "function": {"name": "read", "arguments": "{}"}}],
    [{"index": 0, "id": 5}],
    [{"index": 0, "function": []}],
    [{"index": 0, "function": "read"}],
    [{"index": 0, "function": {"name": ["read"], "arguments": {}}}],
    [{"index": 0, "function": {"name": "read", "arguments": {"path": "a"}}}],
    [{"index": 0, "function": {"name": None, "arguments": None}, "id": None, "type": None}],
    [{}, {}],
]


@pytest.mark.parametrize("calls", TOOL_CALLS, ids=repr)
async def test_no_call_is_believed(calls: Any) -> None:
    chunks: list[dict[str, Any]] = [
        {"prompt_progress": {"total": 9, "cache": 0, "processed": 9}, "choices": []},
        {"choices": [{"index": 0, "delta": {"tool_calls": calls}}], "timings": {"predicted_n": 1}},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
    ]
    backend = await engine_saying(*chunks)
    sink, end = await run(backend, WAYS["chat"].body)
    check(sink, end, backend.slot_context)
    for call in [call for part in sink.parts for call in part.get("tool_calls", ())]:
        assert isinstance(call["function"]["arguments"], str)
        assert isinstance(call["function"].get("name", ""), str)


LOGPROBS: list[Any] = [5, [], {"content": 5}, {"content": [5]}, {"content": [{"top_logprobs": 5}]}, {"a": {}}]


@pytest.mark.parametrize("logprobs", LOGPROBS, ids=repr)
async def test_no_logprobs_are_believed(logprobs: Any) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}
    chunks = [{"choices": [choice], "timings": {"predicted_n": 1}}, {"choices": [{"finish_reason": "stop"}]}]
    chunks.append({"usage": {"prompt_tokens": 9, "completion_tokens": 1}})
    backend = await engine_saying(*chunks)
    sink, end = await run(backend, chat(TEXT, logprobs=True, top_logprobs=2))
    check(sink, end, backend.slot_context)


@ways
async def test_a_reply_does_not_go_on_for_ever(way: Way) -> None:
    """What is said beyond the limit is not forwarded for as long as it comes."""
    said: dict[str, Any] = {
        "content": "a",
        "tokens_predicted": 1,
        "tokens": [5],
        "timings": {"predicted_n": 1},
    }
    said["choices"] = [{"index": 0, "delta": {"content": "a"}}]
    event = b"data: %b\n\n" % orjson.dumps(said)
    async with lying_engine() as (lying, backend):
        lying.lies = [Lie(way.about, EVENTS, repeated=event * 1000)]
        sink, end = await run(backend, way.body)
        assert isinstance(end, EngineUnavailable)
        assert sink.n_tokens == 1
        assert lying.sent < 48 << 20


def test_a_line_in_single_bytes_takes_no_more_than_its_size() -> None:
    parser = SseParser()
    for _ in range(100_000):
        assert not list(parser.feed(b"x"))
    assert sys.getsizeof(parser._rest) < 150_000


# Behind a dispatcher ------------------------------------------------------------------------------------


@ways
@pytest.mark.keys_without_ttl(*PERMANENT)
async def test_every_turn_ends_and_the_next_is_served(redis: Redis, valkey_url: str, way: Way) -> None:
    lies = {name: replace(lie, about=way.about) for name, lie in STREAMS.items()}
    for number, field in enumerate(way.fields):
        value, at = FIELD_LIES[number % len(FIELD_LIES)]
        lies[f"{field}: {value!r}"] = Lie(way.about, twist=put(field, value, at))
    more = {name: value for name, value in way.body.items() if name not in ("messages", "temperature")}
    async with swarm(redis, valkey_url, profile=STEP) as s, liar(s.engine_url) as lying:
        backend = s.backend(url=lying.url, silence_s=1.0)
        dispatcher = s.dispatcher(backend=backend)
        await s.start(dispatcher)
        honest = await s.submit(TEXT, max_tokens=MAX_TOKENS, **more)
        await s.until_end(honest)
        truth = await s.text(honest)
        for name, lie in lies.items():
            lying.lies = [lie]
            sent = lying.sent
            with capture_logs() as logs:
                turn = await s.submit(TEXT, max_tokens=MAX_TOKENS, **more)
                record = await s.until_end(turn)
            assert lie.told == 1, name
            check_logs(logs, name)
            log = await s.log(turn)
            if record.state is TurnState.DONE:
                assert 0 <= log[-1][2]["completion_tokens"] <= MAX_TOKENS, name
                assert 0 <= log[-1][2]["prompt_tokens"] < 1000, name
            else:
                assert log[-1][1] in (400, 502), (name, log[-1])
            if name in STREAMS:
                assert await s.text(turn) == truth, name
            assert lying.sent - sent < max(MAX_ANSWER_BYTES, MAX_EVENT_BYTES) + ON_THE_WAY_BYTES, name
            assert dispatcher.healthy
        await until(lambda: not dispatcher._runs)
        await s.check_done(await s.submit(TEXT, max_tokens=MAX_TOKENS), TEXT, MAX_TOKENS)
        await s.until_idle()


@pytest.mark.keys_without_ttl(*PERMANENT)
async def test_a_liar_about_itself_is_waited_for(redis: Redis, valkey_url: str) -> None:
    """Until it says something that can be: then its turns are served."""
    async with swarm(redis, valkey_url, profile=STEP) as s, liar(s.engine_url) as lying:
        for about, said in (
            (b"GET /props", answer([])),
            (b"GET /slots", answer([{"id": 0, "n_ctx": -1, "is_processing": False}])),
            (b"GET /slots", answer([5])),
        ):
            lying.lies = [Lie(about, said)]
            with capture_logs() as logs:
                stop = await s.start(s.dispatcher(backend=s.backend(url=lying.url)))
                await s.check_done(await s.submit(TEXT, max_tokens=MAX_TOKENS), TEXT, MAX_TOKENS)
                await stop()
            check_logs(logs, about.decode())
            assert "engine not ready" in [line["event"] for line in logs]


def check_logs(logs: Sequence[Any], name: str) -> None:
    """Nothing of a bug: no traceback."""
    bad = [line for line in logs if line.get("exc_info")]
    assert not bad, (name, bad[0])
