"""What gateways keep of prompts in Redis, for each other and for a while."""

from __future__ import annotations

import anyio
import pytest
from redis.asyncio import Redis

from orchestrator.broker import Broker
from orchestrator.broker.prompts import PROMPTS_LENGTH, PromptNotes
from orchestrator.turns import TurnRequest, TurnSize

pytestmark = pytest.mark.keys_without_ttl("swarm:*:seq", "swarm:*:events", "swarm:*:queue")


def request(turn: str) -> TurnRequest:
    size = TurnSize(10, 10, exact=False)
    return TurnRequest(turn, "p", "editor", 50, "normal", "chat", "m", b"{}", True, size, "gw", 1.0)


async def test_notes_are_with_the_turn_and_with_the_agent(redis: Redis) -> None:
    notes = PromptNotes(redis)
    await Broker(redis).submit(request("turn-1"), max_waiting=10)
    await notes.note("p", "editor", "turn-1", {"n_bytes": 7})
    assert await notes.of_turn("p", "turn-1") == {"n_bytes": 7}
    assert await notes.recent("p", ["editor", "other"]) == {"editor": [{"n_bytes": 7}]}
    assert await notes.recent("q", ["editor"]) == {}
    record = await Broker(redis).record("p", "turn-1")
    assert record is not None and record.request.agent == "editor"


async def test_a_turn_that_is_gone_is_not_brought_back(redis: Redis) -> None:
    notes = PromptNotes(redis)
    await notes.note("p", "editor", "turn-1", {"n_bytes": 7})
    assert await notes.of_turn("p", "turn-1") is None
    assert not await redis.exists("swarm:{p}:turn:turn-1")


async def test_the_last_ones_are_kept(redis: Redis) -> None:
    notes = PromptNotes(redis)
    for number in range(PROMPTS_LENGTH + 3):
        await notes.note("p", "editor", "turn-1", {"n": number})
    [found] = (await notes.recent("p", ["editor"])).values()
    assert [one["n"] for one in found] == list(range(PROMPTS_LENGTH + 2, 2, -1))


async def test_no_agents(redis: Redis) -> None:
    assert await PromptNotes(redis).recent("p", []) == {}


async def test_the_first_line_is_pinned_for_all_gateways(redis: Redis) -> None:
    results: list[dict[str, str]] = []

    async def pin(number: int) -> None:
        results.append(await PromptNotes(redis).pin("p", "editor", {"1 x:*": f"x: {number}", "2 é*": "é é"}))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(pin, number)
    assert len({tuple(found.items()) for found in results}) == 1
    assert results[0]["2 é*"] == "é é"
    assert await PromptNotes(redis).pin("p", "other", {"1 x:*": "x: 9"}) == {"1 x:*": "x: 9"}
    assert await PromptNotes(redis).pin("q", "editor", {"1 x:*": "x: 8"}) == {"1 x:*": "x: 8"}
