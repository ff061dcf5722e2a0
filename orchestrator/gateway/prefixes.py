"""Prompts that a prefix cache can use: an agent's rules applied, and what keeps prompts apart observed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import anyio
import orjson
import structlog
from redis.exceptions import RedisError

from orchestrator.broker.prompts import PromptNotes
from orchestrator.config import Config
from orchestrator.gateway.validate import Ask
from orchestrator.prompts import (
    MAX_BODY_BYTES,
    RecentPrompts,
    StableLines,
    apply_rules,
    find_lines,
    read_prompt,
)

# Shorter prompts are evaluated in the time it takes to talk about them.
MIN_BODY_BYTES = 2048
# A note that a broker in trouble does not take is left out.
NOTE_BOUND_S = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Steadied:
    """A request after its agent's rules, which pinned or moved so many of its lines."""

    ask: Ask
    pool: str
    agent: str
    is_chat: bool
    ruled_lines: int


class Prefixes:
    """The rules of all agents, and the last prompts of those that asked of this gateway."""

    def __init__(self, config: Config, notes: PromptNotes) -> None:
        self.notes = notes
        self._rules = {
            name: StableLines.of(agent.stable_prefix.pin, agent.stable_prefix.move)
            for name, agent in config.agents.items()
        }
        self._recent = RecentPrompts()

    async def steady(self, pool: str, agent: str, api: str, ask: Ask) -> Steadied:
        """Apply the agent's rules. Raises RedisError when a pinned line is needed and cannot be had."""
        rules = self._rules.get(agent)
        is_chat = api == "chat"
        messages = ask.body["messages"] if is_chat else ()
        hits = find_lines(messages, rules) if rules else ()
        if not hits:
            return Steadied(ask, pool, agent, is_chat, 0)
        pins = {hit.pin: hit.line for hit in hits if hit.pin is not None}
        pinned = await self.notes.pin(pool, agent, pins) if pins else {}
        steady_messages, ruled_lines = apply_rules(messages, hits, pinned)
        if steady_messages != messages:
            body = {**ask.body, "messages": steady_messages}
            ask = replace(ask, body=body, raw=orjson.dumps(body))
        return Steadied(ask, pool, agent, is_chat, ruled_lines)

    async def note(self, turn: str, steadied: Steadied) -> None:
        """Observe the prompt of a turn that has been submitted. A failure is logged."""
        ask = steadied.ask
        if not steadied.is_chat or not MIN_BODY_BYTES <= len(ask.raw) <= MAX_BODY_BYTES:
            return
        pool, agent = steadied.pool, steadied.agent
        seen = self._recent.observe((pool, agent), turn, read_prompt(ask.body))
        observation = {**seen.data(), "ruled_lines": steadied.ruled_lines}
        try:
            with anyio.fail_after(NOTE_BOUND_S):
                await self.notes.note(pool, agent, turn, observation)
        except (RedisError, OSError) as error:
            _log.warning("a prompt's likeness was not noted", turn=turn, error=str(error))
