"""What the service's replies are read into before anything of them is shown.

Only the documented keys are needed; unknown ones are passed over and the optional ones have defaults, so an
older or newer service can still be looked at. A reply of another shape raises pydantic's ValidationError.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _zero(value: object) -> object:
    return 0 if value is None else value


def _nothing(value: object) -> object:
    return {} if value is None else value


Count = Annotated[int, BeforeValidator(_zero)]


class View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Kv(View):
    """KV of one backend; bytes are None where nobody knows what a token takes.

    Used is what the slots hold, charged what is promised; `owners` says in tokens to whom.
    """

    budget_bytes: int | None = None
    used_bytes: int | None = None
    charged_bytes: int | None = None
    budget_tokens: int | None = None
    used_tokens: int | None = None
    charged_tokens: int | None = None
    owners: Annotated[dict[str, Count], BeforeValidator(_nothing)] = {}
    layout: str | None = None


class Swap(View):
    """KV of paused turns in files. `paused_until_s`: after failures none is written for so long."""

    enabled: bool | None = None
    budget_bytes: int | None = None
    used_bytes: Count = 0
    files: Count = 0
    turns: Count = 0
    saves: Count = 0
    restores: Count = 0
    failures: Count = 0
    stalls: Count = 0
    paused_until_s: float | None = None


class CostFigures(View):
    """What was measured of this engine, None until it was. `*_reevaluated`: the share that resumes lost."""

    prefill_tokens_per_s: float | None = None
    save_s_per_1k_tokens: float | None = None
    restore_s_per_1k_tokens: float | None = None
    resident_s_per_1k_tokens: float | None = None
    resident_reevaluated: float | None = None
    swapped_reevaluated: float | None = None


class Slot(View):
    """One engine slot. `tokens` of `max_tokens` is how far its turn is.

    `has_copy`: its KV is in a file as well. `resume_cost_s`: what its turn's resumes took so far, and
    `predicted_resume_s` what the next one would, by tier.
    """

    id: int
    state: str
    turn: str | None = None
    agent: str | None = None
    priority: int | None = None
    kv_tokens: Count = 0
    kv_bytes: int | None = None
    tokens: int | None = None
    max_tokens: int | None = None
    preemptions: int | None = None
    has_copy: bool | None = Field(default=None, alias="copy")
    resume_cost_s: float | None = None
    predicted_resume_s: Annotated[dict[str, float | None], BeforeValidator(_nothing)] = {}


class PausedTurn(View):
    """A turn that ran and waits to go on; `held` by an operator."""

    turn: str
    agent: str
    tier: str
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    priority: int | None = None
    tokens: int | None = None
    max_tokens: int | None = None
    preemptions: int | None = None
    swap_bytes: int | None = None
    resume_cost_s: float | None = None
    predicted_resume_s: float | None = None
    held: bool = False


class BackendView(View):
    """One backend and its slots."""

    name: str
    kind: str
    healthy: bool
    pool: str = "default"
    model: str | None = None
    decode_slots: int | None = None
    decoding: int | None = None
    engine_slots: Count = 0
    kv: Annotated[Kv, BeforeValidator(_nothing)] = Kv()
    swap: Swap | None = None
    costs: Annotated[CostFigures, BeforeValidator(_nothing)] = CostFigures()
    slots: tuple[Slot, ...] = ()
    step_s: float | None = None

    @property
    def decoding_now(self) -> int:
        """Decode slots in use."""
        if self.decoding is not None:
            return self.decoding
        return sum(1 for slot in self.slots if slot.state not in ("empty", "idle", "paused", "erasing"))


class Queue(View):
    waiting: int
    by_class: dict[str, int]


class SwarmState(View):
    """`GET /swarm/state`."""

    backends: tuple[BackendView, ...]
    queue: Queue
    paused: tuple[PausedTurn, ...]
    counters: dict[str, int]


class TurnSummary(View):
    """A turn's record."""

    id: str
    agent: str
    state: str
    created: float
    priority_class: str = ""
    priority: int = 0
    api: str = ""
    model: str = ""
    backend: str | None = None
    tier: str | None = None
    preemptions: Count = 0
    prompt_tokens: Count = 0
    tokens_generated: Count = 0
    tokens_reevaluated: Count = 0
    max_tokens: Count = 0
    finish_reason: str | None = None
    error: str | None = None


class TimelineEntry(View):
    """Something that happened to a turn; what else is known of it depends on `event`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    t: float
    event: str

    @property
    def details(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TurnStory(TurnSummary):
    """`GET /swarm/turns/ID`."""

    timeline: tuple[TimelineEntry, ...] = ()


class TurnList(View):
    """`GET /swarm/turns`."""

    turns: tuple[TurnSummary, ...]


class ActionReply(View):
    """`POST /swarm/turns/ID/ACTION`: the state the turn was in."""

    state: str
