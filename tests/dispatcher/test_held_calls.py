"""A turn that is cut inside a tool call: what its log says, and what the cut is said to have cost."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from backends.llamacpp import LlamaCppBackend
from backends.protocol import EngineRefused
from backends.simulated import ScriptedReply
from backends.simulated.tokenizer import decode, encode
from orchestrator.turns import TurnState
from tests.dispatcher.harness import PERMANENT, POOL, Swarm, swarm, until

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT)

ARGUMENTS = orjson.dumps({"path": "a.py", "content": "a line of text; " * 20}).decode()
HEAD = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "write", "arguments": ""}}
SCRIPT = ScriptedReply(
    "write the file",
    (
        {"content": "So. "},
        {"tool_calls": [HEAD]},
        # In pieces of a token, so that the tokens are the same when the text is handed back.
        *({"tool_calls": [{"index": 0, "function": {"arguments": decode([t])}}]} for t in encode(ARGUMENTS)),
    ),
    "tool_calls",
)
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Please write the file"}],
    "tools": [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}],
    "temperature": 0,
}
HELD = 120


class WritesNoCalls(LlamaCppBackend):
    """Its template does not take calls, so a half-written one cannot be handed back."""

    async def render(self, body: dict[str, Any]) -> str:
        if any("tool_calls" in message for message in body["messages"]):
            raise EngineRefused(400, "no calls here")
        return await super().render(body)


async def cut_in_the_call(s: Swarm, kind: type[LlamaCppBackend]) -> str:
    """Pause a turn inside its call and let it go on to its end."""
    await s.start(s.dispatcher(backend=s.backend(kind)))
    turn = await s.submit("", max_tokens=500, body=orjson.dumps(BODY))
    await until(lambda: s.engine.stats().tokens_generated >= HELD)
    await s.broker.tell(POOL, turn, "hold")
    await s.until_state(turn, TurnState.PAUSED)
    await s.broker.tell(POOL, turn, "release")
    assert (await s.until_end(turn)).state is TurnState.DONE
    return turn


@pytest.mark.parametrize(("kind", "again"), [(LlamaCppBackend, False), (WritesNoCalls, True)])
async def test_what_is_generated_again_is_counted(
    redis: Redis, valkey_url: str, kind: type[LlamaCppBackend], again: bool
) -> None:
    async with swarm(redis, valkey_url, scripts=(SCRIPT,)) as s:
        turn = await cut_in_the_call(s, kind)
        log = await s.log(turn)
        record = await s.record(turn)
        timeline = await s.broker.timeline(POOL, turn)
        generated = s.engine.stats().tokens_generated
    calls = [entry[1]["tool_calls"] for entry in log if entry[0] == "d" and "tool_calls" in entry[1]]
    assert [[call["function"]["arguments"] for call in part] for part in calls] == [[ARGUMENTS]]
    _, reason, usage = log[-1]
    assert (reason, record.finish_reason) == ("tool_calls", "tool_calls")
    assert usage["completion_tokens"] == record.tokens_generated
    [resumed] = [line["tokens_reevaluated"] for line in timeline if line["event"] == "resumed"]
    assert record.tokens_reevaluated == resumed
    if again:
        assert resumed >= HELD - 20, "all of the call so far is written again"
        assert generated >= usage["completion_tokens"] + HELD - 20
    else:
        assert generated < usage["completion_tokens"] + 20
