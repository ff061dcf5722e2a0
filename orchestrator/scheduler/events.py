"""What the scheduler is told. Frozen, ordered by the time they are handled.

Every command ends in exactly one event: ``Claim`` in Claimed or ClaimLost; ``Start`` and ``Resume``
in Started, then in Paused or Ended; ``Pause`` and ``Abort`` in Paused or Ended (a turn may finish
by itself before it can be stopped); ``Erase`` in Erased; ``Save`` in Saved or SaveFailed. A source that
a Start or Resume names is restored before anything else, which Restored or RestoreFailed tells; either
way the segment goes on. ``Discard``, ``MarkSwapped``, ``MarkDropped`` and ``Forget`` are final.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.scheduler.prefix import Prefix


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
    """This backend now owns the turn.

    `prefix`: what its prompt is known by, for the reuse of KV. `max_tokens`: its generation limit, by which
    its reservation shrinks once the engine has counted its prompt; 0: unknown.
    """

    turn: str
    prefix: Prefix = field(default=(), repr=False)
    max_tokens: int = 0


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
    prefix: Prefix = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Started:
    """The engine picked the turn up. `kv_tokens` is its whole prompt, generated part included.

    `cached_tokens`: how much of that it found in the slot; None where it does not tell.
    """

    turn: str
    kv_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """The turn's KV has grown to `kv_tokens`: less than its prompt while that is being evaluated."""

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
class Saved:
    """A slot's KV is in the file `key` as well. `stall_s`: for how long the engine did nothing else."""

    slot: int
    key: str
    kv_tokens: int
    file_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """There is no file `key`; the slot still holds its KV."""

    slot: int
    key: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The turn's slot holds what the file had: `kv_tokens` tokens."""

    turn: str
    kv_tokens: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The file that the turn's segment was to begin with is of no use; the segment evaluates its prompt."""

    turn: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """So many tokens of a prompt were evaluated in that time, in the company of what else runs.

    `turn`: whose; nothing of its segment's prompt is left to evaluate.
    """

    tokens: int
    seconds: float
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """Decode steps of late took so long each, on average, with nothing but decoding in the batch."""

    step_s: float


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
    | Saved
    | SaveFailed
    | Restored
    | RestoreFailed
    | Prefilled
    | Stepped
    | CancelRequested
    | HoldRequested
    | ReleaseRequested
    | EngineLost
    | EngineReady
    | Tick
)
