"""Anthropic's events: their order, whatever the log's deltas are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.broker import Entry
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects import Chunks, Head, Messages
from orchestrator.gateway.dialects.anthropic_stream import PING
from orchestrator.gateway.errors import ApiError

DIALECT = Messages()
ASK = DIALECT.ask(b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":5}')
HEAD = Head("turn-77", "tiny", 1_790_000_000, ASK)
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 7,
    "total_tokens": 57,
    "prompt_tokens_details": {"cached_tokens": 40},
}
COUNTS = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 40,
    "output_tokens": 7,
}


def delta(**part: Any) -> Entry:
    return ["d", part, 1, []]


def end(reason: str = "stop", *stop_sequence: str) -> Entry:
    return ["e", reason, USAGE, *stop_sequence]


def call(arguments: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "id": f"c{index}", **more, "function": {"name": "read", "arguments": arguments}}


def events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The events, each with the name that is in its data; comments are left out."""
    assert stream.endswith(b"\n\n")
    for block in stream[:-2].split(b"\n\n"):
        name, data = [line for line in block.split(b"\n") if not line.startswith(b":")]
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        yield event


def stream_of(*entries: Entry) -> list[dict[str, Any]]:
    chunks = DIALECT.chunks(HEAD)
    stream = chunks.open() + b"".join(chunks.encode([entry]) for entry in entries)
    assert chunks.over is (entries[-1][0] in "ex")
    return list(events(stream))


def whole_of(*entries: Entry) -> Any:
    collector = Collector()
    collector.add(entries)
    return orjson.loads(DIALECT.whole(HEAD, collector))


