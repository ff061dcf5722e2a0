"""A turn as one backend's scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.scheduler.prefix import Prefix
from orchestrator.scheduler.slots import ANYBODY, NOBODY, Slot
from orchestrator.turns import Tier

if TYPE_CHECKING:
    from orchestrator.scheduler.swap import SwapFile


class Phase(StrEnum):
    """Where a turn stands on this backend."""

    WAITING = "waiting"
    CLAIMING = "claiming"
    READY = "ready"
    HELD = "held"
    PLACED = "placed"
    RUNNING = "running"
    PAUSING = "pausing"


WANTS_PLACE = frozenset({Phase.WAITING, Phase.READY})
ON_ENGINE = (Phase.RUNNING, Phase.PAUSING)


@dataclass(slots=True, eq=False)
class Turn:
    """A turn's books. `reserve` is its KV at most; `queued_at` is moved on by the time it has run."""

    id: str
    agent: str
    priority: int
    seq: int
    reserve: int
    queued_at: float
    phase: Phase
    prefix: Prefix = ()
    max_tokens: int = 0
    """Generation limit; 0 when unknown, and once the reservation is exact."""
    slot: Slot | None = None
    file: SwapFile | None = None
    """Its saved KV, while it is paused; a copy as long as `slot` still holds the same."""
    source: SwapFile | None = None
    """What its segment begins with, until the engine has picked it up."""
    resumed_from: tuple[Tier, int] | None = None
    """Tier and KV tokens of a resume whose outcome is not known yet."""
    kv_tokens: int = 0
    prompt_tokens: int = 0
    """The last segment's prompt, what it had generated before included; 0 until the engine has counted it."""
    unevaluated: int = 0
    """How much of its segment's prompt the engine has still to evaluate, as far as known."""
    after: set[str] = field(default_factory=set)
    """The turns that its prefill gives way to."""
    ran: bool = False
    started_at: float = 0.0
    paused_at: float = 0.0
    placed_at: float = 0.0
    picked_up: bool = False
    """Whether the engine has its present segment's prompt."""
    preemptions: int = 0
    cancelled: bool = False
    hold: bool = False
    stopping: bool = False
    rank: int = 0
    """Effective priority when it was last a candidate; kept while it is claimed, placed or running."""
    since: int = 0
    """The step in which it last began to want a place."""
    placed_in: int = 0
    """The step in which it last was given one."""

    @property
    def tier(self) -> Tier:
        """Where its KV is while it does not run."""
        if self.slot is not None:
            return Tier.RESIDENT
        return Tier.SWAPPED if self.file is not None and self.file.ready else Tier.DROPPED

    def guard(self) -> float:
        """The least priority of those who may take its paused KV; see :class:`Slot`."""
        if self.phase is Phase.PLACED:
            return NOBODY
        return ANYBODY if self.hold or self.cancelled else self.priority


def by_rank(turn: Turn) -> tuple[int, int]:
    return -turn.rank, turn.seq


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as it stood when asked. `tier` is set for turns that ran and do not run now."""

    id: str
    agent: str
    priority: int
    phase: str
    slot: int | None
    kv_tokens: int
    tier: Tier | None
    preemptions: int
    swap_bytes: int
    resume_s: dict[Tier, float | None]
    """What a resume would cost by tier, as measured so far."""
