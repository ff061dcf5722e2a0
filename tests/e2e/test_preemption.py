"""Preempt and resume on the real engine, as a client sees it."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import anyio
import pytest

from tests.e2e.conftest import Streamed, Swarm, SwarmFactory

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

STORY = {"messages": [{"role": "user", "content": "Tell a long story about a fox."}], "ignore_eos": True}


def said(prompt: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **more}


async def cut_at(swarm: Swarm, body: dict[str, Any], positions: list[int], **options: Any) -> Streamed:
    """Run a turn and pause it by the operator's command whenever one of `positions` is reached."""
    seen = Streamed()
    wanted = list(positions)
    reached = anyio.Event()

    def watch(now: Streamed) -> None:
        if wanted and now.chunks >= wanted[0]:
            reached.set()

    async def operate() -> None:
        nonlocal reached
        while wanted:
            await reached.wait()
            paused = seen.marks.count("paused")
            await swarm.http.post(f"/swarm/turns/{seen.id}/preempt")
            with anyio.fail_after(30):
                while seen.marks.count("paused") == paused:
                    if seen.finish_reason:
                        return
                    await anyio.sleep(0.005)
            wanted.pop(0)
            while wanted and wanted[0] <= seen.chunks:
                wanted.pop(0)
            reached = anyio.Event()
            await swarm.http.post(f"/swarm/turns/{seen.id}/resume")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operate)
        await swarm.stream(body, seen=seen, on_chunk=watch, **options)
        tasks.cancel_scope.cancel()
    return seen


async def test_a_greedy_turn_cut_at_20_random_tokens_equals_the_uninterrupted_one(
    swarm: SwarmFactory,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    positions = sorted(random.Random(seed).sample(range(3, 240), 20))
    body = {**STORY, "max_tokens": 250}
    async with swarm() as service:
        whole = await service.stream(body)
        cut = await cut_at(service, body, positions)
        timeline = await service.timeline(cut.id)
    resumes = [line for line in timeline if line["event"] == "resumed"]
    assert cut.text == whole.text
    assert len(resumes) >= 15, "cuts that fall on neighbouring tokens may merge, but not most of them"
    assert max(line["tokens_reevaluated"] for line in resumes) <= 2
    assert cut.usage is not None
    assert cut.usage["completion_tokens"] == 250
    assert cut.finish_reason == "length"


async def test_a_foreground_turn_takes_the_slot_of_a_background_turn_that_goes_on_later(
    swarm: SwarmFactory,
) -> None:
    body = {**STORY, "max_tokens": 120}
    async with swarm(decode_slots=1) as service:
        whole = await service.stream(body)
        seen = Streamed()
        running = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: service.stream(
                    body, seen=seen, on_chunk=lambda s: running.set() if s.chunks > 10 else None
                )
            )
            await running.wait()
            urgent = await service.stream(said("Hi", max_tokens=4), agent="editor")
        timeline = await service.timeline(seen.id)
        counters = (await service.http.get("/swarm/state")).json()["counters"]
    assert seen.text == whole.text
    assert [mark for mark in seen.marks if mark != "keep-alive"] == ["started", "paused", "resumed"]
    assert [line["by"] for line in timeline if line["event"] == "paused"] == [urgent.id]
    assert counters["preemptions"] == 1
    assert counters["resumes"] == 1


async def test_without_preemption_the_foreground_turn_waits(swarm: SwarmFactory) -> None:
    async with swarm(decode_slots=1, preemption=False) as service:
        seen = Streamed()
        running = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: service.stream(
                    {**STORY, "max_tokens": 60}, seen=seen, on_chunk=lambda s: running.set()
                )
            )
            await running.wait()
            await service.stream(said("Hi", max_tokens=4), agent="editor")
            assert seen.finish_reason == "length"
    assert "paused" not in seen.marks


async def test_equals_do_not_preempt_each_other(swarm: SwarmFactory) -> None:
    async with swarm(decode_slots=1) as service:
        async with anyio.create_task_group() as tasks:
            turns = [Streamed() for _ in range(3)]
            for turn in turns:
                tasks.start_soon(partial(service.stream, {**STORY, "max_tokens": 20}, seen=turn))
        assert all("paused" not in turn.marks for turn in turns)
        assert {turn.finish_reason for turn in turns} == {"length"}


