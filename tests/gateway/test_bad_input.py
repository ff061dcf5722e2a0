"""Every kind of bad request: a clear 4xx in OpenAI's shape, and nothing left in Redis."""

from __future__ import annotations

import json
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from backends.protocol import EngineRefused
from orchestrator.broker import Broker, OutputReader, QueueFull
from orchestrator.gateway import create_app
from orchestrator.gateway.dialects import ChatCompletions, Completions, Dialect
from orchestrator.gateway.errors import ApiError
from orchestrator.turns import TurnRequest
from tests.gateway.harness import (
    GATEWAY,
    PERMANENT_KEYS,
    FakeEngines,
    application,
    chat,
    make_config,
    service,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def body(value: Any) -> bytes:
    return orjson.dumps(value)


BAD: list[tuple[str, bytes, int, str | None, str | None]] = [
    (CHAT, b"", 400, "invalid_json", None),
    (CHAT, b"{", 400, "invalid_json", None),
    (CHAT, b'{"messages": [}', 400, "invalid_json", None),
    (CHAT, b"\xff\xfe\x00", 400, "invalid_json", None),
    (CHAT, b'{"messages": ["\xff"]}', 400, "invalid_json", None),
    (CHAT, b'{"messages": [{"content": "\\ud800"}]}', 400, "invalid_json", None),
    (CHAT, b"NaN", 400, "invalid_json", None),
    (CHAT, b"[]", 400, "invalid_json", None),
    (CHAT, b'"text"', 400, "invalid_json", None),
    (CHAT, b"null", 400, "invalid_json", None),
    (CHAT, b"[" * 100_000, 400, "invalid_json", None),
    (CHAT, b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}", 400, "invalid_json", None),
    (CHAT, b'{"messages":[{}],"max_tokens":' + b"9" * 5000 + b"}", 400, "invalid_json", None),
    (CHAT, body({}), 400, "invalid_value", "messages"),
    (CHAT, body({"messages": None}), 400, "invalid_value", "messages"),
    (CHAT, body({"messages": []}), 400, "invalid_value", "messages"),
    (CHAT, body({"messages": "hello"}), 400, "invalid_value", "messages"),
    (CHAT, body({"messages": {"role": "user"}}), 400, "invalid_value", "messages"),
    (CHAT, body({"messages": ["hello"]}), 400, "invalid_value", "messages"),
    (CHAT, body(chat(max_tokens=0)), 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(max_tokens=-5)), 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(max_tokens="10")), 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(max_tokens=1.5)), 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(max_tokens=True)), 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(max_completion_tokens=[])), 400, "invalid_value", "max_completion_tokens"),
    (CHAT, body(chat(n_predict=-1)), 400, "invalid_value", "n_predict"),
    (CHAT, b'{"messages":[{}],"max_tokens":99999999999999999999}', 400, "invalid_value", "max_tokens"),
    (CHAT, body(chat(n=2)), 400, "invalid_value", "n"),
    (CHAT, body(chat(n=0)), 400, "invalid_value", "n"),
    (CHAT, body(chat(n=True)), 400, "invalid_value", "n"),
    (CHAT, body(chat(stream="true")), 400, "invalid_value", "stream"),
    (CHAT, body(chat(stream=1)), 400, "invalid_value", "stream"),
    (CHAT, body(chat(model=5)), 400, "invalid_value", "model"),
    (CHAT, body(chat(model="gpt-4o")), 404, "model_not_found", "model"),
    (CHAT, body(chat(model="")), 404, "model_not_found", "model"),
    (CHAT, body(chat(model="x" * 100_000)), 404, "model_not_found", "model"),
    (CHAT, b" " * 1_048_577, 413, "body_too_large", None),
    (TEXT, body({}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": None}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": 5}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": []}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": ["a", "b"]}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": [1, "b"]}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": [[1, 2]]}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": [-1]}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": [True]}), 400, "invalid_value", "prompt"),
    (TEXT, body({"prompt": [1 << 40]}), 400, "invalid_value", "prompt"),
]


