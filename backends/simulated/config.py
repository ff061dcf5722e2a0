"""Configuration of the simulated engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.simulated.faults import Fault
from backends.simulated.profile import PROFILES, TimingProfile


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """A reply that is played instead of generated text, for chat requests whose last user message contains
    `match`.

    Each delta is sent as it stands, in its own chunk, once the decode steps its text is worth have passed.
    A request that continues a partial assistant message gets the rest of the script only.
    """

    match: str
    deltas: tuple[Mapping[str, Any], ...]
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """What kind of engine is simulated. The defaults are a small, instant engine."""

    n_slots: int = 4
    n_ctx: int = 8192
    """KV tokens in all. Split layout: each slot has n_ctx // n_slots; unified: one pool of n_ctx."""
    kv_unified: bool = False
    profile: TimingProfile = field(default_factory=lambda: PROFILES["instant"])
    time_scale: float = 1.0
    """Multiplies every duration of the profile."""

    eos_probability: float = 1 / 354
    """Chance of the end at each token, for prompts without a `[len=N]` marker; 354 tokens is the mean turn of
    the reference workload. 0: never."""
    multibyte_rate: float = 0.05
    """Share of generated characters that span several tokens."""
    scripts: tuple[ScriptedReply, ...] = ()

    resume_reprefills: bool = False
    """As hybrid and sliding-window models: KV can be appended to, never rolled back, so any other reuse, and
    any use of a restored slot, evaluates the whole prompt again."""
    slot_prompt_similarity: float = 0.1
    """A request without a slot takes the free slot that shares more than this part of its prompt."""
    slot_save_path: Path | None = None
    """Directory for saved slots; None refuses save and restore."""
    embeddings: bool = False
    """Whether inputs are embedded and ranked: a llama.cpp server started with `--embeddings` and
    `--reranking`, which it never is at the same time."""
    native_park: bool = False
    """Whether a processing slot can be parked and unparked."""
    preempt_ram_bytes: int = 1 << 30
    """Host memory for parked sequences; a park that would exceed it is refused."""
    park_keepalive_s: float = 2.0
    kv_bytes_per_token: int = 163_840
    kv_fixed_bytes: int = 0
    """State of one sequence that does not grow with it, as recurrent layers have."""

    model_alias: str = "simulated"
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.n_slots < 1 or self.slot_n_ctx < 2:
            raise ValueError("at least one slot, and two tokens of context per slot")
        if not 0 <= self.eos_probability <= 1 or not 0 <= self.multibyte_rate <= 1:
            raise ValueError("eos_probability and multibyte_rate are probabilities")
        if self.park_keepalive_s <= 0 or self.kv_bytes_per_token < 1 or self.kv_fixed_bytes < 0:
            raise ValueError(
                "park_keepalive_s and kv_bytes_per_token must be above zero, kv_fixed_bytes not below"
            )

    @property
    def slot_n_ctx(self) -> int:
        """The most tokens one sequence can hold."""
        return self.n_ctx if self.kv_unified else self.n_ctx // self.n_slots

    @property
    def timing(self) -> TimingProfile:
        """The profile with `time_scale` applied."""
        return self.profile if self.time_scale == 1.0 else self.profile.scaled(self.time_scale)
