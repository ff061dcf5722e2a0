"""The ``anthropic`` package against the whole service on the simulated engine, cut in a tool call too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson
import pytest
from anthropic import (
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
)
from anthropic.types import Message
from redis.asyncio import Redis

from backends.simulated import ScriptedReply, SimulatedConfig, SimulatedEngine, TimingProfile, serve_simulated
from tests.e2e.conftest import Swarm, serve_swarm, swarm_config

pytestmark = pytest.mark.keys_without_ttl("swarm:{*}:*")

INPUT = {"path": "a/b.py", "edits": [{"line": n, "text": f"text of line {n}: é"} for n in range(12)]}
TEXT = orjson.dumps(INPUT).decode()
TOOL: Any = {"name": "edit", "description": "Edits.", "input_schema": {"type": "object"}}


def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
    name = {"name": head.pop("name")} if "name" in head else {}
    return {"tool_calls": [{"index": index, **head, "function": {**name, "arguments": arguments}}]}


CALLS = ScriptedReply(
    match="edit the file",
    deltas=(
        {"reasoning_content": "The file"},
        {"reasoning_content": " is short."},
        {"content": "I edit"},
        {"content": " it."},
        call(0, "", id="call_a", type="function", name="edit"),
        *(call(0, TEXT[start : start + 8]) for start in range(0, len(TEXT), 8)),
        call(1, '{"path": ', id="call_b", type="function", name="edit"),
        call(1, '"c.py"}'),
    ),
    finish_reason="tool_calls",
)
ANSWER = ScriptedReply(
    match="say what you did", deltas=({"content": "Both files"}, {"content": " are edited."})
)


@dataclass
class World:
    """A service, its engine, and a client of it for each agent."""

    swarm: Swarm
    engine: SimulatedEngine
    worker: AsyncAnthropic
    editor: AsyncAnthropic


@asynccontextmanager
async def world(url: str, **config: Any) -> AsyncIterator[World]:
    """One decode slot, so that a turn of the editor's takes it from the worker."""
    engine = SimulatedEngine(
        SimulatedConfig(
            **{
                "n_slots": 3,
                "n_ctx": 3 * 8192,
                "profile": TimingProfile(base_step_s=0.002),
                "scripts": (CALLS, ANSWER),
                **config,
            }
        )
    )
    async with (
        serve_simulated(engine) as engine_url,
        serve_swarm(swarm_config(url, engine_url, decode_slots=1)) as swarm,
        client_of(swarm, "worker") as worker,
        client_of(swarm, "editor") as editor,
    ):
        yield World(swarm, engine, worker, editor)


def client_of(swarm: Swarm, agent: str) -> AsyncAnthropic:
    headers = {"X-Swarm-Agent": agent}
    return AsyncAnthropic(base_url=swarm.url, api_key="x", max_retries=0, default_headers=headers, timeout=60)


def asked(text: str, *more: Any) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 1000, "messages": [{"role": "user", "content": text}, *more]}


async def foreground(w: World) -> None:
    """A turn that takes the decode slot away from whoever has it."""
    await w.editor.messages.create(**asked("Be quick [len=3]"))


async def edited(w: World, *, cut: bool) -> tuple[Message, str, list[str]]:
    """The reply with two calls, its turn, and the kinds of the package's events; `cut`: in the first call."""
    kinds: list[str] = []
    async with (
        anyio.create_task_group() as tasks,
        w.worker.messages.stream(**asked("Please edit the file"), tools=[TOOL]) as stream,
    ):
        async for event in stream:
            kinds.append(event.type)
            # The engine is in the call from here on, and nothing of it is sent before it is whole.
            if event.type == "text" and event.snapshot == "I edit it." and cut:
                tasks.start_soon(foreground, w)
        message = await stream.get_final_message()
    return message, stream.response.headers["x-swarm-turn"], kinds


def check_calls(message: Message) -> None:
    thinking, text, first, second = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("The file is short.", message.id)
    assert text.type == "text"
    assert text.text == "I edit it."
    assert first.type == second.type == "tool_use"
    assert (first.id, first.name, first.input) == ("call_a", "edit", INPUT)
    assert (second.id, second.name, second.input) == ("call_b", "edit", {"path": "c.py"})
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


