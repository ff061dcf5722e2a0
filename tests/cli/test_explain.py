"""`swarm explain`: what is said of turns whose stories are known, and nothing that the data do not tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from rich.console import Console

from orchestrator.cli.explain import MAX_BESIDE, print_points
from orchestrator.cli.explain_facts import ExplainedTurn, Point, facts_of, neighbours
from orchestrator.cli.explain_text import explain
from orchestrator.config import parse_config
from tests.cli import samples
from tests.cli.conftest import FakeService, Swarm, error

T = 1_800_000_000.0
TURN = samples.turn_id(3)
LINES = [
    {"role": "system", "line": 1, "offset": 0, "shape": "x-billing: ????", "pattern": "x-billing:*"},
    {"role": "system", "line": 14, "offset": 812, "shape": "Time: ??:??", "pattern": "Time:*"},
]


def other(number: int, begin: float, end: float | None, **changes: Any) -> dict[str, Any]:
    """Another turn, which had a slot from `begin` to `end`, seconds after the one that is explained came."""
    timeline = [
        {"t": T + begin - 1, "event": "queued"},
        {"t": T + begin, "event": "started", "engine_wait_s": 0.0},
    ]
    if end is not None:
        timeline.append({"t": T + end, "event": "done"})
    state = "running" if end is None else "done"
    return samples.summary(number, state, created=T + begin - 1, **changes) | {"timeline": timeline}


def story(*events: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A turn's story that begins with `queued`."""
    timeline = [{"t": T, "event": "queued"}, *({**event, "t": T + event["t"]} for event in events)]
    return samples.summary(3, "done", finish_reason="stop") | {"timeline": timeline} | changes


def points(raw: dict[str, Any], others: Sequence[dict[str, Any]] | None = None) -> dict[str, Point]:
    """What is said 20 s after the turn came."""
    turn = ExplainedTurn.model_validate(raw)
    facts = facts_of(turn)
    known = None if others is None else [ExplainedTurn.model_validate(one) for one in others]
    until = facts.slot_at or T + 20
    beside = None if known is None else list(neighbours(turn, known, facts.queued_at, until))
    return {point.about: point for point in explain(turn, facts, beside, {}, T + 20)}


def started(t: float, prompt: int = 1000, cached: int = 0) -> dict[str, Any]:
    tokens = {"prompt_tokens": prompt, "cached_tokens": cached}
    return {"t": t, "event": "started", "engine_wait_s": 0.05, **tokens}


# Waiting ------------------------------------------------------------------------------------------


def test_a_turn_that_did_not_wait() -> None:
    said = points(story(started(0.08), {"t": 3, "event": "done"}))
    assert said["wait"].text == "It had a decode slot of local at once, 30.0 ms after it was asked for."
    assert said["wait"].help is None


def test_a_wait_among_equals() -> None:
    others = [
        *(other(number, -5, 4, agent="tester") for number in (10, 11)),
        other(12, -5, None, agent="reviewer"),
        other(13, 1, 2, agent="editor", priority=100, priority_class="foreground"),
    ]
    said = points(story(started(4.05)), others)["wait"]
    assert said.text == (
        "It waited 4.00 s for a decode slot of local. Meanwhile 4 other turns (foreground: editor; "
        "background: 2 tester, reviewer) ran. 1 of them got a slot in that time, 1 of these of a higher "
        "class. None was of a lower class than background, and only such a turn gives its slot up."
    )
    assert said.help is not None and "agents.reviewer.priority" in said.help


def test_who_ran_before_or_after_or_elsewhere_is_not_told() -> None:
    others = [other(10, -9, -1), other(11, 6, 9), other(12, -5, 9, backend="far"), story(started(4.05))]
    assert "none is known any more" in points(story(started(4.05)), others)["wait"].text


def test_a_lower_class_that_ran_is_no_reason_to_advise() -> None:
    said = points(story(started(4.05)), [other(10, -5, 4, priority=0, priority_class="batch")])["wait"]
    assert "None was of a lower class" not in said.text
    assert said.help is None


