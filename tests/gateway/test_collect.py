"""Deltas put together into one reply."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from orchestrator.broker import Entry
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects import Completions, Head
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.validate import completion_ask

HEAD = Head("t", "m", 1, completion_ask(b'{"prompt":"p"}'))
END: Entry = ["e", "tool_calls", {"total_tokens": 3}]


def message_of(*parts: dict[str, Any]) -> dict[str, Any]:
    collector = Collector()
    collector.add([["s", "started", {}]])
    for part in parts:
        collector.add([["d", part, 1, []]])
    collector.add([END])
    assert collector.over
    return collector.message()


def test_tool_calls_are_merged_by_index() -> None:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **fields}]}

    assert message_of(
        call(0, id="a", type="function", function={"name": "read", "arguments": ""}),
        call(0, function={"arguments": '{"path":'}),
        call(1, id="b", type="function", function={"name": "list", "arguments": "{}"}),
        call(0, function={"arguments": '"x"}'}),
    ) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "read", "arguments": '{"path":"x"}'}},
            {"type": "function", "id": "b", "function": {"name": "list", "arguments": "{}"}},
        ],
    }


def test_content_beside_tool_calls_is_kept() -> None:
    message = message_of(
        {"role": "assistant", "content": None},
        {"content": "I "},
        {"content": "read"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "r", "arguments": "{}"}}]},
    )
    assert message["content"] == "I read"
    assert message["tool_calls"][0]["type"] == "function"


def test_nothing_is_an_empty_text() -> None:
    assert message_of() == {"role": "assistant", "content": ""}


def test_logprobs_are_joined() -> None:
    collector = Collector()
    for number in (1, 2):
        collector.add([["d", {"text": "x", "_logprobs": {"content": [number], "kind": "k"}}, 1, []]])
    collector.add([END])
    choice = orjson.loads(Completions().whole(HEAD, collector))["choices"][0]
    assert choice["logprobs"] == {"content": [1, 2], "kind": "k"}


@pytest.mark.parametrize(("status", "expected"), [(503, 503), (400, 400), (200, 500), (0, 500)])
def test_a_failure_has_its_status(status: int, expected: int) -> None:
    collector = Collector()
    with pytest.raises(ApiError) as caught:
        collector.add([["x", status, {"message": "m", "type": "t", "param": None, "code": "c"}]])
    assert (caught.value.status, caught.value.message, caught.value.code) == (expected, "m", "c")