@pytest.mark.parametrize(("path", "raw", "status", "code", "param"), BAD)
async def test_bad_bodies(
    redis: Redis, path: str, raw: bytes, status: int, code: str | None, param: str | None
) -> None:
    async with application(redis) as client:
        response = await client.post(path, content=raw)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-swarm-turn"].startswith("turn-")
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert len(error["message"]) < 300
    assert [key async for key in redis.scan_iter("*")] == []


async def test_a_prompt_over_the_context(redis: Redis) -> None:
    engines = FakeEngines(count=2048)
    async with application(redis, engines=engines) as client:
        response = await client.post(CHAT, json={"messages": [{"content": "x" * 4000}]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2,048 tokens" in error["message"]
    assert [key async for key in redis.scan_iter("*")] == []


async def test_a_prompt_that_the_engine_refuses(redis: Redis) -> None:
    engines = FakeEngines(count=EngineRefused(422, "unknown role 'x'"))
    async with application(redis, engines=engines) as client:
        response = await client.post(CHAT, json={"messages": [{"content": "x" * 4000}]})
    assert response.status_code == 422
    assert response.json()["error"]["message"] == "unknown role 'x'"
    assert [key async for key in redis.scan_iter("*")] == []


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"x-swarm-agent": "nobody"}, 401, "unknown_agent"),
        ({"x-swarm-priority": "urgent"}, 400, "unknown_priority"),
    ],
)
async def test_bad_headers(redis: Redis, headers: dict[str, str], status: int, code: str) -> None:
    async with application(redis) as client:
        response = await client.post(CHAT, json=chat(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert [key async for key in redis.scan_iter("*")] == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/swarm/turns/turn-1", 405),
        ("POST", "/swarm/turns/turn-1/explode", 404),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_no_such_endpoint(redis: Redis, method: str, path: str, status: int) -> None:
    async with application(redis) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.keys_without_ttl(*PERMANENT_KEYS)
async def test_a_large_body_over_the_wire(redis: Redis, valkey_url: str) -> None:
    async def pieces() -> Any:
        for _ in range(160):
            yield b" " * 65_536

    async with service(redis, valkey_url) as swarm:
        announced = await swarm.client.post(CHAT, content=b" " * 10_485_760)
        unannounced = await swarm.client.post(CHAT, content=pieces())
        after = await swarm.client.get("/v1/models")
        assert await swarm.turn_keys() == []
    assert announced.status_code == unannounced.status_code == 413
    assert after.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        *("messages", "prompt", "model", "max_tokens", "max_completion_tokens", "n_predict", "n", "stream"),
        *("stream_options", "tools", "functions", "swarm_x", "temperature"),
    ]
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON) | JSON, max_size=3
)
BODIES = st.dictionaries(FIELDS, JSON | MESSAGES, max_size=6) | st.builds(
    lambda messages, more: {**more, "messages": messages, "prompt": "p"},
    MESSAGES,
    st.dictionaries(FIELDS, JSON, max_size=4),
)


class FullBroker(Broker):
    """Refuses every turn, after the gateway has accepted it."""

    async def submit(self, request: TurnRequest, *, max_waiting: int) -> int:
        raise QueueFull("full")


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([CHAT, TEXT]), BODIES.map(lambda value: _encode(value)) | st.binary(max_size=60))
async def test_no_body_is_a_server_error(path: str, raw: bytes) -> None:
    redis = Redis()
    broker = FullBroker(redis)
    app = create_app(make_config(), broker, OutputReader(broker, redis, GATEWAY), GATEWAY, FakeEngines())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.post(path, content=raw)
    assert response.status_code in (400, 404, 413, 429)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


@settings(deadline=None)
@given(st.sampled_from([ChatCompletions(), Completions()]), BODIES)
def test_what_is_accepted_passes_unchanged(dialect: Dialect, value: dict[str, Any]) -> None:
    raw = _encode(value)
    try:
        ask = dialect.ask(raw)
    except ApiError as error:
        assert error.status == 400
        return
    private = [name for name in value if name.startswith("swarm_")]
    if not private:
        assert ask.raw is raw
    kept = {name: field for name, field in orjson.loads(raw).items() if name not in private}
    assert orjson.loads(ask.raw) == kept
