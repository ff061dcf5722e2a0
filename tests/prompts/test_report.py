"""From observations to a finding: which lines keep changing, how they are shown, and which rule they get."""

from __future__ import annotations

import pytest

from orchestrator.prompts import RecentPrompts, find_busters, read_prompt
from orchestrator.prompts.report import MIN_SEEN, suggested_rule
from orchestrator.prompts.shape import pattern_of, shape_of
from tests.prompts.bodies import chat


@pytest.mark.parametrize(
    ("line", "shape", "pattern"),
    [
        ("x-billing: ab12-cd34", "x-billing: ????-????", "x-billing:*"),
        ("Current time: 2026-11-29", "Current time: ????-??-??", "Current time:*"),
        ("  Today's date: Sunday  ", "Today's date: ????", "Today's date:*"),
        ("The current time is 20:16.", "The current time ?? ??:??.", "The current time*"),
        ("# Session=17", "# Session=??", "# Session=*"),
        ("Дата: 29.11", "Дата: ??.??", "Дата:*"),
        ("2026-11-29", "????-??-??", None),
        ("You are 7", "??? ??? ?", None),
        ("My password is hunter2", "My password is ????", "My password is*"),
        ("Alice lives in Utrecht", "???? ???? ?? ????", None),
        ("the secret word that Bob told me: x", "??? ???? ???? ???? ??? ???? ??: ?", None),
        ("a: b", "?: ?", None),
        ("", "", None),
        ("\x1b[2Jx-evil\n", " [???-????", None),
    ],
)
def test_shapes(line: str, shape: str, pattern: str | None) -> None:
    assert shape_of(line) == shape
    assert pattern_of(line) == pattern


def test_a_long_line_has_a_short_shape() -> None:
    assert len(shape_of("x-billing: " + "a-" * 5000)) == 60


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [("x-billing:*", "pin"), ("Current time:*", "move"), ("Session=*", "move"), (None, None)],
)
def test_suggested_rule(pattern: str | None, rule: str | None) -> None:
    assert suggested_rule(pattern) == rule


def observations(*tops: str, ruled: dict[int, int] | None = None) -> list[dict[str, object]]:
    """Of one agent's turns, the newest first; `ruled`: how many lines were under rules, by turn."""
    recent = RecentPrompts()
    seen = [
        recent.observe("editor", f"turn-{number}", read_prompt(chat(top, said=number))).data()
        | {"ruled_lines": (ruled or {}).get(number, 0)}
        for number, top in enumerate(tops)
    ]
    return seen[::-1]


def test_a_line_that_keeps_changing_is_reported() -> None:
    seen = observations(*(f"x-billing: {number}" for number in range(MIN_SEEN + 1)))
    [buster] = find_busters(seen)
    assert (buster.role, buster.line, buster.pattern, buster.rule) == ("system", 1, "x-billing:*", "pin")
    assert (buster.seen, buster.turns) == (MIN_SEEN, MIN_SEEN + 1)
    assert 0.8 * buster.n_bytes < buster.lost_bytes <= buster.n_bytes


def test_an_edit_or_two_are_not() -> None:
    seen = observations(*(f"x-billing: {number // 2}" for number in range(2 * MIN_SEEN - 1)))
    assert sum(bool(one["lines"]) for one in seen) == MIN_SEEN - 1
    assert find_busters(seen) == []


def test_a_line_that_changes_from_session_to_session_is() -> None:
    seen = observations(*(f"Session: {number // 4}" for number in range(4 * MIN_SEEN + 4)))
    [buster] = find_busters(seen)
    assert (buster.pattern, buster.seen) == ("Session:*", MIN_SEEN)


def test_what_a_rule_has_cured_is_not() -> None:
    tops = [*(f"x-billing: {number}" for number in range(MIN_SEEN + 1)), "x-billing: 0", "x-billing: 0"]
    newest = len(tops) - 1
    assert find_busters(observations(*tops))
    assert not find_busters(observations(*tops, ruled={newest: 1}))
    always = dict.fromkeys(range(len(tops)), 1)
    assert find_busters(observations(*tops, ruled=always)), "a rule for another line"
    assert not find_busters(observations(*tops, ruled=always | {newest: 2}))


def test_no_turns() -> None:
    assert find_busters([]) == []
