"""What the scheduler wants done. Frozen; a dispatcher carries each out and reports its end."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.turns import Tier


@dataclass(frozen=True, slots=True)
class Claim:
    """Take the turn out of the pool's queue, if it is still there."""

    turn: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The waiting turn is larger than all the KV here: fail it, unless another backend has the room.

    Said again with every Tick, as other backends come and go.
    """

    turn: str
    need_tokens: int
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Start:
    """Run the turn's first segment in engine slot `slot`; what the slot holds may be overwritten.

    `source`: a file to restore there first, whose KV the prompt most likely begins with.
    """

    turn: str
    slot: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Run the turn's next segment in engine slot `slot`. `tier`: where its KV is.

    `source` is set with tier SWAPPED: the file to restore first.
    """

    turn: str
    slot: int
    tier: Tier
    source: str | None = None


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
class MarkSwapped:
    """The paused turn's KV is in a file only; its resume will be a restore."""

    turn: str
    key: str


@dataclass(frozen=True, slots=True)
class MarkDropped:
    """The paused turn's KV was given up; its resume will be a recompute."""

    turn: str


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the KV of idle engine slot `slot` to the file `key`; of turn `turn`, or an idle cache."""

    slot: int
    key: str
    turn: str | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove the file `key`."""

    key: str


@dataclass(frozen=True, slots=True)
class Erase:
    """Free the KV of idle engine slot `slot`."""

    slot: int


Command = (
    Claim
    | Refuse
    | Start
    | Resume
    | Pause
    | Abort
    | Discard
    | MarkSwapped
    | MarkDropped
    | Save
    | Forget
    | Erase
)
