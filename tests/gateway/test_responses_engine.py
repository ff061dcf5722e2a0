"""Responses on the real engine: what the translation asks of it is what it takes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis

from tests.e2e.conftest import Swarm, serve_swarm, swarm_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

TOOLS: Any = [
    {"type": "function", "name": "read", "description": "Reads.", "parameters": None},
    {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "Files.",
        "tools": [{"type": "function", "name": "list", "strict": True, "parameters": {"type": "object"}}],
    },
    {"type": "web_search"},
]
HISTORY: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What is in a?"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I read it."}]},
    {"type": "function_call", "call_id": "c1", "name": "list", "namespace": "mcp__files", "arguments": "{"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
    {"type": "function_call_output", "call_id": "c1", "output": "b"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    {"role": "developer", "content": "Say yes."},
]


class Fox(BaseModel):
    """What a structured reply is."""

    model_config = ConfigDict(extra="forbid")

    name: str
    sly: bool


def client_of(swarm: Swarm, agent: str) -> AsyncOpenAI:
    headers = {"X-Swarm-Agent": agent}
    return AsyncOpenAI(base_url=f"{swarm.url}/v1", api_key="x", max_retries=0, default_headers=headers)


async def test_the_engine_takes_what_it_is_asked(redis: Redis, valkey_url: str, engine_url: str) -> None:
    async with serve_swarm(swarm_config(valkey_url, engine_url)) as swarm, client_of(swarm, "editor") as sdk:
        ask: Any = {"model": "small", "max_output_tokens": 24, "temperature": 0}
        history = await sdk.responses.create(
            **ask, input=HISTORY, tools=TOOLS, parallel_tool_calls=False, reasoning={"effort": "low"}
        )
        likely = await sdk.responses.create(**ask, input="Hello", top_logprobs=2)
        begun = await sdk.responses.create(
            **ask, input=[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,"}]
        )
    assert history.output
    assert history.usage is not None
    assert 0 < history.usage.output_tokens <= 24
    [message] = likely.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert "".join(one.token for one in part.logprobs) == part.text
    assert begun.output_text.strip().startswith("4")


async def test_a_structured_reply_that_is_cut(redis: Redis, valkey_url: str, engine_url: str) -> None:
    ask: Any = {"model": "small", "input": "Describe a fox.", "text_format": Fox, "temperature": 0}
    config = swarm_config(valkey_url, engine_url, decode_slots=1)
    async with (
        serve_swarm(config) as swarm,
        client_of(swarm, "worker") as worker,
        client_of(swarm, "editor") as editor,
        anyio.create_task_group() as tasks,
        worker.responses.stream(**ask, max_output_tokens=100) as stream,
    ):

        async def foreground() -> None:
            await editor.responses.create(model="small", input="Hi", max_output_tokens=2)

        pieces: list[str] = []
        async for event in stream:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
                if len(pieces) == 4:
                    tasks.start_soon(foreground)
        response = await stream.get_final_response()
        record = await swarm.record(f"turn-{response.id.removeprefix('resp_')}")
    assert record["preemptions"] == 1
    assert response.output_text == "".join(pieces)
    assert response.output_parsed is not None
