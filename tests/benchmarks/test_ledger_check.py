"""Which slots of a sample are compared, and what counts as a mismatch."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ledger_check import LedgerTruth

BYTES = 100


def entry(state: str, kv_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "turn": None,
        "agent": "a",
        "preemptions": None,
        "tokens": None,
        "kv_tokens": kv_tokens,
        "kv_bytes": kv_tokens * BYTES,
    } | more


def held(tokens: int | None, *, processing: bool = False, decoded: int = 0) -> dict[str, Any]:
    slot: dict[str, Any] = {"is_processing": processing, "next_token": [{"n_decoded": decoded}]}
    return slot if tokens is None else slot | {"n_prompt_tokens": tokens}


def state(slot: dict[str, Any], charged: int = 500, budget: int = 1000) -> dict[str, Any]:
    kv = {
        "budget_tokens": budget,
        "charged_tokens": charged,
        "owners": {"running": charged},
        "bytes_per_token": BYTES,
    }
    return {"slots": [slot], "kv": kv}


def sample(one: dict[str, Any], engine: dict[str, Any], two: dict[str, Any]) -> LedgerTruth:
    truth = LedgerTruth()
    truth.add(state(one), [engine], state(two))
    return truth


@pytest.mark.parametrize("kind", ["paused", "idle"])
def test_a_slot_that_does_not_run_holds_what_the_account_says(kind: str) -> None:
    same = entry(kind, 300)
    assert (sample(same, held(300), same).still, sample(same, held(300), same).mismatches) == (1, 0)
    assert sample(same, held(301), same).mismatches == 1
    assert sample(same, held(None), same).mismatches == 1


def test_an_engine_that_tells_no_tokens_of_an_empty_slot_agrees() -> None:
    empty = entry("empty", 0, agent=None)
    assert (sample(empty, held(None), empty).still, sample(empty, held(None), empty).mismatches) == (1, 0)


@pytest.mark.parametrize(("tokens", "wrong"), [(298, 1), (299, 0), (305, 0), (310, 0), (311, 1)])
def test_a_running_slot_lies_between_the_states(tokens: int, wrong: int) -> None:
    one, two = entry("running", 300, turn="t", tokens=5), entry("running", 310, turn="t", tokens=15)
    truth = sample(one, held(tokens, processing=True, decoded=3), two)
    assert (truth.running, truth.mismatches) == (1, wrong)


def test_a_prompt_under_way_is_not_compared() -> None:
    one = entry("running", 300, turn="t", tokens=0)
    truth = sample(one, held(64, processing=True), one)
    assert (truth.moving, truth.compared, truth.mismatches) == (1, 0, 0)


def test_slots_that_changed_hands_are_not_compared() -> None:
    one = entry("paused", 300, turn="t")
    for two in (entry("paused", 300, turn="u"), entry("idle", 300), entry("paused", 310, turn="t")):
        assert sample(one, held(7), two).moving == 1
    assert sample(one, held(7, processing=True), one).moving == 1


def test_what_may_be_left_is_an_upper_bound() -> None:
    left = entry("idle", 300, agent=None)
    assert (sample(left, held(299), left).bounded, sample(left, held(299), left).mismatches) == (1, 0)
    assert sample(left, held(301), left).mismatches == 1


def test_bytes_and_owners_add_up() -> None:
    wrong = entry("idle", 300) | {"kv_bytes": 1}
    assert sample(wrong, held(300), wrong).mismatches == 1
    truth = LedgerTruth()
    account = state(entry("idle", 300))
    account["kv"]["owners"] = {"running": 1}
    truth.add(account, [held(300)], account)
    assert truth.first_mismatches[0]["what"].startswith("owners")


@pytest.mark.parametrize(("charged", "tokens", "over"), [(1000, 1000, 0), (1001, 0, 1), (0, 1001, 1)])
def test_nothing_may_pass_the_budget(charged: int, tokens: int, over: int) -> None:
    truth = LedgerTruth()
    account = state(entry("idle", tokens), charged=charged)
    truth.add(account, [held(tokens)], account)
    assert truth.over_budget == over
    assert (truth.most_charged_tokens, truth.most_held_tokens) == (charged, tokens)