def test_a_turn_that_still_waits() -> None:
    said = points(story(state="queued", backend=None), [other(10, -5, None)])
    assert said["wait"].text.startswith("It has waited 20.0 s for a decode slot. Meanwhile 1 other turn ")
    assert list(said) == ["wait"]


def test_a_turn_that_never_ran() -> None:
    said = points(story({"t": 7, "event": "cancelled"}, state="cancelled", backend=None, tokens_generated=0))
    assert said["wait"].text == "It never had a decode slot: it ended after 7.00 s."
    assert said["end"].text.startswith(
        "It was cancelled with 0 tokens, 7.00 s after it was asked for: 7.00 s"
    )


def test_a_slow_engine_is_told_apart() -> None:
    late = {"t": 3.0, "event": "started", "engine_wait_s": 2.9}
    assert "The engine began with it 2.90 s after that." in points(story(late))["wait"].text


# The prompt ---------------------------------------------------------------------------------------


def prompt(cached: int, **changes: Any) -> Point:
    """What is said of a prompt of 1,000 tokens and 4,000 bytes."""
    seen = {"n_bytes": 4000, "like": samples.turn_id(2), "same_bytes": 0, "lost_bytes": 0, **changes}
    return points(story(started(0.1, 1000, cached), prompt=seen))["prompt"]


def test_a_line_that_changed() -> None:
    said = prompt(0, lost_bytes=3900, lines=LINES)
    assert "0 were found in KV, 1,000 had to be evaluated" in said.text
    assert "line 1 of the system message (x-billing: ????) and line 14" in said.text
    assert "about 975 tokens that are the same" in said.text
    assert said.help is not None
    advice, _, rule = said.help.partition("agents.reviewer: ")
    assert advice.endswith("set under ")
    agents = {"reviewer": yaml.safe_load(rule)}
    backend = {"name": "a", "url": "http://x:1"}
    config = parse_config(yaml.safe_dump({"backends": [backend], "agents": agents}))
    assert config.agents["reviewer"].stable_prefix.pin == ("x-billing:*",)
    assert config.agents["reviewer"].stable_prefix.move == ("Time:*",)


def test_no_more_is_lost_than_had_to_be_evaluated() -> None:
    assert "about 300 tokens that are the same" in prompt(700, lost_bytes=3900, lines=LINES).text


def test_a_line_without_a_name_has_no_rule() -> None:
    said = prompt(0, lost_bytes=3900, lines=[{"role": "system", "line": 1, "shape": "??:??"}])
    assert "line 1 of the system message (??:??) changed" in said.text
    assert said.help is None


@pytest.mark.parametrize(
    ("cached", "changes", "words", "helps"),
    [
        (0, {"like": None}, "It is the first prompt of reviewer", False),
        (900, {"same_bytes": 3800}, "That is about what it begins with in common", False),
        (100, {"same_bytes": 3800}, "About 950 are the same as in an earlier prompt of reviewer, but", True),
        (0, {"same_bytes": 40}, "It has next to nothing in common", False),
        (200, {"same_bytes": 800, "tools_changed": True}, "Its tools differ from those of 3c6ef372", False),
    ],
)
def test_why_not_more_was_found(cached: int, changes: dict[str, Any], words: str, helps: bool) -> None:
    said = prompt(cached, **changes)
    assert words in said.text
    assert (said.help is not None) == helps


def test_all_found() -> None:
    assert prompt(1000).text == "Its prompt has 1,000 tokens: 1,000 were found in KV."
    assert prompt(999).text == "Its prompt has 1,000 tokens: 999 were found in KV, 1 had to be evaluated."


@pytest.mark.parametrize("seen", [None, {}, {"n_bytes": 0}])
def test_what_was_not_compared_is_not_explained(seen: dict[str, Any] | None) -> None:
    said = points(story(started(0.1), prompt=seen))["prompt"]
    assert said.text == "Its prompt has 1,000 tokens: 0 were found in KV, 1,000 had to be evaluated."


