"""Ollama's API, and the models' listings."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from orchestrator.broker import delta_entry
from orchestrator.gateway.dialects import Dialect, Embeddings, OllamaChat, Rerank
from orchestrator.gateway.errors import ApiError
from tests.gateway.harness import (
    PERMANENT_KEYS,
    Service,
    Taken,
    application,
    make_config,
    read_stream,
    read_until,
    service,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
FIGURES = {"prompt_eval_count": 5, "eval_count": 3, "load_duration": 0}


def lines(stream: bytes) -> list[dict[str, Any]]:
    assert stream.endswith(b"\n")
    return [orjson.loads(line) for line in stream.split(b"\n")[:-1]]


def call_parts(arguments: str) -> list[dict[str, Any]]:
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "read", "arguments": ""}}
    middle = len(arguments) // 2
    pieces = [arguments[:middle], arguments[middle:]]
    return [
        {"tool_calls": [begun]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces),
    ]


async def say(turn: Taken, *parts: dict[str, Any]) -> None:
    for part in parts:
        await turn.write(delta_entry(part, 1, [7]))


async def streamed(
    swarm: Service, body: dict[str, Any], *parts: dict[str, Any], reason: str = "stop"
) -> bytes:
    """A stream's bytes, its turn paused once."""

    async def dispatch() -> None:
        turn = await swarm.dispatcher.take()
        await turn.start()
        await say(turn, *parts[:1])
        await turn.pause()
        await turn.resume()
        await say(turn, *parts[1:])
        await turn.finish(reason)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/api/chat", json=body) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            got = await read_stream(response)
    return got


async def test_a_stream_is_json_lines_and_nothing_else(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm:
        got = await streamed(
            swarm, HELLO, {"reasoning_content": "Hm."}, {"content": "Hel"}, {"content": "lö"}
        )
    *said, last = lines(got)
    assert [line["message"] for line in said] == [
        {"role": "assistant", "content": "", "thinking": "Hm."},
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lö"},
    ]
    assert all(line["done"] is False and line["model"] == "tiny" for line in said)
    assert len({line["created_at"] for line in [*said, last]}) == 1
    assert last["created_at"].endswith("Z")
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert {name: last[name] for name in FIGURES} == FIGURES
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0


async def test_a_silent_stream_gets_empty_messages(redis: Redis, valkey_url: str) -> None:
    config = make_config(keepalive_s=0.05, header_wait_s=0.0)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", "/api/chat", json=HELLO) as response,
    ):
        pieces = response.aiter_raw()
        got = await read_until(pieces, b"\n")
        turn = await swarm.dispatcher.take()
        await turn.start()
        await turn.finish()
        got += b"".join([piece async for piece in pieces])
    *silence, last = lines(got)
    assert silence
    assert all(line["message"] == {"role": "assistant", "content": ""} for line in silence)
    assert last["done"] is True


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_are_told_whole_with_arguments_as_objects(
    redis: Redis, valkey_url: str, stream: bool
) -> None:
    body = {**HELLO, "stream": stream}
    parts = [{"content": "I read."}, *call_parts('{"path": "a.py"}')]
    wanted = [{"function": {"name": "read", "arguments": {"path": "a.py"}}}]
    async with service(redis, valkey_url) as swarm:
        if stream:
            told = lines(await streamed(swarm, body, *parts, reason="tool_calls"))
            assert told[0]["message"]["content"] == "I read."
            assert told[1]["message"] == {"role": "assistant", "content": "", "tool_calls": wanted}
            assert len(told) == 3
        else:
            told = [(await whole(swarm, body, *parts, reason="tool_calls")).json()]
            assert told[0]["message"] == {"role": "assistant", "content": "I read.", "tool_calls": wanted}
    assert told[-1]["done_reason"] == "stop"


async def whole(
    swarm: Service, body: dict[str, Any], *parts: dict[str, Any], reason: str = "stop"
) -> httpx.Response:
    async def dispatch() -> None:
        turn = await swarm.dispatcher.take()
        await turn.start()
        await say(turn, *parts)
        await turn.finish(reason)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch)
        response = await swarm.client.post("/api/chat", json=body)
    return response