def message_of(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream; fails where it is not well formed."""
    assert stream[0]["type"] == "message_start"
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = stream[0]["message"]
    content: list[dict[str, Any]] = message["content"]
    assert content == []
    pieces: list[str] | None = None
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert pieces is None
            assert event["index"] == len(content)
            content.append(event["content_block"])
            pieces = []
            continue
        assert pieces is not None
        assert event["index"] == len(content) - 1
        block = content[-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = orjson.loads("".join(pieces))
            else:
                assert block[block["type"]] == ""
                block[block["type"]] = "".join(pieces)
            pieces = None
            continue
        assert event["type"] == "content_block_delta"
        kind = event["delta"]["type"]
        if kind == "signature_delta":
            assert block["type"] == "thinking"
            block["signature"] = event["delta"]["signature"]
        else:
            name = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
            assert kind == name[block["type"]]
            pieces.append(event["delta"]["partial_json" if block["type"] == "tool_use" else block["type"]])
    assert pieces is None
    message |= stream[-2]["delta"]
    return {**message, "usage": message["usage"] | stream[-2]["usage"]}


def test_a_stream_is_exact_to_the_byte() -> None:
    chunks = DIALECT.chunks(HEAD)
    stream = chunks.open() + chunks.encode(
        [
            ["s", "started", {"slot": 0}],
            delta(reasoning_content="Hm"),
            delta(content="Hé"),
            delta(content="llo"),
            delta(tool_calls=[call('{"path": "a"}')]),
            end("tool_calls"),
        ]
    )
    zero = '{"input_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}'
    data = [
        '{"type":"message_start","message":{"id":"msg_77","type":"message","role":"assistant","model":"tiny",'
        f'"content":[],"stop_reason":null,"stop_sequence":null,"usage":{zero}}}}}',
        '{"type":"ping"}',
        '{"type":"content_block_start","index":0,'
        '"content_block":{"type":"thinking","thinking":"","signature":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Hm"}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"msg_77"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hé"}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"llo"}}',
        '{"type":"content_block_stop","index":1}',
        '{"type":"content_block_start","index":2,'
        '"content_block":{"type":"tool_use","id":"c0","name":"read","input":{}}}',
        '{"type":"content_block_delta","index":2,'
        '"delta":{"type":"input_json_delta","partial_json":"{\\"path\\":\\"a\\"}"}}',
        '{"type":"content_block_stop","index":2}',
        '{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":'
        '{"input_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":40,"output_tokens":7}}',
        '{"type":"message_stop"}',
    ]
    blocks = [f"event: {orjson.loads(line)['type']}\ndata: {line}\n\n".encode() for line in data]
    assert stream == b"".join([blocks[0], b": started\n", *blocks[1:]])


def test_a_whole_reply() -> None:
    entries = [
        delta(reasoning_content="Hm"),
        delta(content="Hi"),
        delta(tool_calls=[call('{"a": 1}')]),
        end(),
    ]
    assert whole_of(*entries) == {
        "id": "msg_77",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "msg_77"},
            {"type": "text", "text": "Hi"},
            {"type": "tool_use", "id": "c0", "name": "read", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": COUNTS,
    }
    assert message_of(stream_of(*entries)) == whole_of(*entries)


@pytest.mark.parametrize(
    ("reason", "calls", "wanted"),
    [
        ("stop", False, "end_turn"),
        ("length", False, "max_tokens"),
        ("length", True, "max_tokens"),
        ("tool_calls", True, "tool_use"),
        ("stop", True, "tool_use"),
        ("something new", False, "end_turn"),
    ],
)
def test_stop_reasons(reason: str, calls: bool, wanted: str) -> None:
    entries = [*([delta(tool_calls=[call("{}")])] if calls else []), end(reason)]
    assert message_of(stream_of(*entries))["stop_reason"] == wanted
    assert whole_of(*entries)["stop_reason"] == wanted


@pytest.mark.parametrize(
    ("reason", "calls", "wanted"),
    [
        ("stop", False, {"stop_reason": "stop_sequence", "stop_sequence": "\n\nHuman:"}),
        ("length", False, {"stop_reason": "max_tokens", "stop_sequence": None}),
        ("stop", True, {"stop_reason": "tool_use", "stop_sequence": None}),
    ],
)
def test_a_stop_sequence_is_named(reason: str, calls: bool, wanted: dict[str, Any]) -> None:
    entries = [*([delta(tool_calls=[call("{}")])] if calls else []), end(reason, "\n\nHuman:")]
    for message in (message_of(stream_of(*entries)), whole_of(*entries)):
        assert {name: message[name] for name in wanted} == wanted


def test_nothing_said_is_no_block() -> None:
    assert message_of(stream_of(end()))["content"] == whole_of(end())["content"] == []


def test_a_call_without_id_or_arguments_is_given_them() -> None:
    entries = [delta(tool_calls=[{"index": 0, "function": {"name": "list"}}]), end("tool_calls")]
    [block] = message_of(stream_of(*entries))["content"]
    assert block == {"type": "tool_use", "id": "toolu_77_0", "name": "list", "input": {}}
    assert whole_of(*entries)["content"] == [block]


def test_a_call_that_the_limit_cut_off_is_left_out() -> None:
    entries = [
        delta(content="I read"),
        delta(tool_calls=[call("{}"), call('{"path": "a', 1)]),
        end("length"),
    ]
    streamed, whole = message_of(stream_of(*entries)), whole_of(*entries)
    assert streamed == whole
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"path": "a', "[1]", '"a"', "nothing"])
def test_a_call_that_is_no_call_is_an_error(arguments: str) -> None:
    entries = [delta(tool_calls=[call(arguments)]), end("tool_calls")]
    [start, error] = stream_of(*entries)
    assert start["type"] == "message_start"
    assert error == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "the model called 'read' with something that is not a JSON object",
        },
        "request_id": "turn-77",
    }
    with pytest.raises(ApiError) as raised:
        whole_of(*entries)
    assert raised.value.status == 502


def test_an_error_ends_a_stream() -> None:
    stream = stream_of(
        delta(content="H"), ["x", 503, {"message": "engine lost", "type": "server_error", "code": "c"}]
    )
    assert stream[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "engine lost"},
        "request_id": "turn-77",
    }


def test_what_keeps_a_stream_open_is_a_ping() -> None:
    chunks = DIALECT.chunks(HEAD)
    assert chunks.keep_alive() == PING
    assert chunks.encode([["s", "paused", {}]]) == b": paused\n" + PING


TEXTS = st.text(max_size=5)
PARTS = st.lists(
    st.fixed_dictionaries({}, optional={"content": TEXTS, "reasoning_content": TEXTS, "role": st.just("x")})
    | st.fixed_dictionaries({"content": st.none(), "_logprobs": st.just({"content": [1]})}),
    max_size=12,
)
INPUTS = st.lists(
    st.dictionaries(TEXTS, st.none() | st.integers(-5, 5) | TEXTS | st.lists(TEXTS, max_size=2), max_size=3),
    max_size=3,
)


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[Entry], list[dict[str, Any]], list[dict[str, Any]]]:
    """A log, its parts, and the inputs of its calls, which come in pieces between the rest."""
    parts, inputs = draw(PARTS), draw(INPUTS)
    said: list[dict[str, Any]] = list(parts)
    for index, value in enumerate(inputs):
        text = orjson.dumps(value).decode()
        cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        first = {"index": index, "id": f"c{index}", "function": {"name": "read", "arguments": pieces[0]}}
        place = draw(st.integers(0, len(said)))
        said.insert(place, {"tool_calls": [first]})
        for piece in pieces[1:]:
            place = draw(st.integers(place + 1, len(said)))
            said.insert(place, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    entries: list[Entry] = [["d", part, 1, []] for part in said]
    for place in draw(st.lists(st.integers(0, len(entries)), max_size=3)):
        entries.insert(place, ["s", draw(st.sampled_from(["paused", "resumed"])), {}])
    return [*entries, end("tool_calls" if inputs else "stop")], said, inputs


def feed(chunks: Chunks, entries: list[Entry], sizes: list[int]) -> bytes:
    stream = chunks.open()
    while entries:
        size = sizes.pop() if sizes else 1
        stream += chunks.encode(entries[:size])
        entries = entries[size:]
    return stream


@given(replies(), st.lists(st.integers(1, 5), max_size=5))
def test_whatever_the_deltas_the_events_are_well_formed(
    reply: tuple[list[Entry], list[dict[str, Any]], list[dict[str, Any]]], sizes: list[int]
) -> None:
    entries, said, inputs = reply
    stream = [
        event for event in events(feed(DIALECT.chunks(HEAD), entries, sizes)) if event["type"] != "ping"
    ]
    message = message_of(stream)
    blocks = message["content"]
    assert all(block[block["type"]] for block in blocks if block["type"] != "tool_use")
    for kind, name in (("text", "content"), ("thinking", "reasoning_content")):
        got = "".join(block[kind] for block in blocks if block["type"] == kind)
        assert got == "".join(part.get(name) or "" for part in said)
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert [block["input"] for block in calls] == inputs
    assert [block["id"] for block in calls] == [f"c{index}" for index in range(len(inputs))]
    assert blocks[len(blocks) - len(calls) :] == calls
    assert message["stop_reason"] == ("tool_use" if inputs else "end_turn")
    assert message["usage"] == COUNTS
    whole = whole_of(*entries)
    for kind in ("text", "thinking"):
        pieces = [[b[kind] for b in one["content"] if b["type"] == kind] for one in (message, whole)]
        assert "".join(pieces[0]) == "".join(pieces[1])
    assert [block for block in whole["content"] if block["type"] == "tool_use"] == calls
