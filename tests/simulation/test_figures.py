"""Quantiles in little memory, and how sure a mean is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.replications import interval
from orchestrator.simulation.sketch import ACCURACY, Sketch

VALUES = st.lists(st.one_of(st.just(0.0), st.floats(1e-8, 1e6)), min_size=1, max_size=300)


def sketch_of(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(VALUES, st.floats(0, 1))
def test_a_quantile_is_that_of_the_values(values: list[float], share: float) -> None:
    exact = sorted(values)[math.ceil((len(values) - 1) * share - 1e-9)]
    assert sketch_of(values).quantile(share) == pytest.approx(exact, rel=1.01 * ACCURACY)


def test_nothing_has_no_quantiles() -> None:
    assert math.isnan(Sketch().quantile(0.5))
    assert math.isnan(Sketch().mean)


def test_memory_is_bounded_by_the_range() -> None:
    sketch, rng = Sketch(), random.Random(1)
    for _ in range(100_000):
        sketch.add(rng.uniform(0.001, 10.0))
    assert len(sketch._buckets) < 10_000


def test_students_t() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    assert found.within(-0.5, 4.5) and not found.within(0, 4.5)


def test_one_run_is_no_interval() -> None:
    found = interval([1.0])
    assert found.mean == 1.0 and math.isnan(found.half)
    assert not found.within(0.0, 2.0)


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    rng = random.Random(7)
    held = sum(
        interval([rng.gauss(5.0, 1.0) for _ in range(5)]).within(-math.inf, math.inf)
        and abs(interval(sample).mean - 5.0) <= interval(sample).half
        for sample in ([rng.gauss(5.0, 1.0) for _ in range(5)] for _ in range(2000))
    )
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
