"""Steps of one batch after another as a series, against adding them up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.engine_model import EngineModel, Steps, groups_of
from tests.simulation.setups import MODEL


def test_a_step_is_the_sum_of_its_parts() -> None:
    model = EngineModel(1.0, lane_s=0.1, running_token_s=0.01, parked_token_s=0.001, prefill_token_s=0.0001)
    assert model.step_s(0, 0, 0, 0) == 1.0
    assert model.step_s(2, 30, 400, 5000) == pytest.approx(1.0 + 0.2 + 0.3 + 0.4 + 0.5)
    assert replace(model, group_s=7.0).step_s(2, 0, 0, 0, groups=3) == pytest.approx(1.0 + 0.2 + 14.0)


@pytest.mark.parametrize(
    ("slots", "groups"),
    [([], 0), ([3], 1), ([0, 1, 2], 1), ([2, 0, 1], 1), ([0, 2, 4], 3), ([0, 1, 3, 7, 8], 3)],
)
def test_groups_of_adjacent_slots(slots: list[int], groups: int) -> None:
    assert groups_of(slots) == groups


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_step_s", -1.0), ("lane_s", math.nan), ("flush_s", math.inf), ("batch_tokens", 0)],
)
def test_an_impossible_figure_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(MODEL, **{field: value})  # type: ignore[arg-type]


def test_steps_that_take_no_time_are_refused() -> None:
    with pytest.raises(ValueError, match="no time"):
        EngineModel(0.0, running_token_s=1.0)


@given(st.floats(1e-4, 10.0), st.floats(0, 1e-2), st.integers(0, 5000))
def test_a_row_takes_as_long_as_its_steps(first_s: float, growth_s: float, count: int) -> None:
    steps = Steps(first_s, growth_s)
    one_by_one = math.fsum(first_s + growth_s * number for number in range(count))
    assert steps.take_s(count) == pytest.approx(one_by_one, rel=1e-9)


@given(st.floats(1e-4, 10.0), st.sampled_from([0.0, 1e-12, 1e-6, 1e-3]), st.floats(0, 1e4))
def test_what_is_done_is_over_and_the_next_is_not(first_s: float, growth_s: float, after_s: float) -> None:
    steps = Steps(first_s, growth_s)
    done = steps.done_at(after_s)
    assert steps.take_s(done) <= after_s < steps.take_s(done + 1)


def test_a_step_that_ends_now_is_done() -> None:
    steps = Steps(0.1, 0.003)
    for count in range(200):
        assert steps.done_at(steps.take_s(count)) == count
