"""What a server repeats is left out to the character, however its pieces fall."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp.repeated import RepeatedText


def new(repeated: RepeatedText, *parts: dict[str, Any]) -> tuple[str, str]:
    """The reasoning and the content that are let through."""
    kept = [repeated.left_out(part) for part in parts]
    return (
        "".join(part.get("reasoning_content", "") for part in kept),
        "".join(part.get("content", "") for part in kept),
    )


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


def said(text: str) -> dict[str, Any]:
    return {"content": text}


@given(st.text(max_size=12), st.text(max_size=12), st.lists(st.integers(0, 24), max_size=5))
def test_content_goes_on_wherever_the_pieces_fall(had: str, more: str, cuts: list[int]) -> None:
    whole = had + more
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [said(whole[a:b]) for a, b in pairwise(edges) if a < b]
    assert new(RepeatedText("", had, in_content=True), *pieces) == ("", more)


@given(st.text(min_size=1, max_size=12), st.text(max_size=12), st.text(max_size=5), st.integers(0, 24))
def test_reasoning_goes_on_and_content_after_it_is_new(had: str, more: str, content: str, cut: int) -> None:
    whole = had + more
    pieces = [thought(piece) for piece in (whole[:cut], whole[cut:]) if piece]
    after = [said(content)] if content else []
    assert new(RepeatedText(had, "", in_content=False), *pieces, *after) == (more, content)


def test_line_breaks_that_a_template_puts_next_to_its_tags_are_not_new() -> None:
    repeated = RepeatedText("So.", "abc", in_content=True)
    assert new(repeated, thought("\nSo.\n"), said("abcd"), said("e")) == ("", "de")
    assert new(RepeatedText("\nSo.", "", in_content=False), thought("So. And")) == (" And", "")
    assert new(RepeatedText("So.", "", in_content=False), thought("\nSo. And")) == (" And", "")
    assert new(RepeatedText("\nSo.", "", in_content=False), thought("\n\nSo. And")) == (" And", "")
    assert new(RepeatedText("So.", "\n\nabc", in_content=True), thought("So."), said("abcd")) == ("", "d")


def test_spaces_at_the_end_may_come_with_what_follows_or_not_at_all() -> None:
    assert new(RepeatedText("", "abc ", in_content=True), said("abc"), said(" d")) == ("", "d")
    repeated = RepeatedText("", "abc ", in_content=True)
    call = {"tool_calls": [{"index": 0}]}
    assert repeated.left_out(said("abc")) == {}
    assert repeated.left_out(call) == call
    assert repeated.over


def test_a_call_without_content_before_it_ends_the_reasoning() -> None:
    repeated = RepeatedText("So.", "", in_content=True)
    call = {"tool_calls": [{"index": 0}]}
    assert repeated.left_out(thought("So.\n")) == {}
    assert repeated.left_out(call) == call
    assert repeated.left_out(thought("Anew.")) == thought("Anew.")


@pytest.mark.parametrize("pieces", [["abX"], ["ab", "X"], ["X"], ["Xabcd"]])
def test_another_text_is_found_out(pieces: list[str]) -> None:
    with pytest.raises(ValueError, match="another text"):
        new(RepeatedText("", "abcd", in_content=True), *map(said, pieces))
