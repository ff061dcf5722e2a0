"""A turn's state, and who is told what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.scheduler import Prefix
from orchestrator.turns import Tier

NOBODY = -1


@dataclass(slots=True, eq=False)
class Turn:
    """One turn's state, shared by the engine and who drives it.

    `common`: how many leading tokens its prompt has in common with turns before it, by their number. `left`:
    prompt tokens of this segment yet to be evaluated, None before it has started. `segment` counts the
    requests for it. `running`: its driver has heard that the segment started. `last_s`: when its last token
    came; `marked_s`, `marked`: the same and its tokens when the meter last looked.
    """

    number: int
    id: str
    agent: str
    priority_class: str
    priority: int
    arrival_s: float
    prompt: int
    output: int
    limit: int
    prefix: Prefix
    common: dict[int, int]
    generated: int = 0
    slot: int = NOBODY
    left: int | None = None
    segment: int = 0
    stopping: bool = False
    running: bool = False
    tier: Tier | None = None
    asked_s: float = 0.0
    last_s: float = 0.0
    marked_s: float = 0.0
    marked: int = 0
    evaluating: int = 0
    wait_s: float | None = None
    first_token_s: float | None = None
    cached: int = 0
    evaluated_again: int = 0
    lost: int = 0
    preemptions: int = 0
    resumes: dict[Tier, int] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """Whether its prompt is evaluated, so that each step gives it a token."""
        return self.left == 0


class Host(Protocol):
    """Who is told what the engine does."""

    def wake(self, at_s: float) -> None:
        """Call `act` at that time, and not at one that was asked for before."""

    def started(self, turn: Turn, prompt: int, cached: int, now: float) -> None:
        """The first tokens of the segment's prompt are in the batch."""

    def first_token(self, turn: Turn, now: float) -> None:
        """The segment has made its first token."""

    def finished(self, turn: Turn, kv_tokens: int, now: float) -> None:
        """The turn has all its tokens."""

    def stopped(self, turn: Turn, kv_tokens: int, now: float) -> None:
        """The turn is out of the batch; its slot holds so much of its KV."""

    def erased(self, slot: int, now: float) -> None:
        """An erase is over."""

    def saved(self, slot: int, key: str, kv_tokens: int, stall_s: float, now: float) -> None:
        """A save is over; `kv_tokens` 0: there was nothing to save, or the slot was busy."""

    def restored(self, turn: Turn, kv_tokens: int, stall_s: float, now: float) -> None:
        """A restore is over."""
