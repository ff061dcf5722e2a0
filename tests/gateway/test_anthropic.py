"""``/v1/messages`` and ``count_tokens`` over HTTP: replies, pings, errors in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import orjson
import pytest
from hypothesis import given, settings
from redis.asyncio import Redis

from backends.protocol import BackendError, EngineRefused, EngineUnavailable
from orchestrator.broker import OutputReader, delta_entry, error_entry
from orchestrator.config import parse_config
from orchestrator.gateway import create_app
from orchestrator.keys import hash_key
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    CONFIG,
    GATEWAY,
    PERMANENT_KEYS,
    FakeEngines,
    application,
    make_config,
    read_stream,
    read_until,
    service,
)
from tests.gateway.test_anthropic_request import BODIES, CALL, HELLO, READ, result, said, text, user
from tests.gateway.test_anthropic_stream import events, message_of
from tests.gateway.test_bad_input import FullBroker

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [HELLO]}
QUEUED_PINGS = 2


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error in Anthropic's shape."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == response.headers.get("x-swarm-turn")
    assert response.headers["content-type"] == "application/json"
    return response.status_code, body["error"]["type"], body["error"]["message"]


async def test_a_whole_reply_and_what_the_engine_is_asked(redis: Redis, valkey_url: str) -> None:
    body = {
        **ASK,
        "system": "Be brief.",
        "tools": [READ],
        "messages": [HELLO, said(CALL), user(result("42"))],
    }
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("It is ", "42.")
            await turn.finish()

        tasks.start_soon(dispatch)
        reply = await swarm.client.post(f"{PATH}?beta=true", json=body)
        turn = reply.headers["x-swarm-turn"]
        record = await swarm.broker.record("default", turn)
    assert reply.status_code == 200
    assert reply.json() == {
        "id": turn.replace("turn-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "It is 42."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 3,
        },
    }
    assert record is not None
    assert (record.request.api, record.request.stream, record.request.size.max_tokens) == ("chat", False, 50)
    chat = orjson.loads(record.request.body)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool"]
    assert set(chat) == {"model", "max_tokens", "messages", "tools"}


async def test_pings_while_the_turn_is_queued_and_paused(redis: Redis, valkey_url: str) -> None:
    config = make_config(keepalive_s=0.05, header_wait_s=0.05)
    async with service(redis, valkey_url, config=config) as swarm:
        async with swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response:
            pieces = response.aiter_raw()
            got = await read_until(pieces, b"message_start")
            while got.count(b"event: ping") < QUEUED_PINGS:
                got += await anext(pieces)
            assert b"content_block" not in got
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.write(delta_entry({"reasoning_content": "Hm."}, 1, [7]))
            await turn.say("One")
            got += await read_until(pieces, b"One")
            await turn.pause()
            got += await read_until(pieces, b": paused")
            before = got.count(b"event: ping")
            while got.count(b"event: ping") < before + QUEUED_PINGS:
                got += await anext(pieces)
            await turn.resume()
            await turn.say(", two.")
            await turn.finish()
            got += b"".join([piece async for piece in pieces])
        await swarm.until_state(turn.id, TurnState.DONE)
    message = message_of([event for event in events(got) if event["type"] != "ping"])
    assert [block.get("text") or block["thinking"] for block in message["content"]] == ["Hm.", "One, two."]
    assert message["usage"]["input_tokens"] == 3


async def test_an_early_failure_has_its_status_and_a_late_one_its_event(
    redis: Redis, valkey_url: str
) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            await (await swarm.dispatcher.take()).fail(400, "the engine refused it")
            late = await swarm.dispatcher.take()
            await late.say("Hi")
            await late.write(error_entry(503, "engine lost", "server_error", "engine_unavailable"))
            await late.become(TurnState.FAILED)

        tasks.start_soon(dispatch)
        early = await swarm.client.post(PATH, json={**ASK, "stream": True})
        async with swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response:
            got = await read_stream(response)
    assert error_of(early) == (400, "invalid_request_error", "the engine refused it")
    assert response.status_code == 200
    *_, last = events(got)
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "engine lost"},
        "request_id": response.headers["x-swarm-turn"],
    }


BAD: list[tuple[bytes, int, str]] = [
    (b"{", 400, "invalid_request_error"),
    (b"[]", 400, "invalid_request_error"),
    (orjson.dumps({"messages": [HELLO]}), 400, "invalid_request_error"),
    (orjson.dumps({**ASK, "max_tokens": 0}), 400, "invalid_request_error"),
    (orjson.dumps({**ASK, "messages": []}), 400, "invalid_request_error"),
    (orjson.dumps({**ASK, "model": "claude-next"}), 404, "not_found_error"),
    (b" " * 1_048_577, 413, "request_too_large"),
]


@pytest.mark.parametrize(("raw", "status", "kind"), BAD)
async def test_bad_requests(redis: Redis, raw: bytes, status: int, kind: str) -> None:
    async with application(redis) as client:
        response = await client.post(PATH, content=raw)
    assert error_of(response)[:2] == (status, kind)
    assert [key async for key in redis.scan_iter("*")] == []


async def test_keys(redis: Redis) -> None:
    config = parse_config(
        CONFIG.format(keepalive_s=10, header_wait_s=1, max_waiting=100)
        .replace("max_turn_tokens: 100}", f"max_turn_tokens: 100, key: {hash_key('key-of-editor')}}}")
        .replace("default_agent: editor\n", "")
    )
    async with application(redis, config=config) as client:
        for path in (PATH, COUNT):
            nobody = await client.post(path, json=ASK)
            wrong = await client.post(path, json=ASK, headers={"x-api-key": "key-of-nobody"})
            assert error_of(nobody)[:2] == error_of(wrong)[:2] == (401, "authentication_error")
        headers = {"x-api-key": "key-of-editor", "anthropic-version": "1", "anthropic-beta": "a,b"}
        right = await client.post(COUNT, json=ASK, headers=headers)
        bearer = await client.post(COUNT, json=ASK, headers={"authorization": "Bearer key-of-editor"})
    assert right.json() == bearer.json() == {"input_tokens": 10}


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(redis: Redis) -> None:
    async with application(redis, engines=FakeEngines(count=2048)) as client:
        response = await client.post(PATH, json={**ASK, "messages": [user(text("x" * 4000))]})
    wanted = "prompt is too long: 2048 tokens > 2047 maximum"
    assert error_of(response) == (400, "invalid_request_error", wanted)


async def test_a_full_queue(redis: Redis) -> None:
    broker = FullBroker(redis)
    app = create_app(make_config(), broker, OutputReader(broker, redis, GATEWAY), GATEWAY, FakeEngines())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.post(PATH, json=ASK)
    assert error_of(response)[:2] == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) > 0


async def test_counting_asks_the_engine_and_nothing_else(redis: Redis) -> None:
    engines = FakeEngines(count=17)
    async with application(redis, engines=engines) as client:
        response = await client.post(f"{COUNT}?beta=true", json={"model": "large", "messages": [HELLO]})
    assert (response.status_code, response.json()) == (200, {"input_tokens": 17})
    assert engines.counted == [("large", "chat")]
    assert [key async for key in redis.scan_iter("*")] == []


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (EngineRefused(400, "no such role"), 400, "invalid_request_error"),
        (EngineRefused(501, "no images"), 400, "invalid_request_error"),
        (EngineUnavailable("gone"), 503, "overloaded_error"),
    ],
)
async def test_an_engine_that_does_not_count(
    redis: Redis, failure: BackendError, status: int, kind: str
) -> None:
    async with application(redis, engines=FakeEngines(count=failure)) as client:
        response = await client.post(COUNT, json={"messages": [HELLO]})
    assert error_of(response)[:2] == (status, kind)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("GET", COUNT, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
    ],
)
async def test_no_such_endpoint(redis: Redis, method: str, path: str, status: int, kind: str) -> None:
    async with application(redis) as client:
        response = await client.request(method, path)
        head = await client.head(path)
    assert error_of(response)[:2] == (status, kind)
    assert head.status_code == status


@settings(deadline=None, max_examples=60)
@given(BODIES)
async def test_no_body_is_a_server_error(body: dict[str, Any]) -> None:
    redis = Redis()
    broker = FullBroker(redis)
    app = create_app(make_config(), broker, OutputReader(broker, redis, GATEWAY), GATEWAY, FakeEngines())
    raw = json.dumps(body).encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        turn = await client.post(PATH, content=raw)
        count = await client.post(COUNT, content=raw)
    assert error_of(turn)[0] in (400, 404, 429)
    if count.status_code != 200:
        assert error_of(count)[0] in (400, 404)
