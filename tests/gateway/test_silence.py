"""Turns that say nothing for long: what their clients hear meanwhile, in every dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import Broker
from orchestrator.gateway.dialects import KEEP_ALIVE
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    PERMANENT_KEYS,
    Service,
    Taken,
    chat,
    make_config,
    read_until,
    service,
    text_of,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
EMPTY_CHUNK = b'"choices":[{"index":0,"delta":{},"finish_reason":null}]'
# Every dialect that streams: what it is asked with, and how what keeps its silent stream open is known. It is
# an event in each of them: clients that mind a silence do not count comments.
DIALECTS: dict[str, tuple[dict[str, Any], bytes]] = {
    CHAT: (chat(), EMPTY_CHUNK),
    "/v1/completions": ({"prompt": "p"}, b'"text":"","finish_reason":null'),
    "/v1/messages": (chat(max_tokens=5), b'data: {"type":"ping"}'),
    "/v1/responses": ({"input": "i"}, b"event: keepalive"),
    "/api/chat": (chat(), b'"message":{"role":"assistant","content":""},"done":false'),
}
QUICK = make_config(keepalive_s=0.05, header_wait_s=0)


async def _in_prefill(turn: Taken) -> None:
    await turn.start()


async def _paused(turn: Taken) -> None:
    await turn.start()
    await turn.say("some")
    await turn.pause()


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("script", [None, _in_prefill, _paused])
async def test_a_silent_stream_is_kept_open(
    redis: Redis, valkey_url: str, path: str, script: Callable[[Taken], Awaitable[None]] | None
) -> None:
    body, mark = DIALECTS[path]
    async with (
        service(redis, valkey_url, config=QUICK) as swarm,
        swarm.client.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        assert response.headers["x-accel-buffering"] == "no"
        if script is not None:
            turn = await swarm.dispatcher.take()
            await script(turn)
        pieces = response.aiter_raw()
        got = b""
        with anyio.fail_after(10):
            while got.count(mark) < 5:  # a status may come with one of its own
                got += await anext(pieces)
        if script is _paused:
            assert b"some" in got
        if script is not None:
            await turn.become(TurnState.CANCELLED)


def _asking(swarm: Service) -> AbstractAsyncContextManager[httpx.Response]:
    return swarm.client.stream("POST", CHAT, json=chat())


async def test_a_reply_in_one_piece_is_kept_open_with_blanks(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.answer.WHOLE_SILENCE_S", 0.1)
    async with service(redis, valkey_url, config=QUICK) as swarm, _asking(swarm) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-accel-buffering"] == "no"
        pieces = response.aiter_raw()
        assert await read_until(pieces, b"\n\n\n") == b"\n\n\n"
        turn = await swarm.dispatcher.take()
        await turn.start()
        await turn.say("late")
        await turn.finish()
        rest = b"".join([piece async for piece in pieces])
    assert orjson.loads(b"\n" + rest)["choices"][0]["message"]["content"] == "late"


async def test_a_quick_reply_in_one_piece_has_no_blanks(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.finish()

        tasks.start_soon(dispatch)
        response = await swarm.client.post(CHAT, json=chat())
    assert response.content.startswith(b"{")
    assert int(response.headers["content-length"]) == len(response.content)


async def test_after_blanks_a_refusal_is_the_body(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.answer.WHOLE_SILENCE_S", 0.0)
    async with service(redis, valkey_url, config=QUICK) as swarm, _asking(swarm) as response:
        turn = await swarm.dispatcher.take()
        await turn.fail(400, "the engine refuses this")
        body = await response.aread()
    assert response.status_code == 200
    assert orjson.loads(body)["error"]["message"] == "the engine refuses this"


async def test_after_blanks_a_failure_that_may_pass_breaks_the_connection_off(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.answer.WHOLE_SILENCE_S", 0.0)
    async with service(redis, valkey_url, config=QUICK) as swarm, _asking(swarm) as response:
        turn = await swarm.dispatcher.take()
        await turn.fail(503)
        with pytest.raises(httpx.TransportError):
            await response.aread()


async def test_a_broker_that_hangs_does_not_silence_a_stream(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.follow.SILENCE_CHECK_S", 0.05)
    answers = anyio.Event()
    read = Broker.log
    asked = 0

    async def hang(self: Broker, *args: Any, **kwargs: Any) -> list[bytes]:
        nonlocal asked
        asked += 1
        await answers.wait()
        return await read(self, *args, **kwargs)

    monkeypatch.setattr(Broker, "log", hang)
    async with (
        service(redis, valkey_url, config=QUICK) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        pieces = response.aiter_raw()
        turn = await swarm.dispatcher.take()
        await turn.start()
        got = b""
        with anyio.fail_after(10):
            while got.count(KEEP_ALIVE) < 3:
                got += await anext(pieces)
        assert asked == 1
        answers.set()
        await turn.say("back")
        await turn.finish()
        got += b"".join([piece async for piece in pieces])
    assert text_of(got) == "back"