@pytest.mark.parametrize("cut", [False, True])
async def test_a_tool_loop(redis: Redis, valkey_url: str, cut: bool) -> None:
    async with world(valkey_url) as w:
        message, turn, kinds = await edited(w, cut=cut)
        check_calls(message)
        assert [kind for kind in kinds if kind.startswith("content_block_st")] == [
            "content_block_stop" if stop else "content_block_start"
            for _ in message.content
            for stop in (False, True)
        ]
        assert kinds[-1] == "message_stop"
        record = await w.swarm.record(turn)
        assert (record["preemptions"] > 0) is cut
        results: Any = [
            *(
                {"type": "tool_result", "tool_use_id": name, "content": "done"}
                for name in ("call_a", "call_b")
            ),
            {"type": "text", "text": "Now say what you did."},
        ]
        history = [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        answer = await w.worker.messages.create(**asked("Please edit the file", *history), tools=[TOOL])
    [block] = answer.content
    assert block.type == "text"
    assert block.text == "Both files are edited."
    assert (answer.stop_reason, answer.model, answer.role) == ("end_turn", "small", "assistant")


async def test_a_stream_is_the_whole_reply_also_when_it_is_cut(redis: Redis, valkey_url: str) -> None:
    ask = asked("Tell me a story [len=120]")
    async with world(valkey_url) as w:
        whole = await w.worker.messages.create(**ask)
        async with (
            anyio.create_task_group() as tasks,
            w.worker.messages.stream(**ask) as stream,
        ):
            pieces = []
            async for piece in stream.text_stream:
                pieces.append(piece)
                if len(pieces) in (20, 60):
                    tasks.start_soon(foreground, w)
            streamed = await stream.get_final_message()
        record = await w.swarm.record(stream.response.headers["x-swarm-turn"])
    assert record["preemptions"] == 2
    assert len(pieces) > 100
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    totals = [m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in (whole, streamed)]
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("cut", [False, True])
async def test_a_stop_sequence_is_told(redis: Redis, valkey_url: str, cut: bool) -> None:
    ask = asked("Tell me a story [len=120]")
    async with world(valkey_url) as w:
        whole = await w.worker.messages.create(**ask)
        [told] = whole.content
        assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
        assert told.type == "text"
        stop = told.text[300:312]
        ask |= {"stop_sequences": ["###", stop]}
        stopped = await w.worker.messages.create(**ask)
        async with anyio.create_task_group() as tasks, w.worker.messages.stream(**ask) as stream:
            pieces = 0
            async for _ in stream.text_stream:
                pieces += 1
                if pieces == 20 and cut:
                    tasks.start_soon(foreground, w)
            streamed = await stream.get_final_message()
        record = await w.swarm.record(stream.response.headers["x-swarm-turn"])
    assert record["preemptions"] == cut
    text = {"type": "text", "text": told.text[: told.text.index(stop)]}
    for message in (stopped, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert [{name: block.to_dict()[name] for name in text} for block in message.content] == [text]


async def test_a_limit_and_a_begun_reply(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        begun = {"role": "assistant", "content": "Once upon a time"}
        ask = asked("Tell me a story [len=50]", begun)
        short = await w.worker.messages.create(**{**ask, "max_tokens": 5})
        counted = await w.worker.messages.count_tokens(model="small", messages=ask["messages"])
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 5)
    [block] = short.content
    assert block.type == "text"
    assert not block.text.startswith("Once")
    assert counted.input_tokens == short.usage.input_tokens + (short.usage.cache_read_input_tokens or 0)


async def test_counting_while_no_slot_is_free(redis: Redis, valkey_url: str) -> None:
    async with (
        world(valkey_url, profile=TimingProfile(base_step_s=0.02)) as w,
        w.worker.messages.stream(**asked("Talk [len=900]")) as stream,
    ):
        await anext(aiter(stream.text_stream))
        hello = asked("hello")["messages"]
        counted = await w.editor.messages.count_tokens(
            model="small", messages=hello, system="Be brief.", tools=[TOOL]
        )
        assert w.engine.stats().running == 1
    assert counted.input_tokens > 10


async def test_errors_are_the_packages_own(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        messages = w.worker.messages
        for expected, status, kind, ask in (
            (NotFoundError, 404, "not_found_error", {**asked("x"), "model": "claude-next"}),
            (BadRequestError, 400, "invalid_request_error", {**asked("x"), "stop_sequences": [5]}),
            (BadRequestError, 400, "invalid_request_error", asked("x " * 9000)),
        ):
            for run in (messages.create(**ask), messages.create(**ask, stream=True)):
                with pytest.raises(expected) as raised:
                    await run
                assert (raised.value.status_code, raised.value.type) == (status, kind)
        with pytest.raises(AuthenticationError):
            await w.worker.with_options(default_headers={"X-Swarm-Agent": "nobody"}).messages.create(
                **asked("x")
            )
        assert raised.value.api_message is not None
        assert raised.value.api_message.startswith("prompt is too long: ")


async def test_a_turn_that_is_cancelled_ends_its_stream_with_an_error(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w, w.worker.messages.stream(**asked("Talk [len=900]")) as stream:
        texts = aiter(stream.text_stream)
        await anext(texts)
        turn = stream.response.headers["x-swarm-turn"]
        reply = await w.swarm.http.post(f"/swarm/turns/{turn}/cancel")
        assert reply.status_code == 200
        with pytest.raises(APIStatusError) as raised:
            async for _ in texts:
                pass
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["request_id"] == turn == raised.value.request_id
    assert raised.value.type == "invalid_request_error"
