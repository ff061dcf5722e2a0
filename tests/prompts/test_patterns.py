"""Patterns for lines: what they cover, and that no text makes them slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prompts import LinePattern
from orchestrator.prompts.patterns import MAX_LINE_CHARS, MAX_TRIES


@pytest.mark.parametrize(
    ("pattern", "line", "expected"),
    [
        ("x-billing:*", "x-billing: 12", True),
        ("x-billing:*", "  x-billing: 12\t", True),
        ("x-billing:*", "x-billing:", True),
        ("x-billing:*", "an x-billing: 12", False),
        ("*session=*", "a session=1", True),
        ("*session=*", "a sessionless day", False),
        ("20*-*-* *:*", "2026-11-29 20:16", True),
        ("20*-*-* *:*", "2026-11-29", False),
        ("today", "today", True),
        ("today", "today is", False),
        ("a.c(*", "a.c(1", True),
        ("a.c(*", "abc(1", False),
        ("ab*ba", "aba", False),
        ("ab*ba", "abba", True),
        ("ab**ba", "ab-ba", True),
        ("X*", "x1", False),
    ],
)
def test_matches(pattern: str, line: str, expected: bool) -> None:
    assert LinePattern(pattern).matches(line) is expected


def test_lines_are_whole_lines() -> None:
    text = "Time: 1\nThe Time: 2\n  Time: 3\r\nTime: 4"
    found = [text[start:end] for start, end in LinePattern("Time:*").lines(text)]
    assert found == ["Time: 1", "  Time: 3\r", "Time: 4"]


def test_a_long_line_is_left_alone() -> None:
    text = "Time: " + "x" * MAX_LINE_CHARS
    assert not list(LinePattern("Time:*").lines(text))


@given(
    st.text("ab*", min_size=1, max_size=12).filter(lambda text: text.strip("*")), st.text("ab", max_size=16)
)
def test_matches_as_a_star_does(pattern: str, line: str) -> None:
    """By the definition: either the star takes nothing, or one character more."""

    def covers(pattern: str, line: str) -> bool:
        if not pattern:
            return not line
        if pattern[0] == "*":
            return covers(pattern[1:], line) or (bool(line) and covers(pattern, line[1:]))
        return bool(line) and line[0] == pattern[0] and covers(pattern[1:], line[1:])

    assert LinePattern(pattern).matches(line) == covers(pattern, line)


def test_takes_time_in_proportion() -> None:
    """What would take a backtracking matcher 2**n steps, against a plain search of the same text."""
    pattern = LinePattern("*a" * 60 + "*b")
    line = "a" * MAX_LINE_CHARS
    began = time.perf_counter()
    for _ in range(100):
        assert not pattern.matches(line)
    took = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(100 * 60):
        assert line.find("b") < 0
    # Nothing near the ages that the other takes: hundreds of times the plain search are generous.
    assert took < 1000 * (time.perf_counter() - began)


def test_gives_up_on_a_text_of_near_misses() -> None:
    text = "\n".join(["no Time: 1"] * (MAX_TRIES + 10) + ["Time: 2"])
    assert not list(LinePattern("Time:*").lines(text))
