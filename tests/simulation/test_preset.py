"""The published table of the reference machine, from seeded replications: see docs/simulator.md."""

from __future__ import annotations

import pytest

from orchestrator.simulation import EngineModel, Outcome
from orchestrator.simulation.presets import PRESETS, QUANTILES
from orchestrator.simulation.replications import interval, quantiles, replicate, worst
from orchestrator.simulation.timeline import Span, Timeline, record

PRESET = PRESETS["rx9070xt"]
STEP_S, FLUSH_S = PRESET.model.base_step_s, PRESET.model.flush_s


@pytest.fixture(scope="module")
def off() -> list[Outcome]:
    return runs(preemption=False, replications=6, hours=2.5)


@pytest.fixture(scope="module")
def on() -> list[Outcome]:
    return runs(preemption=True, replications=4, hours=1.0)


def runs(*, preemption: bool, replications: int, hours: float) -> list[Outcome]:
    setup = PRESET.setup(preemption=preemption)
    seconds = hours * 3600
    return replicate(setup, seed=1, replications=replications, until_s=seconds, warmup_s=PRESET.warmup_s)


def test_the_machine_is_the_published_one() -> None:
    assert PRESET.model == EngineModel(base_step_s=1 / 39, flush_s=0.004)
    policy = PRESET.setup(preemption=True).backends[0].policy
    assert policy.decode_slots == 8 < policy.engine_slots


def test_without_preemption_the_waits_are_the_published_ones(off: list[Outcome]) -> None:
    """Each within 15%: the mean over the replications is, and its interval reaches no further than 25%."""
    for share, found, published in zip(
        QUANTILES, quantiles(off, "foreground", QUANTILES), PRESET.off.quantiles, strict=True
    ):
        assert found.mean == pytest.approx(published, rel=0.15), share
        assert found.within(0.75 * published, 1.25 * published), (share, found)
    # The worst of so few turns is below that of many; the tail that makes it reach 31 s is there.
    assert 10.0 < worst(off, "foreground") < 45.0


def test_the_slots_are_always_full(off: list[Outcome]) -> None:
    for outcome in off:
        assert outcome.tokens_per_s() == pytest.approx(8 * 39, rel=0.001)


def test_with_preemption_a_turn_waits_for_its_boundary_and_the_flush(on: list[Outcome]) -> None:
    """Uniform over a step, and the flush: p50 half a step later, p99 at its end."""
    p50, p90, p99 = quantiles(on, "foreground", QUANTILES)
    assert p50.within(0.014, 0.020)
    assert p99.within(0.026, 0.032)
    assert worst(on, "foreground") <= STEP_S + FLUSH_S + 1e-9
    for share, found in zip(QUANTILES, (p50, p90, p99), strict=True):
        assert found.mean == pytest.approx(FLUSH_S + share * STEP_S, abs=0.0015)


def test_the_published_p90_is_not_that_of_turns_at_random_moments(on: list[Outcome]) -> None:
    (p90,) = quantiles(on, "foreground", [0.9])
    assert p90.low > PRESET.on.quantiles[1] + 0.008


def test_preemption_costs_the_background_next_to_nothing(off: list[Outcome], on: list[Outcome]) -> None:
    whole = interval([each.tokens_per_s() for each in on]).mean
    assert whole == pytest.approx(interval([each.tokens_per_s() for each in off]).mean, rel=0.005)
    figures = [each.classes["background"] for each in on]
    preemptions = sum(each.preemptions for each in figures)
    # The token under way, and the one by which the resume goes on; all are found in their slots.
    assert sum(each.lost_tokens for each in figures) == preemptions
    assert sum(each.evaluated_again for each in figures) == preemptions
    assert sum(each.resumes["resident"] for each in figures) == preemptions


# The worked example ----------------------------------------------------------------------------------


def story(timeline: Timeline) -> tuple[list[Span], Span]:
    """Who had slot 3, in order, and the foreground turn's wait."""
    spans = sorted((span for span in timeline.spans if span.lane == 3), key=lambda span: span.start_s)
    return spans, timeline.waits[-1]


def test_without_preemption_the_newcomer_is_blocked_for_twenty_seconds() -> None:
    (background, foreground), wait = story(record(PRESET.example(preemption=False), until_s=60))
    assert background.end_s - background.start_s == pytest.approx(24.1, abs=0.1)
    assert (background.priority, foreground.priority) == (20, 100)
    assert wait.start_s == 4.0
    assert wait.end_s - wait.start_s == pytest.approx(20.1, abs=0.1)


def test_with_it_the_newcomer_starts_within_a_step_and_the_background_turn_resumes() -> None:
    (before, foreground, after), wait = story(record(PRESET.example(preemption=True), until_s=60))
    assert 0 < wait.end_s - wait.start_s <= STEP_S + FLUSH_S + 1e-9
    assert before.turn == after.turn != foreground.turn == wait.turn
    assert after.start_s == foreground.end_s
    # 940 tokens, of which the one under way at the cut is made again.
    made = (before.end_s - before.start_s + after.end_s - after.start_s) / STEP_S
    assert made == pytest.approx(941, abs=0.5)
