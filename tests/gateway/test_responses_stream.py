"""The events of a response: their order and numbers, whatever the log's deltas are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.broker import Entry
from orchestrator.gateway.dialects import Chunks, Head, Responses
from orchestrator.gateway.errors import ApiError

DIALECT = Responses()
TOOLS = [
    {"type": "function", "name": "read", "parameters": {}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", "name": "read"}]},
]
REQUEST = {
    "input": "hello",
    "instructions": "Be short.",
    "tools": TOOLS,
    "metadata": {"a": "b"},
    "temperature": 0.5,
    "max_output_tokens": 50,
    "truncation": "auto",
    "reasoning": {"effort": "low"},
    "store": True,
}
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 7,
    "total_tokens": 57,
    "prompt_tokens_details": {"cached_tokens": 40},
}
#: By the kind of an item: its text's events, and the name of the whole text in the last of them.
TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def head(**fields: Any) -> Head:
    return Head("turn-77", "tiny", 1_790_000_000, DIALECT.ask(orjson.dumps({**REQUEST, **fields})))


def delta(n_tokens: int = 1, **part: Any) -> Entry:
    return ["d", part, n_tokens, []]


def end(reason: str = "stop") -> Entry:
    return ["e", reason, USAGE]


def call(arguments: str, index: int = 0, **more: Any) -> Entry:
    function = {"arguments": arguments, **({"name": more.pop("name")} if "name" in more else {})}
    return delta(tool_calls=[{"index": index, **more, "function": function}])


def events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The events, each with the name that is in its data; comments are left out."""
    assert stream.endswith(b"\n\n")
    for block in stream[:-2].split(b"\n\n"):
        if block.startswith(b":"):
            continue
        name, data = block.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        yield event


def stream_of(entries: Iterable[Entry], chunks: Chunks | None = None) -> list[dict[str, Any]]:
    chunks = chunks or DIALECT.chunks(head())
    stream = chunks.open() + b"".join(chunks.encode([entry]) for entry in entries)
    assert chunks.over
    return list(events(stream))


def whole_of(entries: Iterable[Entry]) -> dict[str, Any]:
    asked = head()
    collector = DIALECT.collector(asked)
    collector.add(entries)
    return dict(orjson.loads(DIALECT.whole(asked, collector)))


