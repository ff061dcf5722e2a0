"""Sizes: when a bound is enough, when the engine is asked, what the limits become."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.kv_shape import KvShape
from backends.protocol import EngineInfo, EngineRefused, EngineUnavailable, KvLayout
from orchestrator.gateway import sizer
from orchestrator.gateway.dialects import ChatCompletions
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.sizer import prompt_bound, size_turn
from orchestrator.gateway.validate import Ask, chat_ask
from orchestrator.turns import TurnSize
from tests.gateway.harness import FakeEngines, make_info


def ask(text: str = "hello", **fields: Any) -> Ask:
    return chat_ask(orjson.dumps({"messages": [{"role": "user", "content": text}], **fields}))


async def size(engines: FakeEngines, request: Ask, most: int = 500) -> TurnSize:
    return await size_turn(engines, "default", ChatCompletions(), request, most)


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


async def test_a_turn_waits_for_an_engine_to_be_known() -> None:
    """Sized without its numbers, it could exceed the KV budget and would never be claimed."""
    engines, sizes = FakeEngines({}, count=900), []

    async def run() -> None:
        sizes.append(await size(engines, ask("x" * 3000)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert sizes == []
        engines.infos["default"] = replace(make_info(), kv_budget_tokens=1000)
    assert sizes == [TurnSize(900, 100, exact=True)]


async def test_an_engine_that_nobody_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizer, "ENGINE_BOUND_S", 0.05)
    with pytest.raises(ApiError) as caught:
        await size(FakeEngines({}), ask())
    assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")
    assert caught.value.headers == ((b"retry-after", b"1"),)


async def refusal(info: EngineInfo, count: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await size(FakeEngines({"default": info}, count), ask("x" * 3000))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "messages"
    return caught.value


async def test_a_prompt_must_leave_room() -> None:
    info = make_info(2048)
    engines = FakeEngines({"default": info}, count=2047)
    assert await size(engines, ask("x" * 3000)) == TurnSize(2047, 1, exact=True)
    assert (await refusal(info, 2048)).message == (
        "the prompt has 2,048 tokens and the reply needs at least 1: 2,049 tokens (0.2 MiB of KV), "
        "but the context of this model is 2,048 tokens (0.2 MiB of KV)"
    )


@pytest.mark.parametrize("layout", KvLayout)
async def test_the_budget_is_a_limit_too(layout: KvLayout) -> None:
    info = replace(make_info(2048, 4, layout), kv_budget_tokens=1000)
    engines = FakeEngines({"default": info}, count=900)
    assert await size(engines, ask("x" * 3000)) == TurnSize(900, 100, exact=True)
    engines.count = 999
    assert await size(engines, ask("x" * 3000)) == TurnSize(999, 1, exact=True)
    assert (await refusal(replace(info, kv=None), 1000)).message == (
        "the prompt has 1,000 tokens and the reply needs at least 1: 1,001 tokens, "
        "but the KV budget of this model's engine is 1,000 tokens"
    )


async def test_bytes_follow_the_shape_of_the_kv() -> None:
    shape = KvShape(token_bytes=1 << 20, window_token_bytes=1 << 20, window_tokens=10, fixed_bytes=5 << 20)
    message = (await refusal(replace(make_info(100), kv=shape), 5000)).message
    assert "5,001 tokens (5,016.0 MiB of KV)" in message
    assert "100 tokens (115.0 MiB of KV)" in message


async def test_a_shared_pool_is_shared_fairly() -> None:
    engines = FakeEngines({"default": make_info(4096, 4, KvLayout.UNIFIED)}, count=700)
    # It fits the context, but not a fourth of the pool.
    assert (await size(engines, ask("x" * 800))).exact
    assert not (await size(engines, ask("x" * 200))).exact


async def test_an_engine_that_does_not_count() -> None:
    engines = FakeEngines(count=EngineUnavailable("busy"))
    assert await size(engines, ask("x" * 3000)) == TurnSize(1548, 500, exact=False)
    engines.infos["default"] = replace(make_info(), kv_budget_tokens=600)
    assert await size(engines, ask("x" * 3000)) == TurnSize(100, 500, exact=False)
    engines.infos["default"] = replace(make_info(), kv_budget_tokens=0)
    with pytest.raises(ApiError):
        await size(engines, ask("x" * 3000))


async def test_an_engine_that_refuses() -> None:
    engines = FakeEngines(count=EngineRefused(500, "template"))
    with pytest.raises(ApiError) as caught:
        await size(engines, ask("x" * 3000))
    assert caught.value.status == 400


async def test_images_have_no_bound() -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://a/b"}}]
    engines = FakeEngines(count=800)
    request = chat_ask(orjson.dumps({"messages": [{"content": content}]}))
    assert await size(engines, request) == TurnSize(800, 500, exact=True)
    assert not (await size(engines, ask("x", tools=[{"type": "function"}]))).exact


ENGINES = st.builds(
    lambda context, budget, slots, layout: replace(
        make_info(context, slots, layout), kv_budget_tokens=budget
    ),
    *(st.integers(1, 5000), st.integers(0, 20_000), st.integers(1, 16), st.sampled_from(KvLayout)),
)


@settings(deadline=None, max_examples=300)
@given(ENGINES, st.integers(0, 6000), st.integers(1, 6000), st.integers(0, 6000), st.booleans())
async def test_refused_only_and_always_what_cannot_fit(
    info: EngineInfo, count: int, limit: int, padding: int, counts: bool
) -> None:
    """Whichever way a turn is sized: by its bound, by the engine, or by its bound for want of the engine."""
    engines = FakeEngines({"default": info}, count if counts else EngineUnavailable("busy"))
    most = min(info.slot_context, info.kv_budget_tokens)
    try:
        found = await size(engines, ask("x" * padding), limit)
    except ApiError as error:
        assert error.code == "context_length_exceeded"
        assert f"{most:,} tokens" in error.message
        assert (count if counts else 0) + 1 > most
    else:
        assert 1 <= found.max_tokens <= limit and found.prompt_tokens >= 0
        assert found.kv_tokens <= info.slot_context and found.kv_tokens <= info.kv_budget_tokens
        if found.exact:
            assert found == TurnSize(count, min(limit, most - count), exact=True)


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_the_bound_covers_the_bytes_of_all_text(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    raw = orjson.dumps({"messages": messages})
    assert prompt_bound({"messages": messages}, len(raw)) >= sum(len(text.encode()) for text in texts)
