"""What fits: the published figures of one machine, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.kv_shape import KvShape
from orchestrator.planner.plan import Load, Memory, Plan, columns

GIB = 1 << 30
K = 1024
#: 2 (K and V) x 8 KV heads x 128 x 40 layers.
ELEMENTS = 81_920
CARD = Memory(usable=int(15.5 * GIB), weights=int(5.2 * GIB), buffers=int(0.8 * GIB))
SESSION = Load(running=8, context=6 * K, long_context=16 * K)


def plan(bytes_per_element: float) -> Plan:
    return Plan("any", KvShape(int(ELEMENTS * bytes_per_element)), CARD, SESSION)


def test_published_figures_with_16_bits() -> None:
    f16 = plan(2)
    assert f16.kv.token_bytes == 163_840
    assert f16.memory.kv_budget / GIB == pytest.approx(9.5)
    assert round(f16.turn / GIB, 2) == 0.94
    assert f16.running / GIB == 7.5
    assert f16.headroom / GIB == pytest.approx(2.0)
    assert f16.average_paused == 2
    assert f16.long_left < 0


def test_published_figures_with_8_bits() -> None:
    q8 = plan(1)
    assert round(q8.turn / GIB, 2) == 0.47
    assert q8.running / GIB == 3.75
    assert q8.headroom / GIB == pytest.approx(5.75)
    assert q8.average_paused == 12
    assert q8.long_left / GIB == pytest.approx(4.5)


def test_the_published_long_turn_counts_a_thousand_mib_as_a_gib() -> None:
    """16k tokens are 2,560 MiB with 16 bits: 2.5 GiB here, published as 2.56."""
    assert plan(2).long_turn / GIB == 2.5
    assert plan(2).long_turn / (1 << 20) / 1000 == 2.56
    assert -plan(2).long_left / GIB == pytest.approx(0.5)


def test_scales_of_the_blocks_cost_one_turn_in_twelve() -> None:
    q8_0 = plan(34 / 32)
    assert q8_0.average_paused == 11
    assert q8_0.long_left / GIB == pytest.approx(4.1875)


def test_the_published_chart() -> None:
    counted = columns(plan(2))
    totals = [column.total / GIB for column in counted]
    assert totals == pytest.approx([13.5, 14.4375, 15.375, 16.3125, 17.25, 16.0])
    over = [column.over / GIB for column in counted]
    assert over == pytest.approx([0, 0, 0, 0.8125, 1.75, 0.5])
    assert [column.label for column in counted] == ["0", "1", "2", "3", "4", "one of 16k"]


SHAPES = st.builds(
    KvShape,
    token_bytes=st.integers(1, 1 << 20),
    window_token_bytes=st.integers(0, 1 << 20),
    window_tokens=st.integers(0, 5000),
    fixed_bytes=st.integers(0, 1 << 30),
)
PLANS = st.builds(
    Plan,
    cache_type=st.just("any"),
    kv=SHAPES,
    memory=st.builds(
        Memory,
        usable=st.integers(1, 1 << 36),
        weights=st.integers(0, 1 << 35),
        buffers=st.integers(0, 1 << 32),
    ),
    load=st.builds(
        Load,
        running=st.integers(1, 64),
        context=st.integers(1, 100_000),
        long_context=st.integers(1, 100_000),
    ),
)


@given(PLANS)
def test_what_is_said_to_fit_fits_and_one_more_does_not(plan: Plan) -> None:
    used = plan.memory.fixed + plan.running
    if plan.average_paused:
        assert used + plan.average_paused * plan.turn <= plan.memory.usable
    if plan.headroom >= 0:
        assert used + (plan.average_paused + 1) * plan.turn > plan.memory.usable
    assert (plan.long_left >= 0) == (used + plan.long_turn <= plan.memory.usable)
    longest = plan.longest_paused
    assert longest is not None
    if longest:
        assert used + plan.kv.bytes(longest) <= plan.memory.usable
    assert plan.long_left < 0 or longest >= plan.load.long_context


@given(PLANS)
def test_columns_are_the_sum_of_their_parts(plan: Plan) -> None:
    for column in columns(plan):
        assert sum(column.within) + column.over == column.total
        assert column.total - column.over <= plan.memory.usable
        assert min(column.within) >= 0
        for shown, whole in zip(
            column.within, (column.weights, column.buffers, column.running, column.paused), strict=True
        ):
            assert shown <= whole


def test_length_without_a_price_has_no_longest_turn() -> None:
    state = Plan("any", KvShape(0, fixed_bytes=GIB), CARD, SESSION)
    assert state.longest_paused is None
    assert state.average_paused == 1
