"""The ``openai`` package against the whole service on the simulated engine, cut in tool calls too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson
import pytest
from openai import (
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    RateLimitError,
)
from openai.types.responses import Response
from pydantic import BaseModel
from redis.asyncio import Redis

from backends.simulated import ScriptedReply, SimulatedConfig, TimingProfile, serve_simulated
from tests.clients.scripted import ScriptedEngine
from tests.e2e.conftest import Swarm, serve_swarm, swarm_config

pytestmark = pytest.mark.keys_without_ttl("swarm:{*}:*")

ARGUMENTS = {"path": "a/b.py", "edits": [{"line": n, "text": f"text of line {n}: é"} for n in range(12)]}
TEXT = orjson.dumps(ARGUMENTS).decode()
PATCH = '*** Begin Patch\n+"é"\n*** End Patch\n'
PATCH_TEXT = orjson.dumps({"input": PATCH}).decode()
PIECE = 8

EDIT: Any = {"type": "function", "name": "edit", "description": "Edits.", "parameters": {"type": "object"}}
CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Patches."}
GROUP: Any = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [EDIT]}
CHAT_EDIT: Any = {
    "type": "function",
    "function": {"name": "edit", "description": "Edits.", "parameters": {"type": "object"}},
}


class Fox(BaseModel):
    """What a structured reply is."""

    name: str
    legs: int


def call(index: int, id_: str, name: str, arguments: str) -> tuple[dict[str, Any], ...]:
    """The deltas of one call."""
    head = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
    pieces = [arguments[at : at + PIECE] for at in range(0, len(arguments), PIECE)]
    rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
    return tuple({"tool_calls": [one]} for one in (head, *rest))


CALLS = ScriptedReply(
    match="",
    deltas=(
        {"reasoning_content": "The file"},
        {"reasoning_content": " is short."},
        {"content": "I edit"},
        {"content": " it."},
        *call(0, "call_a", "edit", TEXT),
        *call(1, "call_b", "apply_patch", PATCH_TEXT),
        *call(2, "call_c", "mcp__files__edit", '{"path": "c.py"}'),
    ),
    finish_reason="tool_calls",
)
CHAT_CALLS = ScriptedReply(match="", deltas=call(0, "call_a", "edit", TEXT), finish_reason="tool_calls")
ANSWER = ScriptedReply(match="", deltas=({"content": "All files"}, {"content": " are edited."}))
FOX = ScriptedReply(match="as JSON", deltas=({"content": '{"name": "Fé'}, {"content": 'lix", "legs": 4}'}))


@dataclass
class World:
    """A service, its engine, and a client of it for each agent."""

    swarm: Swarm
    worker: AsyncOpenAI
    editor: AsyncOpenAI


@asynccontextmanager
async def world(url: str, *, calls: ScriptedReply = CALLS) -> AsyncIterator[World]:
    """One decode slot, so that a turn of the editor's takes it from the worker."""
    config = SimulatedConfig(n_slots=3, n_ctx=3 * 8192, profile=TimingProfile(base_step_s=0.002))
    async with (
        serve_simulated(ScriptedEngine(config, FOX, [calls, ANSWER])) as engine_url,
        serve_swarm(swarm_config(url, engine_url, decode_slots=1)) as swarm,
        client_of(swarm, "worker") as worker,
        client_of(swarm, "editor") as editor,
    ):
        yield World(swarm, worker, editor)


def client_of(swarm: Swarm, agent: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{swarm.url}/v1",
        api_key="x",
        max_retries=0,
        default_headers={"X-Swarm-Agent": agent},
        timeout=60,
    )


async def foreground(w: World) -> None:
    """A turn that takes the decode slot away from whoever has it."""
    await w.editor.responses.create(model="small", input="Be quick [len=3]")


def check_calls(response: Response) -> None:
    reasoning, message, function, custom, grouped = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "The file is short."
    assert message.type == "message"
    assert response.output_text == "I edit it."
    assert function.type == grouped.type == "function_call"
    assert (function.call_id, function.name, function.arguments) == ("call_a", "edit", TEXT)
    assert custom.type == "custom_tool_call"
    assert (custom.call_id, custom.name, custom.input) == ("call_b", "apply_patch", PATCH)
    assert (grouped.call_id, grouped.name, grouped.namespace) == ("call_c", "edit", "mcp__files")
    assert (response.status, response.model, response.error) == ("completed", "small", None)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@pytest.mark.parametrize("cut", [False, True])
