"""The resume bench's figures."""

from __future__ import annotations

import math

import pytest

from benchmarks.resume import Costs, RawSwap, ResumeSettings, ServiceSwap, report


def raw(save_s: float) -> RawSwap:
    return RawSwap(save_s, 9.0, 0.001, 0.03, 0.001, 0.02, 1)


def through_service(resume_s: float) -> ServiceSwap:
    return ServiceSwap(0.05, 0.03, 0.04, resume_s, 1, 1024)


def test_costs_are_the_save_and_what_the_resume_waits_for() -> None:
    costs = Costs(recompute_s=[9.0, 10.0, 11.0], raw=[raw(0.05)], swapped=[through_service(0.075)])
    assert costs.raw_times == pytest.approx(10 / 0.1)
    assert costs.swapped_times == pytest.approx(10 / 0.125)
    assert costs.part_of_raw == pytest.approx(0.8)
    assert costs.data()["samples"]["swapped"] == [through_service(0.075)]


def test_what_was_not_measured_is_a_dash() -> None:
    costs = Costs()
    assert math.isnan(costs.part_of_raw)
    made = report(ResumeSettings(), {500: costs, 2000: costs})
    assert {cell for row in made.rows for cell in row[1:]} == {"-"}
    assert all(len(row) == 3 for row in made.rows)


def test_lengths_fit_into_a_slot() -> None:
    fitting = ResumeSettings(lengths=(500, 20_000, 30_000)).fitting
    assert len(fitting) == 2
    assert fitting[1] < ResumeSettings().shape.slot_context
    assert ResumeSettings().quick().fitting == (500, 2000)
