"""Timing of the simulated engine: how long one decode step, a prefill batch or a KV copy takes.

A decode step's duration is linear in what the engine reads from memory during that step:

    step_s = base_step_s + per_sequence_s * batch + per_kv_token_s * resident_tokens

`base_step_s` stands for reading the weights once, `per_sequence_s` for the work each sequence of the batch
adds, `per_kv_token_s` for reading the KV of the attended tokens. Under a unified KV layout the KV of parked
and idle sequences is attended over too (masked, but not free), so the engine counts it into
`resident_tokens`; with one stream per slot it does not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """Durations in seconds, rates in tokens per second; an infinite rate costs no time."""

    base_step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    prefill_tokens_per_s: float = math.inf
    save_tokens_per_s: float = math.inf
    restore_tokens_per_s: float = math.inf
    n_batch: int = 512
    """Most tokens one step evaluates; a cancel during prefill waits for the end of such a batch."""

    def __post_init__(self) -> None:
        if min(self.base_step_s, self.per_sequence_s, self.per_kv_token_s) < 0:
            raise ValueError("step times must not be negative")
        if min(self.prefill_tokens_per_s, self.save_tokens_per_s, self.restore_tokens_per_s) <= 0:
            raise ValueError("rates must be above zero")
        if self.n_batch < 1:
            raise ValueError("n_batch must be at least 1")

    def step_s(self, batch: int, resident_tokens: int, prefill_tokens: int = 0) -> float:
        """Duration of one step that decodes `batch` sequences and evaluates `prefill_tokens` of prompts."""
        decode_s = 0.0
        if batch:
            decode_s = self.base_step_s + self.per_sequence_s * batch + self.per_kv_token_s * resident_tokens
        return decode_s + prefill_tokens / self.prefill_tokens_per_s

    def save_s(self, tokens: int) -> float:
        """How long copying the KV of `tokens` out of the engine stalls every slot."""
        return tokens / self.save_tokens_per_s

    def restore_s(self, tokens: int) -> float:
        """How long copying the KV of `tokens` back into the engine stalls every slot."""
        return tokens / self.restore_tokens_per_s

    def scaled(self, time_scale: float) -> "TimingProfile":
        """The same engine with every duration multiplied by `time_scale`; 0 makes it instant."""
        if time_scale < 0:
            raise ValueError("time_scale must not be negative")

        def rate(tokens_per_s: float) -> float:
            return tokens_per_s / time_scale if time_scale else math.inf

        return replace(
            self,
            base_step_s=self.base_step_s * time_scale,
            per_sequence_s=self.per_sequence_s * time_scale,
            per_kv_token_s=self.per_kv_token_s * time_scale,
            prefill_tokens_per_s=rate(self.prefill_tokens_per_s),
            save_tokens_per_s=rate(self.save_tokens_per_s),
            restore_tokens_per_s=rate(self.restore_tokens_per_s),
        )


_REFERENCE_PREFILL_TOKENS_PER_S = 1_000.0
_REFERENCE_SWAP_SPEEDUP = 177.0

PROFILES: Mapping[str, TimingProfile] = MappingProxyType(
    {
        "instant": TimingProfile(),
        "fast": TimingProfile(
            base_step_s=0.001,
            prefill_tokens_per_s=100_000.0,
            save_tokens_per_s=1_000_000.0,
            restore_tokens_per_s=1_000_000.0,
        ),
        # A 16 GB Radeon RX 9070 XT with a 9B Q4_K_M model: eight sequences of 6k tokens take 25.9 ms a step,
        # 38.6 tokens/s per slot. The published model puts swap at 177 times cheaper than recompute; its
        # prefill rate is not published, 1,000 tokens/s makes the copy 27 GiB/s at 160 KiB a token.
        "reference": TimingProfile(
            base_step_s=0.0176,
            per_sequence_s=0.0008,
            per_kv_token_s=4e-8,
            prefill_tokens_per_s=_REFERENCE_PREFILL_TOKENS_PER_S,
            save_tokens_per_s=_REFERENCE_PREFILL_TOKENS_PER_S * _REFERENCE_SWAP_SPEEDUP,
            restore_tokens_per_s=_REFERENCE_PREFILL_TOKENS_PER_S * _REFERENCE_SWAP_SPEEDUP,
        ),
        "crowd": TimingProfile(base_step_s=0.5, prefill_tokens_per_s=1_000_000.0, n_batch=8192),
    }
)
"""`instant` takes no time but still works step by step; `fast` has steps of 1 ms; `reference` is the
reference machine; `crowd` has two steps a second for any number of sequences: a thousand streams on a small
machine."""
