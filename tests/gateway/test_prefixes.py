"""Rules for lines that change, on their way through the gateway, and what it tells of such lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.broker.prompts import PromptNotes
from orchestrator.config import Config, parse_config
from orchestrator.prompts.report import MIN_SEEN
from tests.gateway.harness import PERMANENT_KEYS, FakeEngines, Service, Taken, application, service
from tests.prompts.bodies import RULES, chat

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CONFIG = """
server: {header_wait_s: 0}
backends: [{name: local, url: "http://127.0.0.1:1", model: tiny, decode_slots: 2}]
agents:
  plain: {priority: normal}
  steady: {stable_prefix: {pin: ["x-billing:*"], move: ["Time: *"]}}
default_agent: plain
"""

CHAT = "/v1/chat/completions"


def config() -> Config:
    return parse_config(CONFIG)


def top(number: int) -> list[str]:
    """Two lines that change with each turn."""
    return [f"x-billing: {number}", f"Time: {number}"]


@asynccontextmanager
async def taken(swarm: Service, body: dict[str, Any], agent: str, path: str = CHAT) -> AsyncIterator[Taken]:
    """The turn as its dispatcher has it, which is then ended."""
    reply: list[httpx.Response] = []

    async def ask() -> None:
        reply.append(await swarm.client.post(path, json=body, headers={"X-Swarm-Agent": agent}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        turn = await swarm.dispatcher.take()
        yield turn
        await turn.start()
        await turn.finish()
    assert reply[0].status_code == 200


async def stored(swarm: Service, body: dict[str, Any], agent: str, path: str = CHAT) -> dict[str, Any]:
    """The body as the engine would get it."""
    async with taken(swarm, body, agent, path) as turn:
        return dict(orjson.loads(turn.record.request.body))


async def story(swarm: Service, turn: str) -> dict[str, Any]:
    return dict((await swarm.client.get(f"/swarm/turns/{turn}")).json())


async def test_rules_apply_before_the_turn_is_stored(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=config()) as swarm:
        sent = [chat(*top(number), said=number) for number in range(3)]
        bodies = [await stored(swarm, body, "steady") for body in sent]
    for number, (body, before) in enumerate(zip(bodies, sent, strict=True)):
        assert body["messages"][0]["content"] == "\n".join(["x-billing: 0", *RULES])
        assert body["messages"][1:-1] == before["messages"][1:-1]
        assert body["messages"][-1]["content"] == f"{before['messages'][-1]['content']}\n\nTime: {number}"
        assert body["tools"] == before["tools"]


async def test_anthropics_system_blocks(redis: Redis, valkey_url: str) -> None:
    blocks = [[*top(number), "\n".join(RULES)] for number in (1, 2)]
    async with service(redis, valkey_url, config=config()) as swarm:
        bodies = [
            await stored(
                swarm,
                {
                    "max_tokens": 8,
                    "system": [{"type": "text", "text": text} for text in texts],
                    "messages": [{"role": "user", "content": "Hello."}],
                },
                "steady",
                "/v1/messages",
            )
            for texts in blocks
        ]
    for number, body in enumerate(bodies, 1):
        system, user = body["messages"]
        assert system["content"] == "\n".join(["x-billing: 1", *RULES])
        assert user["content"] == f"Hello.\n\nTime: {number}"


async def test_anthropics_count_is_of_what_would_be_sent(redis: Redis, valkey_url: str) -> None:
    engines = FakeEngines()
    asked = [
        {
            "system": "\n".join([*top(number), *RULES]),
            "messages": [{"role": "user", "content": "Hello."}],
            "max_tokens": 8,
        }
        for number in (1, 2)
    ]
    headers = {"X-Swarm-Agent": "steady"}
    async with service(redis, valkey_url, config=config(), engines=engines) as swarm:
        sent = [await stored(swarm, body, "steady", "/v1/messages") for body in asked]
        for body in asked:
            response = await swarm.client.post("/v1/messages/count_tokens", json=body, headers=headers)
            assert response.status_code == 200
    counted = [body["messages"] for body in engines.bodies[-2:]]
    assert counted == [body["messages"] for body in sent]
    assert counted[0][0] == counted[1][0], "the pinned line, and without the moved one"


async def test_without_a_rule_the_bytes_are_the_clients(redis: Redis, valkey_url: str) -> None:
    raw = orjson.dumps(chat(*top(1)), option=orjson.OPT_INDENT_2)
    async with service(redis, valkey_url, config=config()) as swarm:
        for agent in ("plain", "steady"):
            sent = (
                raw
                if agent == "plain"
                else raw.replace(b"x-billing", b"y-billing").replace(b"Time:", b"Date:")
            )
            async with anyio.create_task_group() as tasks:
                headers = {"X-Swarm-Agent": agent}
                tasks.start_soon(lambda s=sent, h=headers: swarm.client.post(CHAT, content=s, headers=h))  # type: ignore[misc]
                turn = await swarm.dispatcher.take()
                assert turn.record.request.body == sent
                await turn.start()
                await turn.finish()


async def test_a_completion_has_no_instructions(redis: Redis, valkey_url: str) -> None:
    body = {"prompt": "\n".join([*top(1), *RULES])}
    async with service(redis, valkey_url, config=config()) as swarm:
        assert await stored(swarm, body, "steady", "/v1/completions") == body
        assert await PromptNotes(redis).recent("default", ["steady"]) == {}


async def test_the_record_tells_what_the_prompt_is_like(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=config()) as swarm:
        seen = []
        for number in range(2):
            async with taken(swarm, chat(*top(number), said=number), "plain") as turn:
                pass
            seen.append((turn.id, (await story(swarm, turn.id))["prompt"]))
        (first, alone), (_, second) = seen
        assert (alone["like"], alone["lines"], alone["ruled_lines"]) == (None, [], 0)
        assert second["like"] == first
        assert [line["pattern"] for line in second["lines"]] == ["x-billing:*", "Time:*"]
        async with taken(swarm, chat(*top(0)), "steady"):
            pass
        async with taken(swarm, chat(*top(1), said=1), "steady") as turn:
            pass
        cured = (await story(swarm, turn.id))["prompt"]
    assert (cured["lines"], cured["lost_bytes"], cured["ruled_lines"]) == ([], 0, 2)
    assert cured["same_bytes"] > 0.5 * cured["n_bytes"]


async def test_a_short_prompt_is_not_compared(redis: Redis, valkey_url: str) -> None:
    body = {"messages": [{"role": "system", "content": "x-billing: 1"}, {"role": "user", "content": "Hi."}]}
    async with service(redis, valkey_url, config=config()) as swarm:
        async with taken(swarm, body, "plain") as turn:
            pass
        assert (await story(swarm, turn.id))["prompt"] is None


async def test_lines_that_keep_changing_are_listed(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url, config=config()) as swarm:
        for agent in ("plain", "steady"):
            for number in range(MIN_SEEN + 1):
                async with taken(swarm, chat(*top(number), said=number), agent):
                    pass
        response = await swarm.client.get("/swarm/prefixes")
    assert response.status_code == 200
    [found] = response.json()["prefixes"]
    assert (found["pool"], found["agent"]) == ("default", "plain")
    assert [(line["line"], line["rule"]) for line in found["lines"]] == [(1, "pin"), (2, "move")]


async def test_nothing_to_list(redis: Redis) -> None:
    async with application(redis, config=config()) as client:
        assert (await client.get("/swarm/prefixes")).json() == {"prefixes": []}
        assert (await client.post("/swarm/prefixes")).status_code == 405


async def test_a_broker_that_does_not_take_the_note_costs_nothing(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: PromptNotes, *args: object) -> None:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(PromptNotes, "note", refuse)
    async with service(redis, valkey_url, config=config()) as swarm:
        body = chat(*top(1))
        assert await stored(swarm, body, "plain") == body


async def test_a_pin_that_cannot_be_had_is_an_outage(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: PromptNotes, *args: object) -> None:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(PromptNotes, "pin", refuse)
    async with application(redis, config=config()) as client:
        response = await client.post(CHAT, json=chat(*top(1)), headers={"X-Swarm-Agent": "steady"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "broker_unavailable")


@pytest.mark.parametrize("role", [["system"], {"a": 1}, 7, None])
async def test_strange_roles_are_the_engines_business(redis: Redis, valkey_url: str, role: Any) -> None:
    body = {"messages": [{"role": role, "content": "x-billing: 1\n" * 300}]}
    async with service(redis, valkey_url, config=config()) as swarm:
        assert await stored(swarm, body, "steady") == body