async def test_multibyte_text_survives_cuts_at_every_few_tokens(swarm: SwarmFactory) -> None:
    body = said(
        "Repeat after me: 你好世界 🙂 Ünïcödé — ελληνικά, 日本語。 Again:", max_tokens=90, ignore_eos=True
    )
    async with swarm() as service:
        whole = await service.stream(body)
        cut = await cut_at(service, body, list(range(2, 80, 4)))
    assert cut.text == whole.text
    assert cut.usage == {
        **(whole.usage or {}),
        "prompt_tokens_details": (cut.usage or {})["prompt_tokens_details"],
    }


async def test_a_stop_string_that_a_cut_falls_into_is_still_found(swarm: SwarmFactory) -> None:
    async with swarm() as service:
        whole = await service.stream({**STORY, "max_tokens": 60})
        middle = whole.text[len(whole.text) // 2 :][:24]
        body = {**STORY, "max_tokens": 60, "stop": [middle]}
        stopped = await service.stream(body)
        cut = await cut_at(service, body, list(range(2, 60, 2)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert cut.text == stopped.text
    assert cut.finish_reason == "stop"


async def test_a_json_schema_turn_stays_whole_json(swarm: SwarmFactory) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    body = said(
        "Describe a person as JSON.",
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    async with swarm() as service:
        cut = await cut_at(service, body, list(range(2, 40, 3)))
    assert cut.finish_reason == "stop"
    assert set(json.loads(cut.text)) == {"name", "age"}
    assert "paused" in cut.marks


async def test_a_client_that_leaves_frees_its_slot(swarm: SwarmFactory) -> None:
    async with swarm(decode_slots=1) as service:
        seen = Streamed()
        with anyio.CancelScope() as leave:
            await service.stream(
                {**STORY, "max_tokens": 1500},
                seen=seen,
                on_chunk=lambda s: leave.cancel() if s.chunks > 5 else None,
            )
        record = await service.until(seen.id, "cancelled")
        again = await service.stream(said("Hi", max_tokens=3))
    assert record["tokens_generated"] < 100
    assert again.finish_reason == "length"


async def test_a_reply_in_one_piece_counts_right_after_preemptions(swarm: SwarmFactory) -> None:
    async with swarm(decode_slots=1) as service:
        replies: list[dict[str, Any]] = []

        async def whole() -> None:
            reply = await service.http.post(
                "/v1/chat/completions",
                json={**STORY, "max_tokens": 80, "temperature": 0},
                headers={"X-Swarm-Agent": "worker"},
            )
            replies.append(reply.json())

        await whole()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(whole)
            for _ in range(3):
                await anyio.sleep(0.2)
                await service.stream(said("Hi", max_tokens=2), agent="editor")
    first, second = replies
    assert second["choices"] == first["choices"]
    assert second["usage"]["completion_tokens"] == 80


async def test_bad_input_leaves_nothing_in_redis_or_in_a_slot(swarm: SwarmFactory, redis: Any) -> None:
    async with swarm() as service:
        await service.stream(said("Hi", max_tokens=2))
        before = set(await redis.keys("swarm:*:turn:*"))
        post = service.http.post
        chat = "/v1/chat/completions"
        good = said("Hi")["messages"]
        long = "word " * 30_000
        replies = {
            "malformed": await post(chat, content=b"{"),
            "unknown model": await post(chat, json={"model": "nope", "messages": good}),
            "unknown agent": await post(chat, json={"messages": good}, headers={"X-Swarm-Agent": "nobody"}),
            "negative": await post(chat, json={"messages": good, "max_tokens": -5}),
            "over the context": await post(chat, json=said(long)),
            "huge": await post(chat, content=b'{"messages": "' + b"x" * 10_000_000 + b'"}'),
        }
        after = set(await redis.keys("swarm:*:turn:*"))
        state = (await service.http.get("/swarm/state")).json()
    statuses = {name: reply.status_code for name, reply in replies.items()}
    assert statuses == {
        "malformed": 400,
        "unknown model": 404,
        "unknown agent": 401,
        "negative": 400,
        "over the context": 400,
        "huge": 413,
    }
    for reply in replies.values():
        assert set(reply.json()["error"]) >= {"message", "type", "code"}
    assert after == before
    assert all(slot["turn"] is None for slot in state["backends"][0]["slots"])