async def test_a_reply_in_one_piece(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm:
        body = {**HELLO, "model": "tiny:latest", "stream": False}
        parts = ({"reasoning_content": "Hm."}, {"content": "Hel"}, {"content": "lo"})
        reply = (await whole(swarm, body, *parts, reason="length")).json()
    assert reply["message"] == {"role": "assistant", "content": "Hello", "thinking": "Hm."}
    assert (reply["model"], reply["done"], reply["done_reason"]) == ("tiny:latest", True, "length")
    assert {name: reply[name] for name in FIGURES} == FIGURES


async def test_a_call_that_the_limit_cut_off_is_none(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm:
        parts = call_parts('{"path": "a')
        reply = (await whole(swarm, {**HELLO, "stream": False}, *parts, reason="length")).json()
    assert "tool_calls" not in reply["message"]
    assert reply["done_reason"] == "length"


async def test_errors_are_one_sentence(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm:
        missing = await swarm.client.post("/api/chat", json={**HELLO, "model": "other"})
        assert missing.status_code == 404
        assert missing.json() == {"error": "no model 'other' here; available: tiny, large"}
        unknown = await swarm.client.get("/api/nothing")
        assert (unknown.status_code, list(unknown.json())) == (404, ["error"])

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await say(turn, {"content": "Hel"})
            await turn.fail(502, "engine lost")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dispatch)
            async with swarm.client.stream("POST", "/api/chat", json=HELLO) as response:
                got = await read_stream(response)
    assert lines(got)[-1] == {"error": "engine lost"}


def translated(**fields: Any) -> dict[str, Any]:
    ask = OllamaChat().ask(orjson.dumps({**HELLO, **fields}))
    assert orjson.loads(ask.raw) == ask.body
    return ask.body


NAMES = (
    *(
        "model",
        "messages",
        "role",
        "content",
        "images",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "tools",
    ),
    *("options", "num_predict", "format", "think", "stream", "input", "encoding_format", "dimensions"),
    *("query", "documents", "text", "top_n", "return_documents"),
)
PLAIN: dict[str, Any] = {**HELLO, "stream": True}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({}, {}),
        ({"stream": False, "keep_alive": "5m"}, {"stream": False}),
        ({"options": {"temperature": 0, "num_ctx": 4096, "top_k": 4}}, {"temperature": 0, "top_k": 4}),
        ({"options": {"num_predict": 9, "stop": ["x"]}}, {"max_tokens": 9, "stop": ["x"]}),
        ({"options": {"num_predict": -1, "seed": None}}, {}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"tools": []}, {}),
        ({"format": ""}, {}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        (
            {"format": SCHEMA},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}},
        ),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "low"}, {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}),
    ],
)
def test_a_request_as_the_engine_gets_it(fields: dict[str, Any], engine: dict[str, Any]) -> None:
    assert translated(**fields) == {**PLAIN, **engine}


def test_calls_and_their_results_get_ids() -> None:
    read = {"function": {"name": "read", "arguments": {"path": "a"}}}
    listed = {"function": {"name": "list", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [read, listed]},
        {"role": "tool", "content": "files", "tool_name": "list"},
        {"role": "tool", "content": "text"},
        {"role": "tool", "content": "of nothing"},
    ]
    said, *results = translated(messages=messages)["messages"]
    assert said == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call_0_0",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path":"a"}'},
            },
            {"id": "call_0_1", "type": "function", "function": {"name": "list", "arguments": "{}"}},
        ],
    }
    assert [result["tool_call_id"] for result in results] == ["call_0_1", "call_0_0", "call_3"]


def test_images_become_data_urls() -> None:
    message = {"role": "user", "content": "see", "images": ["/9j/AAA", "iVBOR"]}
    [said] = translated(messages=[message])["messages"]
    assert said["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/AAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR"}},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "images": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": {"function": {}}}]}, "messages"),
        ({"options": []}, None),
        ({"options": "fast"}, "options"),
        ({"options": {"num_predict": 0}}, "max_tokens"),
        ({"options": {"num_predict": "x"}}, "max_tokens"),
        ({"format": "yaml"}, "format"),
        ({"format": 3}, "format"),
        ({"think": 3}, "think"),
        ({"stream": "no"}, "stream"),
        ({"model": 3}, "model"),
        ({"tools": "x"}, "tools"),
    ],
)
def test_bad_requests(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        translated(**fields)
        return
    with pytest.raises(ApiError) as caught:
        translated(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.just("json"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([OllamaChat(), Embeddings(), Rerank()]), st.dictionaries(st.sampled_from(NAMES), VALUES)
)
def test_any_body_is_taken_or_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    try:
        ask = dialect.ask(orjson.dumps(body))
    except ApiError as error:
        assert error.status == 400
    else:
        assert orjson.loads(ask.raw) == ask.body


async def test_models_as_ollama_lists_them(redis: Redis) -> None:
    async with application(redis) as client:
        models = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in models] == ["tiny", "large"]
        shown = (await client.post("/api/show", json={"model": "tiny:latest"})).json()
        assert shown["model_info"] == {"general.architecture": "swarm", "swarm.context_length": 2048}
        assert "tools" in shown["capabilities"]
        named = (await client.post("/api/show", json={"name": "large"})).json()
        assert named["model_info"] == {"general.architecture": "swarm"}, "not known yet"
        assert (await client.post("/api/show", json={"model": "none"})).status_code == 404
        bad = await client.post("/api/show", json={})
        assert (bad.status_code, bad.json()) == (400, {"error": "model must be a string"})
        version = (await client.get("/api/version")).json()["version"]
        assert [number.isdigit() for number in version.split(".")] == [True] * 3


async def test_one_model_by_its_name(redis: Redis) -> None:
    async with application(redis) as client:
        [tiny, large] = (await client.get("/v1/models")).json()["data"]
        assert (await client.get("/v1/models/tiny")).json() == tiny
        assert tiny["context_length"] == 2048
        assert (await client.get("/v1/models/large")).json() == large
        other = await client.get("/v1/models/org/other")
        assert other.status_code == 404
        assert other.json()["error"]["code"] == "model_not_found"
