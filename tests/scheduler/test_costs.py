"""What is measured is found again, what nobody measured stays unknown, and no input breaks it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import astuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.scheduler import Costs
from orchestrator.scheduler.costs import FAILURES_TO_DEMOTE, MIN_PREFILL_TOKENS, MIN_SAMPLES
from orchestrator.turns import Tier

STEP_S = 0.025
#: Seconds: each step, for a lane, for a running token, for a parked one; the last as under unified KV.
PLANTED = (0.012, 0.0008, 0.4e-6, 0.9e-6)

TOKENS = st.integers(0, 2_000_000)
SECONDS = st.one_of(st.sampled_from([0.0, 1e-9, 1e9]), st.floats(0.0, 1e9, allow_nan=False))
ODD_SECONDS = st.one_of(SECONDS, st.sampled_from([-1.0, math.inf, -math.inf, math.nan]))


def samples(dice: random.Random, count: int) -> Iterator[tuple[int, int, int]]:
    """What may be in the batch and beside it: lanes come and go, tokens grow, turns are parked."""
    for _ in range(count):
        lanes = dice.randint(1, 8)
        yield lanes, sum(dice.randint(200, 6000) for _ in range(lanes)), 2000 * dice.randint(0, 5)


def planted(costs: Costs, dice: random.Random, count: int, noise: float) -> None:
    each, lane, running, parked = PLANTED
    for lanes, running_tokens, parked_tokens in samples(dice, count):
        step_s = each + lane * lanes + running * running_tokens + parked * parked_tokens
        costs.stepped(step_s * (1 + dice.gauss(0, noise)), lanes, running_tokens, parked_tokens)


# The parking tax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.001), (0.02, 0.05), (0.10, 0.20)])
@pytest.mark.parametrize("seed", range(5))
def test_the_planted_tax_is_found(seed: int, noise: float, off: float) -> None:
    costs = Costs()
    planted(costs, random.Random(seed), 2000, noise)
    assert costs.parked_step_s() == pytest.approx(PLANTED[3], rel=off)


def test_the_tax_follows_the_engine() -> None:
    costs = Costs()
    dice = random.Random(1)
    planted(costs, dice, 2000, 0.02)
    for lanes, running_tokens, parked_tokens in samples(dice, 4000):  # restarted with split KV
        costs.stepped(0.012 + 0.0008 * lanes + 0.4e-6 * running_tokens, lanes, running_tokens, parked_tokens)
    tax = costs.parked_step_s()
    assert tax is not None
    assert tax < 0.02 * PLANTED[3]


def test_a_tax_below_nothing_is_none() -> None:
    costs = Costs()
    for parked in range(200):
        costs.stepped(STEP_S - parked * 1e-5, 4, 8000, 100 * parked)
    assert costs.parked_step_s() == 0.0


def test_the_tax_is_unknown_before_enough_was_seen() -> None:
    costs = Costs()
    for number in range(MIN_SAMPLES):
        assert costs.parked_step_s() is None
        costs.stepped(STEP_S, 1 + number % 8, 1000 * (number % 7), 1000 * (number % 3))
    assert costs.parked_step_s() is not None


def test_the_tax_is_unknown_while_nothing_was_parked() -> None:
    costs = Costs()
    for lanes, running_tokens, _ in samples(random.Random(1), 500):
        costs.stepped(STEP_S, lanes, running_tokens, 0)
    assert costs.parked_step_s() is None
    assert not costs.rent_due(2000, 1e6)


@pytest.mark.parametrize("lanes_vary", [False, True])
def test_the_tax_is_unknown_while_what_is_parked_never_varied(lanes_vary: bool) -> None:
    """The same 8,000 tokens beside every step: nobody can tell their price from the step's own."""
    costs = Costs()
    for lanes, running_tokens, _ in samples(random.Random(1), 500):
        lanes = lanes if lanes_vary else 8
        costs.stepped(STEP_S + 0.4e-6 * running_tokens, lanes, running_tokens, 8000)
    assert costs.parked_step_s() is None


def test_what_else_never_varied_does_not_disturb_the_tax() -> None:
    costs = Costs()
    for number in range(500):
        costs.stepped(STEP_S + PLANTED[3] * 1000 * (number % 5), 8, 16000, 1000 * (number % 5))
    assert costs.parked_step_s() == pytest.approx(PLANTED[3], rel=0.01)


# No input breaks it --------------------------------------------------------------------------------------

