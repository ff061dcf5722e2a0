"""The cut-anywhere bench: every wrong reply is found out, and a right one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from benchmarks.cuts import CutsSettings, Found, report
from benchmarks.cuts_turns import KINDS, LONG_TEXT, Reply, chat_template, misfit, satisfies, violations

BY_NAME = {kind.name: kind for kind in KINDS}
ARGUMENTS = orjson.dumps({"path": "notes/ferry.txt", "content": LONG_TEXT}).decode()
BODY = {"max_tokens": 50, "stop": ["vixen"]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29}


def event(delta: dict[str, Any], finish_reason: str | None = None, **head: Any) -> str:
    named = {"id": "c-1", "object": "chat.completion.chunk", "created": 5, "model": "m", **head}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return "data: " + orjson.dumps({**named, "choices": [choice]}).decode()


def call(arguments: str, **head: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, **head, "function": {"name": "write_file", "arguments": arguments}}]}


def reply(*lines: str, usage: dict[str, int] | None = USAGE, done: bool = True) -> Reply:
    seen = Reply()
    end = {"id": "c-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": []}
    for line in (
        ": started",
        *lines,
        *(["data: " + orjson.dumps({**end, "usage": usage}).decode()] if usage else []),
        *(["data: [DONE]"] if done else []),
    ):
        seen.take(line)
    return seen


ROLE = event({"role": "assistant", "content": ""})
PROSE = [ROLE, event({"content": "a fox"}), event({}, "stop")]
CALL = [ROLE, event(call(ARGUMENTS, id="x")), event({}, "tool_calls")]


def test_right_replies_are_right() -> None:
    prose, called = reply(*PROSE), reply(*CALL)
    assert violations(BY_NAME["plain"], prose, prose, BODY) == []
    assert violations(BY_NAME["tool call"], called, called, BODY) == []
    cut_short = reply(ROLE, event(call(ARGUMENTS[:30], id="x")), event({}, "length"))
    assert violations(BY_NAME["tool call over its limit"], cut_short, called, {"max_tokens": 20}) == []


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("plain", reply(*PROSE, done=False)),
        ("plain", reply(*PROSE, usage=None)),
        ("plain", reply(*PROSE, usage={**USAGE, "total_tokens": 5})),
        ("plain", reply(*PROSE, usage={**USAGE, "prompt_tokens": 10, "total_tokens": 30})),
        ("plain", reply(*PROSE, usage={**USAGE, "completion_tokens": 50, "total_tokens": 59})),
        ("plain", reply(*PROSE, usage={**USAGE, "completion_tokens": 19, "total_tokens": 28})),
        ("plain", reply(ROLE, event({"content": "a  fox"}), event({}, "stop"))),
        ("plain", reply(ROLE, event({"content": "a fox"}, created=6), event({}, "stop"))),
        ("plain", reply(ROLE, event({"content": "a fox"}), event({}, "stop", id="c-2"))),
        ("plain", reply(ROLE, *PROSE)),
        ("plain", reply(*PROSE, event({}, "stop"))),
        ("plain", reply(ROLE, event({"content": "a fox"}), event({}, "length"))),
        ("plain", reply('data: {"error": {"message": "it broke"}}')),
        ("prose beside tools", reply(ROLE, event({"content": "\n</think>a"}), event({}, "stop"))),
        ("prose with a stop string", reply(ROLE, event({"content": "a vixen"}), event({}, "stop"))),
        ("tool call", reply(ROLE, event(call(ARGUMENTS[:30], id="x")), event({}, "tool_calls"))),
        (
            "tool call",
            reply(ROLE, event(call(ARGUMENTS.replace("ferry", "fery"), id="x")), event({}, "tool_calls")),
        ),
        ("tool call", reply(ROLE, event(call(ARGUMENTS, id="x")), event({}, "stop"))),
        ("tool call", reply(ROLE, event(call(ARGUMENTS)), event({}, "tool_calls"))),
        (
            "tool call",
            reply(ROLE, event(call("", id="x")), event(call(ARGUMENTS, id="y")), event({}, "tool_calls")),
        ),
        ("tool call", reply(*PROSE)),
        ("tool call", reply(ROLE, event({"content": "x"}), event({}, "tool_calls"))),
        ("JSON schema", reply(ROLE, event({"content": '{"name": "A"}'}), event({}, "stop"))),
        ("reasoning then prose", reply(*PROSE[:2], event({"reasoning_content": "So."}), event({}, "stop"))),
        ("reasoning then prose", reply(*PROSE)),
    ],
)
def test_wrong_replies_are_found_out(kind: str, wrong: Reply) -> None:
    whole = reply(*(CALL if "call" in kind else PROSE))
    assert len(violations(BY_NAME[kind], wrong, whole, BODY)) >= 1


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        ({"a": 1}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True),
        ({}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}, False),
        ({"b": 1}, {"type": "object", "properties": {"a": {}}}, False),
        (True, {"type": "integer"}, False),
        (121, {"type": "integer", "maximum": 120}, False),
        ("abc", {"type": "string", "maxLength": 2}, False),
        (["a"], {"type": "array", "minItems": 2}, False),
        (["a", 1], {"type": "array", "items": {"type": "string"}}, False),
        ("b", {"enum": ["a"]}, False),
        ("b", {"const": "b"}, True),
    ],
)
def test_schemas(value: Any, schema: dict[str, Any], fits: bool) -> None:
    assert satisfies(value, schema) is fits
    assert (misfit(orjson.dumps(value).decode(), schema) == []) is fits


def test_what_is_no_json_is_a_misfit() -> None:
    assert misfit('{"a": ', {}) != []


def test_the_bodies_of_a_kind_differ_by_number_and_are_not_shared() -> None:
    for kind in KINDS:
        first = kind.body(0)
        assert first != kind.body(1)
        first["messages"].clear()
        assert kind.body(0)["messages"]


def test_only_one_template_thinks() -> None:
    marks: Callable[[bool], bool] = lambda thinking: "assistant\\n<think>" in chat_template(thinking=thinking)  # noqa: E731
    assert (marks(False), marks(True)) == (False, True)


def test_the_report_has_a_row_a_kind_and_says_what_is_wrong() -> None:
    found = {
        "plain": Found(turns=2, same=2, cuts=10, tokens=99, reevaluated=[1.0, 2.0]),
        "tool call": Found(turns=1, same=0, cuts=5, violations=["turn 1, cut after [3]: no end"]),
    }
    told = report(CutsSettings(), copy.deepcopy(found))
    assert told.title == "15 cuts at random places, 1 violations"
    assert [row[0] for row in told.rows] == ["plain", "tool call"]
    assert told.rows[0][3:] == ["2 of 2", "2", "2", "0"]
    assert "tool call: turn 1, cut after [3]: no end" in told.notes


def test_quick_is_a_few_of_each_kind() -> None:
    assert CutsSettings().quick().cuts == 4 * len(KINDS)
    assert CutsSettings().cuts == 300
