"""What prompts share: against the naive count, and what an estimate of tokens may never do."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scheduler.prefix import Prefix, overlap, shared_tokens


@st.composite
def chains(draw: st.DrawFn) -> tuple[Prefix, Prefix]:
    """Two prompts' chains: the same up to somewhere, and never again after that, as checksums of all
    that went before are."""
    common = draw(st.lists(st.integers(0, 9), max_size=40))
    left = [100 + 2 * value for value in draw(st.lists(st.integers(0, 9), max_size=40))]
    right = [101 + 2 * value for value in draw(st.lists(st.integers(0, 9), max_size=40))]
    return (*common, *left), (*common, *right)


def naive(left: Prefix, right: Prefix) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@given(chains())
def test_overlap_is_the_naive_count(pair: tuple[Prefix, Prefix]) -> None:
    left, right = pair
    assert overlap(left, right) == naive(left, right) == overlap(right, left)


@pytest.mark.parametrize("length", range(20))
def test_overlap_at_every_place(length: int) -> None:
    whole = tuple(range(20))
    other = whole[:length] + tuple(range(100, 120 - length))
    assert overlap(whole, other) == length
    assert overlap(whole, whole[:length]) == length


@given(chains(), st.integers(0, 5000), st.integers(0, 5000))
def test_shared_tokens_are_between_nothing_and_all(
    pair: tuple[Prefix, Prefix], prompt_tokens: int, kv_tokens: int
) -> None:
    prompt, held = pair
    shared = shared_tokens(prompt, held, prompt_tokens, kv_tokens)
    assert 0 <= shared <= kv_tokens
    if not overlap(prompt, held):
        assert shared == 0
    elif prompt[: len(held)] == held:
        assert shared == kv_tokens
    else:
        assert shared <= prompt_tokens, "a prompt that left the held one cannot go on with its reply"


@given(
    held=st.lists(st.integers(0, 99), min_size=1, max_size=30).map(tuple),
    prompt_tokens=st.integers(0, 5000),
    reply_tokens=st.integers(0, 500),
)
def test_a_longer_common_beginning_never_shares_less(
    held: Prefix, prompt_tokens: int, reply_tokens: int
) -> None:
    kv_tokens = prompt_tokens + reply_tokens
    shared = [
        shared_tokens((*held[:blocks], -1), held, prompt_tokens, kv_tokens) for blocks in range(len(held) + 1)
    ]
    assert shared == sorted(shared)
    assert shared[0] == 0
    assert shared[-1] == kv_tokens


@given(chains(), st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_more_kv_never_shares_less(
    pair: tuple[Prefix, Prefix], prompt_tokens: int, kv_tokens: int, more: int
) -> None:
    prompt, held = pair
    assert shared_tokens(prompt, held, prompt_tokens, kv_tokens) <= shared_tokens(
        prompt, held, prompt_tokens, kv_tokens + more
    )


def test_in_proportion_to_the_blocks() -> None:
    held = (1, 2, 3, 4)
    assert shared_tokens((1, 2, 9), held, 400, 450) == 200
    assert shared_tokens((1, 2, 3, 4, 5), held, 400, 450) == 450
    assert shared_tokens((1, 2, 3), held, 400, 250) == 250, "what was evaluated of it so far"
    assert shared_tokens((), held, 400, 450) == shared_tokens(held, (), 400, 450) == 0
