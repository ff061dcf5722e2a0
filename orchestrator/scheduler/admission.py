"""Whether a turn can have a place now, and who yields for it. It decides and changes nothing.

A place takes a decode slot, an engine slot that no more important turn's paused KV is kept in, and, under a
shared KV budget, room for all the turn may need. Turns of strictly lower priority may have to give theirs
up, in the order of `policy.py`, rules 2 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.scheduler.memory import Memory
from orchestrator.scheduler.policy import Policy
from orchestrator.scheduler.turn import Phase, Turn


class Admission:
    """Looks at the scheduler's own groups of turns: `decoding` have a decode slot, `placed` of them wait for
    an engine slot, `pausing` have given theirs back and are still in the batch.
    """

    def __init__(
        self,
        policy: Policy,
        memory: Memory,
        decoding: Mapping[str, Turn],
        placed: Mapping[str, Turn],
        pausing: Mapping[str, Turn],
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._decoding = decoding
        self._placed = placed
        self._pausing = pausing

    def has_room(self, turn: Turn, yielding: list[Turn], ahead: Sequence[Turn]) -> bool:
        """Whether the engine can hold the turn once `yielding` have left and all that may go is gone.

        What it may not take is the paused KV of turns of higher base priority; those stand before it,
        unless it is aged.
        """
        slots = self._memory.slots
        priority = turn.priority
        leaving = [other for other in self._pausing.values() if other.guard() <= priority]
        if turn.slot is None:
            kept = len(self._pausing) - len(leaving) + slots.kept_from(priority)
            if kept and len(self._decoding) - len(yielding) + 1 + len(ahead) + kept > len(slots.slots):
                return False
        if slots.budget is None:
            return True
        leaving += [other for other in yielding if other.phase is Phase.RUNNING]
        coming = [other for other in self._placed.values() if other not in yielding]
        return (
            slots.held_from(priority)
            - sum(slots.charged(other.slot) for other in leaving if other.slot is not None)
            + sum(other.reserve for other in coming)
            + sum(other.reserve for other in ahead)
            + turn.reserve
            + self._memory.headroom(turn)
            <= slots.budget
        )

    def below(self, turn: Turn) -> list[Turn]:
        """Who would have to yield to `turn`, in no order."""
        priority = turn.priority
        preemption = self._policy.preemption
        return [
            other
            for other in self._decoding.values()
            if other.priority < priority
            and not other.stopping
            and (preemption or other.phase is Phase.PLACED)
            and (other.rank < priority or turn.since > other.placed_in)
        ]

    def who_yields(
        self, turn: Turn, count: int, below: list[Turn], ahead: Sequence[Turn], now: float
    ) -> list[Turn] | None:
        """The fewest of `below`, at least `count`, that make room for the turn; None when all do not."""
        if not count and self.has_room(turn, [], ahead):
            return []
        if not self.has_room(turn, below, ahead):
            return None
        below = self._by_loss(below, now)
        chosen = below[:count]
        while not self.has_room(turn, chosen, ahead):
            chosen.append(below[len(chosen)])
        for other in chosen[-2::-1]:
            rest = [one for one in chosen if one is not other]
            if len(rest) >= count and self.has_room(turn, rest, ahead):
                chosen = rest
        return chosen

    def _by_loss(self, turns: list[Turn], now: float) -> list[Turn]:
        """In the order of `policy.py`, rules 2 to 6; a PLACED turn loses nothing."""
        policy = self._policy

        def loss(turn: Turn) -> tuple[int, bool, bool, bool, bool, int, float, str]:
            if turn.phase is Phase.PLACED:
                return turn.priority, False, False, False, False, 0, -turn.seq, turn.id
            return (
                turn.priority,
                True,
                turn.preemptions >= policy.max_preemptions,
                now - turn.started_at < policy.min_run_s,
                not turn.picked_up,
                turn.kv_tokens,
                -turn.started_at,
                turn.id,
            )

        return sorted(turns, key=loss)
