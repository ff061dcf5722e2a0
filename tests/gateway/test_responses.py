"""``/v1/responses`` over HTTP: replies, silence, failures, and what is not stored."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import orjson
import pytest
from hypothesis import given, settings
from redis.asyncio import Redis
from starlette.types import Message, Receive, Scope

from orchestrator.broker import Broker, Entry, OutputReader, TurnStream, delta_entry, end_entry
from orchestrator.gateway import create_app
from orchestrator.gateway.answer import answer
from orchestrator.gateway.dialects import Head, Responses
from orchestrator.gateway.endpoint import Endpoint
from orchestrator.gateway.follow import Output
from orchestrator.gateway.reply import Reply
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    BOUND_S,
    GATEWAY,
    PERMANENT_KEYS,
    FakeEngines,
    application,
    make_config,
    read_stream,
    read_until,
    service,
)
from tests.gateway.test_bad_input import FullBroker
from tests.gateway.test_responses_request import BODIES, CALL, HELLO, OUTPUT, READ, READ_FUNCTION
from tests.gateway.test_responses_stream import check, events

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "hello"}


async def test_a_whole_reply_and_what_the_engine_is_asked(redis: Redis, valkey_url: str) -> None:
    body = {"model": "tiny", "instructions": "Be brief.", "tools": [READ], "input": [HELLO, CALL, OUTPUT]}
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:
        asked: list[dict[str, Any]] = []

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            asked.append(orjson.loads(turn.record.request.body))
            await turn.start()
            await turn.write(delta_entry({"reasoning_content": "Hm."}, 2, []))
            await turn.say("He", "llo")
            await turn.finish(tokens=4)

        tasks.start_soon(dispatch)
        response = await swarm.client.post(PATH, json=body)
    turn = response.headers["x-swarm-turn"].removeprefix("turn-")
    got = response.json()
    assert response.headers["content-type"] == "application/json"
    assert (response.status_code, got["status"], got["model"]) == (200, "completed", "tiny")
    assert (got["id"], got["instructions"], got["tools"]) == (f"resp_{turn}", "Be brief.", [READ])
    reasoning, message = got["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Hello"
    assert got["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 9,
    }
    assert asked == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                HELLO,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"path":"a"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "text of a"},
            ],
            "tools": [READ_FUNCTION],
        }
    ]


async def test_a_stream_begins_at_once_and_is_never_silent(redis: Redis, valkey_url: str) -> None:
    config = make_config(keepalive_s=0.05, header_wait_s=0.01)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        pieces = response.aiter_raw()
        # Nobody has taken the turn yet. To codex a comment is no sign of life; an event is.
        got = await read_until(pieces, b'{"type":"keepalive","sequence_number":3}')
        assert got.index(b"response.created") < got.index(b"response.in_progress")
        turn = await swarm.dispatcher.take()
        await turn.start()
        await turn.say("He")
        got += await read_until(pieces, b"output_text.delta")
        await turn.pause()
        got += await read_until(pieces, b"event: keepalive")
        await turn.resume()
        await turn.say("llo")
        await turn.finish()
        got += await read_until(pieces, b"event: response.completed")
        got += b"".join([piece async for piece in pieces])
    assert b": paused\n\n" in got
    assert b"[DONE]" not in got
    assert check(list(events(got)))["output"][0]["content"][0]["text"] == "Hello"


async def test_hanging_up_on_the_last_event_is_no_abort(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm:
        async with swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("done")
            # The dispatcher has not come to recording the end when the client is gone.
            await turn.write(end_entry("stop", 5, 3, 2))
            await read_until(response.aiter_raw(), b"event: response.completed")
        # The gateway has noticed by the time that it answers anything else.
        assert (await swarm.client.get("/v1/models")).status_code == 200
        await turn.become(TurnState.DONE, turns_done=1)
        record = await swarm.broker.record("default", turn.id)
        _, told = await swarm.broker.events("default", "0-0", 100)
    assert record is not None
    assert record.state is TurnState.DONE
    assert "cancel" not in [event.kind for event in told]


async def test_leaving_earlier_cancels_the_turn(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm:
        async with swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("half")
            await read_until(response.aiter_raw(), b"output_text.delta")
        await swarm.dispatcher.event("cancel")
        await turn.become(TurnState.CANCELLED)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_turn_has_its_own_status(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            await (await swarm.dispatcher.take()).fail(400, "the engine refuses this")

        tasks.start_soon(dispatch)
        response = await swarm.client.post(PATH, json={**ASK, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the engine refuses this"


async def test_a_failure_in_the_stream(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("half")
            await turn.fail(502, "engine lost")

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", PATH, json={**ASK, "stream": True}) as response:
            got = list(events(await read_stream(response)))
    assert check(got)["error"] == {"code": "server_error", "message": "engine lost"}
    assert got[-2]["error"]["code"] == "engine_unavailable"


class Breaking(Output):
    """A log that says something, and then whoever reads it fails."""

    def __init__(self, broker: Broker, stream: TurnStream) -> None:
        super().__init__(broker, stream, "default")
        self._entries: list[Entry] = [["d", {"content": "half"}, 1, []]]

    async def next(self, timeout_s: float | None = None) -> list[Entry]:
        if not self._entries:
            raise RuntimeError
        entries, self._entries = self._entries, []
        return entries


async def test_a_stream_that_breaks_here_ends_in_its_own_dialect(redis: Redis, valkey_url: str) -> None:
    dialect, sent = Responses(), list[bytes]()
    head = Head("turn-1", "tiny", 1, dialect.ask(orjson.dumps({**ASK, "stream": True})))
    broker = Broker(redis)
    async with (
        Redis.from_url(valkey_url, socket_timeout=None) as subscriber,
        anyio.create_task_group() as tasks,
    ):
        reader = OutputReader(broker, subscriber, GATEWAY)
        await tasks.start(reader.run)
        async with reader.open("default", "turn-1") as stream:

            async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
                await answer(
                    make_config().server, Breaking(broker, stream), dialect, head, reply, stream=True
                )

            async def send(message: Message) -> None:
                sent.append(message.get("body", b""))

            async def receive() -> Message:
                return {"type": "http.request", "body": b""}

            with anyio.fail_after(BOUND_S):
                await Endpoint(handle)({"type": "http", "path": PATH}, receive, send)
        tasks.cancel_scope.cancel()
    got = list(events(b"".join(sent)))
    assert check(got)["status"] == "failed"
    assert got[-2]["code"] == "internal"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{PATH}/resp_1"),
        ("GET", f"{PATH}/resp_1/input_items"),
        ("DELETE", f"{PATH}/resp_1"),
        ("POST", f"{PATH}/resp_1/cancel"),
    ],
)
async def test_nothing_is_stored(redis: Redis, method: str, path: str) -> None:
    async with application(redis) as client:
        response = await client.request(method, path)
        unknown = await client.request(method, path, headers={"X-Swarm-Agent": "nobody"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "response_not_found")
    assert "not stored" in error["message"]
    assert unknown.status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", PATH, 405), ("POST", f"{PATH}/compact", 405), ("PUT", PATH, 405)]
)
async def test_no_such_endpoint(redis: Redis, method: str, path: str, status: int) -> None:
    async with application(redis) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (orjson.dumps({**ASK, "model": "gpt-9"}), 404, "model_not_found", "model"),
        (orjson.dumps({**ASK, "input": "x" * 9000}), 400, "context_length_exceeded", "input"),
        (
            orjson.dumps({**ASK, "previous_response_id": "r"}),
            400,
            "unsupported_parameter",
            "previous_response_id",
        ),
    ],
)
async def test_errors_are_openais(
    redis: Redis, body: bytes, status: int, code: str, param: str | None
) -> None:
    async with application(redis, engines=FakeEngines(count=9000)) as client:
        response = await client.post(PATH, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"


@settings(deadline=None, max_examples=200)
@given(BODIES)
async def test_no_body_is_a_server_error(body: dict[str, Any]) -> None:
    redis = Redis()
    broker = FullBroker(redis)
    app = create_app(make_config(), broker, OutputReader(broker, redis, GATEWAY), GATEWAY, FakeEngines())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.post(PATH, content=json.dumps(body).encode())
    assert response.status_code in (400, 404, 429)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
