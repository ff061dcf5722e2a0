"""What gateways tell each other of agents' prompts: how alike they are, and which lines are pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

import orjson
from redis.asyncio import Redis

from orchestrator.broker.keys import Keys

PROMPTS_LENGTH = 32
PROMPTS_TTL_S = 24 * 3600
PINS_TTL_S = 24 * 3600

_LUA = files("orchestrator.broker") / "lua"


class PromptNotes:
    """Typed access to an agent's last observations and its pinned lines. All methods raise RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis
        self._note = self._redis.register_script((_LUA / "note_prompt.lua").read_text())
        self._pin = self._redis.register_script((_LUA / "pin.lua").read_text())

    async def note(self, pool: str, agent: str, turn: str, observation: Mapping[str, Any]) -> None:
        """Keep what was observed of a turn's prompt, with the turn and with its agent's last ones."""
        keys = Keys(pool)
        await self._note(
            keys=[keys.turn(turn), keys.prompts(agent)],
            args=[orjson.dumps(observation), PROMPTS_LENGTH, PROMPTS_TTL_S],
        )

    async def of_turn(self, pool: str, turn: str) -> dict[str, Any] | None:
        """What was observed of a turn's prompt, None where nothing was."""
        raw = await self._redis.hget(Keys(pool).turn(turn), "prompt_like")
        return cast(dict[str, Any], orjson.loads(raw)) if raw else None

    async def recent(self, pool: str, agents: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """The last observations of each agent that has any, newest first."""
        pipe = self._redis.pipeline(transaction=False)
        for agent in agents:
            pipe.lrange(Keys(pool).prompts(agent), 0, -1)
        found = zip(agents, await pipe.execute(), strict=True)
        return {agent: [orjson.loads(line) for line in lines] for agent, lines in found if lines}

    async def pin(self, pool: str, agent: str, lines: Mapping[str, str]) -> dict[str, str]:
        """What each named line of an agent reads: as it did when it was first pinned.

        That is forgotten when the agent has had no pinned line for `PINS_TTL_S`.
        """
        pairs = [item.encode(errors="replace") for pair in lines.items() for item in pair]
        kept = await self._pin(keys=[Keys(pool).pins(agent)], args=[PINS_TTL_S, *pairs])
        return {name: line.decode() for name, line in zip(lines, kept, strict=True)}