def test_rules_that_were_applied_are_named() -> None:
    seen = {"n_bytes": 4000, "like": samples.turn_id(2), "same_bytes": 3800, "ruled_lines": 2}
    said = points(story(started(0.1, 1000, 900), prompt=seen))
    assert said["rules"].text.startswith(
        "2 of its instructions' lines were pinned or moved by agents.reviewer."
    )


# Pauses -------------------------------------------------------------------------------------------


def paused(t: float, by: str | None = "turn-x") -> dict[str, Any]:
    return {"t": t, "event": "paused", "by": by, "stop_s": 0.02, "tokens": 5, "kv_tokens": 1005}


def resumed(t: float, tier: str, again: int) -> dict[str, Any]:
    return {"t": t, "event": "resumed", "tier": tier, "tokens_reevaluated": again, "engine_wait_s": 0.03}


def test_pauses_and_resumes_add_up() -> None:
    said = points(
        story(
            started(0.1),
            *(paused(1), resumed(2, "resident", 1)),
            *(paused(3, None), resumed(6, "dropped", 1010)),
            *({"t": 7, "event": "interrupted", "error": "it broke"}, resumed(8, "dropped", 1020)),
            {"t": 10, "event": "done"},
        )
    )
    assert said["pauses"].text == (
        "It gave its slot up twice: once for turns that are not known any more, once by hand. The engine "
        "broke it off once, last with: it broke. That took 5.00 s in all."
    )
    assert said["resumes"].text == (
        "It went on once from its slot (1 token evaluated again) and twice without its KV "
        "(2,030 tokens evaluated again)."
    )
    assert said["resumes"].help is not None and "swap_budget" in said["resumes"].help
    assert "50.0 ms waiting, 5.00 s paused, 4.95 s with a slot" in said["end"].text


def test_a_turn_that_is_paused_now() -> None:
    said = points(story(started(0.1), paused(5), state="paused", tier="swapped"))
    assert said["pauses"].text.endswith("It is paused now, and was for 15.0 s in all; its KV is swapped.")
    assert "now" in said and "end" not in said


def test_many_pauses() -> None:
    events = [event for t in range(1, 13, 2) for event in (paused(t), resumed(t + 1, "resident", 1))]
    said = points(story(started(0.1), *events))["pauses"]
    assert "6 times" in said.text
    assert said.help is not None and "policy.max_preemptions" in said.help


def test_an_engine_that_cannot_go_back() -> None:
    said = points(story(started(0.1), paused(1), resumed(2, "resident", 500)))["resumes"]
    assert "could not go back" in said.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "length", "max_tokens": 354}, "354 was its limit."),
        ({"state": "failed", "error": "no\nroom"}, "The reason: no room."),
        ({"state": "failed", "error": None}, "The reason: not known."),
        ({"state": "running"}, "It is running, with 354 tokens of at most 1,500"),
    ],
)
def test_ends(changes: dict[str, Any], words: str) -> None:
    said = points(story(started(0.1), **changes))
    assert words in (said.get("end") or said["now"]).text


def test_an_empty_or_strange_timeline_is_no_trouble() -> None:
    assert points(samples.summary(3, "queued") | {"timeline": []})
    strange = [{"t": 1, "event": "started", "prompt_tokens": "many", "engine_wait_s": None}]
    strange += [
        {"t": 2, "event": "paused", "by": 7},
        {"t": 3, "event": "resumed", "tier": 5},
        {"t": 1, "event": "x"},
    ]
    assert points(story(*strange))["resumes"]


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def told(service: FakeService) -> FakeService:
    """A service that knows the story's turn, one that took its slot and one that ran while it waited."""
    taker = other(9, 5.4, 9, agent="editor", priority=100, priority_class="foreground")
    beside = other(20, -5, 8, agent="tester")
    service.reply("GET /swarm/turns", {"turns": [samples.story(), taker, beside]})
    for turn in (taker, beside):
        service.reply(f"GET /swarm/turns/{turn['id']}", turn)
    return service


