"""A line that changes at the top of a prompt, on the real engine: what it costs, and what rules give back."""

from __future__ import annotations

import pytest
import yaml

from orchestrator.prompts.report import MIN_SEEN
from tests.e2e.conftest import Swarm, serve_swarm, swarm_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

RULES = "\n".join(f"Rule {number}: say what you change, and why you change it." for number in range(40))
FEW_TOKENS = 40


def config(valkey_url: str, engine_url: str) -> str:
    """Three agents: one without a rule, and one for each way to cure it."""
    document = yaml.safe_load(swarm_config(valkey_url, engine_url))
    rules = {"pin": {"pin": ["x-billing:*"]}, "move": {"move": ["x-billing:*"]}}
    document["agents"] = {"plain": {}} | {name: {"stable_prefix": rule} for name, rule in rules.items()}
    del document["default_agent"]
    return yaml.safe_dump(document)


async def conversation(swarm: Swarm, agent: str, turns: int) -> list[tuple[int, int]]:
    """The prompt tokens of each of its turns, and how many of them were found in KV.

    The agent's name begins the prompt, so that nobody finds another one's.
    """
    messages: list[dict[str, str]] = []
    counts = []
    for number in range(turns):
        top = f"You are {agent}.\nx-billing: request={number}{number * 7919:05x}"
        messages.append({"role": "user", "content": f"Name colour number {number}."})
        body = {"messages": [{"role": "system", "content": f"{top}\n{RULES}"}, *messages], "max_tokens": 4}
        seen = await swarm.stream(body, agent=agent)
        assert seen.error is None and seen.usage is not None
        cached = seen.usage["prompt_tokens_details"]["cached_tokens"]
        counts.append((seen.usage["prompt_tokens"], cached))
        messages.append({"role": "assistant", "content": seen.text})
    return counts


@pytest.mark.usefixtures("redis")
async def test_a_changing_line_and_its_cures(valkey_url: str, engine_url: str) -> None:
    async with serve_swarm(config(valkey_url, engine_url)) as swarm:
        broken = await conversation(swarm, "plain", MIN_SEEN + 1)
        cured = {agent: await conversation(swarm, agent, 2) for agent in ("pin", "move")}
        [told] = (await swarm.http.get("/swarm/prefixes")).json()["prefixes"]
    for prompt, found in broken:
        assert prompt > 10 * FEW_TOKENS
        assert found < FEW_TOKENS, "more than what comes before the line"
    for (_, first), (prompt, found) in cured.values():
        assert first < FEW_TOKENS, "somebody else's prompt"
        # All but the last reply and what is new; moved, also the line itself.
        assert found > prompt - 2 * FEW_TOKENS
    [line] = told["lines"]
    assert (told["agent"], line["line"], line["pattern"], line["rule"]) == ("plain", 2, "x-billing:*", "pin")
