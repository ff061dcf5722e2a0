"""What gets lost between the log and the client: messages, connections, the broker, the client's reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import delta_entry, end_entry
from orchestrator.broker.embedded import EmbeddedValkey
from orchestrator.broker.streams import BACKLOG
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    PERMANENT_KEYS,
    Service,
    chat,
    data_of,
    make_config,
    read_stream,
    service,
    text_of,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)


async def _numbers(swarm: Service, **publish: Any) -> tuple[str, str]:
    """Stream 60 numbered deltas, of which `publish` says how every third message is lost."""
    expected = "".join(f"{number} " for number in range(60))
    async with swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        turn = await swarm.dispatcher.take()
        await turn.start()
        for number in range(60):
            lost = publish if number % 3 == 0 else {}
            await turn.write(delta_entry({"content": f"{number} "}, 1, []), **lost)
        await turn.finish()
        return text_of(await read_stream(response)), expected


async def test_lost_messages_are_read_from_the_log(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm:
        got, expected = await _numbers(swarm, gateway="somebody-else")
    assert got == expected


async def test_a_lost_end_is_found_after_a_silence(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.follow.SILENCE_CHECK_S", 0.1)
    async with (
        service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        turn = await swarm.dispatcher.take()
        await turn.start()
        await turn.write(
            delta_entry({"content": "all"}, 1, []), end_entry("stop", 1, 1, 0), gateway="somebody-else"
        )
        await turn.become(TurnState.DONE)
        assert text_of(await read_stream(response)) == "all"


async def test_a_broken_output_channel_costs_nothing(redis: Redis, valkey_url: str) -> None:
    config = make_config(header_wait_s=0)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        turn = await swarm.dispatcher.take()
        await turn.start()
        await redis.client_kill_filter(_type="pubsub")
        await turn.say("a", "b")
        await turn.finish()
        assert text_of(await read_stream(response)) == "ab"


async def test_a_restart_of_the_broker_costs_nothing(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as valkey, Redis.from_url(valkey.url) as redis:
        config = make_config(keepalive_s=0.1, header_wait_s=0)
        async with service(redis, valkey.url, config=config) as swarm:
            body = chat(stream=True)
            async with swarm.client.stream("POST", "/v1/chat/completions", json=body) as response:
                turn = await swarm.dispatcher.take()
                await turn.start()
                await turn.say("before ")
                await valkey.restart()
                await turn.say("after")
                await turn.finish()
                assert text_of(await read_stream(response)) == "before after"


async def test_a_turn_that_redis_forgot_ends_with_an_error(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.follow.SILENCE_CHECK_S", 0.1)
    config = make_config(keepalive_s=0.05, header_wait_s=0)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        turn = await swarm.dispatcher.take()
        await turn.start()
        await redis.flushdb()
        assert data_of(await read_stream(response))[-1]["error"]["code"] == "turn_lost"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (TurnState.CANCELLED, "cancelled"),
        (TurnState.FAILED, "turn_failed"),
        (TurnState.DONE, "turn_lost"),
    ],
)
async def test_a_turn_whose_end_was_never_written(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, state: TurnState, code: str
) -> None:
    monkeypatch.setattr("orchestrator.gateway.follow.SILENCE_CHECK_S", 0.1)
    config = make_config(keepalive_s=0.05, header_wait_s=0)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        turn = await swarm.dispatcher.take()
        await turn.start()
        await turn.become(state)
        assert data_of(await read_stream(response))[-1]["error"]["code"] == code


async def test_a_slow_reader_is_bounded_and_loses_nothing(redis: Redis, valkey_url: str) -> None:
    # More than the sockets' own buffers hold, so that the gateway's sends block.
    text, count = "x" * 4000, 3000
    body = orjson.dumps(chat(stream=True))
    config = make_config(header_wait_s=0)
    async with (
        service(redis, valkey_url, config=config) as swarm,
        await anyio.connect_tcp("127.0.0.1", swarm.port) as stream,
    ):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        await stream.send(head + body)
        turn = await swarm.dispatcher.take()
        await turn.start()
        pushed, behind = 0, False
        for start in range(0, count, 100):
            entries = [delta_entry({"content": f"{start + i}{text}"}, 1, []) for i in range(100)]
            await turn.write(*entries)
            await anyio.sleep(0.001)
            [followed] = swarm.reader._streams[turn.id]
            pushed, behind = max(pushed, len(followed._pushed)), behind or followed._behind
        await turn.finish()
        # Somebody else is served meanwhile.
        assert (await swarm.client.get("/v1/models")).status_code == 200
        got = bytearray()
        with anyio.fail_after(20):
            while not got.endswith(b"0\r\n\r\n"):
                got += await stream.receive(1 << 20)
    assert behind and pushed <= BACKLOG
    place = 0
    for number in range(count):
        place = got.find(b'{"content":"%dx' % number, place)
        assert place >= 0, f"delta {number} is missing or out of order"
    assert got.count(b'{"content":"') == count
