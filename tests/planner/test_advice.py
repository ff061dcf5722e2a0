"""Settings that follow from a plan, rule by rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.kv_shape import KvShape
from orchestrator.planner.advice import Advice, advise
from orchestrator.planner.plan import Load, Memory, Plan
from tests.planner.test_plan import CARD, ELEMENTS, GIB, PLANS, SESSION, K

BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


def plans(*types: str, memory: Memory = CARD, load: Load = SESSION) -> list[Plan]:
    return [Plan(name, KvShape(int(ELEMENTS * BYTES[name])), memory, load) for name in types]


def advice(*types: str, memory: Memory = CARD, load: Load = SESSION, trained: int | None = None) -> Advice:
    found = advise(plans(*types, memory=memory, load=load), trained)
    assert found is not None
    return found


def test_the_first_type_that_holds_everything() -> None:
    assert advice("f16", "q8_0", "q4_0").plan.cache_type == "q8_0"
    assert advice("q4_0", "q8_0").plan.cache_type == "q4_0"
    assert advice("f16", "q8_0").remark is None


def test_else_the_first_that_holds_one_paused_turn() -> None:
    found = advice("f16")
    assert found.plan.cache_type == "f16"
    assert found.remark == "the long paused turn does not fit: it is swapped out or recomputed"


def test_else_the_smallest() -> None:
    small = Memory(int(10.2 * GIB), CARD.weights, CARD.buffers)
    found = advice("f16", "q8_0", memory=small)
    assert found.plan.cache_type == "q8_0"
    assert found.remark == "no paused turn fits beside the running ones: each is swapped out or recomputed"
    smaller = Memory(8 * GIB, CARD.weights, CARD.buffers)
    found = advice("f16", "q8_0", memory=smaller)
    assert found.decode_slots == 2 * GIB // found.plan.turn == 4
    assert found.remark == "the running turns do not fit: fewer run at once"


def test_a_place_for_each_paused_turn_that_fits() -> None:
    assert (advice("f16").decode_slots, advice("f16").engine_slots) == (8, 10)
    assert advice("q8_0").engine_slots == 16, "as many paused as running ones, though 11 would fit"


def test_split_where_each_share_holds_the_long_turn() -> None:
    short = Load(running=4, context=2 * K, long_context=5 * K)
    found = advice("f16", load=short)
    assert (found.layout, found.engine_slots) == ("split", 8)
    assert found.slot_context == found.context // 8 == 7680, "9.5 GiB / 8 / 160 KiB, down to 256"
    assert advice("f16").layout == "unified"


def test_unified_has_the_tokens_of_the_budget() -> None:
    found = advice("f16")
    assert found.context == 62_208, "9.5 GiB / 160 KiB, down to 256"
    assert found.slot_context == 62_208


def test_no_slot_is_longer_than_the_training_context() -> None:
    found = advice("q4_0", trained=8192)
    assert (found.layout, found.slot_context) == ("split", 8192)
    assert found.context == 8192 * 16


def test_swap_holds_all_running_turns_and_the_long_one() -> None:
    assert advice("f16").swap_bytes == 10 * GIB
    assert advice("q8_0").swap_bytes == int(5.5 * GIB), "5.31 up to 256 MiB"


def test_no_room_for_two_turns() -> None:
    assert advise(plans("f16", memory=Memory(6 * GIB, CARD.weights, CARD.buffers))) is None


@given(PLANS, st.one_of(st.none(), st.integers(1, 1 << 20)))
def test_advice_keeps_to_the_budget(plan: Plan, trained: int | None) -> None:
    found = advise([plan], trained)
    if found is None:
        return
    assert 1 <= found.decode_slots < found.engine_slots
    assert found.decode_slots <= plan.load.running
    budget = plan.memory.kv_budget
    slots, share = found.engine_slots, found.context // found.engine_slots
    assert found.context % 256 == 0
    assert found.context >= 256 * slots, "less is no context that an engine takes"
    if found.layout == "split":
        assert found.context == share * slots
        assert slots * plan.kv.bytes(share) <= budget
        assert found.slot_context >= min(plan.load.long_context, trained or found.slot_context)
    # However the tokens are spread over the slots, they take no more than the budget.
    else:
        for spread in ([share] * slots, [found.context - slots + 1, *[1] * (slots - 1)]):
            assert sum(map(plan.kv.bytes, spread)) <= budget
    assert trained is None or found.slot_context <= trained
    assert found.swap_bytes >= plan.running + plan.long_turn
