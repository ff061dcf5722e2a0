"""The last prompts of each agent, and what a new one has in common with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.prompts.compare import Likeness, compare, run
from orchestrator.prompts.fingerprint import Fingerprint, Prompt
from orchestrator.prompts.shape import pattern_of, shape_of

#: Conversations of an agent that are told apart; a prompt that continues one takes its place.
MAX_CONVERSATIONS = 8
MAX_AGENTS = 256
#: Less than this is not worth a rule: some hundred tokens.
MIN_LOST_BYTES = 1024
MAX_SHOWN_LINES = 4
#: An earlier prompt with this part of a new one is the one that it goes on from: no better one is sought.
ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class ChangedLine:
    """A line of instructions that the earlier prompt did not have there.

    `role` of its message; `line` its number in it, from 1; `offset` bytes of the prompt before it; `shape`
    for people, without what it says; `pattern` for a rule, None where the line has no name to know it by.
    """

    role: str
    line: int
    offset: int
    shape: str
    pattern: str | None


@dataclass(frozen=True, slots=True)
class Observation:
    """What a turn's prompt has in common with its agent's earlier ones. Bytes.

    `n_bytes`: of the prompt. `like`: the turn whose prompt has most of it, None for an agent's first.
    `same_bytes`: what an earlier prompt begins with too. `lost_bytes`: what would be found besides if the
    lines in `lines` were the same. `tools_changed`: the tools differ from that turn's.
    """

    n_bytes: int
    like: str | None
    same_bytes: int
    lost_bytes: int
    lines: tuple[ChangedLine, ...]
    tools_changed: bool

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Earlier:
    turn: str
    fingerprint: Fingerprint
    tools: int | None


class RecentPrompts:
    """Fingerprints of the last conversations of the agents that asked last. Bounded in both."""

    def __init__(self) -> None:
        self._agents: OrderedDict[Hashable, list[_Earlier]] = OrderedDict()

    def observe(self, agent: Hashable, turn: str, prompt: Prompt) -> Observation:
        """Compare a turn's prompt with the agent's earlier ones, and remember it as the newest."""
        earlier = self._agents.setdefault(agent, [])
        self._agents.move_to_end(agent)
        if len(self._agents) > MAX_AGENTS:
            self._agents.popitem(last=False)
        new = prompt.fingerprint
        same = [run(new.hashes, 0, one.fingerprint.hashes, 0) for one in earlier]
        observation = _observation(prompt, earlier, max(same, default=0))
        gone_on_from = [n == len(one.fingerprint.hashes) for n, one in zip(same, earlier, strict=True)]
        kept = [one for one, over in zip(earlier, gone_on_from, strict=True) if not over]
        earlier[:] = [_Earlier(turn, new, prompt.tools), *kept][:MAX_CONVERSATIONS]
        return observation


def _observation(prompt: Prompt, earlier: list[_Earlier], same: int) -> Observation:
    """`same`: how many pieces the prompt has in common with an earlier one from the beginning, at most."""
    new = prompt.fingerprint
    n_bytes, same_bytes = new.n_bytes, sum(new.sizes[:same])
    best, like = Likeness(0, 0, ()), None
    for one in earlier:
        likeness = compare(new, one.fingerprint)
        if like is None or likeness.n_bytes > best.n_bytes:
            best, like = likeness, one
        if best.n_bytes >= ENOUGH * n_bytes:
            break
    if like is None:
        return Observation(n_bytes, None, 0, 0, (), False)
    lost_bytes = best.n_bytes - same_bytes
    lines = tuple(_changed_lines(prompt, best)) if lost_bytes >= MIN_LOST_BYTES else ()
    tools_changed = like.tools != prompt.tools
    return Observation(n_bytes, like.turn, same_bytes, lost_bytes if lines else 0, lines, tools_changed)


def _changed_lines(prompt: Prompt, likeness: Likeness) -> list[ChangedLine]:
    """What the new prompt has at the changed places; where it only lacks lines, the line that follows."""
    shown = []
    for first, end in likeness.changes:
        for piece in range(first, max(end, first + 1)):
            if not prompt.fingerprint.lines[piece]:
                continue
            line = prompt.line(piece)
            offset = sum(prompt.fingerprint.sizes[:piece])
            changed = end > first
            shown.append(
                ChangedLine(
                    line.role,
                    line.number,
                    offset,
                    shape_of(line.text) if changed else "",
                    pattern_of(line.text) if changed else None,
                )
            )
    return shown[:MAX_SHOWN_LINES]
