"""What the scheduler wants done. Frozen; a dispatcher carries each out and reports its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the turn out of the pool's queue, if it is still there."""

    turn: str


@dataclass(frozen=True, slots=True)
class Start:
    """Run the turn's first segment in engine slot `slot`; what the slot holds may be overwritten."""

    turn: str
    slot: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Run the turn's next segment in engine slot `slot`. `resident`: its KV is still there."""

    turn: str
    slot: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Take the turn out of the running batch at the next token boundary, for turn `by`."""

    turn: str
    by: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the running turn for good."""

    turn: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Close the books of a turn that was cancelled while it did not run."""

    turn: str


@dataclass(frozen=True, slots=True)
class MarkDropped:
    """The paused turn's KV was given up; its resume will be a recompute."""

    turn: str


@dataclass(frozen=True, slots=True)
class Erase:
    """Free the KV of idle engine slot `slot`."""

    slot: int


Command = Claim | Start | Resume | Pause | Abort | Discard | MarkDropped | Erase
