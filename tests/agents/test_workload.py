"""The turn mixture has the figures that its docstring states, and replays."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents import workload
from agents.workload import Lengths, TurnPlan, Workload, chat_body, client_turns, filler, gaps


def plans(seed: int, client: int | str, count: int, given: Workload | None = None) -> list[TurnPlan]:
    return list(islice(client_turns(given or Workload(), seed, client), count))


def test_the_mixture_has_the_stated_figures() -> None:
    lengths = Lengths()
    median, p90, p99 = (lengths.quantile(share) for share in (0.5, 0.9, 0.99))
    stated = f"| {lengths.mean:.0f} | {median} | {p90} | {p99} | {lengths.high} | 0.7% |"
    assert stated in (workload.__doc__ or "")
    assert lengths.quantile(0.992) < lengths.high == lengths.quantile(0.994)


def test_drawn_lengths_have_the_mean_and_the_tail() -> None:
    rng = random.Random(354)
    lengths = Lengths()
    drawn = sorted(lengths.draw(rng) for _ in range(100_000))
    assert sum(drawn) / len(drawn) == pytest.approx(354, rel=0.01)
    assert drawn[50_000] == pytest.approx(240, rel=0.02)
    assert drawn[99_000] == pytest.approx(1949, rel=0.05)
    assert drawn[0] >= 8
    assert drawn[-1] == 2200


@pytest.mark.parametrize("mean", [1.0, 3.5, 24.0, 354.0, 1000.0, 5000.0])
def test_another_mean_keeps_the_shape(mean: float) -> None:
    rng = random.Random(1)
    lengths = Lengths.heavy(mean)
    drawn = [lengths.draw(rng) for _ in range(50_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.04)
    assert min(drawn) >= 1
    assert max(drawn) <= max(4.0, 6.3 * mean)


@given(st.floats(1, 1e5))
def test_fixed_lengths_are_the_mean(mean: float) -> None:
    assert Lengths.fixed(mean).draw(random.Random(0)) == round(mean)


@given(st.floats(1, 1e5), st.integers())
def test_every_length_is_within_its_limits(mean: float, seed: int) -> None:
    lengths = Lengths.heavy(mean)
    assert lengths.low <= lengths.draw(random.Random(seed)) <= lengths.high


@pytest.mark.parametrize(
    "arguments", [(8.0,), (2200.0,), (354.0, -0.1), (354.0, 0.9, 0), (354.0, 0.9, 400), (10.0, 0.0, 20)]
)
def test_impossible_lengths_are_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="no such lengths"):
        Lengths(*arguments)  # type: ignore[arg-type]


def test_a_client_replays_whatever_the_others_do() -> None:
    together = [client_turns(Workload(), 7, client) for client in range(3)]
    mixed = [next(together[client]) for client in (0, 1, 1, 2, 1, 0)]
    assert [mixed[1], mixed[2], mixed[4]] == plans(7, 1, 3)


def test_seeds_and_clients_differ() -> None:
    names: list[tuple[int, int | str]] = [(1, 11), (11, 1), (1, 1), (2, 1), (1, "f")]
    sequences = [tuple(plan.max_tokens for plan in plans(seed, client, 8)) for seed, client in names]
    assert len(set(sequences)) == len(names)


def test_the_sequence_is_the_same_on_every_platform() -> None:
    assert [plan.max_tokens for plan in plans(1, 0, 5)] == [37, 189, 311, 140, 511]


def test_prompts_are_short_distinct_and_begin_alike() -> None:
    prompts = [plan.prompt for client in range(12) for plan in plans(1, client, 50)]
    assert len(set(prompts)) == len(prompts)
    assert all(prompt.startswith("Review: ") and len(prompt) < 40 for prompt in prompts)


def test_think_times_have_their_mean_and_default_to_none() -> None:
    thinking = plans(3, 0, 20_000, Workload(think_s=1.5))
    assert sum(plan.think_s for plan in thinking) / len(thinking) == pytest.approx(1.5, rel=0.03)
    assert {plan.think_s for plan in plans(3, 0, 100)} == {0.0}


def test_gaps_have_their_mean_and_replay() -> None:
    first = list(islice(gaps(0.5, 1, "f"), 20_000))
    assert first == list(islice(gaps(0.5, 1, "f"), 20_000))
    assert sum(first) / len(first) == pytest.approx(0.5, rel=0.03)


def test_filler_is_distinct_from_its_first_word() -> None:
    assert filler(100, "a1").split()[1:] != filler(100, "a2").split()[1:]
    assert filler(100, "a1") == filler(100, "a1")
    assert len(filler(3000, "a1").split()) == 3001


def test_only_a_bench_generates_past_the_end_of_the_text() -> None:
    plan = TurnPlan("Review: 0.0", 12)
    assert "ignore_eos" not in chat_body(plan)
    body = chat_body(plan, exact_length=True)
    assert body["ignore_eos"] is True
    assert (body["max_tokens"], body["stream"], body["temperature"]) == (12, True, 0)
    assert body["messages"][-1] == {"role": "user", "content": "Review: 0.0"}
