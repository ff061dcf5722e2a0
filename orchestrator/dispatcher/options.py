"""What the configuration says about one backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """What the configuration says about one backend.

    `decode_slots` None: one fewer than the engine's slots, at least one. `kv_budget_bytes` None: all of the
    engine's context. `swap_budget` in bytes, 0: no swap; None: half of what is free, at most 8 GiB.
    `others`: the pool's other backends, by name.
    """

    pool: str
    name: str
    kind: str
    decode_slots: int | None
    preemption: bool
    min_run_s: float
    max_preemptions: int
    aging_s: float
    priorities: tuple[int, ...]
    kv_budget_bytes: int | None = None
    swap_budget: int | None = None
    others: tuple[str, ...] = ()
