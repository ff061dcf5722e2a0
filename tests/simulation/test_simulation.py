"""What holds of every run, whatever is simulated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.scheduler import Command, Event, SwapPolicy
from orchestrator.simulation import (
    REFERENCE,
    Arrival,
    BackendSetup,
    ClosedLoop,
    Fixed,
    Poisson,
    Recorded,
    Sessions,
    Setup,
    Several,
    SimulationError,
    TurnRow,
    simulate,
    sketch,
)
from orchestrator.simulation.event_log import encode, replay
from orchestrator.turns import Tier
from tests.simulation.setups import (
    CLASSES,
    MODEL,
    one_step_at_a_time,
    policy,
    rows_of,
    setup,
    setups,
    turn,
)

RANDOMLY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def busy(**changes: object) -> Setup:
    """Sessions that outgrow the pool, and somebody who asks: all three tiers."""
    swap = SwapPolicy(250_000, token_bytes=100)
    backend = BackendSetup("one", policy(3, 2, first_slots=1, kv_budget_tokens=4000, swap=swap), MODEL)
    load = Several(
        (
            Sessions(
                "background-agent",
                "background",
                agents=5,
                system_tokens=200,
                question=Fixed(100),
                result=Fixed(150),
                output=Fixed(90),
                tool_s=0.5,
                rest_s=2.0,
                context_tokens=1500,
            ),
            Sessions(
                "normal-agent", "normal", agents=3, system_tokens=300, output=Fixed(60), context_tokens=1800
            ),
            Poisson("foreground", "foreground", 0.5, Fixed(20), Fixed(200)),
        )
    )
    return replace(Setup((backend,), CLASSES, load), **changes)  # type: ignore[arg-type]


def files_of(folder: Path, what: Setup) -> tuple[bytes, bytes]:
    rows, events = folder / "rows", folder / "events"
    with rows.open("wb") as row_file, events.open("wb") as event_file:

        def log(now: float, backend: str, event: Event, commands: tuple[Command, ...]) -> None:
            event_file.write(encode(now, backend, event, commands) + b"\n")

        def sink(row: TurnRow) -> None:
            row_file.write(repr(astuple(row)).encode() + b"\n")

        simulate(what, seed=3, until_s=120, sink=sink, log=log)
    return rows.read_bytes(), events.read_bytes()


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    once = files_of(first, busy())
    assert once == files_of(second, busy())
    assert len(once[1]) > 100_000


def test_another_seed_makes_another_run() -> None:
    assert rows_of(busy(), seed=1, until_s=60)[0] != rows_of(busy(), seed=2, until_s=60)[0]


def test_the_events_replay_to_the_same_commands(tmp_path: Path) -> None:
    what = busy()
    _, events = files_of(tmp_path, what)
    lines = events.splitlines()
    policies = {backend.name: backend.policy for backend in what.backends}
    assert replay(lines, policies) == len(lines)
    other = {name: replace(each, preemption=False) for name, each in policies.items()}
    with pytest.raises(SimulationError, match=r"line .* led to"):
        replay(lines, other)


def test_every_tier_is_used_and_memory_is_never_exceeded() -> None:
    _, outcome = rows_of(busy(), until_s=400)
    figures = outcome.backends["one"]
    resumes = [each.resumes for each in outcome.classes.values()]
    assert all(sum(each[tier] for each in resumes) for tier in Tier), resumes
    assert figures.saves and figures.restores and figures.swapped
    assert 0 < figures.most_kv_tokens <= 4000
    assert 0 < figures.most_swap_bytes <= 250_000


def check(what: Setup, rows: list[TurnRow]) -> None:
    """Every arrival ends once, with what it asked for."""
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        if row.refused:
            assert row.wait_s is None and row.generated_tokens == 0
            continue
        assert row.generated_tokens == row.output_tokens
        assert row.wait_s is not None and row.first_token_s is not None
        assert 0 <= row.wait_s < row.first_token_s <= row.end_s - row.arrival_s + 1e-9
        resumes = row.resident_resumes + row.swapped_resumes + row.dropped_resumes
        assert resumes == row.preemptions
        assert row.lost_tokens <= row.preemptions


@given(setups(), st.integers(0, 3))
@RANDOMLY
def test_every_arrival_ends_once_with_the_tokens_it_asked_for(what: Setup, seed: int) -> None:
    rows, outcome = rows_of(what, seed=seed, until_turns=40)
    check(what, rows)
    assert outcome.arrived == outcome.ended == len(rows) == 40
    generated = sum(row.generated_tokens + row.lost_tokens for row in rows)
    assert sum(each.generated for each in outcome.backends.values()) == generated
    for backend in what.backends:
        figures = outcome.backends[backend.name]
        assert figures.most_lanes <= backend.policy.decode_slots
        assert figures.most_batch_tokens <= backend.model.batch_tokens
        if backend.policy.kv_budget_tokens is not None:
            assert figures.most_kv_tokens <= backend.policy.kv_budget_tokens
        if backend.policy.swap is not None:
            assert figures.most_swap_bytes <= backend.policy.swap.budget_bytes


@given(setups(), st.integers(0, 3))
@RANDOMLY
def test_rows_of_steps_are_as_their_steps_one_by_one(what: Setup, seed: int) -> None:
    at_once, outcome = rows_of(what, seed=seed, until_turns=25)
    stepped, stepped_outcome = rows_of(one_step_at_a_time(what), seed=seed, until_turns=25)
    assert outcome.backends.keys() == stepped_outcome.backends.keys()
    for name, figures in outcome.backends.items():
        assert figures.steps == stepped_outcome.backends[name].steps
        assert figures.busy_s == pytest.approx(stepped_outcome.backends[name].busy_s, rel=1e-9)
    for left, right in zip(at_once, stepped, strict=True):
        for one, other in zip(astuple(left), astuple(right), strict=True):
            same = one == other or one == pytest.approx(other, rel=1e-9, abs=1e-9)
            assert same, (left, right)


@given(setups(), st.integers(0, 3))
@settings(parent=RANDOMLY, max_examples=25)
def test_random_runs_replay(what: Setup, seed: int) -> None:
    lines: list[bytes] = []
    simulate(what, seed=seed, until_turns=30, log=lambda *entry: lines.append(encode(*entry)))
    policies = {backend.name: backend.policy for backend in what.backends}
    assert replay(lines, policies) == len(lines)


def test_backends_share_the_queue() -> None:
    backends = tuple(BackendSetup(f"gpu-{number}", policy(2, 1), MODEL) for number in range(3))
    load = ClosedLoop("background", "background", clients=12, output=Fixed(40))
    rows, outcome = rows_of(Setup(backends, CLASSES, load), until_turns=120)
    check(Setup(backends, CLASSES, load), rows)
    shares = {
        backend.name: sum(row.backend == backend.name for row in rows) / len(rows) for backend in backends
    }
    assert all(0.2 < share < 0.5 for share in shares.values()), shares
    assert any(each.claims_lost for each in outcome.backends.values())


def test_twice_the_engines_do_twice_the_work() -> None:
    load = ClosedLoop("background", "background", clients=16, output=Fixed(40))

    def rate(count: int) -> float:
        backends = tuple(BackendSetup(f"gpu-{number}", policy(4, 1), MODEL) for number in range(count))
        return simulate(Setup(backends, CLASSES, load), seed=1, until_s=300, warmup_s=10).tokens_per_s()

    assert rate(2) == pytest.approx(2 * rate(1), rel=0.02)


def test_with_a_spare_slot_the_highest_class_waits_for_one_boundary() -> None:
    """A step with a whole batch, the flush, and the service's own time; nothing of other turns' lengths."""
    backend = BackendSetup("one", policy(8, 4, first_slots=2), replace(MODEL, batch_tokens=16))
    load = Several(
        (
            ClosedLoop("background", "background", clients=12, output=REFERENCE, prompt=Fixed(60)),
            ClosedLoop("foreground", "foreground", output=Fixed(15), prompt=Fixed(3), think_s=3.0),
        )
    )
    _, outcome = rows_of(Setup((backend,), CLASSES, load), until_s=1500)
    wait = outcome.classes["foreground"].wait
    step_s = backend.model.step_s(8, 8 * 2700, 4 * 2700, 16)
    assert wait.count > 200
    assert wait.largest <= step_s + backend.model.flush_s + backend.model.control_s + 1e-9
    assert wait.smallest >= backend.model.control_s


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: setup(turn(5, "normal", 1), turn(4, "normal", 1)), "ordered by time"),
        (lambda: setup(Arrival(0, "a", "nobody", 1, 1)), "'nobody', which is not among"),
    ],
)
def test_impossible_workloads_are_one_line(what: Callable[[], Setup], message: str) -> None:
    with pytest.raises(SimulationError, match=message) as caught:
        rows_of(what())
    assert "\n" not in str(caught.value)


def test_a_turn_that_fits_nowhere_is_refused() -> None:
    small = BackendSetup("small", policy(kv_budget_tokens=100), MODEL)
    short = BackendSetup("short", policy(), MODEL, slot_tokens=150)
    turns = Recorded((turn(0, "normal", 20, prompt=90), turn(1, "normal", 20, prompt=140)))
    rows, outcome = rows_of(Setup((small, short), CLASSES, turns))
    assert [(row.backend, row.refused) for row in rows] == [("short", False), (None, True)]
    assert outcome.refused == 1


def test_more_than_may_wait_are_refused() -> None:
    what = setup(*(turn(0, "normal", 10) for _ in range(6)), policy=policy(1, 0), max_waiting=2)
    rows, _ = rows_of(what)
    # While they all come at once the first is still being told of its place.
    assert [row.refused for row in rows].count(True) in (3, 4)


def test_memory_does_not_grow_with_time() -> None:
    """But for the sketches' buckets, of which there are as many as the range of the values needs."""
    held: list[int] = []

    def note(now: float, ended: int) -> None:
        if now in (300.0, 1200.0):
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, sketch.__file__)])
            held.append(sum(each.size for each in snapshot.statistics("filename")))

    tracemalloc.start()
    try:
        simulate(busy(), seed=1, until_s=1260, on_time=note)
    finally:
        tracemalloc.stop()
    assert len(held) == 2
    # Some 2,000 turns later: prefixes and the journal have grown to their bounds, and nothing else has.
    assert held[1] < held[0] + 120_000


def test_what_was_made_is_counted_in_the_measured_time_only() -> None:
    what = setup(turn(0, "background", 100))
    _, outcome = rows_of(what, until_s=10.0, warmup_s=5.0)
    assert outcome.measured_s == 5.0
    assert outcome.classes["background"].measured_tokens == 20
    assert outcome.classes["background"].turns == 0
