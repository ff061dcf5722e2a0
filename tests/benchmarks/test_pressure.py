"""The pressure bench's turns, and what it reads from timelines."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any

import orjson
import pytest
from rich.console import Console

from agents.client import TurnResult
from benchmarks.pressure import (
    CLASSES,
    IN_PROMPT,
    NEVER,
    Found,
    Moves,
    Outcome,
    PressureSettings,
    asks,
    report,
    sample_conversations,
    service_config,
)
from orchestrator.config import parse_config

SETTINGS = PressureSettings()


def outcome(*timeline: dict[str, Any], client: str = "batch-0", conversation: int = 0) -> Outcome:
    result = TurnResult(tokens=40, prompt_tokens=100, cached_tokens=60)
    return Outcome(client, conversation, {}, result, list(timeline))


def paused(tokens: int) -> dict[str, Any]:
    return {"event": "paused", "tokens": tokens}


def resumed(tier: str, again: int = 1) -> dict[str, Any]:
    return {"event": "resumed", "tier": tier, "tokens_reevaluated": again}


@pytest.mark.parametrize("of", CLASSES)
def test_conversations_grow_to_their_limit_and_replay(of: str) -> None:
    turns = list(islice(asks(SETTINGS, f"{of}-1", of), 60))
    assert turns == list(islice(asks(SETTINGS, f"{of}-1", of), 60))
    assert len({turn.message.split()[0] for turn in turns}) == 60
    low, high = SETTINGS.reply_tokens[CLASSES.index(of)]
    assert {low <= turn.max_tokens <= high for turn in turns} == {True}
    lengths = [sum(turn.conversation == number for turn in turns) for number in range(turns[-1].conversation)]
    assert all(4 <= length <= 12 for length in lengths)
    firsts = [turn.conversation for turn in turns if turn.first]
    assert firsts == list(range(len(firsts)))


def test_classes_and_clients_differ() -> None:
    first = {next(asks(SETTINGS, f"{of}-{number}", of)).message for of in CLASSES for number in range(4)}
    assert len(first) == 12


@pytest.mark.parametrize("layout", ["unified", "split"])
def test_the_layout_decides_what_the_limit_is(layout: Any) -> None:
    settings = PressureSettings(layout=layout)
    shape = settings.shape
    backend = {"name": "bench", "url": "http://127.0.0.1:1", "save_path": "/kv", "kv_layout": layout}
    config = parse_config(orjson.dumps(service_config(settings, backend)).decode())
    (made,) = config.backends
    if layout == "unified":
        assert (shape.context(shape.engine_slots), made.kv_budget_bytes) == (settings.kv_tokens, None)
    else:
        assert made.kv_budget_bytes == settings.kv_tokens * 23_040
        assert shape.context(shape.engine_slots) == shape.engine_slots * settings.slot_tokens
    assert len(config.agents) == 13


def test_a_turn_is_of_the_kind_that_changes_its_text_most() -> None:
    assert outcome().kind == NEVER
    assert outcome(paused(5), resumed("resident"), paused(9), resumed("swapped")).kind == "swapped"
    assert outcome(paused(5), resumed("dropped", 105), paused(9), resumed("swapped")).kind == "dropped"
    assert outcome(paused(0), resumed("resident")).kind == IN_PROMPT
    assert (outcome(paused(7)).first_pause, outcome().first_pause) == (7, 40)


def test_timelines_add_up() -> None:
    moves = Moves.of(
        [
            outcome(paused(3), {"event": "swapped", "stall_s": 0.02}, resumed("swapped", 2)),
            outcome(paused(3), resumed("dropped", 103), {"event": "restored", "stall_s": 0.01}),
        ]
    )
    assert (moves.preemptions, moves.prompt_tokens, moves.cached_tokens) == (2, 200, 120)
    assert moves.resumes == {"resident": 0, "swapped": 1, "dropped": 1}
    assert moves.reevaluated == {"resident": 0, "swapped": 2, "dropped": 103}
    assert (moves.save_stalls_s, moves.restore_stalls_s) == ([0.02], [0.01])


def test_references_are_whole_conversations() -> None:
    outcomes = [outcome(client=f"c{number % 3}", conversation=number // 6) for number in range(18)]
    outcomes[0].result.error = "broken"
    chosen = sample_conversations(outcomes, 1, 3)
    assert chosen == sample_conversations(outcomes, 1, 3)
    assert 3 <= len(chosen) < 3 + 2
    assert outcomes[0] not in chosen
    for where in {each.where for each in chosen}:
        complete = [each for each in outcomes if each.where == where and each.result.error is None]
        assert [each for each in chosen if each.where == where] == complete


def test_an_empty_run_makes_a_report() -> None:
    swap = dict.fromkeys(("saves", "restores", "failures", "stalls"), 0)
    made = report(SETTINGS, Found(swap=swap, outcomes=[outcome(paused(3), resumed("resident"))]))
    output = io.StringIO()
    made.finish(Console(file=output, width=100), None)
    assert "1, 1 tokens evaluated again" in output.getvalue()
