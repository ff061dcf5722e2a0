"""Which differences between an agent's prompts count as a line that breaks its prefix."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prompts import Observation, RecentPrompts, read_prompt
from orchestrator.prompts.compare import Likeness, compare
from orchestrator.prompts.fingerprint import MAX_PIECES
from orchestrator.prompts.history import MAX_AGENTS, MAX_CONVERSATIONS, MIN_LOST_BYTES
from tests.prompts.bodies import RULES, chat


def observe(*bodies: dict[str, Any]) -> Observation:
    """What is said of the last of one agent's prompts."""
    recent = RecentPrompts()
    for number, body in enumerate(bodies):
        observation = recent.observe("editor", f"turn-{number}", read_prompt(body))
    return observation


def test_first_prompt() -> None:
    seen = observe(chat("x-billing: 1"))
    assert (seen.like, seen.same_bytes, seen.lost_bytes, seen.lines) == (None, 0, 0, ())


def test_a_conversation_that_goes_on_is_not_broken() -> None:
    seen = observe(chat("x-billing: 1"), chat("x-billing: 1", said=1))
    assert seen.like == "turn-0"
    assert seen.lost_bytes == 0 and not seen.lines
    assert 0.8 * seen.n_bytes < seen.same_bytes < seen.n_bytes


def test_a_first_line_that_changes() -> None:
    seen = observe(chat("x-billing: v2; hash=a81f"), chat("x-billing: v2; hash=90cc", said=1))
    assert seen.same_bytes == 0
    assert seen.lost_bytes > 0.8 * seen.n_bytes
    [line] = seen.lines
    assert (line.role, line.line, line.offset) == ("system", 1, 0)
    assert (line.shape, line.pattern) == ("x-billing: ??; ????=????", "x-billing:*")


def test_several_lines_that_change() -> None:
    first, second = (
        chat(f"You help.\nTime: {now}", said=said, tail=(f"Session: {now}", "End of the rules."))
        for said, now in enumerate(("20:16", "20:17"))
    )
    seen = observe(first, second)
    assert [(line.line, line.pattern) for line in seen.lines] == [
        (2, "Time:*"),
        (len(RULES) + 3, "Session:*"),
    ]
    assert seen.same_bytes == len("You help.")


def test_a_listing_that_grows_by_a_line() -> None:
    seen = observe(chat("Files:", "a.py"), chat("Files:", "a.py", "b.py", said=1))
    assert [line.line for line in seen.lines] == [3]
    seen = observe(chat("Files:", "a.py", "b.py"), chat("Files:", "a.py", said=1))
    assert [(line.line, line.shape) for line in seen.lines] == [(3, "")]


def test_text_parts_are_lines_of_their_own() -> None:
    bodies = [chat(f"x-billing: {number}") for number in (1, 2)]
    for body in bodies:
        lines = body["messages"][0]["content"].split("\n", 1)
        body["messages"][0] = {
            "role": "developer",
            "content": [{"type": "text", "text": text} for text in lines],
        }
    [line] = observe(*bodies).lines
    assert (line.role, line.line, line.pattern) == ("developer", 1, "x-billing:*")


@pytest.mark.parametrize(
    "other",
    [
        chat("x-billing: 2", user="Quite another thing, and long enough."),
        {
            "messages": [
                {"role": "system", "content": "Find a title."},
                {"role": "user", "content": "x" * 3000},
            ]
        },
        {"messages": [{"role": "user", "content": "x" * 3000}]},
    ],
    ids=["user", "title", "plain"],
)
def test_another_prompt_is_no_broken_one(other: dict[str, Any]) -> None:
    lines = observe(chat("x-billing: 2"), other).lines
    assert not lines


def test_what_the_user_says_is_never_such_a_line() -> None:
    seen = observe(
        *({"messages": [{"role": "user", "content": f"Time: {n}\n" + "\n".join(RULES)}]} for n in (1, 2))
    )
    assert seen.lost_bytes == 0 and not seen.lines


def test_a_rewritten_system_prompt_is_no_changed_line() -> None:
    seen = observe(chat(*(f"Old {n}" for n in range(30))), chat(*(f"New {n}" for n in range(30))))
    assert not seen.lines


