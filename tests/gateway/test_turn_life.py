"""A turn whose client leaves, one that is cancelled, one that is answered in one piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.broker import Broker, OutputReader, delta_entry
from orchestrator.gateway import create_app
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    GATEWAY,
    PERMANENT_KEYS,
    FakeEngines,
    Service,
    Taken,
    chat,
    make_config,
    read_stream,
    read_until,
    service,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
QUICK = make_config(header_wait_s=0)


async def test_leaving_while_queued_takes_the_turn_out(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True)) as response:
            assert await swarm.broker.waiting("default", 10) == [response.headers["x-swarm-turn"]]
        await swarm.until_state(response.headers["x-swarm-turn"], TurnState.CANCELLED)
        assert await swarm.broker.waiting("default", 10) == []
        assert not swarm.reader._streams


async def _started(turn: Taken) -> None:
    await turn.start()


async def _paused(turn: Taken) -> None:
    await turn.start()
    await turn.say("some")
    await turn.pause()


async def _claimed(turn: Taken) -> None:
    pass


@pytest.mark.parametrize("script", [_claimed, _started, _paused])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_tells_the_turns_owner(
    redis: Redis, valkey_url: str, script: Callable[[Taken], Awaitable[None]], stream: bool
) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_ask_and_read, swarm, chat(stream=stream))
            turn = await swarm.dispatcher.take()
            await script(turn)
            # All of it is on its way before the client goes.
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        event = await swarm.dispatcher.event("cancel")
        assert event.turn == turn.id
        if script is _claimed:
            await turn.become(TurnState.RUNNING)
        await turn.become(TurnState.CANCELLED)


async def _ask_and_read(swarm: Service, body: dict[str, object]) -> None:
    async with swarm.client.stream("POST", CHAT, json=body) as response:
        await read_stream(response)


async def test_leaving_at_the_end_is_no_abort(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        for _ in range(5):
            async with swarm.client.stream("POST", CHAT, json=chat(stream=True)) as response:
                turn = await swarm.dispatcher.take()
                await turn.start()
                await turn.finish()
                await read_until(response.aiter_raw(), b"[DONE]")
        await anyio.sleep(0.05)
        with pytest.raises(TimeoutError), anyio.fail_after(0.1):
            await swarm.dispatcher.event("cancel")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_turn_says_so(redis: Redis, valkey_url: str, stream: bool) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def cancel() -> None:
            event = await swarm.dispatcher.event("queued")
            response = await swarm.client.post(f"/swarm/turns/{event.turn}/cancel")
            assert response.status_code == 200
            assert response.json()["state"] == "queued"

        tasks.start_soon(cancel)
        response = await swarm.client.post(CHAT, json=chat(stream=stream))
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "cancelled"


async def test_a_reply_in_one_piece(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.write(delta_entry({"reasoning_content": "h"}, 1, []))
            await turn.write(delta_entry({"reasoning_content": "m"}, 1, []))
            await turn.say("a", "b")
            await turn.pause()
            await turn.resume()
            await turn.say("c")
            await turn.finish("length", tokens=5)

        tasks.start_soon(dispatch)
        response = await swarm.client.post(CHAT, json=chat(model="tiny"))
    turn = response.headers["x-swarm-turn"]
    reply = response.json()
    assert reply.pop("created") > 1_700_000_000
    assert reply == {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "reasoning_content": "hm"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_what_the_dispatcher_gets(redis: Redis, valkey_url: str) -> None:
    raw = (
        b'{ "messages":[{"role":"developer","content":"x"}],"tools":[{"type":"namespace"}], "max_tokens":7 }'
    )
    headers = {"x-swarm-agent": "indexer", "x-swarm-priority": "batch"}
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            request = turn.record.request
            assert request.body == raw
            assert (request.agent, request.priority, request.priority_class) == ("indexer", 0, "batch")
            assert (request.api, request.model, request.stream) == ("chat", "tiny", False)
            assert (request.size.max_tokens, request.size.exact) == (7, False)
            assert request.gateway == GATEWAY
            await turn.start()
            await turn.finish()

        tasks.start_soon(dispatch)
        response = await swarm.client.post(CHAT, content=raw, headers=headers)
    assert response.status_code == 200


async def test_private_fields_stay_here(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm, anyio.create_task_group() as tasks:

        async def dispatch() -> None:
            turn = await swarm.dispatcher.take()
            assert turn.record.request.body == b'{"prompt":"p","seed":1}'
            await turn.start()
            await turn.say("q")
            await turn.finish()

        tasks.start_soon(dispatch)
        body = {"prompt": "p", "swarm_note": {"a": 1}, "seed": 1}
        response = await swarm.client.post("/v1/completions", json=body)
    assert response.json()["choices"] == [
        {"index": 0, "text": "q", "logprobs": None, "finish_reason": "stop"}
    ]


async def test_a_full_queue_refuses(redis: Redis, valkey_url: str) -> None:
    config = make_config(header_wait_s=0, max_waiting=1)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)),
    ):
        before = await swarm.turn_keys()
        response = await swarm.client.post(CHAT, json=chat(stream=True))
        assert response.status_code == 429
        assert response.headers["retry-after"] == "5"
        assert response.headers["x-swarm-turn"]
        assert response.json()["error"]["code"] == "queue_full"
        assert await swarm.turn_keys() == before


async def test_a_missing_broker_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.gateway.generate.WITHDRAW_BOUND_S", 0.1)
    async with Redis(unix_socket_path="/nonexistent/redis.sock") as redis:

        async def refuse(*args: object, **kwargs: object) -> None:
            raise RedisConnectionError("gone")

        monkeypatch.setattr(redis, "execute_command", refuse)
        broker = Broker(redis)
        reader = OutputReader(broker, redis, GATEWAY)
        app = create_app(make_config(), broker, reader, GATEWAY, FakeEngines())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            turn = await client.post(CHAT, json=chat(stream=True))
            health = await client.get("/healthz")
            state = await client.get("/swarm/state")
    assert turn.status_code == state.status_code == 503
    assert turn.json()["error"]["code"] == state.json()["error"]["code"] == "broker_unavailable"
    assert health.status_code == 503
    assert health.json()["reason"] == "Redis does not answer"


async def test_a_bug_is_a_500_without_a_traceback(redis: Redis, valkey_url: str) -> None:
    class Broken(FakeEngines):
        async def count_tokens(self, pool: str, api: str, body: dict[str, object]) -> int:
            raise RuntimeError("secret detail")

    async with service(redis, valkey_url, engines=Broken()) as swarm:
        response = await swarm.client.post(CHAT, json=chat(prompt="x" * 5000))
        assert response.status_code == 500
        assert response.headers["x-swarm-turn"]
        assert response.json()["error"]["code"] == "internal"
        assert "secret" not in response.text
        assert await swarm.turn_keys() == []
