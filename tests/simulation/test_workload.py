"""Who asks when."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest

from agents.workload import Lengths, client_turns
from agents.workload import Workload as AgentWorkload
from orchestrator.simulation import (
    REFERENCE,
    Arrival,
    Bursty,
    ClosedLoop,
    Demo,
    Fixed,
    Mixture,
    Poisson,
    Sessions,
    Several,
    Workload,
)

ALL: list[Workload] = [
    ClosedLoop("a", "normal", 2, think_s=1.0, start_s=5.0),
    Poisson("a", "normal", 2.0),
    Bursty("a", "normal", 5.0, 3.0, 6.0),
    Sessions("a", "normal", 2),
    Demo("a", "normal", 2, AgentWorkload(Lengths.heavy(50), 1.0), 30, 100),
]


def turns_of(workload: Workload, seed: int = 1, count: int = 50) -> list[list[Arrival]]:
    """Each source's turns, ended a second after they came."""
    found = []
    for source in workload.sources(seed):
        now, turns = 0.0, []
        for _ in range(count):
            arrival = source.next(now)
            assert arrival is not None
            turns.append(arrival)
            now = arrival.at_s + (1.0 if source.closed else 0.0)
        found.append(turns)
    return found


@pytest.mark.parametrize("workload", ALL, ids=lambda each: type(each).__name__)
def test_a_seed_says_everything(workload: Workload) -> None:
    assert turns_of(workload) == turns_of(workload)
    assert turns_of(workload) != turns_of(workload, seed=2)
    for turns in turns_of(workload):
        assert all(left.at_s <= right.at_s for left, right in pairwise(turns))


def test_the_reference_mixture_is_as_it_is_written_down() -> None:
    rng = random.Random(1)
    drawn = sorted(REFERENCE.draw(rng) for _ in range(200_000))
    assert fmean(drawn) == pytest.approx(354, rel=0.01)
    assert drawn[100_000] == pytest.approx(147, rel=0.03)
    assert drawn[180_000] == pytest.approx(770, rel=0.15)
    assert 2000 < drawn[198_000] < 2700
    assert drawn[-1] <= 3000
    assert sum(tokens >= 1500 for tokens in drawn) / len(drawn) == pytest.approx(0.09, abs=0.003)


def test_the_shares_of_a_mixture_add_up() -> None:
    with pytest.raises(ValueError, match="add up"):
        Mixture(((0.5, Fixed(1)), (0.4, Fixed(2))))


def test_poisson_arrivals_come_at_their_rate_and_at_random() -> None:
    (turns,) = turns_of(Poisson("a", "normal", 4.0), count=20_000)
    gaps = [right.at_s - left.at_s for left, right in pairwise(turns)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 * 0.25**2, rel=0.08)


def test_bursts_have_the_mean_of_their_spans_and_more_spread() -> None:
    (turns,) = turns_of(Bursty("a", "normal", 5.0, 4.0, 12.0), count=20_000)
    gaps = [right.at_s - left.at_s for left, right in pairwise(turns)]
    assert fmean(gaps) == pytest.approx(1 / (5.0 * 4.0 / 16.0), rel=0.1)
    assert fmean(gap * gap for gap in gaps) > 5 * fmean(gaps) ** 2


def test_a_client_thinks_after_each_reply() -> None:
    (turns,) = turns_of(ClosedLoop("a", "normal", think_s=3.0), count=5000)
    pauses = [right.at_s - left.at_s - 1.0 for left, right in pairwise(turns)]
    assert min(pauses) >= 0
    assert fmean(pauses) == pytest.approx(3.0, rel=0.05)


def test_a_session_grows_and_is_cut_back() -> None:
    plan = Sessions(
        "a",
        "normal",
        system_tokens=100,
        question=Fixed(20),
        result=Fixed(30),
        output=Fixed(10),
        context_tokens=400,
    )
    (turns,) = turns_of(plan, count=200)
    assert turns[0].prompt_tokens == 120 and turns[0].shared_tokens == 0
    grown = cut = 0
    for left, right in pairwise(turns):
        assert right.prompt_tokens + right.output_tokens <= 400
        if right.prompt_tokens > left.prompt_tokens:
            grown += 1
            assert right.shared_tokens == left.prompt_tokens + left.output_tokens - 1
            assert right.prompt_tokens - right.shared_tokens - 1 in (20, 30)
        else:
            cut += 1
            assert right.shared_tokens == 99
    assert grown > 5 * cut > 0


def test_the_demos_turns_are_those_of_the_demo() -> None:
    plan = AgentWorkload(Lengths.heavy(60), 2.0, "Review:")
    (turns, _) = turns_of(Demo("a", "normal", 2, plan, prompt_tokens=30, most_tokens=100), seed=4)
    planned = client_turns(plan, 4, "a-0")
    assert [each.output_tokens for each in turns] == [min(100, next(planned).max_tokens) for _ in turns]
    assert max(each.output_tokens for each in turns) == 100


def test_sources_do_not_disturb_each_other() -> None:
    together = turns_of(Several((ClosedLoop("a", "normal"), Poisson("b", "normal", 1.0))))
    assert together == turns_of(ClosedLoop("a", "normal")) + turns_of(Poisson("b", "normal", 1.0))


@pytest.mark.parametrize(
    "values", [(-1.0, 1, 1, 0), (float("nan"), 1, 1, 0), (0.0, 0, 1, 0), (0.0, 1, 0, 0), (0.0, 5, 1, 6)]
)
def test_an_impossible_turn_is_refused(values: tuple[float, int, int, int]) -> None:
    at_s, prompt, output, shared = values
    with pytest.raises(ValueError, match=r"arrival|turn of|shared"):
        Arrival(at_s, "a", "normal", prompt, output, shared)