def test_explain(swarm: Swarm, told: FakeService) -> None:
    result = swarm("explain", TURN, "--url", told.url)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert [line.partition(":")[0] for line in lines[2:]] == ["wait", "prompt", "pauses", "resumes", "end"]
    assert "Meanwhile 1 other turn (background: tester) ran" in result.out
    assert "once for editor (foreground), once for turns that are not known any more" in result.out
    assert "the swap folder is full" in result.out


def test_explain_as_json(swarm: Swarm, told: FakeService) -> None:
    found = json.loads(swarm("explain", TURN, "--json", "--url", told.url).out)
    assert (found["id"], found["state"], found["preemptions"]) == (TURN, "done", 2)
    assert found["waited_s"] == pytest.approx(1.2098, abs=1e-3)
    assert found["paused_s"] == pytest.approx(5.74, abs=1e-3)
    assert [point["about"] for point in found["points"]] == ["wait", "prompt", "pauses", "resumes", "end"]


def test_nobody_is_asked_about_a_turn_that_did_not_wait(swarm: Swarm, service: FakeService) -> None:
    service.reply(f"GET /swarm/turns/{TURN}", story(started(0.08), {"t": 3, "event": "done"}))
    assert swarm("explain", TURN, "--url", service.url).code == 0
    assert service.asked == [f"GET /swarm/turns/{TURN}"]


def test_others_are_asked_about_within_bounds(swarm: Swarm, service: FakeService) -> None:
    others = [other(number, -5, 8) for number in range(10, 10 + 3 * MAX_BESIDE)]
    service.reply("GET /swarm/turns", {"turns": others})
    for turn in others:
        service.reply(f"GET /swarm/turns/{turn['id']}", turn)
    assert swarm("explain", TURN, "--url", service.url).code == 0
    assert len(service.asked) < MAX_BESIDE + 10


def test_those_that_ended_before_end_the_search(swarm: Swarm, service: FakeService) -> None:
    others = [other(10, -5, 8), other(11, -9, -2), other(12, -9, -3)]
    service.reply("GET /swarm/turns", {"turns": others})
    for turn in others:
        service.reply(f"GET /swarm/turns/{turn['id']}", turn)
    swarm("explain", TURN, "--url", service.url)
    asked = [f"GET /swarm/turns/{turn['id']}" in service.asked for turn in others]
    assert asked == [True, True, False]


@pytest.mark.parametrize("typed", ["nope", "", "../x"])
def test_unknown_turn_is_one_line(swarm: Swarm, service: FakeService, typed: str) -> None:
    result = swarm("explain", typed, "--url", service.url)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("reply", [b"", b"[]", b"{}", b'{"id": 3}', b"\xff"])
@pytest.mark.parametrize("status", [200, 500])
def test_garbage_is_one_line(swarm: Swarm, service: FakeService, reply: bytes, status: int) -> None:
    service.reply(f"GET /swarm/turns/{TURN}", reply, status)
    result = swarm("explain", TURN, "--url", service.url)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)


def test_others_that_cannot_be_had_are_left_out(swarm: Swarm, told: FakeService) -> None:
    told.replies[f"GET /swarm/turns/{samples.turn_id(20)}"] = error(500, "no")
    assert "none is known any more" in swarm("explain", TURN, "--url", told.url).out


@pytest.mark.parametrize("width", [80, 140])
def test_paragraphs_stay_within_the_terminal(width: int) -> None:
    turn = ExplainedTurn.model_validate(
        samples.story() | {"prompt": {"n_bytes": 4000, "like": "turn-x", "lost_bytes": 3900, "lines": LINES}}
    )
    facts = facts_of(turn)
    said = explain(turn, facts, [], {}, T + 20)
    console = Console(width=width, force_terminal=True, color_system=None, highlight=False)
    with console.capture() as shown:
        print_points(console, turn, said)
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= (24 if width == 80 else 16)
    assert all(line[:8].strip() in (*(point.about for point in said), "help", "") for line in lines[2:])
