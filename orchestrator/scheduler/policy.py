"""The scheduler's fixed choices: who may be preempted, for whom, and in which order.

1. Only a strictly lower priority is preempted; equals never evict each other.
2. Among those, the lowest priority goes first.
3. Then turns that were not preempted too often, then those that have had their minimum run.
   Neither keeps a more important turn waiting: they only decide who yields.
4. Then those that decode: one that the engine has not picked up yet would lose the wait for it, and it is
   always the one with the least KV.
5. Then the one that loses least: the fewest KV tokens, should its KV have to be dropped.
6. Then the one that started last, then the turn's id, so that the choice is deterministic.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

#: What a saved file holds of each token beside its KV (position, sequence ids, token id), and in all.
FILE_TOKEN_BYTES = 16
FILE_HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """The swap folder of one backend.

    `budget_bytes`: all files together. `token_bytes`, `fixed_bytes`: a sequence's KV. `tag`: how the names
    of this owner's files begin. `min_tokens`: less KV than this is not worth a file. `retry_s`: for how
    long no save is tried after one that failed, doubled with each further one up to `retry_most_s`.
    `patience_s`: so long a turn that needs a save or a restore waits for the highest class to be done
    decoding, which both would stall.
    """

    budget_bytes: int
    token_bytes: int
    fixed_bytes: int = 0
    tag: str = "kv"
    min_tokens: int = 32
    retry_s: float = 5.0
    retry_most_s: float = 300.0
    patience_s: float = 2.0

    def file_bytes(self, tokens: int) -> int:
        """What a file of so many tokens takes."""
        return FILE_HEAD_BYTES + self.fixed_bytes + tokens * (self.token_bytes + FILE_TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Policy:
    """Scheduling parameters of one backend.

    `decode_slots`: how many turns may run at once. `engine_slots`: places for KV, at least as many.
    `first_slots`: how many of the first ones are kept for the highest class (see `slots.py`).
    `kv_budget_tokens`: what all slots together may hold (the pool of unified KV, or less where the user
    said so), or None when every slot has its own (split KV), where a turn that fits its slot always fits.
    `min_shared_tokens`: fewer tokens than this are not worth moving or awaiting somebody else's KV.
    `long_prefill_tokens`: a prompt with as many left to evaluate may give way to another (`scheduler.py`, 7).
    `adjacent`: whether turns in adjacent slots are computed together and others apart (see `slots.py`).
    `swap`: the folder for KV that gives way, None without. `min_run_s`, `max_preemptions`: see
    the module's rule 3. `aging_s`: a waiting turn counts one priority class higher for each such
    span, in the order of the queue only and never up to the highest class; 0 turns aging off.
    `priorities`: the classes' values.
    """

    decode_slots: int
    engine_slots: int
    first_slots: int = 0
    kv_budget_tokens: int | None = None
    min_shared_tokens: int = 64
    long_prefill_tokens: int = 512
    adjacent: bool = False
    swap: SwapPolicy | None = None
    preemption: bool = True
    min_run_s: float = 0.0
    max_preemptions: int = 50
    aging_s: float = 60.0
    priorities: tuple[int, ...] = (0, 20, 50, 100)
    _ladder: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.decode_slots < 1:
            raise ValueError(f"decode_slots is {self.decode_slots}; at least 1 is needed")
        if self.engine_slots < self.decode_slots:
            raise ValueError(
                f"engine_slots is {self.engine_slots}; at least decode_slots ({self.decode_slots}) are needed"
            )

        object.__setattr__(self, "_ladder", tuple(sorted(set(self.priorities)))[:-1])

    def effective_priority(self, priority: int, waited_s: float) -> int:
        """The priority by which a turn that has waited `waited_s` stands in the queue."""
        if self.aging_s <= 0 or waited_s < self.aging_s:
            return priority
        at = bisect_right(self._ladder, priority) - 1 + int(waited_s / self.aging_s)
        return max(priority, self._ladder[min(at, len(self._ladder) - 1)]) if self._ladder else priority
