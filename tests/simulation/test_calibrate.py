"""Calibration's arithmetic: planted coefficients come back, and nothing gets faster with work."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.calibrate import (
    STEP_FIELDS,
    CalibrationError,
    CopySample,
    Measurements,
    StepSample,
    fit,
    least_squares,
    read_model,
    to_json,
)
from orchestrator.simulation.engine_model import EngineModel

PLANTED = EngineModel(
    base_step_s=0.0176,
    lane_s=0.0008,
    running_token_s=4e-7,
    parked_token_s=2e-7,
    prefill_token_s=0.001,
    group_s=0.004,
    batch_tokens=64,
)
#: Lanes, running, parked and prefill tokens, and groups of slots, as a calibration has them.
PARTS = [
    *((lanes, lanes * 20, 0, 0, 1) for lanes in (1, 2, 4, 8)),
    *((lanes, lanes * 20, 0, 0, groups) for lanes, groups in ((6, 6), (8, 4))),
    *((lanes, lanes * 512, (8 - lanes) * 512, 0, 1) for lanes in (1, 2, 4, 8)),
    *((0, 256, slot * 512, 64, 1) for slot in (0, 7)),
    (4, 300, 2000, 60, 2),
    (7, 500, 2000, 57, 1),
]


def samples(model: EngineModel, noise: float = 0.0, seed: int = 1) -> tuple[StepSample, ...]:
    rng = random.Random(seed)
    return tuple(
        StepSample(
            f"part {at}",
            model.step_s(lanes, running, parked, prefill, groups) * (1 + noise * rng.uniform(-1, 1)),
            lanes,
            running,
            parked,
            prefill,
            groups=groups,
        )
        for at, (lanes, running, parked, prefill, groups) in enumerate(PARTS)
    )


def test_without_noise_the_planted_model_comes_back() -> None:
    found = fit(Measurements(64, samples(PLANTED)))
    for name in STEP_FIELDS:
        assert getattr(found.model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert found.model.batch_tokens == 64
    assert found.worst_error < 1e-9


@given(
    st.floats(0.002, 0.1),
    st.floats(0.0, 0.02),
    st.floats(0.0, 2e-5),
    st.floats(0.0, 5e-6),
    st.floats(0.0, 0.02),
    st.floats(0.0, 0.01),
    st.integers(0, 1000),
)
def test_noisy_samples_give_steps_within_the_noise(
    base: float, lane: float, running: float, parked: float, prefill: float, group: float, seed: int
) -> None:
    """Single coefficients may trade against each other; what a step takes may not."""
    planted = EngineModel(base, lane, running, parked, prefill, group, batch_tokens=64)
    model = fit(Measurements(64, samples(planted, 0.03, seed))).model
    for name in STEP_FIELDS:
        assert getattr(model, name) >= 0
    for part in PARTS:
        assert model.step_s(*part) == pytest.approx(planted.step_s(*part), rel=0.09)


@given(st.lists(st.floats(0.001, 1.0), min_size=len(PARTS), max_size=len(PARTS)))
def test_no_coefficient_is_ever_negative(times: list[float]) -> None:
    """Whatever was measured; at worst there is no model."""
    measured = [replace(sample, step_s=at) for sample, at in zip(samples(PLANTED), times, strict=True)]
    try:
        found = fit(Measurements(64, tuple(measured)))
    except CalibrationError:
        return
    assert min(getattr(found.model, name) for name in STEP_FIELDS) >= 0


def test_least_squares_stays_at_the_bound_where_the_free_solution_is_negative() -> None:
    # Free: y = 3 - x. With x >= 0 as a coefficient, the best is the mean.
    assert least_squares([[1, 0], [1, 1], [1, 2]], [3, 2, 1]) == pytest.approx([2, 0])
    assert least_squares([[0, 0], [0, 0]], [1, 2]) == [0, 0]


def test_what_was_not_varied_is_left_out() -> None:
    plain = tuple(StepSample(str(n), 0.01 + 0.001 * n, n, 0.0) for n in (1, 4, 8))
    model = fit(Measurements(512, plain)).model
    assert (model.running_token_s, model.parked_token_s, model.prefill_token_s) == (0, 0, 0)
    assert model.step_s(8, 0, 0, 0) == pytest.approx(0.018)


def test_a_light_sample_counts_only_where_nothing_else_tells() -> None:
    """Another way through the engine, twice as fast as the planted one."""
    odd = StepSample("alone", 0.5 * PLANTED.step_s(0, 256, 0, 64), 0, 256.0, 0.0, 64.0, weight=0.001)
    heavy = samples(PLANTED)
    found = fit(Measurements(64, (*heavy, odd)))
    assert found.model.prefill_token_s == pytest.approx(PLANTED.prefill_token_s, rel=0.02)
    assert found.worst_error < 0.02
    assert found.errors[-1] > 0.9
    decode = tuple(sample for sample in heavy if not sample.prefill_tokens)
    alone = fit(Measurements(64, (*decode, odd)))
    assert alone.model.step_s(0, 256, 0, 64) == pytest.approx(odd.step_s, rel=0.01)


def test_copies_and_delays() -> None:
    measured = Measurements(
        64,
        samples(PLANTED),
        saves=(CopySample(1000, 0.010), CopySample(2000, 0.020)),
        restores=(CopySample(1000, 0.004), CopySample(0, 0.0)),
        flushes_s=(0.001, 0.003, 0.5),
        calls_s=(-0.010, 0.020),
    )
    model = fit(measured).model
    assert model.save_token_s == pytest.approx(1e-5)
    assert model.restore_token_s == pytest.approx(4e-6)
    assert model.flush_s == 0.003, "the median: one that just missed a boundary is another step's"
    assert model.call_s == model.control_s == pytest.approx(0.002)


def test_behind_a_service_steps_are_those_of_all_lanes_there() -> None:
    alone = fit(Measurements(64, samples(PLANTED), flushes_s=(0.001,)))
    step = StepSample("service", 1.1 * PLANTED.step_s(8, 400, 0, 0), 8, 400)
    behind = alone.behind_service((0.013, 0.009), (0.004, 0.006), step)
    assert behind.step_factor == pytest.approx(1.1)
    assert behind.model.step_s(8, 400, 0, 0) == pytest.approx(step.step_s)
    assert behind.model.control_s == pytest.approx(0.010)
    assert behind.model.call_s == pytest.approx(0.004)
    assert behind.worst_error < 1e-9, "the fit is as good as it was"
    slower = behind.with_steps(1.05)
    assert slower.model.step_s(8, 400, 0, 0) == pytest.approx(1.05 * step.step_s)
    assert slower.model.control_s == behind.model.control_s
    assert slower.worst_error < 1e-9, "it is another machine, not another fit"
    late = alone.behind_service((0.003,), (0.010,), step)
    assert late.model.call_s == late.model.control_s, "a part is never more than the whole"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (samples(PLANTED)[:1], "at least 2"),
        ((*samples(PLANTED), StepSample("odd", 0.0, 1, 1)), "odd: a step of 0 s"),
        ((*samples(PLANTED), StepSample("odd", float("nan"), 1, 1)), "odd: a step of nan s"),
        ((*samples(PLANTED), StepSample("odd", 1.0, 1, -1)), "odd"),
        (tuple(StepSample(str(n), n / 100, 0, float(n)) for n in (1, 2, 3)), "take no time"),
    ],
)
def test_impossible_measurements_are_one_line(steps: tuple[StepSample, ...], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        fit(Measurements(64, steps))


def test_the_file_has_the_model_first_and_is_read_again(tmp_path: Path) -> None:
    found = fit(Measurements(64, samples(PLANTED, 0.02)), {"model": "tiny"})
    path = tmp_path / "engine.json"
    path.write_bytes(to_json(found))
    assert read_model(path) == found.model
    document = orjson.loads(path.read_bytes())
    assert list(document) == ["model", "how", "measured", "errors"]
    assert document["how"]["model"] == "tiny"
    assert len(document["errors"]) == len(PARTS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not the file of a calibration"),
        ('{"model": {}}', "not the file of a calibration"),
        ('{"model": {"base_step_s": 0}}', "not the file of a calibration"),
        ('{"model": {"base_step_s": "1"}}', "model.base_step_s is '1'"),
        ('{"model": {"base_step_s": -1}}', "model.base_step_s is -1"),
        ('{"model": {"base_step_s": 1, "warp": 9}}', "model.warp is not a figure"),
        ('{"model": {"base_step_s": 1, "batch_tokens": 1.5}}', "model.batch_tokens is 1.5"),
    ],
)
def test_another_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(CalibrationError) as found:
        read_model(path)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