async def test_a_tool_loop(redis: Redis, valkey_url: str, cut: bool) -> None:
    tools = [EDIT, CUSTOM, GROUP, {"type": "web_search"}]
    history: list[Any] = [{"role": "user", "content": "Please edit the file"}]
    async with world(valkey_url) as w:
        async with (
            anyio.create_task_group() as tasks,
            w.worker.responses.stream(model="small", input=history, tools=tools) as stream,
        ):
            kinds = []
            async for event in stream:
                kinds.append(event.type)
                # The engine is in the first call from here on.
                if event.type == "response.output_text.delta" and event.snapshot == "I edit it." and cut:
                    tasks.start_soon(foreground, w)
            response = await stream.get_final_response()
        turn = f"turn-{response.id.removeprefix('resp_')}"
        record = await w.swarm.record(turn)
        assert (record["preemptions"] > 0) is cut
        check_calls(response)
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 5
        assert kinds[-1] == "response.completed"
        history += response.output
        history += [
            {"type": "function_call_output", "call_id": "call_a", "output": "done"},
            {"type": "custom_tool_call_output", "call_id": "call_b", "output": "done"},
            {
                "type": "function_call_output",
                "call_id": "call_c",
                "output": [{"type": "input_text", "text": "done"}],
            },
        ]
        answer = await w.worker.responses.create(model="small", input=history, tools=tools)
    assert answer.output_text == "All files are edited."
    assert answer.status == "completed"


async def test_a_whole_reply_has_the_same_items(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        response = await w.worker.responses.create(
            model="small",
            input="Please edit the file",
            tools=[EDIT, CUSTOM, GROUP],
            metadata={"a": "b"},
            instructions="Be short.",
        )
    check_calls(response)
    assert (response.instructions, response.metadata) == ("Be short.", {"a": "b"})
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]


async def test_a_stream_is_the_whole_reply_also_when_it_is_cut(redis: Redis, valkey_url: str) -> None:
    ask: Any = {"model": "small", "input": "Tell me a story [len=120]", "temperature": 0}
    async with world(valkey_url) as w:
        whole = await w.worker.responses.create(**ask)
        async with anyio.create_task_group() as tasks:
            stream = await w.worker.responses.create(**ask, stream=True)
            pieces = []
            final = None
            async for event in stream:
                if event.type == "response.output_text.delta":
                    pieces.append(event.delta)
                    if len(pieces) in (20, 60):
                        tasks.start_soon(foreground, w)
                elif event.type == "response.completed":
                    final = event.response
        assert final is not None
        record = await w.swarm.record(f"turn-{final.id.removeprefix('resp_')}")
    assert record["preemptions"] == 2
    assert whole.output_text == final.output_text == "".join(pieces)
    assert whole.usage is not None
    assert final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.input_tokens == final.usage.input_tokens > 0


