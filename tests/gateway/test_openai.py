"""OpenAI's chat and completions APIs: which fields are refused, and how a reply accounts for itself."""

from __future__ import annotations

from typing import Any

import anyio
import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import delta_entry
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.validate import MAX_STOPS, chat_ask, completion_ask
from tests.gateway.harness import PERMANENT_KEYS, chat, data_of, read_stream, service

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
STREAMED = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)


def forced(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n_cmpl": 2}, "n_cmpl"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": 5}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"tools": {}}, "tools"),
        ({"tools": ["read"]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": ["auto"], "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": forced("write"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": forced(None), "tools": [{}]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": forced("read")}, "tool_choice"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "tools": TOOLS}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ],
)
def test_chats_that_cannot_be_served_as_asked_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_ask(orjson.dumps(chat(**fields)))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_value")
    assert caught.value.message.startswith(f"{param} ")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stop": "x"},
        {"stop": ["x"] * MAX_STOPS},
        {"stop": None, "tools": None, "tool_choice": None, "logprobs": None, "top_logprobs": None},
        {"tools": [], "tool_choice": "auto", "logprobs": False},
        {"tools": TOOLS, "tool_choice": forced("read")},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "text"}, "logprobs": True, "top_logprobs": 0},
        {
            "metadata": {"a": 1},
            "store": False,
            "service_tier": "auto",
            "user": "u",
            "parallel_tool_calls": True,
        },
    ],
)
def test_all_others_pass_as_they_are(fields: dict[str, Any]) -> None:
    raw = orjson.dumps(chat(**fields))
    assert chat_ask(raw).raw is raw


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("logprobs", [0, 3, True], [None, False]),
        ("best_of", [2, "1", True], [None, 1]),
        ("echo", [True, "x"], [None, False]),
        ("suffix", ["x", 5], [None, ""]),
        ("n", [2], [None, 1]),
        ("stop", [5, ["x"] * (MAX_STOPS + 1)], [None, "x", ["x"]]),
    ],
)
def test_completions_refuse_what_they_would_have_to_ignore(
    field: str, bad: list[Any], good: list[Any]
) -> None:
    for value in good:
        completion_ask(orjson.dumps({"prompt": "p", field: value}))
    for value in bad:
        with pytest.raises(ApiError) as caught:
            completion_ask(orjson.dumps({"prompt": "p", field: value}))
        assert (caught.value.status, caught.value.param) == (400, field)


@STREAMED
@pytest.mark.parametrize("asked", [False, True])
async def test_the_service_counts_whether_or_not_the_client_asks(
    redis: Redis, valkey_url: str, asked: bool
) -> None:
    body = chat(stream=True, **({"stream_options": {"include_usage": True}} if asked else {}))
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("He", "llo")
            await turn.finish(tokens=3)

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/chat/completions", json=body) as response:
            events = data_of(await read_stream(response))
    usages = [event["usage"] for event in events if "usage" in event]
    assert [usage["completion_tokens"] for usage in usages] == [3] * asked
    assert [event["choices"] for event in events if "usage" in event] == [[]] * asked
    finishes = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert finishes == [None, None, None, "stop"]


@STREAMED
async def test_id_created_and_model_are_the_same_in_every_event_and_role_comes_once(
    redis: Redis, valkey_url: str
) -> None:
    body = chat(stream=True, tools=TOOLS, stream_options={"include_usage": True})
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.write(delta_entry({"reasoning_content": "So."}, 1, []))
            await turn.pause()
            await turn.resume()
            await turn.say("I ", "read")
            await turn.pause()
            await turn.resume()
            await turn.write(delta_entry({"tool_calls": [call]}, 9, []))
            await turn.finish("tool_calls", tokens=12)

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/chat/completions", json=body) as response:
            events = data_of(await read_stream(response))
    heads = {(event["id"], event["object"], event["created"], event["model"]) for event in events}
    [(id_, kind, _, model)] = heads
    assert (id_, kind) == (f"chatcmpl-{response.headers['x-swarm-turn']}", "chat.completion.chunk")
    assert model == "tiny", "not the engine's name of it, which is a path"
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert [delta.pop("role", None) for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert deltas == [
        {"content": ""},
        {"reasoning_content": "So."},
        {"content": "I "},
        {"content": "read"},
        {"tool_calls": [call]},
        {},
    ]
