"""The vocabulary every room shares: turn states, their legal transitions, and the turn's request.

Theory of operation
-------------------
A turn is one generation request of one agent. It is accepted into a pool's queue (QUEUED), taken by
exactly one backend's dispatcher (CLAIMED), and runs in segments: RUNNING until it ends or is
preempted, PAUSED until it is resumed. A paused turn's KV is in one of the tiers of :class:`Tier`;
which one decides what a resume costs, never whether the turn can go on.

The transition table is data. The scheduler's state and the broker's Lua scripts both follow it: the
scripts receive the states that a transition may start from, so a deposed dispatcher that comes too
late changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TurnState(StrEnum):
    """Where a turn is in its life."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Tier(StrEnum):
    """Where a paused turn's KV is."""

    RESIDENT = "resident"
    SWAPPED = "swapped"
    DROPPED = "dropped"


TRANSITIONS: dict[TurnState, frozenset[TurnState]] = {
    TurnState.QUEUED: frozenset({TurnState.CLAIMED, TurnState.FAILED, TurnState.CANCELLED}),
    TurnState.CLAIMED: frozenset(
        {TurnState.QUEUED, TurnState.RUNNING, TurnState.FAILED, TurnState.CANCELLED}
    ),
    TurnState.RUNNING: frozenset({TurnState.PAUSED, TurnState.DONE, TurnState.FAILED, TurnState.CANCELLED}),
    TurnState.PAUSED: frozenset({TurnState.RUNNING, TurnState.FAILED, TurnState.CANCELLED}),
    TurnState.DONE: frozenset(),
    TurnState.FAILED: frozenset(),
    TurnState.CANCELLED: frozenset(),
}

FINAL_STATES = frozenset(state for state, following in TRANSITIONS.items() if not following)


def sources_of(target: TurnState) -> tuple[TurnState, ...]:
    """The states from which `target` may legally be entered, in the table's order."""
    return tuple(state for state, following in TRANSITIONS.items() if target in following)


class IllegalTransition(Exception):
    """A turn was told to enter a state that its present one does not lead to."""


@dataclass(frozen=True, slots=True)
class TurnSize:
    """What a turn may occupy, in tokens.

    `prompt_tokens` is exact when `exact`, else an upper bound (a byte-level tokeniser never makes
    more tokens than the text has bytes). `max_tokens` is the generation limit.
    """

    prompt_tokens: int
    max_tokens: int
    exact: bool

    @property
    def kv_tokens(self) -> int:
        """KV cells to reserve so that the turn can never outgrow its place."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Kept:
    """What it takes to hand out the reply of a turn whose client may have left.

    `path` is the endpoint that it was asked of, `asked` the request's body as it came.
    """

    path: str
    asked: bytes


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn as the gateway accepted it.

    `body` is the client's JSON with the service's own fields removed. `api` names the endpoint whose
    shape the reply has: ``chat`` or ``completion``. `created` is seconds since the epoch. `kept` is set
    when the turn goes on without its client, None when it ends with it.
    """

    id: str
    pool: str
    agent: str
    priority: int
    priority_class: str
    api: str
    model: str
    body: bytes
    stream: bool
    size: TurnSize
    gateway: str
    created: float
    kept: Kept | None = None