MEASURED = st.one_of(
    st.tuples(st.just("prefilled"), TOKENS, ODD_SECONDS),
    st.tuples(st.just("saved"), TOKENS, ODD_SECONDS),
    st.tuples(st.just("restored"), TOKENS, ODD_SECONDS),
    st.tuples(st.just("resumed"), st.sampled_from(Tier), TOKENS, TOKENS),
    st.tuples(st.just("stepped"), ODD_SECONDS, st.integers(0, 512), TOKENS, TOKENS),
)


def feed(costs: Costs, measured: tuple[object, ...]) -> None:
    getattr(costs, str(measured[0]))(*measured[1:])


@given(
    st.lists(MEASURED, max_size=80),
    st.integers(0, 60),
    st.tuples(SECONDS, st.integers(0, 8), TOKENS, TOKENS),
    TOKENS,
    SECONDS,
)
@example([], 60, (0.0, 0, 0, 0), 0, 0.0)
@example([], 60, (0.0, 0, 0, 1), 1, 1.0)
@example([("stepped", math.nan, 1, 1, 1)], 60, (STEP_S, 8, 8000, 2000), 1000, 1.0)
@example([("saved", 5, math.inf)], 0, (STEP_S, 8, 8000, 2000), 1000, 1.0)
def test_nothing_but_plain_numbers_comes_out(
    measured: list[tuple[object, ...]],
    again: int,
    step: tuple[float, int, int, int],
    tokens: int,
    parked_s: float,
) -> None:
    costs = Costs()
    for one in measured:
        feed(costs, one)
    for _ in range(again):
        costs.stepped(*step)
    figures = [
        *astuple(costs.view()),
        costs.prefill_s(tokens),
        costs.swap_s(tokens),
        costs.swap_s(tokens, saved=True),
        costs.step_s(),
        *(costs.resume_s(tier, tokens) for tier in Tier),
    ]
    for figure in figures:
        assert figure is None or (math.isfinite(figure) and figure >= 0.0)
    assert costs.rent_due(tokens, parked_s) in (True, False)
    assert costs.swap_pays(tokens) in (True, False)


@given(st.lists(MEASURED, max_size=60))
def test_the_same_measurements_give_the_same_figures(measured: list[tuple[object, ...]]) -> None:
    once, twice = Costs(), Costs()
    for one in measured:
        feed(once, one)
        once.view()  # a look changes nothing
        feed(twice, one)
    assert once.view() == twice.view()


# Rates ---------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_it_was_measured() -> None:
    costs = Costs()
    assert set(astuple(costs.view())) == {None}
    assert costs.prefill_s(100) is costs.swap_s(100) is costs.swap_s(100, saved=True) is None
    assert [costs.resume_s(tier, 100) for tier in Tier] == [None, None, None]
    assert costs.step_s() == 0.0


def test_rates_are_smoothed_over_the_last_few() -> None:
    costs = Costs()
    costs.prefilled(1000, 4.0)
    assert costs.prefill_s(500) == pytest.approx(2.0)
    costs.prefilled(1000, 9.0)
    assert costs.prefill_s(500) == pytest.approx(2.5)
    for _ in range(40):
        costs.prefilled(1000, 9.0)
    assert costs.prefill_s(500) == pytest.approx(4.5, rel=0.01)


def test_a_few_tokens_say_nothing_of_the_prefill() -> None:
    costs = Costs()
    costs.prefilled(MIN_PREFILL_TOKENS - 1, 60.0)
    assert costs.prefill_s(100) is None
    costs.prefilled(MIN_PREFILL_TOKENS, 0.32)
    assert costs.prefill_s(100) == pytest.approx(1.0)


def test_resume_by_tier() -> None:
    costs = Costs()
    costs.stepped(STEP_S, 1, 1000, 0)
    assert costs.resume_s(Tier.RESIDENT, 2000) == pytest.approx(STEP_S)
    assert costs.resume_s(Tier.SWAPPED, 2000) is costs.resume_s(Tier.DROPPED, 2000) is None
    costs.prefilled(2000, 4.245)
    costs.saved(2000, 0.019)
    costs.restored(2000, 0.009)
    assert costs.resume_s(Tier.SWAPPED, 2000) == pytest.approx(0.009 + STEP_S), "it is saved already"
    assert costs.resume_s(Tier.DROPPED, 2000) == pytest.approx(4.245 + STEP_S)
    costs.resumed(Tier.RESIDENT, 2000, 1000)
    assert costs.resume_s(Tier.RESIDENT, 2000) == pytest.approx(4.245 / 2 + STEP_S)


