"""Bytes and tokens of a sequence say the same."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backends.kv_shape import UNBOUNDED_TOKENS, KvShape

SHAPES = st.builds(
    KvShape,
    token_bytes=st.integers(0, 1 << 20),
    window_token_bytes=st.integers(0, 1 << 20),
    window_tokens=st.integers(0, 5000),
    fixed_bytes=st.integers(0, 1 << 30),
)
TOKENS = st.integers(0, 20_000)


def test_full_attention_is_a_product() -> None:
    shape = KvShape(23_040)
    assert shape.bytes(1000) == 23_040_000
    assert shape.tokens(23_040_000) == 1000
    assert shape.tokens(23_039_999) == 999


def test_window_layers_stop_growing() -> None:
    shape = KvShape(token_bytes=10, window_token_bytes=100, window_tokens=4)
    assert [shape.bytes(tokens) for tokens in (1, 4, 5, 10)] == [110, 440, 450, 500]
    assert [shape.tokens(n_bytes) for n_bytes in (109, 110, 439, 440, 449, 450, 500)] == [
        0,
        1,
        3,
        4,
        4,
        5,
        10,
    ]


def test_a_state_is_paid_with_the_first_token() -> None:
    shape = KvShape(token_bytes=10, fixed_bytes=1000)
    assert shape.bytes(0) == 0
    assert shape.bytes(1) == 1010
    assert shape.tokens(1009) == 0
    assert shape.tokens(1010) == 1


def test_length_without_a_price_is_unbounded() -> None:
    assert KvShape(0, fixed_bytes=1000).tokens(1000) == UNBOUNDED_TOKENS
    assert KvShape(0, fixed_bytes=1000).tokens(999) == 0
    assert KvShape(0, window_token_bytes=10, window_tokens=5).tokens(50) == UNBOUNDED_TOKENS
    assert KvShape(0, window_token_bytes=10, window_tokens=5).tokens(49) == 4


@pytest.mark.parametrize("name", ["token_bytes", "window_token_bytes", "window_tokens", "fixed_bytes"])
def test_negative_parts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0, not -1"):
        KvShape(**{"token_bytes": 1, name: -1})


@given(SHAPES, TOKENS)
def test_tokens_are_the_inverse_of_bytes(shape: KvShape, tokens: int) -> None:
    assume(shape.bytes(tokens + 1) > shape.bytes(tokens))
    assert shape.tokens(shape.bytes(tokens)) == tokens


@given(SHAPES, st.integers(-10, 1 << 40))
def test_tokens_fit_and_one_more_does_not(shape: KvShape, n_bytes: int) -> None:
    tokens = shape.tokens(n_bytes)
    assert tokens >= 0
    if tokens:
        assert shape.bytes(tokens) <= n_bytes
    if tokens < UNBOUNDED_TOKENS:
        assert shape.bytes(tokens + 1) > n_bytes


@given(SHAPES, TOKENS, TOKENS)
def test_more_tokens_never_take_less(shape: KvShape, one: int, other: int) -> None:
    assert shape.bytes(min(one, other)) <= shape.bytes(max(one, other))


@given(SHAPES, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_bytes_never_hold_less(shape: KvShape, one: int, other: int) -> None:
    assert shape.tokens(min(one, other)) <= shape.tokens(max(one, other))
