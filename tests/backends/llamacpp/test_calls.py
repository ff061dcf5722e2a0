"""Tool calls that break off: where they can be gone on with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp.calls import broken_off, goes_on, last_text_place, merged, tokens_until

TEXT = '{"path": "a/b.py", "lines": [1, "two"], "deep": {"k": "v\\n\\"q\\" \\u00e9"}}'


@pytest.mark.parametrize(
    ("broken", "kept", "closing"),
    [
        ('{"path": "a/b', '{"path": "a/b', '"}'),
        ('{"path": "', '{"path": "', '"}'),
        ('{"path": "a/b.py"', '{"path": "a/b.py', '"}'),
        ('{"path": "a/b.py", "li', '{"path": "a/b.py', '"}'),
        ('{"path": "a", "lines": [1, "tw', '{"path": "a", "lines": [1, "tw', '"]}'),
        ('{"path": "a", "lines": [1, "two"], "n": 7', '{"path": "a", "lines": [1, "two', '"]}'),
        ('{"a": {"b": "x', '{"a": {"b": "x', '"}}'),
        ('{"a": "x\\', '{"a": "x', '"}'),
        ('{"a": "x\\u00', '{"a": "x', '"}'),
        ('{"a": "x\\ud83d', '{"a": "x', '"}'),
        ('{"a": "x\\ud83d\\ude00', '{"a": "x\\ud83d\\ude00', '"}'),
        ('{"a": "x\\\\', '{"a": "x\\\\', '"}'),
        ('{"a": "x\\"y', '{"a": "x\\"y', '"}'),
        ('{"a": "{[,:', '{"a": "{[,:', '"}'),
    ],
)
def test_the_last_place_inside_a_text(broken: str, kept: str, closing: str) -> None:
    assert last_text_place(broken) == (len(kept), closing)
    assert broken.startswith(kept)
    json.loads(kept + closing)


@pytest.mark.parametrize(
    "broken", ["", "{", '{"pa', '{"path"', '{"path": ', '{"n": 12', '{"n": [1, {"k', "{}"]
)
def test_where_no_text_has_begun_there_is_none(broken: str) -> None:
    assert last_text_place(broken) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans(), st.integers(0, 300))
def test_whatever_breaks_off_is_whole_again(value: dict[str, Any], ascii_only: bool, at: int) -> None:
    whole = json.dumps(value, ensure_ascii=ascii_only)
    found = last_text_place(whole[:at])
    if found is None:
        return
    place, closing = found
    assert place <= min(at, len(whole))
    json.loads(whole[:place] + "MARK" + closing)
    marks = json.dumps(json.loads(whole[:place] + "MARK" + closing), ensure_ascii=ascii_only)
    assert "MARK" in marks.replace('"MARK": ', ""), "in a value, not a key"


def call(arguments: str, name: str = "write") -> dict[str, Any]:
    return {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def piece(index: int, arguments: str, **head: Any) -> dict[str, Any]:
    name = {"name": head.pop("name")} if "name" in head else {}
    return {"tool_calls": [{"index": index, **head, "function": {**name, "arguments": arguments}}]}


def test_the_last_call_breaks_off_and_those_before_it_are_whole() -> None:
    first = call('{"path": "a"}')
    assert broken_off([first, call('{"path": "b')]) == ([first, call('{"path": "b')], '"}')
    assert broken_off([call('{"path": "b", "n": 1')]) == ([call('{"path": "b')], '"}')


def test_a_call_without_a_text_is_given_up_for_the_one_before() -> None:
    assert broken_off([call('{"path": "a"}'), call('{"n": 1')]) == ([call('{"path": "a')], '"}')
    assert broken_off([call('{"n": 1')]) is None
    assert broken_off([]) is None


@pytest.mark.parametrize(
    ("arguments", "goes"),
    [
        ('{"p": "a", "n": [1, {"k": "xy', True),
        ('{"p": "a", "n": [1, {"k": "xyz"}], "m": 2}', True),
        ('{"p":"a","n":[1,{"k":"xyz","l":3},4]}', True),
        ('{"p": "a", "n": [1, {"k": "x', False),
        ('{"p": "a", "n": [1, {"k": "zz"}]}', False),
        ('{"p": "b", "n": [1, {"k": "xyz"}]}', False),
        ('{"p": "a", "n": [2, {"k": "xyz"}]}', False),
        ('{"p": "a", "n": [{"k": "xyz"}]}', False),
        ('{"p": "a", "n": []}', False),
        ('{"n": [1, {"k": "xyz"}], "p": "a"}', False),
        ('{"p": "a", "n": [1, {"k": "xy\nz"}]}', False),
        ('{"p": "a", "n": "xyz"}', False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_a_call_that_was_begun_is_known_again(arguments: str, goes: bool) -> None:
    before = call('{"q": "whole"}')
    found = broken_off([before, call('{"p": "a", "n": [1, {"k": "xy')])
    assert found is not None
    assert goes_on([call('{"q":"whole"}'), call(arguments)], *found) is goes
    assert not goes_on([call('{"q": "other"}'), call(arguments)], *found)
    assert not goes_on([before], *found)
    assert not goes_on([before, call(arguments, "read")], *found)


def test_tokens_are_counted_up_to_the_place() -> None:
    held = [
        (3, {"content": "x"}),
        (5, piece(0, "", id="a", name="read")),
        (6, piece(0, '{"x": "')),
        (8, piece(1, '{"y": "', id="b", name="read")),
        (9, piece(0, "abc")),
        (11, piece(1, "def")),
    ]
    assert tokens_until(held, {"index": 0, "function": {"arguments": '{"x": "'}}) == 6
    assert tokens_until(held, {"index": 0, "function": {"arguments": '{"x": "a'}}) == 9
    assert tokens_until(held, {"index": 1, "function": {"arguments": '{"y": "d'}}) == 11
    with pytest.raises(ValueError, match="longer than its deltas"):
        tokens_until(held, {"index": 1, "function": {"arguments": '{"y": "defg'}})


def test_pieces_of_calls_become_one_delta() -> None:
    assert merged(
        [
            piece(0, "", id="a", name="read"),
            piece(0, '{"x"'),
            piece(1, "{}", id="b", name="ls"),
            piece(0, ": 1}"),
        ]
    ) == {
        "tool_calls": [
            {"index": 0, "id": "a", "function": {"name": "read", "arguments": '{"x": 1}'}},
            {"index": 1, "id": "b", "function": {"name": "ls", "arguments": "{}"}},
        ]
    }
