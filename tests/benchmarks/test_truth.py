"""The truth bench: its trace, its arithmetic, and once all of it on the simulated engine."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from agents.client import TurnResult
from benchmarks import truth
from benchmarks.calibration import Effort, Words, boundaries, lane_counts, phases
from benchmarks.harness import BenchError, EngineShape, simulated_engine
from benchmarks.truth_report import Measured, Truth, Verdict, report, verdicts
from benchmarks.truth_settings import TruthSettings, background_per_s, make_trace, recorded
from orchestrator.simulation.calibrate import Measurements, StepSample, fit
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.trace import write_trace
from orchestrator.simulation.workload import Arrival

MODEL = EngineModel(0.02, lane_s=0.009, prefill_token_s=0.007, batch_tokens=16)


# Calibration's parts ------------------------------------------------------------------------------


def test_boundaries_are_those_of_any_lane() -> None:
    # The second lane is late by a hair, and has a token without text at 0.2.
    lanes = [[0.0, 0.1, 0.2, 0.3, 0.4], [0.001, 0.101, 0.301, 0.402, 0.5]]
    assert boundaries(lanes, 0.0, 0.45) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert boundaries(lanes, 0.05, 0.35) == [0.1, 0.2, 0.3]
    assert boundaries([[0.1], [0.2]], 0.0, 1.0) == []


@pytest.mark.parametrize("number", [1, 2, 6, 10, 12, 24])
def test_phases_are_spread_evenly_over_a_step(number: int) -> None:
    found = list(phases(number))
    assert sorted(found) == pytest.approx([(at + 0.5) / number for at in range(number)])
    assert sum(found) / number == pytest.approx(0.5), "so that what is left of a step is half of one"


def test_lane_counts_have_one_and_all() -> None:
    assert (lane_counts(8), lane_counts(1), lane_counts(3)) == ([1, 2, 4, 8], [1], [1, 3])


def test_prompts_are_exactly_as_long_as_asked_for_and_differ() -> None:
    words = Words(range(50), 1)
    first, second = words.prompt(200), words.prompt(200)
    assert len(first) == len(second) == 200
    assert first != second
    assert Words(range(50), 1).prompt(200) == first


def test_an_engine_that_knows_one_token_is_no_engine() -> None:
    with pytest.raises(BenchError, match="tokeniser"):
        Words([3, 3, 3], 1)


# The trace ----------------------------------------------------------------------------------------


def test_the_trace_is_sorted_repeatable_and_of_its_seed() -> None:
    settings = TruthSettings()
    trace = make_trace(settings, MODEL)
    assert trace == make_trace(settings, MODEL)
    assert trace != make_trace(replace(settings, seed=2), MODEL)
    assert [arrival.at_s for arrival in trace] == sorted(arrival.at_s for arrival in trace)
    assert trace[-1].at_s < settings.duration_s
    foreground = [arrival for arrival in trace if arrival.priority_class == "foreground"]
    assert min(arrival.at_s for arrival in foreground) > settings.lead_in_s
    assert all(arrival.output_tokens == settings.foreground_tokens for arrival in foreground)
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in trace)
    assert longest <= settings.shape.slot_context, "every turn fits its slot"


def test_the_offered_work_is_the_given_part_of_the_engine() -> None:
    """Counted in another way: tokens and prompts of a long trace, at what they take with all lanes busy."""
    settings = TruthSettings(duration_s=20_000.0, lead_in_s=0.0, load=0.9)
    trace = make_trace(settings, MODEL)
    slots = settings.shape.decode_slots
    step_s = MODEL.step_s(slots, 0, 0, 0)
    tokens = sum(arrival.output_tokens for arrival in trace)
    prompts = sum(arrival.prompt_tokens for arrival in trace)
    # Nine prompt tokens a step fit beside seven lanes; each makes the step longer for all eight.
    slot_s = tokens * step_s + prompts * (step_s / 9 + slots * MODEL.prefill_token_s)
    assert slot_s / (slots * settings.duration_s) == pytest.approx(0.9, rel=0.06)


def test_a_foreground_beyond_the_load_is_one_line() -> None:
    with pytest.raises(BenchError, match="foreground alone"):
        background_per_s(TruthSettings(load=0.1), MODEL)


def test_a_recorded_trace_must_fit_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    settings = TruthSettings(shape=EngineShape(slot_context=512))
    write_trace(path, [Arrival(0.0, "a", "normal", 100, 400)])
    assert len(recorded(settings, path)) == 1
    write_trace(path, [Arrival(0.0, "a", "normal", 113, 400)])
    with pytest.raises(BenchError, match="a turn of 513 tokens"):
        recorded(settings, path)
    write_trace(path, [Arrival(0.0, "a", "normal", 100, 40, 50)])
    with pytest.raises(BenchError, match="shared tokens"):
        recorded(settings, path)
    path.write_text("{}\n")
    with pytest.raises(BenchError, match="line 1"):
        recorded(settings, path)


# Figures ------------------------------------------------------------------------------------------


def result(sent: float, started: float, times: list[float], tokens: int, prompt: int) -> TurnResult:
    return TurnResult(
        sent=sent,
        started=started,
        first_token=times[0],
        last_token=times[-1],
        ended=times[-1],
        tokens=tokens,
        prompt_tokens=prompt,
        times=array("d", times),
    )


def test_a_real_runs_figures() -> None:
    settings = TruthSettings(duration_s=10.0)
    trace = [
        Arrival(0.0, "background", "background", 20, 8),
        Arrival(1.0, "foreground", "foreground", 10, 2),
        Arrival(2.0, "foreground", "foreground", 10, 2),
    ]
    results = [
        # Eight tokens in four pieces of text, of which the last comes after the end.
        result(100.0, 100.1, [101.0, 102.0, 103.0, 111.0], 8, 20),
        result(101.0, 101.25, [101.5, 101.6], 2, 10),
        TurnResult(error="HTTP 503: gone"),
    ]
    found = truth.measured(settings, trace, results, 100.0, 3)
    assert found.waits == pytest.approx([0.25])
    assert found.first_tokens == pytest.approx([0.5])
    assert found.background_whole == pytest.approx([11.0])
    assert found.background_rate == pytest.approx(6 / 10)
    assert found.preemptions == 3
    assert found.end_s == pytest.approx(11.0)
    assert found.step_s == pytest.approx(1.0), "the gap of eight is a pause"
    assert found.errors == ["foreground: HTTP 503: gone"]


def test_a_turn_of_another_length_is_an_error() -> None:
    trace = [Arrival(0.0, "background", "background", 20, 8)]
    found = truth.measured(TruthSettings(), trace, [result(0.0, 0.1, [1.0, 2.0], 7, 20)], 0.0, 0)
    assert found.errors == ["background: 20 + 7 tokens instead of 20 + 8"]


def column(wait: float, rate: float = 100.0, preemptions: int = 10) -> Measured:
    return Measured([wait], [2 * wait], [5.0], background_rate=rate, preemptions=preemptions)


def test_within_a_tenth_or_within_the_spread_is_good() -> None:
    (wait, *_) = verdicts([column(0.100)], column(0.109))
    assert wait.good
    assert wait.difference == pytest.approx(0.09)
    (wait, *_) = verdicts([column(0.100)], column(0.111))
    assert not wait.good
    (wait, *_) = verdicts([column(0.090), column(0.110)], column(0.118))
    assert wait.good
    assert wait.spread == pytest.approx(0.2)
    assert wait.difference == pytest.approx(0.18)
    (wait, *_) = verdicts([column(0.099), column(0.101)], column(0.118))
    assert not wait.good, "two runs that agree leave no excuse"


def test_what_was_not_measured_is_not_good() -> None:
    assert not Verdict("wait p50", 0.1, math.nan, math.nan).good
    assert not Verdict("preemptions", 0.0, 5.0, math.nan).good
    assert Verdict("preemptions", 0.0, 0.0, math.nan).good


@pytest.mark.parametrize(("after_s", "said"), [(0.0205, False), (0.023, True), (0.017, True)])
def test_a_machine_that_was_not_quiet_is_said(after_s: float, said: bool) -> None:
    steps = (StepSample("one", 0.01, 1, 10), StepSample("all", 0.02, 8, 80))
    calibration = fit(Measurements(16, steps))
    after = StepSample("all", after_s, 8, 80)
    found = Truth([], calibration, [column(0.1)], column(0.1), after)
    assert found.drift == pytest.approx(after_s / 0.02 - 1)
    notes = report(TruthSettings(), found).notes
    assert any("not quiet" in note for note in notes) is said


# All of it ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_on_the_simulated_engine_both_columns_tell_the_same(tmp_path: Path) -> None:
    """The service is real, the engine's steps are slept: counts must agree, and times roughly."""
    shape = EngineShape(decode_slots=3, engine_slots=5, slot_context=512, batch_tokens=512)
    settings = TruthSettings(
        duration_s=6.0,
        lead_in_s=1.0,
        mean_tokens=60.0,
        foreground_gap_s=0.5,
        foreground_tokens=3,
        shape=shape,
        effort=Effort(long_tokens=96, steps=8, mixed_tokens=60, copies=1, flushes=3, controls=4),
    )
    told: list[str] = []
    async with simulated_engine(shape.engine_slots, slot_context=shape.slot_context) as url:
        backend = {
            "name": "bench",
            "kind": "llama.cpp",
            "url": url,
            "decode_slots": shape.decode_slots,
            "kv_layout": "split",
            "batch_tokens": shape.batch_tokens,
        }
        found = await truth.measure_on(settings, url, backend, lambda done, label: told.append(label))
    (real,) = found.real
    simulated = found.simulated
    assert real.errors == simulated.errors == []
    assert len(real.waits) == len(simulated.waits) > 5
    assert len(real.background_whole) == len(simulated.background_whole) > 3
    assert real.background_rate == pytest.approx(simulated.background_rate, rel=0.5)
    assert abs(real.preemptions - simulated.preemptions) <= 4
    # The profile's own figures: 17.6 ms, and 0.8 ms a lane.
    assert found.calibration.model.step_s(3, 100, 0, 0) == pytest.approx(0.020, rel=0.5)
    assert found.calibration.measured.controls_s
    assert "real run 1 of 1" in told
    assert abs(found.drift) < 1
    shown = report(settings, found)
    assert len(shown.data["trace"]) == len(found.trace)
    assert [row[0] for row in shown.rows[:8]] == list(real.figures())