# Tiers that do not work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.RESIDENT, Tier.SWAPPED])
def test_a_tier_works_until_it_did_not_twice_running(tier: Tier) -> None:
    costs = Costs()
    other = Tier.SWAPPED if tier is Tier.RESIDENT else Tier.RESIDENT
    assert costs.works(tier)
    costs.resumed(tier, 1000, 99)
    assert costs.works(tier)
    costs.resumed(tier, 1000, 100)
    costs.resumed(tier, 1000, 0)
    assert costs.works(tier), "one that worked lay between"
    costs.resumed(tier, 1000, 0)
    assert not costs.works(tier)
    assert costs.works(other)
    costs.resumed(tier, 1000, 999)
    assert costs.works(tier), "a resume that finds its KV is proof enough"


def test_a_recompute_always_works() -> None:
    costs = Costs()
    for _ in range(FAILURES_TO_DEMOTE + 1):
        costs.resumed(Tier.DROPPED, 1000, 0)
    assert costs.works(Tier.DROPPED)


def test_a_resume_without_kv_proves_nothing() -> None:
    costs = Costs()
    for _ in range(FAILURES_TO_DEMOTE + 1):
        costs.resumed(Tier.RESIDENT, 0, 0)
    assert costs.works(Tier.RESIDENT)
    assert costs.view().resident_reevaluated is None


# Choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "pays"),
    [
        ((), True),
        (("prefill",), True),
        (("save", "restore"), True),
        (("prefill", "save"), True),
        (("prefill", "save", "restore"), True),
        (("fast prefill", "save", "restore"), False),
        (("demoted",), False),
        (("prefill", "save", "restore", "demoted"), False),
    ],
)
def test_a_swap_pays_unless_known_not_to(known: tuple[str, ...], pays: bool) -> None:
    costs = Costs()
    for figure in known:
        match figure:
            case "prefill":
                costs.prefilled(1000, 2.0)
            case "fast prefill":
                costs.prefilled(1000, 0.010)
            case "save":
                costs.saved(1000, 0.010)
            case "restore":
                costs.restored(1000, 0.005)
            case _:
                for _ in range(FAILURES_TO_DEMOTE):
                    costs.resumed(Tier.SWAPPED, 1000, 0)
    assert costs.swap_pays(1000) is pays


def taxed(tax: float, save_s: float, restore_s: float) -> Costs:
    costs = Costs()
    for number in range(400):
        parked = 1000 * (number % 6)
        costs.stepped(STEP_S + tax * parked, 1 + number % 8, 2000 * (1 + number % 8), parked)
    for _ in range(100):  # of late, nothing is parked
        costs.stepped(STEP_S, 4, 8000, 0)
    costs.saved(1000, save_s * 1000)
    costs.restored(1000, restore_s * 1000)
    return costs


@pytest.mark.parametrize("tax", [1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("tokens", [100, 2000, 30_000])
@pytest.mark.parametrize("stays_s", [0.05, 0.5, 5.0, 50.0, 5000.0])
def test_rent_or_buy_costs_at_most_twice_what_hindsight_would(
    tax: float, tokens: int, stays_s: float
) -> None:
    """The rule is asked each step; what it pays is the rent so far and, once it switches, the swap."""
    costs = taxed(tax, 10e-6, 5e-6)
    swap_s = costs.swap_s(tokens)
    step_s = costs.step_s()
    assert swap_s is not None
    price_a_step = tax * tokens
    steps = int(stays_s / step_s)
    hindsight = min(steps * price_a_step, swap_s)
    due = next((n for n in range(1, steps + 1) if costs.rent_due(tokens, n * step_s)), None)
    paid = steps * price_a_step if due is None else due * price_a_step + swap_s
    # A step is the least that can be rented.
    assert paid <= 2.05 * hindsight + price_a_step


def test_no_rent_without_a_tax_or_a_price() -> None:
    assert not taxed(0.0, 1e-5, 5e-6).rent_due(10_000, 3600.0)
    unpriced = Costs()
    planted(unpriced, random.Random(1), 500, 0.0)
    assert not unpriced.rent_due(10_000, 1e9)
    unpriced.saved(1000, 0.01)
    assert not unpriced.rent_due(10_000, 1e9), "the way back has no price yet"
    unpriced.restored(1000, 0.005)
    assert unpriced.rent_due(10_000, 1e9)


def test_a_resume_of_next_to_nothing_says_nothing_of_its_tier() -> None:
    costs = Costs()
    for _ in range(5):
        costs.resumed(Tier.RESIDENT, held=1, cached=0)
        costs.resumed(Tier.RESIDENT, held=2, cached=0)
    assert costs.works(Tier.RESIDENT)
