"""What the scheduler is told. Frozen, ordered by the time they are handled.

Every command ends in exactly one event: ``Claim`` in Claimed or ClaimLost; ``Start`` and ``Resume``
in Started, then in Paused or Ended; ``Pause`` and ``Abort`` in Paused or Ended (a turn may finish
by itself before it can be stopped); ``Erase`` in Erased. ``Discard`` and ``MarkDropped`` are final.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnQueued:
    """A turn stands in the pool's queue. `seq` orders arrivals; `kv_tokens` is prompt plus limit."""

    turn: str
    agent: str
    priority: int
    seq: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A queued turn is gone from the queue: cancelled there, or claimed by another backend."""

    turn: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """This backend now owns the turn."""

    turn: str


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """Another backend, or a cancel, was quicker."""

    turn: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """A turn that a former owner of this backend left behind: it has to be recomputed from its log.

    Whoever sends it has to know that the turn fits the engine; one larger than its KV is never placed.
    """

    turn: str
    agent: str
    priority: int
    seq: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The engine picked the turn up. `kv_tokens` is its whole prompt, generated part included."""

    turn: str
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The turn's KV has grown to `kv_tokens`."""

    turn: str
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The turn left the batch and can go on. `resident`: its slot still holds its KV.

    Never `resident` for a segment that began before the last EngineReady.
    """

    turn: str
    kv_tokens: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The turn left the engine for good. `resident`: its slot holds KV worth keeping."""

    turn: str
    kv_tokens: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Erased:
    """An idle engine slot's KV was freed."""

    slot: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Nobody wants the turn any more."""

    turn: str


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """An operator wants the turn paused until a ReleaseRequested.

    Without effect on a turn that nobody has claimed: it is not this backend's to hold.
    """

    turn: str


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """An operator lets a held turn compete again."""

    turn: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine does not answer: nothing may start, and all KV in it is gone."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine answers (again), with empty slots."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; lets aging and the minimum run act without another event."""


Event = (
    TurnQueued
    | Withdrawn
    | Claimed
    | ClaimLost
    | Recovered
    | Started
    | Progressed
    | Paused
    | Ended
    | Erased
    | CancelRequested
    | HoldRequested
    | ReleaseRequested
    | EngineLost
    | EngineReady
    | Tick
)