def check(got: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of a well-formed stream: what a client that follows the reference ends with."""
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    assert [event["type"] for event in got[:2]] == ["response.created", "response.in_progress"]
    last = got[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    closed: set[int] = set()
    parts: set[int] = set()
    for event in got[2:-1]:
        kind = event["type"]
        if kind in ("keepalive", "error"):
            continue
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items), "items are added in order"
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
            continue
        assert index < len(items)
        assert index not in closed, "nothing of an item after it is done"
        item = items[index]
        text_events, whole = TEXTS[item["type"]]
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        if kind == "response.content_part.added":
            assert (item["content"], event["content_index"]) == ([], 0)
            parts.add(index)
        elif kind == f"{text_events}.delta":
            assert (index in parts) == (item["type"] in ("message", "reasoning"))
            texts[index] += event["delta"]
        elif kind == f"{text_events}.done":
            assert event[whole] == texts[index]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts[index]
            parts.remove(index)
        else:
            assert kind == "response.output_item.done"
            assert index not in parts
            done = event["item"]
            assert {**done, "status": None} == {
                **item,
                "status": None,
                **({"content": done["content"]} if "content" in done else {whole: texts[index]}),
            }
            if "content" in done:
                assert "".join(part["text"] for part in done["content"]) == texts[index]
            items[index] = done
            closed.add(index)
    if last["type"] != "response.failed":
        assert closed == set(range(len(items)))
        assert last["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)
    assert len({event["response"]["id"] for event in (got[0], got[1], last)}) == 1
    return dict(last["response"])


def test_a_small_stream() -> None:
    got = stream_of(
        [
            ["s", "started", {}],
            delta(2, reasoning_content="Hm"),
            delta(content="He"),
            delta(content="y"),
            end(),
        ]
    )
    final = check(got)
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert got[10] == {
        "type": "response.output_text.delta",
        "sequence_number": 10,
        "item_id": "msg_77_1",
        "output_index": 1,
        "content_index": 0,
        "delta": "He",
        "logprobs": [],
    }
    assert final["output"] == [
        {
            "id": "rs_77_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
            "encrypted_content": None,
        },
        {
            "id": "msg_77_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hey"}],
        },
    ]


def test_the_response_repeats_the_request() -> None:
    got = stream_of([delta(3, reasoning_content="x"), end()])
    created, final = got[0]["response"], got[-1]["response"]
    assert isinstance(final.pop("completed_at"), int)
    expected = {
        "id": "resp_77",
        "object": "response",
        "created_at": 1_790_000_000,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be short.",
        "max_output_tokens": 50,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "tiny",
        "output": final["output"],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": "low"},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": TOOLS,
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "auto",
        "usage": {
            "input_tokens": 50,
            "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 57,
        },
        "user": None,
    }
    assert final == expected
    begun: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    assert created == {**expected, **begun}


def test_calls_are_what_the_client_knows() -> None:
    got = stream_of(
        [
            delta(content="I call."),
            call("", 0, id="a", name="read"),
            call('{"x":', 0),
            call("1}", 0),
            call('{"input": "*** Begin', 1, id="b", name="patch"),
            call(' \\"é\\"\\n"}', 1),
            call("{}", 2, id="c", name="mcp__x__read"),
            call("", 3, name="unheard_of"),
            end("tool_calls"),
        ]
    )
    _, *calls = check(got)["output"]
    assert calls == [
        {
            "id": "fc_77_1",
            "type": "function_call",
            "status": "completed",
            "name": "read",
            "call_id": "a",
            "arguments": '{"x":1}',
        },
        {
            "id": "ctc_77_2",
            "type": "custom_tool_call",
            "status": "completed",
            "name": "patch",
            "call_id": "b",
            "input": '*** Begin "é"\n',
        },
        {
            "id": "fc_77_3",
            "type": "function_call",
            "status": "completed",
            "name": "read",
            "namespace": "mcp__x",
            "call_id": "c",
            "arguments": "{}",
        },
        # No arguments at all are not JSON, and clients read JSON.
        {
            "id": "fc_77_4",
            "type": "function_call",
            "status": "completed",
            "name": "unheard_of",
            "call_id": "call_77_4",
            "arguments": "{}",
        },
    ]
    deltas = [event["delta"] for event in got if event["type"].endswith("arguments.delta")]
    assert deltas == ['{"x":', "1}", "{}", "{}"]


def test_a_freeform_call_with_other_arguments_is_told_as_it_is() -> None:
    for arguments in ('{"patch": 1}', "just text", "[]", '{"input": 5}'):
        got = stream_of([call(arguments, name="patch"), end("tool_calls")])
        assert check(got)["output"][0]["input"] == arguments


@pytest.mark.parametrize(
    ("entries", "status", "says"),
    [
        ([delta(content="He")], "incomplete", "He"),
        ([call('{"x', name="read")], "incomplete", '{"x'),
        ([call('{"input": "rm', name="patch")], "incomplete", ""),
        ([call("", name="read")], "incomplete", ""),
    ],
)
def test_a_reply_at_its_limit_is_incomplete(entries: list[Entry], status: str, says: str) -> None:
    got = stream_of([delta(reasoning_content="whole"), *entries, end("length")])
    final = check(got)
    assert (final["status"], final["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    whole, cut = final["output"]
    assert (whole["status"], cut["status"]) == ("completed", status)
    assert says == (cut["content"][0]["text"] if "content" in cut else cut.get("arguments", cut.get("input")))
    assert got[-1]["type"] == "response.incomplete"


def test_logprobs_are_in_deltas_and_parts() -> None:
    def tokens(*names: str) -> dict[str, Any]:
        return {"content": [{"token": name, "logprob": -0.5, "top_logprobs": []} for name in names]}

    got = stream_of(
        [
            delta(content="a", _logprobs=tokens("a")),
            delta(_logprobs=tokens("half")),
            delta(content="é", _logprobs=tokens("é")),
            end(),
        ]
    )
    final = check(got)
    [message] = final["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["a", "half", "é"]
    deltas = [event for event in got if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [["a"], ["half"], ["é"]]


def test_a_silent_stream_gets_numbered_events() -> None:
    chunks = DIALECT.chunks(head())
    stream = chunks.open() + chunks.keep_alive() + chunks.encode([["s", "paused", {}], delta(content="a")])
    stream += chunks.keep_alive() + chunks.encode([delta(content="b"), end()])
    assert b": paused\n\n" in stream
    got = list(events(stream))
    assert check(got)["output"][0]["content"][0]["text"] == "ab"
    assert [event for event in got if event["type"] == "keepalive"] == [
        {"type": "keepalive", "sequence_number": 2},
        {"type": "keepalive", "sequence_number": 6},
    ]


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (503, "engine_unavailable", "server_error"),
        (500, None, "server_error"),
        (400, "context_length_exceeded", "context_length_exceeded"),
        (400, None, "invalid_prompt"),
        (499, "cancelled", "invalid_prompt"),
        (429, "queue_full", "rate_limit_exceeded"),
    ],
)
def test_a_failure_is_an_error_and_a_failed_response(status: int, code: str | None, told: str) -> None:
    detail = {"message": "no more", "type": "some_error", "param": None, "code": code}
    chunks = DIALECT.chunks(head())
    stream = chunks.open() + chunks.encode(
        [delta(content="half"), ["x", status, detail], delta(content="never")]
    )
    assert chunks.over
    got = list(events(stream))
    flat = {"code": code, "message": "no more", "param": None}
    assert got[-2] == {
        "type": "error",
        "sequence_number": len(got) - 2,
        **flat,
        "error": {"type": "some_error", **flat},
    }
    final = check(got)
    assert final["status"] == "failed"
    assert final["error"] == {"code": told, "message": "no more"}
    [message] = final["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "half")


def test_an_error_from_outside_of_the_log_ends_the_stream_as_well() -> None:
    chunks = DIALECT.chunks(head())
    stream = chunks.open() + chunks.encode([delta(content="half")])
    stream += chunks.errors.event(ApiError(503, "the service is stopping", code="stopping"))
    assert check(list(events(stream)))["error"]["message"] == "the service is stopping"


NAMES = st.sampled_from(["read", "patch", "mcp__x__read", "other"])
PIECE = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "function": st.fixed_dictionaries({"arguments": st.text(max_size=4)})}
)
FIRST = st.builds(
    lambda piece, name, id_: {
        **piece,
        **({"id": id_} if id_ else {}),
        "function": {**piece["function"], "name": name},
    },
    PIECE,
    NAMES,
    st.text(max_size=3),
)
STRANGE = st.sampled_from(
    [
        {},
        {"content": None},
        {"content": ["x"]},
        {"reasoning_content": 5},
        {"tool_calls": None},
        {"tool_calls": 5},
        {"tool_calls": [None, {}, {"index": None, "function": None}]},
        {"_logprobs": None},
        {"_logprobs": {"content": None}},
        {"role": "assistant"},
    ]
)
PARTS = st.one_of(
    st.builds(lambda text: {"content": text}, st.text(max_size=4)),
    st.builds(lambda text: {"reasoning_content": text}, st.text(max_size=4)),
    st.builds(lambda calls: {"tool_calls": calls}, st.lists(st.one_of(PIECE, FIRST), max_size=3)),
    STRANGE,
)
ENTRIES = st.lists(st.builds(lambda part, n: ["d", part, n, []], PARTS, st.integers(0, 3)), max_size=20)
REASONS = st.sampled_from(["stop", "tool_calls", "length", "content_filter"])


def texts_of(entries: list[Entry], name: str) -> str:
    said = [entry[1].get(name) for entry in entries]
    return "".join(text for text in said if isinstance(text, str))


def items_of(response: dict[str, Any], kind: str) -> str:
    items = [item for item in response["output"] if item["type"] == kind]
    return "".join(part["text"] for item in items for part in item["content"])


@settings(deadline=None)
@given(entries=ENTRIES, reason=REASONS, silences=st.sets(st.integers(0, 20)), at_once=st.booleans())
def test_any_deltas_make_a_well_formed_stream(
    entries: list[Entry], reason: str, silences: set[int], at_once: bool
) -> None:
    chunks = DIALECT.chunks(head())
    stream = chunks.open()
    if at_once:
        stream += chunks.encode([*entries, end(reason)])
    else:
        for number, entry in enumerate([*entries, end(reason)]):
            stream += (chunks.keep_alive() if number in silences else b"") + chunks.encode([entry])
    assert chunks.over
    final = check(list(events(stream)))
    assert items_of(final, "message") == texts_of(entries, "content")
    assert items_of(final, "reasoning") == texts_of(entries, "reasoning_content")
    calls = {
        piece.get("index") if isinstance(piece.get("index"), int) else 0
        for entry in entries
        if isinstance(entry[1].get("tool_calls"), list)
        for piece in entry[1]["tool_calls"]
        if isinstance(piece, dict)
    }
    assert sum("call_id" in item for item in final["output"]) == len(calls)
    assert all(item["call_id"] for item in final["output"] if "call_id" in item)
    incomplete = [item for item in final["output"] if item["status"] == "incomplete"]
    assert len(incomplete) <= (reason == "length")
    whole = whole_of([*entries, end(reason)])
    assert {**whole, "completed_at": None} == {**final, "completed_at": None}


@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=3),
    text=st.text(max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_a_call_is_the_same_in_whatever_pieces(arguments: Any, text: str, cuts: list[int]) -> None:
    function, freeform = orjson.dumps(arguments).decode(), orjson.dumps({"input": text}).decode()
    entries: list[Entry] = []
    for number, (name, whole) in enumerate((("read", function), ("patch", freeform))):
        places = sorted({min(cut, len(whole)) for cut in (0, *cuts, len(whole))})
        pieces = [whole[start:stop] for start, stop in pairwise(places)]
        entries.append(call("", number, id=f"c{number}", name=name))
        entries += [call(piece, number) for piece in pieces]
    first, second = check(stream_of([*entries, end("tool_calls")]))["output"]
    assert (first["arguments"], second["input"]) == (function, text)