def test_other_tools() -> None:
    seen = observe(chat("You help."), chat("You help.", said=1, tools=[{"type": "function", "function": {}}]))
    assert seen.tools_changed and not seen.lines
    assert seen.same_bytes == len("You help.") + sum(map(len, RULES))


def test_little_lost_is_nothing_lost() -> None:
    short = [{"messages": [{"role": "system", "content": f"Time: {n}\n" + "x" * 900}]} for n in (1, 2)]
    assert observe(*short).lost_bytes == 0
    long = [
        {"messages": [{"role": "system", "content": f"Time: {n}\n" + "x" * MIN_LOST_BYTES}]} for n in (1, 2)
    ]
    assert observe(*long).lost_bytes == MIN_LOST_BYTES


def test_sessions_side_by_side_lose_nothing_after_their_first_turns() -> None:
    recent = RecentPrompts()
    for turn in range(4):
        for session in range(MAX_CONVERSATIONS):
            prompt = read_prompt(chat(f"Session: {session}", said=turn))
            seen = recent.observe("editor", f"turn-{session}-{turn}", prompt)
            assert bool(seen.lines) == (turn == 0 and session > 0)


def test_agents_are_apart_and_bounded() -> None:
    recent = RecentPrompts()
    prompt = read_prompt(chat())
    for number in range(MAX_AGENTS + 1):
        assert recent.observe(number, "turn", prompt).like is None
    assert recent.observe(0, "turn", prompt).like is None
    assert recent.observe(MAX_AGENTS, "turn", prompt).like == "turn"


def test_no_text_is_kept() -> None:
    """What an agent's history holds, all the way down, has no piece of the prompt in it."""
    recent = RecentPrompts()
    recent.observe("editor", "turn-0", read_prompt(chat("Secret: 1", user="A secret thing.")))
    found: list[object] = [recent]
    for value in found:
        assert not isinstance(value, str) or value in ("turn-0", "editor")
        assert not isinstance(value, bytes) or not value.strip(b"\0\1")
        if isinstance(value, dict):
            found += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            found += value
        else:
            found += [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
            found += list(vars(value).values()) if hasattr(value, "__dict__") else []
    assert len(found) > 50


def test_a_line_is_shown_without_what_it_says() -> None:
    secret = "tok-8c1f2277 alice@example.com /home/alice"
    seen = observe(chat("Session: one"), chat(f"Session: {secret}", said=1))
    said = orjson.dumps(seen.data()).decode()
    for word in ("8c1f", "alice", "example", "home"):
        assert word not in said


@pytest.mark.parametrize("content", [None, 3, "", [], ["x", None, {"text": 4}], {"a": 1}])
@pytest.mark.parametrize("role", ["system", "user", None, 7, ["system"]])
def test_strange_messages_are_read(role: Any, content: Any) -> None:
    body = {"messages": [{"role": role, "content": content}, {}], "tools": {"odd": 1}, "functions": 3}
    observe(body, chat("x-billing: 1"), body)


def test_a_long_prompt_is_bounded() -> None:
    body = {"messages": [{"role": "system", "content": "\n" * 300_000}] + [{"role": "user"}] * 10_000}
    assert len(read_prompt(body).fingerprint.hashes) == MAX_PIECES


@given(st.integers())
def test_compare_counts_every_byte_once(seed: int) -> None:
    random_ = random.Random(seed)
    lines = [f"line {number} " + "x" * random_.randrange(40) for number in range(random_.randrange(2, 60))]
    other = list(lines)
    for _ in range(random_.randrange(4)):
        other[random_.randrange(len(other))] = f"changed {random_.random()}"
    new, old = (
        read_prompt({"messages": [{"role": "system", "content": "\n".join(text)}]}).fingerprint
        for text in (lines, other)
    )
    likeness = compare(new, old)
    same = sum(len(line) for line, change in zip(lines, other, strict=True) if line == change)
    assert likeness.same_bytes + likeness.later_bytes <= same
    skipped = sum(sum(new.sizes[first:end]) for first, end in likeness.changes)
    assert likeness.same_bytes + likeness.later_bytes + skipped <= new.n_bytes
    if lines == other:
        assert likeness == (Likeness(new.n_bytes, 0, ()))
