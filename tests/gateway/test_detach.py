"""Turns that go on without their client, and the way back to their replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis

from orchestrator.broker import Broker, OutputReader, delta_entry, end_entry
from orchestrator.gateway import create_app, serve
from orchestrator.turns import Kept, TurnState
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
    text_of,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
DETACHED = {"X-Swarm-Detach": "true"}
QUICK = make_config(keepalive_s=0.1, header_wait_s=0)
Script = Callable[[Taken], Awaitable[None]]


def output_of(turn: str, query: str = "") -> str:
    return f"/v1/turns/{turn}/output{query}"


async def _claimed(turn: Taken) -> None:
    pass


async def _started(turn: Taken) -> None:
    await turn.start()


async def _paused(turn: Taken) -> None:
    await turn.start()
    await turn.say("some")
    await turn.pause()


async def left_turn(swarm: Service, script: Script = _started, **fields: Any) -> Taken:
    """A turn whose client asked to keep it, and has gone once the script was played."""
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            async with swarm.client.stream("POST", CHAT, json=chat(**fields), headers=DETACHED) as response:
                await read_stream(response)

        tasks.start_soon(ask)
        turn = await swarm.dispatcher.take()
        await script(turn)
        await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    with anyio.fail_after(10):
        while swarm.reader._streams:  # noqa: ASYNC110 - until the gateway has heard of it
            await anyio.sleep(0.005)
    return turn


async def no_cancel(swarm: Service) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(0.1):
        await swarm.dispatcher.event("cancel")


@pytest.mark.parametrize("script", [_claimed, _started, _paused])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_kept_turn_goes_on_when_its_client_leaves(
    redis: Redis, valkey_url: str, script: Script, stream: bool
) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, script, stream=stream)
        await no_cancel(swarm)
        if script is _claimed:
            await turn.start()
        elif script is _paused:
            await turn.resume()
        await turn.say(" more")
        await turn.finish()
        response = await swarm.client.get(output_of(turn.id))
    assert response.status_code == 200
    assert response.headers["x-swarm-turn"] == turn.id
    said = "some more" if script is _paused else " more"
    if stream:
        assert text_of(response.content) == said
    else:
        assert response.json()["choices"][0]["message"]["content"] == said


async def test_a_kept_turn_goes_on_while_it_waits(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True), headers=DETACHED) as response:
            id_ = response.headers["x-swarm-turn"]
        with anyio.fail_after(10):
            while swarm.reader._streams:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert await swarm.broker.waiting("default", 10) == [id_]
        assert (await swarm.client.get(f"/swarm/turns/{id_}")).json()["kept"] is True
        await swarm.broker.cancel("default", id_)


async def test_it_is_the_same_reply_again(redis: Redis, valkey_url: str) -> None:
    body = chat(stream=True, stream_options={"include_usage": True}, swarm_note="private")
    async with service(redis, valkey_url, config=make_config()) as swarm:
        async with anyio.create_task_group() as tasks:

            async def dispatch() -> None:
                turn = await swarm.dispatcher.take()
                await turn.start()
                await turn.say("a", "b")
                await turn.finish()

            tasks.start_soon(dispatch)
            async with swarm.client.stream("POST", CHAT, json=body, headers=DETACHED) as response:
                first = await read_stream(response)
        id_ = response.headers["x-swarm-turn"]
        again = await swarm.client.get(output_of(id_))
        whole = await swarm.client.get(output_of(id_, "?stream=false"))
    assert again.content == first
    assert again.headers["content-type"] == response.headers["content-type"]
    assert whole.json()["choices"][0]["message"]["content"] == "ab"
    assert whole.json()["id"] == f"chatcmpl-{id_}"


async def test_a_running_turn_is_followed_by_any_number(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, _paused, stream=True)
        await turn.resume()
        async with (
            swarm.client.stream("GET", output_of(turn.id)) as one,
            swarm.client.stream("GET", output_of(turn.id)) as two,
        ):
            first, second = one.aiter_raw(), two.aiter_raw()
            await read_until(first, b'"some"')
            got = await read_until(second, b'"some"')
            async with swarm.client.stream("GET", output_of(turn.id)) as three:
                await read_until(three.aiter_raw(), b'"some"')
            await no_cancel(swarm)
            await turn.say(" thing")
            await turn.finish()
            got += b"".join([piece async for piece in second])
    assert text_of(got) == "some thing"


async def test_the_output_of_another_gateways_turn_is_followed(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=make_config(keepalive_s=600)) as swarm:
        turn = await left_turn(swarm, _paused, stream=True)
        # As after a restart: nobody here hears of what is written.
        await redis.hset(f"swarm:{{default}}:turn:{turn.id}", "gateway", "gone")
        async with swarm.client.stream("GET", output_of(turn.id)) as response:
            pieces = response.aiter_raw()
            got = await read_until(pieces, b": paused")
            await turn.write(
                delta_entry({"content": " more"}, 1, []), end_entry("stop", 1, 2, 0), gateway="gone"
            )
            await turn.become(TurnState.RUNNING)
            await turn.become(TurnState.DONE)
            got += await read_until(pieces, b"[DONE]")
    assert text_of(got) == "some more"


async def test_a_failure_is_told_as_it_would_have_been(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, stream=True)
        await turn.fail(502, "engine lost")
        response = await swarm.client.get(output_of(turn.id))
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "engine lost"


async def test_who_may_not_read_it(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, stream=True)
        other = await swarm.client.get(output_of(turn.id), headers={"X-Swarm-Agent": "indexer"})
        nobody = await swarm.client.get(output_of(turn.id), headers={"X-Swarm-Agent": "unknown"})
        absent = await swarm.client.get(output_of("turn-0"))
        bad = await swarm.client.get(output_of(turn.id, "?stream=maybe"))
        await turn.finish()
    # Nobody learns that there is such a turn.
    assert other.status_code == absent.status_code == 404
    assert other.json()["error"]["code"] == absent.json()["error"]["code"] == "turn_not_found"
    assert nobody.status_code == 401
    assert bad.status_code == 400


@pytest.mark.parametrize("script", [_claimed, _started, _paused])
async def test_its_agent_cancels_it(redis: Redis, valkey_url: str, script: Script) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, script, stream=True)
        before = await swarm.broker.record("default", turn.id)
        assert before is not None
        # The owner is told each time, and acts on the first.
        for _ in range(2):
            response = await swarm.client.delete(f"/v1/turns/{turn.id}")
            assert response.json() == {"id": turn.id, "requested": "cancel", "state": before.state}
            assert (response.status_code, response.headers["x-swarm-turn"]) == (200, turn.id)
            assert (await swarm.dispatcher.event("cancel")).turn == turn.id
        await turn.become(TurnState.CANCELLED)


async def test_one_that_waits_is_cancelled_at_once(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True), headers=DETACHED) as response:
            id_ = response.headers["x-swarm-turn"]
        replies = [await swarm.client.delete(f"/v1/turns/{id_}") for _ in range(2)]
        output = await swarm.client.get(output_of(id_))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.json()["state"] for reply in replies] == ["queued", "cancelled"]
    assert (output.status_code, output.json()["error"]["code"]) == (499, "cancelled")


async def test_cancelling_what_has_ended_does_nothing(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, stream=True)
        await turn.say("all")
        await turn.finish()
        response = await swarm.client.delete(f"/v1/turns/{turn.id}")
        await no_cancel(swarm)
        output = await swarm.client.get(output_of(turn.id))
    assert (response.status_code, response.json()["state"]) == (200, "done")
    assert text_of(output.content) == "all"


async def test_who_may_not_cancel_it(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        turn = await left_turn(swarm, stream=True)
        path = f"/v1/turns/{turn.id}"
        other = await swarm.client.delete(path, headers={"X-Swarm-Agent": "indexer"})
        nobody = await swarm.client.delete(path, headers={"X-Swarm-Agent": "unknown"})
        absent = await swarm.client.delete("/v1/turns/turn-0")
        strange = await swarm.client.delete("/v1/turns/a%7Bb%7D")
        method = await swarm.client.get(path)
        await no_cancel(swarm)
        await turn.finish()
    assert [reply.status_code for reply in (other, absent, strange)] == [404] * 3
    assert {reply.json()["error"]["code"] for reply in (other, absent, strange)} == {"turn_not_found"}
    assert nobody.status_code == 401
    assert method.status_code == 405


async def test_a_turn_that_was_not_to_be_kept_is_not_handed_out(redis: Redis, valkey_url: str) -> None:
    async with (
        service(redis, valkey_url, config=QUICK) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        refused = await swarm.client.get(output_of(response.headers["x-swarm-turn"]))
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "turn_not_kept"


@pytest.mark.parametrize("word", ["false", "no", "0", "", "Off"])
async def test_words_that_mean_no(redis: Redis, valkey_url: str, word: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        headers = {"X-Swarm-Detach": word}
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True), headers=headers) as response:
            pass
        await swarm.until_state(response.headers["x-swarm-turn"], TurnState.CANCELLED)


@pytest.mark.parametrize("word", ["TRUE", "yes", "1", "on"])
async def test_words_that_mean_yes(redis: Redis, valkey_url: str, word: str) -> None:
    async with service(redis, valkey_url, config=QUICK) as swarm:
        headers = {"X-Swarm-Detach": word}
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True), headers=headers) as response:
            record = await swarm.broker.record("default", response.headers["x-swarm-turn"])
            await swarm.broker.cancel("default", response.headers["x-swarm-turn"])
    assert record is not None and record.request.kept == Kept(CHAT, record.request.body)


@pytest.mark.parametrize("word", [b"maybe", b"\xff", b"true, true"])
async def test_other_words_are_refused(redis: Redis, valkey_url: str, word: bytes) -> None:
    async with service(redis, valkey_url) as swarm:
        response = await swarm.client.post(CHAT, json=chat(), headers={b"X-Swarm-Detach": word})
        assert await swarm.turn_keys() == []
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Swarm-Detach"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"prompt": "p"}),
        # What the engine gets of it is another body than the client's.
        ("/v1/messages", chat(max_tokens=5, system="s")),
    ],
)
async def test_each_api_has_its_own_shape_again(
    redis: Redis, valkey_url: str, path: str, body: dict[str, Any]
) -> None:
    async with service(redis, valkey_url, config=make_config()) as swarm:
        async with anyio.create_task_group() as tasks:

            async def dispatch() -> None:
                turn = await swarm.dispatcher.take()
                await turn.start()
                await turn.say("words")
                await turn.finish()

            tasks.start_soon(dispatch)
            first = await swarm.client.post(path, json=body, headers=DETACHED)
        again = await swarm.client.get(output_of(first.headers["x-swarm-turn"]))
    assert first.status_code == 200
    assert again.json() == first.json()


async def test_the_services_end_leaves_a_kept_turn(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.gateway.server.GRACE_S", 0.1)
    broker = Broker(redis)
    async with (
        Redis.from_url(valkey_url, socket_timeout=None) as subscriber,
        anyio.create_task_group() as all_,
    ):
        reader = OutputReader(broker, subscriber, GATEWAY)
        await all_.start(reader.run)
        app = create_app(QUICK, broker, reader, GATEWAY, FakeEngines())
        scope = anyio.CancelScope()
        ended = anyio.Event()

        async def run(*, task_status: anyio.abc.TaskStatus[int]) -> None:
            with scope:
                await serve(app, "127.0.0.1", 0, task_status=task_status)
            ended.set()

        port = await all_.start(run)
        stream = await anyio.connect_tcp("127.0.0.1", port)
        async with stream:
            body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nX-Swarm-Detach: 1\r\nContent-Length: %d\r\n\r\n"
            await stream.send(head % (CHAT.encode(), len(body)) + body)
            _, [queued] = await broker.events("default", "0-0", 4000)
            scope.cancel()
            with anyio.fail_after(10):
                await ended.wait()
        all_.cancel_scope.cancel()
    record = await broker.record("default", queued.turn)
    assert record is not None and record.state is TurnState.QUEUED
    await broker.cancel("default", queued.turn)
