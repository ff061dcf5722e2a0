"""Rules: only the lines that match change, only in instructions, and the body that was given does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.prompts import Hit, StableLines, apply_rules, find_lines
from orchestrator.prompts.rules import MAX_HITS

BILLING, TIME = "x-billing: 17; hash=ab12", "Time: 20:16"
USER = {"role": "user", "content": "Hello."}


def run(
    messages: list[dict[str, Any]], rules: StableLines, pinned: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The messages after the rules; without `pinned` every line is its own first one."""
    before = copy.deepcopy(messages)
    hits = find_lines(messages, rules)
    known = {hit.pin: hit.line for hit in hits if hit.pin is not None} if pinned is None else pinned
    after, _ = apply_rules(messages, hits, known)
    assert messages == before
    return [dict(message) for message in after]


def system(*lines: str) -> dict[str, Any]:
    return {"role": "system", "content": "\n".join(lines)}


def test_pin_keeps_the_first_line() -> None:
    rules = StableLines.of(["x-billing:*"], [])
    messages = [system(BILLING, "You help."), USER]
    [hit] = find_lines(messages, rules)
    assert hit == Hit(0, None, 0, len(BILLING), BILLING, "1 x-billing:*")
    assert run(messages, rules) == messages
    assert run(messages, rules, {"1 x-billing:*": "x-billing: 1"})[0] == system("x-billing: 1", "You help.")


def test_a_line_that_is_not_pinned_yet_stays() -> None:
    messages = [system(BILLING), USER]
    assert run(messages, StableLines.of(["x-billing:*"], []), {}) == messages


def test_each_of_several_lines_has_its_own_pin() -> None:
    hits = find_lines([system("Time: 1", "Time: 2"), system("Time: 3"), USER], StableLines.of(["Time:*"], []))
    assert [hit.pin for hit in hits] == ["1 Time:*", "2 Time:*", "3 Time:*"]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([TIME, "You help."], "You help."),
        (["You help.", TIME], "You help."),
        (["You help.", TIME, ""], "You help.\n"),
        (["You help.", "", TIME, "", "Be brief."], "You help.\n\n\nBe brief."),
        ([TIME], ""),
    ],
)
def test_move_takes_the_line_to_the_end(lines: list[str], left: str) -> None:
    after = run([system(*lines), USER], StableLines.of([], ["Time:*"]))
    assert after == [
        {"role": "system", "content": left},
        {"role": "user", "content": f"Hello.\n\n{TIME}"},
    ]


def test_moved_lines_keep_their_order() -> None:
    messages = [system("B: 1111", "x", "A: 2222"), {"role": "developer", "content": "B: 3333"}, USER]
    after = run(messages, StableLines.of([], ["A: *", "B: *"]))
    assert after[-1]["content"] == "Hello.\n\nB: 1111\nA: 2222\nB: 3333"
    assert [message["content"] for message in after[:2]] == ["x", ""]


def test_pin_goes_before_move() -> None:
    hits = find_lines([system(TIME)], StableLines.of(["Time: *"], ["Time:*"]))
    assert [hit.pin for hit in hits] == ["1 Time: *"]


def test_text_parts() -> None:
    parts = [{"type": "text", "text": TIME}, {"type": "text", "text": f"You help.\n{BILLING}", "cache": 1}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
    ]
    after = run(messages, StableLines.of(["x-billing:*"], ["Time:*"]), {"1 x-billing:*": "x-billing: 1"})
    assert after[0]["content"] == [{"type": "text", "text": "You help.\nx-billing: 1", "cache": 1}]
    assert after[1]["content"][1:] == [{"type": "text", "text": TIME}]


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "System", None, 3, ["system"], {"system": 1}])
def test_only_instructions_are_looked_at(role: Any) -> None:
    messages = [{"role": role, "content": f"{BILLING}\n{TIME}"}, USER]
    rules = StableLines.of(["x-billing:*"], ["Time:*"])
    assert find_lines(messages, rules) == []
    assert run(messages, rules) == messages


def test_the_line_goes_behind_a_tools_answer_but_not_behind_what_the_model_said() -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": "42"}
    begun = {"role": "assistant", "content": "The ans"}
    after = run([system(TIME, "x"), USER, tool, begun], StableLines.of([], ["Time:*"]))
    assert after[1:] == [USER, {**tool, "content": f"42\n\n{TIME}"}, begun]


@pytest.mark.parametrize("last", [None, {"role": "user", "content": None}, {"role": "user"}])
def test_without_a_place_to_go_nothing_moves(last: dict[str, Any] | None) -> None:
    messages = [system(TIME, "x"), *([] if last is None else [last])]
    hits = find_lines(messages, StableLines.of([], ["Time:*"]))
    assert apply_rules(messages, hits, {}) == (messages, 0)


def test_hits_are_bounded() -> None:
    hits = find_lines([system(*["Time: 1"] * 500), USER], StableLines.of(["Time:*"], []))
    assert len(hits) == MAX_HITS


_CONTENT = st.one_of(
    st.none(),
    st.integers(),
    st.text("ab:\n", max_size=12),
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"type": st.just("text"), "text": st.text("ab:\n", max_size=12)}),
            st.fixed_dictionaries({"text": st.integers()}),
            st.text(max_size=3),
            st.none(),
        ),
        max_size=3,
    ),
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "tool"]), "content": _CONTENT}
    ),
    max_size=5,
)


@given(_MESSAGES, st.lists(st.sampled_from(["a*", "*b", "a:*", "*:*"]), max_size=2))
def test_no_text_is_lost_and_rules_are_done_when_done(
    messages: list[dict[str, Any]], move: list[str]
) -> None:
    rules = StableLines.of([], move)
    before = copy.deepcopy(messages)
    after, ruled = apply_rules(messages, find_lines(messages, rules), {})
    assert messages == before
    assert (ruled == 0) == (list(after) == before)
    assert _letters(after) == _letters(before)
    if ruled:
        assert find_lines(after, rules) == []


def _letters(messages: Any) -> list[str]:
    """All characters of all texts but line breaks and blanks, in any order."""
    whole = ""
    for message in messages:
        content = message["content"]
        pieces = (
            [content]
            if not isinstance(content, list)
            else [p.get("text") for p in content if isinstance(p, dict)]
        )
        whole += "".join(piece for piece in pieces if isinstance(piece, str))
    return sorted(whole.replace("\n", "").replace(" ", ""))
