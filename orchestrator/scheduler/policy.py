"""The scheduler's fixed choices: who may be preempted, for whom, and in which order.

1. Only a strictly lower priority is preempted; equals never evict each other.
2. Among those, the lowest priority goes first.
3. Then turns that were not preempted too often, then those that have had their minimum run.
   Neither keeps a more important turn waiting: they only decide who yields.
4. Then the one that loses least: the fewest KV tokens, should its KV have to be dropped.
5. Then the one that started last, then the turn's id, so that the choice is deterministic.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Policy:
    """Scheduling parameters of one backend.

    `decode_slots`: how many turns may run at once. `engine_slots`: places for KV, at least as many.
    `first_slots`: how many of the first ones are kept for the highest class (see `slots.py`).
    `kv_budget_tokens`: the pool that all slots share (unified KV), or None when every slot has its
    own (split KV), where a turn that fits its slot always fits. `min_run_s`, `max_preemptions`: see
    the module's rule 3. `aging_s`: a waiting turn counts one priority class higher for each such
    span, in the order of the queue only and never up to the highest class; 0 turns aging off.
    `priorities`: the classes' values.
    """

    decode_slots: int
    engine_slots: int
    first_slots: int = 0
    kv_budget_tokens: int | None = None
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
