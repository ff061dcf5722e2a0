"""Sweeps: what is read, what is simulated, and that the same sweep gives the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.workload import Lengths
from agents.workload import Workload as AgentWorkload
from orchestrator.scheduler import Policy, SwapPolicy
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.setup import BackendSetup
from orchestrator.simulation.sweep import (
    COLUMNS,
    Background,
    Base,
    PartOfCapacity,
    SweepRow,
    TimesTheClients,
    csv_text,
    run_sweep,
)
from orchestrator.simulation.sweep_chart import axis, draw_sweep, series
from orchestrator.simulation.sweep_grid import MAX_RUNS, Point, SweepError, parse_sweep
from orchestrator.simulation.workload import Demo, Fixed, Poisson

PRIORITIES = {"foreground": 100, "background": 20}
MODEL = EngineModel(0.01, lane_s=0.001, running_token_s=1e-6, save_token_s=1e-5)


def base(*, kv_bytes: int | None = None) -> Base:
    return Base(
        BackendSetup("one", Policy(4, 6, first_slots=1, priorities=(20, 100)), MODEL),
        PRIORITIES,
        PartOfCapacity(
            Poisson("editor", "foreground", 0.5, Fixed(5), Fixed(20)),
            Background("tester", "background", Fixed(100), 100.0, Fixed(50), 50.0),
        ),
        kv_bytes=kv_bytes,
        token_bytes={"f16": 1000, "q8_0": 531},
    )


def rows(text: str, until_s: float = 60.0) -> list[SweepRow]:
    return list(run_sweep(parse_sweep(text), base(), until_s=until_s))


# Reading ------------------------------------------------------------------------------------------


def test_lists_ranges_and_switches() -> None:
    sweep = parse_sweep("slots=4,8,12 load=0.5..0.95:0.15 preemption=on,off replications=3")
    assert sweep.values == {
        "slots": (4, 8, 12),
        "load": (0.5, 0.65, 0.8, 0.95),
        "preemption": (True, False),
    }
    assert (sweep.replications, sweep.runs) == (3, 3 * 4 * 2 * 3)
    assert sweep.changing == ("slots", "preemption", "load")


def test_points_come_in_a_fixed_order_whatever_the_order_of_the_words() -> None:
    one, other = parse_sweep("load=0.5,0.9 slots=4,8"), parse_sweep("slots=4,8 load=0.5,0.9")
    assert list(one.points()) == list(other.points())
    assert list(one.points())[:2] == [Point(slots=4, load=0.5), Point(slots=4, load=0.9)]


def test_ranges_of_whole_numbers_and_mixed_with_single_ones() -> None:
    assert parse_sweep("slots=1,4..12:4 min_run=0,1.5 aging=30").values == {
        "slots": (1, 4, 8, 12),
        "min_run_s": (0.0, 1.5),
        "aging_s": (30.0,),
    }


@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 9))
def test_a_range_has_both_ends_without_rounding(first: int, steps: int, step: int) -> None:
    """In hundredths, which floats do not add up."""
    text = f"load={first / 100}..{(first + steps * step) / 100}:{step / 100}"
    loads = parse_sweep(text).values["load"]
    assert loads == tuple((first + number * step) / 100 for number in range(steps + 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing to vary"),
        ("replications=5", "nothing to vary"),
        ("slots", "'slots' is not one of"),
        ("lanes=4", "'lanes=4' is not one of slots, spare"),
        ("slots=", "slots has an empty value"),
        ("slots=4,,8", "slots has an empty value"),
        ("slots=0", "slots is '0'"),
        ("slots=four", "slots is 'four'"),
        ("slots=4.5", "slots is '4.5'"),
        ("slots=4,4", "slots has a value twice"),
        ("slots=4 slots=8", "slots is given twice"),
        ("load=nan", "load is 'nan'"),
        ("load=0.5..0.1:0.1", "a range goes up"),
        ("load=0.1..0.5:0", "a range goes up"),
        ("load=0.1..x", "not a range"),
        ("load=0.1..nan", "not a range"),
        ("load=0..1:0.0001", "more than 100 values"),
        ("preemption=yes", "preemption is 'yes'"),
        ("kv=q8/0", "kv is 'q8/0'"),
        ("slots=4 replications=1,2", "replications is one number"),
        ("slots=4 replications=0", "replications is '0'"),
        ("slots=1..100 load=0.1..1:0.01", f"at most {MAX_RUNS:,}"),
    ],
)
def test_a_wrong_sweep_is_one_line(text: str, said: str) -> None:
    with pytest.raises(SweepError) as found:
        parse_sweep(text)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


# Points -------------------------------------------------------------------------------------------


def test_a_point_changes_what_it_names_and_nothing_else() -> None:
    setup = base().setup(Point(slots=8, preemption=False, aging_s=5.0))
    policy = setup.backends[0].policy
    assert (policy.decode_slots, policy.engine_slots, policy.first_slots) == (8, 10, 1)
    assert (policy.preemption, policy.aging_s, policy.min_run_s) == (False, 5.0, 0.0)
    assert setup.backends[0].model == MODEL
    assert base().setup(Point(spare=4)).backends[0].policy.first_slots == 2


def test_kv_precision_sets_budget_and_traffic() -> None:
    setup = base(kv_bytes=1_000_000).setup(Point(kv="q8_0")).backends[0]
    assert setup.policy.kv_budget_tokens == 1_000_000 // 531
    assert setup.model.running_token_s == pytest.approx(0.531e-6)
    assert setup.model.save_token_s == pytest.approx(0.531e-5)
    assert setup.model.base_step_s == MODEL.base_step_s


def test_kv_precision_of_files() -> None:
    grown = base(kv_bytes=1_000_000)
    swap = SwapPolicy(10_000_000, token_bytes=1000)
    policy = Policy(4, 6, swap=swap, priorities=(20, 100))
    grown = replace(grown, backend=BackendSetup("one", policy, MODEL))
    found = grown.setup(Point(kv="q8_0")).backends[0].policy.swap
    assert found is not None
    assert found.token_bytes == 531


@pytest.mark.parametrize(("kv_bytes", "kv"), [(None, "q8_0"), (1000, "q2_k")])
def test_an_unknown_kv_precision_is_one_line(kv_bytes: int | None, kv: str) -> None:
    with pytest.raises(SweepError, match="kv"):
        base(kv_bytes=kv_bytes).setup(Point(kv=kv))


def test_the_load_is_a_part_of_what_the_slots_can_do() -> None:
    """At 0.5 the lanes are half busy: the rest of the capacity is the foreground's and nobody's."""
    (row,) = rows("load=0.5", 2000.0)
    # Four lanes with 50 + 50 tokens each, and prompts that cost nothing.
    capacity = 4 / MODEL.step_s(4, 400, 0, 0)
    assert row.background_tokens_per_s == pytest.approx(0.5 * capacity, rel=0.1)


@pytest.mark.parametrize(("load", "clients"), [(1.0, 4), (0.1, 1), (0.5, 2), (1.4, 6), (2.0, 8)])
def test_the_load_of_a_swarm_is_its_clients(load: float, clients: int) -> None:
    turns = AgentWorkload(Lengths.fixed(20))
    agents = (
        Demo("editor", "foreground", 1, turns, 10, 100),
        Demo("worker", "background", 4, turns, 10, 100),
    )
    workload = TimesTheClients(agents, "foreground")(load, base().backend)
    assert len(workload.sources(seed=1)) == 1 + clients


# Runs ---------------------------------------------------------------------------------------------


def test_the_same_sweep_gives_the_same_bytes() -> None:
    text = "slots=2,4 preemption=on,off load=0.6,0.9 replications=2"
    once, twice = csv_text(rows(text)), csv_text(rows(text))
    assert once == twice
    lines = once.splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) == 1 + 16
    assert lines[1].startswith("2,2,on,0.6,f16,0,50,60,,1,")
    assert all(len(line.split(",")) == len(COLUMNS) for line in lines)
    assert "\r" not in once


def test_points_are_asked_the_same_and_replications_are_not() -> None:
    on, off, on_again, off_again = sorted(
        rows("preemption=on,off load=0.9 replications=2"), key=lambda row: (row.seed, not row.preemption)
    )
    assert on.foreground_turns == off.foreground_turns
    assert on_again.foreground_turns == off_again.foreground_turns
    assert (on.wait_p50_s, on.background_turns) != (on_again.wait_p50_s, on_again.background_turns)


def test_preemption_shortens_the_foregrounds_wait() -> None:
    on, off = rows("preemption=on,off load=1.2", 200.0)
    assert on.wait_p99_s < 0.05 < off.wait_p99_s
    assert (on.preemptions > 0, off.preemptions) == (True, 0)


def test_progress_is_told_before_each_run() -> None:
    told: list[tuple[int, str]] = []
    sweep = parse_sweep("slots=2,4 preemption=on replications=2")
    found = run_sweep(sweep, base(), until_s=5.0, advance=lambda done, what: told.append((done, what)))
    assert len(list(found)) == 4
    assert told == [
        (0, "slots=2 preemption=on"),
        (1, "slots=2 preemption=on"),
        (2, "slots=4 preemption=on"),
        (3, "slots=4 preemption=on"),
    ]


# Chart --------------------------------------------------------------------------------------------


def test_series_are_lines_over_the_most_varied_number() -> None:
    found = rows("load=0.3,0.6,0.9 preemption=on,off replications=2", 20.0)
    assert axis(found) == "load"
    lines = series(found, "background_tokens_per_s")
    assert [line.label for line in lines] == ["preemption on", "preemption off"]
    for line in lines:
        assert line.x == (0.3, 0.6, 0.9)
        assert all(a <= b <= c for a, b, c in zip(line.least, line.mean, line.most, strict=True))


def test_the_chart_is_the_same_file_twice(tmp_path: Path) -> None:
    found = rows("load=0.3,0.9 preemption=on,off", 20.0)
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        draw_sweep(found, path, "a $5 sweep")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<svg" in paths[0].read_bytes()
    draw_sweep(found, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="does not end in"):
        draw_sweep([], tmp_path / "a.pdf")
    with pytest.raises(SweepError, match="no rows"):
        draw_sweep([], tmp_path / "a.svg")
