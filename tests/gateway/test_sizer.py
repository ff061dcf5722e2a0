"""Sizes: when a bound is enough, when the engine is asked, what the limits become."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol import EngineRefused, EngineUnavailable, KvLayout
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.sizer import prompt_bound, size_turn, uncounted_size
from orchestrator.gateway.validate import Ask, parse_ask
from orchestrator.turns import TurnSize
from tests.gateway.harness import FakeEngines, make_info


def ask(text: str = "hello", **fields: Any) -> Ask:
    return parse_ask("chat", orjson.dumps({"messages": [{"role": "user", "content": text}], **fields}))


async def size(engines: FakeEngines, request: Ask, most: int = 500) -> TurnSize:
    return await size_turn(engines, "default", "chat", request, most)


async def test_a_small_turn_costs_no_call() -> None:
    engines, request = FakeEngines(), ask(max_tokens=40)
    assert await size(engines, request) == TurnSize(len(request.raw) + 16 + 64, 40, exact=False)
    assert not engines.counted


@pytest.mark.parametrize(("asked", "limit"), [(None, 500), (40, 40), (500, 500), (10**9, 500)])
async def test_the_agents_limit_holds(asked: int | None, limit: int) -> None:
    assert (await size(FakeEngines(), ask(max_tokens=asked))).max_tokens == limit


async def test_a_large_turn_is_counted() -> None:
    engines = FakeEngines(count=900)
    assert await size(engines, ask("x" * 3000)) == TurnSize(900, 500, exact=True)
    assert engines.counted == [("default", "chat")]


async def test_the_context_limits_the_reply() -> None:
    assert await size(FakeEngines(count=2000), ask("x" * 3000)) == TurnSize(2000, 48, exact=True)


@pytest.mark.parametrize("count", [2048, 5000])
async def test_a_prompt_must_leave_room(count: int) -> None:
    with pytest.raises(ApiError) as caught:
        await size(FakeEngines(count=count), ask("x" * 3000))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert f"{count:,}" in caught.value.message and "2,048" in caught.value.message


async def test_a_shared_pool_is_shared_fairly() -> None:
    engines = FakeEngines({"default": make_info(4096, 4, KvLayout.UNIFIED)}, count=700)
    # It fits the context, but not a fourth of the pool.
    assert (await size(engines, ask("x" * 800))).exact
    assert not (await size(engines, ask("x" * 200))).exact


async def test_no_engine_yet_is_the_dispatchers_business() -> None:
    engines = FakeEngines({})
    assert not (await size(engines, ask("x" * 100_000))).exact
    assert not engines.counted


async def test_an_engine_that_does_not_count() -> None:
    engines = FakeEngines(count=EngineUnavailable("busy"))
    assert await size(engines, ask("x" * 3000)) == TurnSize(1548, 500, exact=False)


async def test_an_engine_that_refuses() -> None:
    engines = FakeEngines(count=EngineRefused(500, "template"))
    with pytest.raises(ApiError) as caught:
        await size(engines, ask("x" * 3000))
    assert caught.value.status == 400


async def test_images_have_no_bound() -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://a/b"}}]
    engines = FakeEngines(count=800)
    request = parse_ask("chat", orjson.dumps({"messages": [{"content": content}]}))
    assert await size(engines, request) == TurnSize(800, 500, exact=True)
    assert not (await size(engines, ask("x", tools=[{"type": "function"}]))).exact


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(2, 10**5))
def test_an_uncounted_turn_never_exceeds_the_context(bound: int, limit: int, context: int) -> None:
    found = uncounted_size(make_info(context), bound, limit)
    assert found.kv_tokens <= context
    assert found.max_tokens >= 1 and found.prompt_tokens >= 0


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_the_bound_covers_the_bytes_of_all_text(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    raw = orjson.dumps({"messages": messages})
    assert prompt_bound({"messages": messages}, len(raw)) >= sum(len(text.encode()) for text in texts)
