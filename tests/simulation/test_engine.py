"""What the model engine does at its boundaries, told by heart: a step takes a quarter of a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.scheduler import Event, Started
from orchestrator.simulation import EngineModel, SimulationError, simulate
from orchestrator.simulation.engine import Engine
from orchestrator.simulation.turn import Turn
from tests.simulation.setups import MODEL, PLAIN, policy, rows_of, setup, turn


def test_a_turn_takes_a_step_for_its_prompt_and_one_for_each_token_but_the_first() -> None:
    (row,), outcome = rows_of(setup(turn(1.0, "background", 4, prompt=10)))
    assert (row.wait_s, row.first_token_s, row.end_s) == (0.0, 0.25, 2.0)
    assert outcome.backends["one"].steps == 4
    assert outcome.backends["one"].evaluated == 10
    assert outcome.backends["one"].most_kv_tokens == 13


def test_a_prompt_is_evaluated_by_batches_beside_the_lanes() -> None:
    model = replace(PLAIN, batch_tokens=8, prefill_token_s=0.01)
    turns = turn(0, "background-1", 40), turn(1.0, "background-2", 5, prompt=16)
    rows, _ = rows_of(setup(*turns, model=model))
    # 7 + 7 + 2 tokens beside one lane. The first prompt's token made its step end at 0.26, not 0.25.
    assert rows[1].wait_s == pytest.approx(0.01)
    assert rows[1].first_token_s == pytest.approx(0.01 + 3 * 0.25 + 16 * 0.01)


def test_prompts_are_evaluated_in_the_order_of_the_slots() -> None:
    model = replace(PLAIN, batch_tokens=8)
    rows, _ = rows_of(
        setup(
            turn(0, "background-1", 4, prompt=20),
            turn(0, "background-2", 4, prompt=8),
            model=model,
        )
    )
    assert rows[0].wait_s == 0.0
    # 8 + 8 + 4 tokens of the first, and what is left of the third batch for the second.
    assert rows[1].wait_s == 0.5
    assert rows[1].first_token_s == 1.0


def test_a_stop_takes_effect_at_the_boundary_and_the_newcomer_starts_there() -> None:
    one = policy(1, 1)
    rows, outcome = rows_of(setup(turn(0, "background", 20), turn(1.1, "foreground", 4), policy=one))
    background, foreground = rows
    assert foreground.wait_s == pytest.approx(0.15)
    assert foreground.end_s == pytest.approx(2.25)
    assert (background.preemptions, background.resident_resumes) == (1, 1)
    # The step under way at 1.1 is made again by the one that evaluates a single token.
    assert (background.lost_tokens, background.evaluated_again) == (1, 1)
    assert background.end_s == pytest.approx(6.25)
    assert outcome.backends["one"].most_lanes == 1


def test_a_flush_passes_before_the_newcomer_starts() -> None:
    model = replace(PLAIN, flush_s=0.1)
    rows, outcome = rows_of(
        setup(turn(0, "background", 20), turn(1.1, "foreground", 4), policy=policy(1, 1), model=model)
    )
    assert rows[1].wait_s == pytest.approx(0.25)
    assert outcome.backends["one"].flushed_s == pytest.approx(0.1)


def test_a_stopped_prefill_keeps_what_was_evaluated() -> None:
    model = replace(PLAIN, batch_tokens=8)
    rows, _ = rows_of(
        setup(
            turn(0, "background", 4, prompt=80), turn(0.6, "foreground", 2), policy=policy(1, 1), model=model
        )
    )
    background, foreground = rows
    assert foreground.wait_s == pytest.approx(0.15)
    # Three batches of 8 were done: the rest is 56 tokens.
    assert (background.evaluated_again, background.lost_tokens) == (56, 0)
    assert background.end_s == pytest.approx(0.75 + 2 * 0.25 + 7 * 0.25 + 3 * 0.25)


def test_control_comes_before_the_queue_and_a_call_before_the_engine() -> None:
    model = replace(PLAIN, control_s=0.03, call_s=0.01)
    (row,), _ = rows_of(setup(turn(1.0, "background", 1), model=model))
    assert row.wait_s == pytest.approx(0.03)


def test_a_slot_that_frees_is_filled_a_call_later() -> None:
    turns = turn(0, "background-1", 4), turn(0, "background-2", 4)
    at_once, _ = rows_of(setup(*turns, policy=policy(1, 0)))
    later, _ = rows_of(setup(*turns, policy=policy(1, 0), model=replace(PLAIN, call_s=0.01)))
    assert at_once[1].wait_s == 1.0
    assert later[1].wait_s == pytest.approx(1.0 + 0.01 + 0.01)


def test_the_next_turn_of_an_agent_finds_what_its_last_one_left() -> None:
    first = turn(0, "background", 5, prompt=100)
    rows, _ = rows_of(setup(first, turn(10, "background", 5, prompt=150, shared=104)))
    assert [row.cached_tokens for row in rows] == [0, 104]


def test_and_what_one_before_that_left_as_far_as_they_are_the_same() -> None:
    turns = [
        turn(0, "background", 5, prompt=200),
        turn(0.1, "background", 400, prompt=200, shared=150),  # in another slot, and for long
        turn(10, "background", 5, prompt=250, shared=180),
    ]
    rows, _ = rows_of(setup(*turns, block_tokens=10))
    assert [row.cached_tokens for row in rows] == [0, 0, 150]


def test_another_agent_finds_nothing() -> None:
    rows, _ = rows_of(
        setup(turn(0, "background", 5, prompt=100), turn(10, "normal", 5, prompt=100), policy=policy(1, 0))
    )
    assert rows[1].cached_tokens == 0


def test_steps_get_longer_with_kv_lanes_and_what_is_parked() -> None:
    model = EngineModel(1.0, running_token_s=0.001, lane_s=0.01)
    (row,), outcome = rows_of(setup(turn(0, "background", 3, prompt=10), model=model))
    # The prompt's step, then two of a lane with 10 and 11 tokens of KV.
    assert row.end_s == pytest.approx(1.0 + 2 * 1.01 + 0.010 + 0.011)
    assert outcome.backends["one"].lane_s == pytest.approx(2 * 1.01 + 0.010 + 0.011)


def test_a_pool_that_overflows_is_an_error() -> None:
    """The engine is not asked whether it can: that is the scheduler's to know."""

    class Nobody:
        def wake(self, at_s: float) -> None:
            self.at_s = at_s

        def started(self, *_: object) -> None:
            pass

    host = Nobody()
    engine = Engine(PLAIN, 1, host, budget_tokens=10)  # type: ignore[arg-type]
    big = Turn(1, "t1", "a", "background", 20, 0.0, prompt=11, output=1, limit=1, prefix=(), common={})
    engine.run(big, 0, None, 0.0)
    engine.act(0.0)
    with pytest.raises(SimulationError, match="11 tokens of KV in a pool of 10"):
        engine.act(host.at_s)


def test_the_scheduler_hears_of_a_start_when_the_batch_is_made() -> None:
    heard: list[tuple[float, Event]] = []
    simulate(
        setup(turn(0.1, "background", 2, prompt=3)),
        seed=1,
        until_s=10,
        log=lambda now, backend, event, commands: heard.append((now, event)),
    )
    assert (0.1, Started("t1", 3, 0)) in heard


def test_reports_are_as_the_dispatcher_makes_them() -> None:
    kinds: dict[str, int] = {}

    def count(now: float, backend: str, event: Event, commands: object) -> None:
        kinds[type(event).__name__] = kinds.get(type(event).__name__, 0) + 1

    simulate(setup(turn(0, "background", 400), model=MODEL), seed=1, until_s=10, log=count)
    assert kinds["Progressed"] >= 20
    assert kinds["Stepped"] >= 18
    assert kinds["Prefilled"] == 1
