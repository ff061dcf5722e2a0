"""Long prompts on the real engine: who asks for little beside one, and who gives up and asks again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.e2e.conftest import Streamed, Swarm, SwarmFactory

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
    pytest.mark.usefixtures("redis"),
]
BATCH_TOKENS = 64


def ask(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


def long_prompt(about: str) -> dict[str, Any]:
    """About 1,700 tokens."""
    return ask(f"{about}. " + " ".join(f"Rule {number}: be kind to {about}." for number in range(150)))


async def evaluated(swarm: Swarm, tokens: int) -> None:
    """Return once some slot that is busy has so many tokens of KV, and not yet the whole prompt."""
    with anyio.fail_after(120):
        while not any(  # noqa: ASYNC110
            slot["state"] == "running" and tokens <= slot["kv_tokens"] < 1_400
            for slot in (await swarm.state())["slots"]
        ):
            await anyio.sleep(0.02)


async def test_a_title_does_not_wait_for_the_prompt_beside_it(swarm: SwarmFactory) -> None:
    big, title = Streamed(), Streamed()
    async with swarm(decode_slots=3) as s:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(s.stream, long_prompt("foxes"), "worker", big)
            await anyio.sleep(0.2)
            await s.stream(ask("A title for foxes?"), "worker", title)
            assert title.usage is not None
            assert not big.text, "the title waited for all of the prompt"
            state = await s.state()
            [kv_tokens] = [slot["kv_tokens"] for slot in state["slots"] if slot["turn"] == big.id]
        assert kv_tokens < 1_000, "the title waited for most of the prompt"
        paused = [entry for entry in await s.timeline(big.id) if entry["event"] == "paused"]
        assert [entry["by"] for entry in paused] == [title.id]
        assert (await s.record(big.id))["tokens_reevaluated"] <= 2 * BATCH_TOKENS
    assert big.finish_reason == "length"


async def test_who_gives_up_and_asks_again_goes_on_from_there(swarm: SwarmFactory) -> None:
    first, again = Streamed(), Streamed()
    async with swarm(decode_slots=3) as s:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(s.stream, long_prompt("owls"), "worker", first)
            await evaluated(s, 4 * BATCH_TOKENS)
            tasks.cancel_scope.cancel()
        await s.stream(long_prompt("owls"), "worker", again)
    assert again.usage is not None
    assert again.usage["prompt_tokens_details"]["cached_tokens"] >= 4 * BATCH_TOKENS