async def test_structured_output(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        parsed = await w.worker.responses.parse(model="small", input="A fox as JSON", text_format=Fox)
        async with w.worker.responses.stream(model="small", input="A fox as JSON", text_format=Fox) as stream:
            streamed = await stream.get_final_response()
        chat = await w.worker.chat.completions.parse(
            model="small", messages=[{"role": "user", "content": "A fox as JSON"}], response_format=Fox
        )
    fox = Fox(name="Félix", legs=4)
    assert parsed.output_parsed == streamed.output_parsed == chat.choices[0].message.parsed == fox
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


async def test_a_limit(redis: Redis, valkey_url: str) -> None:
    ask: Any = {"model": "small", "input": "Talk [len=50]", "max_output_tokens": 5}
    async with world(valkey_url) as w:
        response = await w.worker.responses.create(**ask)
        last = None
        async for event in await w.worker.responses.create(**ask, stream=True):
            last = event
    assert (response.status, response.max_output_tokens) == ("incomplete", 5)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    [message] = response.output
    assert message.type == "message"
    assert message.status == "incomplete"
    assert last is not None
    assert last.type == "response.incomplete"


async def test_errors_are_the_packages_own(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        responses = w.worker.responses
        for expected, code, param, ask in (
            (NotFoundError, "model_not_found", "model", {"model": "gpt-9", "input": "x"}),
            (BadRequestError, "invalid_value", "temperature", {"input": "x", "temperature": "hot"}),
            (BadRequestError, "context_length_exceeded", "input", {"input": "x " * 9000}),
            (
                BadRequestError,
                "unsupported_parameter",
                "previous_response_id",
                {"input": "x", "previous_response_id": "resp_1"},
            ),
        ):
            asked: Any = {"model": "small", **ask}
            for run in (responses.create(**asked), responses.create(**asked, stream=True)):
                with pytest.raises(expected) as raised:
                    await run
                assert (raised.value.code, raised.value.param) == (code, param)
                assert raised.value.type == "invalid_request_error"
        with pytest.raises(AuthenticationError):
            await w.worker.with_options(default_headers={"X-Swarm-Agent": "nobody"}).responses.create(
                model="small", input="x"
            )
        with pytest.raises(NotFoundError, match="not stored"):
            await responses.retrieve("resp_1")
        with pytest.raises(NotFoundError, match="not stored"):
            await responses.cancel("resp_1")
        with pytest.raises(NotFoundError, match="not stored"):
            await responses.delete("resp_1")


async def test_a_full_queue_is_a_rate_limit(redis: Redis, valkey_url: str) -> None:
    config = SimulatedConfig(n_slots=3, n_ctx=3 * 4096, profile=TimingProfile(base_step_s=0.01))
    async with serve_simulated(config) as engine_url:
        text = swarm_config(valkey_url, engine_url, decode_slots=1).replace(
            "policy: {", "policy: {max_waiting: 1, "
        )
        refused: list[RateLimitError] = []
        told = anyio.Event()
        async with (
            serve_swarm(text) as swarm,
            client_of(swarm, "editor") as editor,
            anyio.create_task_group() as tasks,
        ):

            async def ask() -> None:
                try:
                    await editor.responses.create(model="small", input="Talk [len=900]")
                except RateLimitError as error:
                    refused.append(error)
                    told.set()

            for _ in range(3):
                tasks.start_soon(ask)
            with anyio.fail_after(20):
                await told.wait()
            tasks.cancel_scope.cancel()
    assert refused[0].code == "queue_full"


async def test_a_turn_that_is_cancelled_ends_its_stream_with_an_error(redis: Redis, valkey_url: str) -> None:
    async with world(valkey_url) as w:
        stream = await w.worker.responses.create(model="small", input="Talk [len=900]", stream=True)
        with pytest.raises(APIError) as raised:
            async for event in stream:
                if event.type == "response.output_text.delta" and event.content_index == 0:
                    turn = stream.response.headers["x-swarm-turn"]
                    await w.swarm.http.post(f"/swarm/turns/{turn}/cancel")
    assert (raised.value.code, raised.value.message) == ("cancelled", "the turn was cancelled")


async def test_chats_with_tools(redis: Redis, valkey_url: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Please edit the file"}]
    options: Any = {"include_usage": True}
    async with world(valkey_url, calls=CHAT_CALLS) as w:
        async with w.worker.chat.completions.stream(
            model="small", messages=messages, tools=[CHAT_EDIT], stream_options=options
        ) as stream:
            async for _ in stream:
                pass
            called = await stream.get_final_completion()
        [choice] = called.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        [tool_call] = choice.message.tool_calls
        assert (tool_call.id, tool_call.function.name, tool_call.function.arguments) == (
            "call_a",
            "edit",
            TEXT,
        )
        assert called.usage is not None
        assert called.usage.completion_tokens > 0
        messages += [
            choice.message,
            {"role": "tool", "tool_call_id": "call_a", "content": "done"},
        ]
        answer = await w.worker.chat.completions.create(model="small", messages=messages, tools=[CHAT_EDIT])
        listed = [model.id async for model in w.worker.models.list()]
    assert answer.choices[0].message.content == "All files are edited."
    assert listed == ["small"]
