"""Streams: shape, order, comments and errors."""

from __future__ import annotations

import anyio
import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import delta_entry, end_entry, status_entry
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    PERMANENT_KEYS,
    chat,
    data_of,
    make_config,
    read_stream,
    read_until,
    service,
    text_of,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)


def chunk(turn: str, created: int, choice: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":%d,"model":"tiny",'
        b'"choices":[{"index":0,%b}]}\n\n' % (turn.encode(), created, choice)
    )


async def test_a_chat_stream_is_exact_to_the_byte(redis: Redis, valkey_url: str) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    async with service(redis, valkey_url) as swarm:
        async with anyio.create_task_group() as tasks:

            async def dispatch() -> None:
                turn = await swarm.dispatcher.take()
                await turn.start()
                await turn.say("He", "llo")
                await turn.pause()
                await turn.resume()
                await turn.say(" wörld")
                await turn.write(delta_entry({"content": "!", "_logprobs": {"content": [1]}}, 1, [9]))
                await turn.finish()

            tasks.start_soon(dispatch)
            async with swarm.client.stream("POST", "/v1/chat/completions", json=body) as response:
                got = await read_stream(response)
        turn = response.headers["x-swarm-turn"]
        record = await swarm.broker.record("default", turn)
    assert record is not None
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    created = int(record.request.created)
    usage = (
        b'"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":2}}'
    )
    assert got == b"".join(
        [
            b": started\n\n",
            chunk(turn, created, b'"delta":{"role":"assistant","content":""},"finish_reason":null'),
            chunk(turn, created, b'"delta":{"content":"He"},"finish_reason":null'),
            chunk(turn, created, b'"delta":{"content":"llo"},"finish_reason":null'),
            b": paused\n\n",
            b": resumed\n\n",
            chunk(turn, created, '"delta":{"content":" wörld"},"finish_reason":null'.encode()),
            chunk(turn, created, b'"delta":{"content":"!"},"logprobs":{"content":[1]},"finish_reason":null'),
            chunk(turn, created, b'"delta":{},"finish_reason":"stop"'),
            chunk(turn, created, b"").replace(b'[{"index":0,}]}', b"[]," + usage + b"}"),
            b"data: [DONE]\n\n",
        ]
    )


async def test_a_completion_stream_has_its_own_shape(redis: Redis, valkey_url: str) -> None:
    body = {"prompt": "one", "stream": True, "model": "default"}
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say(" two", "", " three")
            await turn.finish("length")

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/completions", json=body) as response:
            events = data_of(await read_stream(response))
    turn = response.headers["x-swarm-turn"]
    assert [event.pop("choices") for event in events] == [
        [{"index": 0, "text": " two", "finish_reason": None, "logprobs": None}],
        [{"index": 0, "text": " three", "finish_reason": None, "logprobs": None}],
        [{"index": 0, "text": "", "finish_reason": "length", "logprobs": None}],
    ]
    assert all(event == events[0] for event in events)
    assert events[0]["id"] == f"cmpl-{turn}"
    assert events[0]["object"] == "text_completion"
    assert events[0]["model"] == "default"


async def test_a_reply_without_output_still_has_its_role(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.finish()

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            events = data_of(await read_stream(response))
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]


async def test_headers_wait_only_so_long_and_empty_chunks_keep_the_stream_alive(
    redis: Redis, valkey_url: str
) -> None:
    config = make_config(keepalive_s=0.05, header_wait_s=0.05)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        pieces = response.aiter_raw()
        # Nobody has taken the turn yet.
        first = await read_until(pieces, b"data: ")
        assert first.startswith(b": keep-alive\n\ndata: ")
        assert b'"delta":{"role":"assistant","content":""}' in first
        await read_until(pieces, b'"delta":{}')
        turn = await swarm.dispatcher.take()
        await turn.start()
        assert await read_until(pieces, b": started\n\n")
        await turn.pause()
        await read_until(pieces, b": paused\n\n")
        await read_until(pieces, b'"delta":{}')
        await turn.resume()
        await turn.say("done")
        await turn.finish()
        assert (await read_until(pieces, b"[DONE]")).endswith(b"data: [DONE]\n\n")


async def test_entries_that_came_together_are_sent_together(redis: Redis, valkey_url: str) -> None:
    async with (
        service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        pieces = response.aiter_raw()
        turn = await swarm.dispatcher.take()
        await turn.write(
            status_entry("started"),
            *(delta_entry({"content": str(number)}, 1, []) for number in range(50)),
            end_entry("stop", 1, 50, 0),
        )
        await turn.become(TurnState.RUNNING)
        await turn.become(TurnState.DONE)
        piece = await anext(pieces)
        assert text_of(piece) == "".join(map(str, range(50)))


async def test_a_failure_before_any_output_has_its_own_status(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.fail(503)

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            body = await read_stream(response)
    # The two entries may come apart: then the headers are gone already.
    if response.status_code == 503:
        assert orjson.loads(body)["error"]["code"] == "engine_unavailable"
        assert response.headers["content-type"] == "application/json"
    else:
        assert data_of(body)[-1]["error"]["code"] == "engine_unavailable"
    assert response.headers["x-swarm-turn"]


async def test_a_refusal_by_the_dispatcher_has_its_own_status(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.fail(400, "the engine refuses this")

        tasks.start_soon(dispatch)
        response = await swarm.client.post("/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "the engine refuses this",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }


async def test_a_failure_after_output_ends_the_stream(redis: Redis, valkey_url: str) -> None:
    async with (
        service(redis, valkey_url) as swarm,
        anyio.create_task_group() as tasks,
    ):

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.say("half")
            await turn.fail(502, "engine lost")

        tasks.start_soon(dispatch)
        async with swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            got = await read_stream(response)
    assert response.status_code == 200
    assert data_of(got)[-1]["error"]["message"] == "engine lost"
    assert b'"content":"half"' in got
