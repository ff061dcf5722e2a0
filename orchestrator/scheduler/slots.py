"""Engine slots: who sits where, whose KV is left there, and what a newcomer may take.

A slot is EMPTY, BUSY (a turn runs or is about to leave), PAUSED (a paused turn's resident KV), IDLE
(idle cache) or ERASING. Under split KV a slot is the whole account: what fits the slot fits. Under
unified KV all slots draw on one pool of `budget` tokens: a busy slot is charged with its turn's whole
reservation, a paused or idle one with what it holds, and the sum may never pass the budget, because
an engine whose pool runs out fails every running turn at once. Until the engine has picked a newcomer
up, its slot is charged with what it held before as well, if that is more; and a turn that leaves
nothing of worth may still leave cells behind, so its slot stays charged until overwritten or erased.

The engine fills its batch in the order of its slots: a turn in a slot *after* one in prefill gets no place
in the batch, and does not start, before that prefill is over. So the first slots (`Policy.first_slots`)
are kept for the highest class: others take them only when nothing else is left, and the highest class
takes the first it can.

Order of giving up, whoever asks: empty slots, then idle cache (of the lowest priority, then the least
recently used), then resident KV of paused turns (of the lowest priority, then the last to come).
A paused turn of higher priority than the asker is never touched, unless it is held: an operator's
hold has no end that others could wait for. Nor is one that has its decode slot and is about to resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

ANYBODY = -math.inf
NOBODY = math.inf


class SlotState(StrEnum):
    """What an engine slot holds."""

    EMPTY = "empty"
    BUSY = "busy"
    PAUSED = "paused"
    IDLE = "idle"
    ERASING = "erasing"


@dataclass(slots=True, eq=False)
class Slot:
    """One engine slot's books.

    `reserved` is the tokens charged to it under unified KV. `guard` is the least priority of those who
    may take a paused turn's KV from it: ANYBODY, NOBODY or a priority.
    """

    id: int
    state: SlotState = SlotState.EMPTY
    turn: str | None = None
    agent: str | None = None
    priority: int = 0
    kv_tokens: int = 0
    reserved: int = 0
    order: int = 0
    guard: float = ANYBODY

    def clear(self) -> None:
        """Forget everything the slot held."""
        self.state = SlotState.EMPTY
        self.turn = self.agent = None
        self.priority = self.kv_tokens = self.reserved = 0


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as it stood when asked."""

    id: int
    state: SlotState
    turn: str | None
    agent: str | None
    priority: int
    kv_tokens: int


class SlotTable:
    """The slots of one engine."""

    __slots__ = ("_clock", "_first", "_top_priority", "budget", "slots")

    def __init__(self, engine_slots: int, budget: int | None, *, first: int, top_priority: int) -> None:
        """`budget` is the shared pool in tokens under unified KV, None under split KV.

        `first` slots are kept for turns of `top_priority`.
        """
        self.slots = [Slot(index) for index in range(engine_slots)]
        self.budget = budget
        self._first = first
        self._top_priority = top_priority
        self._clock = 0

    def charged(self) -> int:
        """Tokens charged against the pool."""
        return sum(slot.reserved for slot in self.slots)

    def occupy(self, slot: Slot, *, turn: str, agent: str, priority: int, reserve: int) -> None:
        """Seat a turn that is about to run."""
        self._clock += 1
        slot.state = SlotState.BUSY
        slot.turn, slot.agent, slot.priority = turn, agent, priority
        slot.kv_tokens = 0
        slot.reserved = max(reserve, slot.reserved)
        slot.order = self._clock

    def leave(self, slot: Slot, *, state: SlotState, kv_tokens: int) -> None:
        """A turn left the batch; its KV stays as `state` (PAUSED or IDLE), or is nothing."""
        self._clock += 1
        if kv_tokens <= 0:
            leftover = 0 if self.budget is None else slot.reserved
            slot.clear()
            if leftover:
                slot.state = SlotState.IDLE
                slot.kv_tokens = slot.reserved = leftover
            return
        slot.state = state
        slot.kv_tokens = slot.reserved = kv_tokens
        slot.order = self._clock
        slot.guard = slot.priority
        if state is SlotState.IDLE:
            slot.turn = None

    def candidate(self, agent: str, priority: int) -> Slot | None:
        """The slot a newcomer should take: the agent's own idle cache, else the cheapest to give up."""
        best: Slot | None = None
        best_cost: tuple[int, ...] | None = None
        for slot in self.slots:
            if slot.state is SlotState.BUSY:
                continue
            cost = self._cost(slot, agent, priority)
            if cost is not None and (best_cost is None or cost < best_cost):
                best, best_cost = slot, cost
        return best

    def victims_for_room(self, need: int, priority: int, keep: Slot | None) -> list[Slot] | None:
        """Slots to erase so that `need` more tokens fit the pool; none when they fit already.

        None: wait, either for slots that are being erased or for turns that are leaving. `keep` (the
        slot the newcomer will use) is not listed: its present charge is replaced.
        """
        if self.budget is None:
            return []
        free = self.budget - self.charged() + (keep.reserved if keep is not None else 0)
        if free >= need:
            return []
        free += sum(slot.reserved for slot in self.slots if slot.state is SlotState.ERASING)
        if free >= need:
            return None
        costs = [
            (cost, slot)
            for slot in self.slots
            if slot is not keep
            and slot.reserved
            and (cost := self._cost(slot, agent="", priority=priority)) is not None
        ]
        chosen: list[Slot] = []
        for _, slot in sorted(costs, key=lambda pair: pair[0]):
            chosen.append(slot)
            free += slot.reserved
            if free >= need:
                return chosen
        return None

    def kept_from(self, priority: int) -> int:
        """How many slots a newcomer may not take for the paused KV in them."""
        return sum(
            1 for slot in self.slots if slot.state is SlotState.PAUSED and priority < slot.guard < NOBODY
        )

    def held_from(self, priority: int) -> int:
        """Tokens of the pool that a newcomer may not take, those of turns about to resume left out."""
        return sum(
            slot.reserved
            for slot in self.slots
            if slot.state is SlotState.BUSY
            or (slot.state is SlotState.PAUSED and priority < slot.guard < NOBODY)
        )

    def view(self) -> tuple[SlotView, ...]:
        """All slots as they stand."""
        return tuple(
            SlotView(slot.id, slot.state, slot.turn, slot.agent, slot.priority, slot.kv_tokens)
            for slot in self.slots
        )

    def _cost(self, slot: Slot, agent: str, priority: int) -> tuple[int, ...] | None:
        top = priority >= self._top_priority
        kept = slot.id < self._first and not top
        if slot.state is SlotState.IDLE and slot.agent is not None:
            if slot.agent == agent:
                return (0, 0, -slot.order)
            return (2, kept, slot.priority, slot.id if top and self._first else slot.order)
        if slot.state in (SlotState.EMPTY, SlotState.IDLE):
            return (2 if kept else 1, kept, slot.id)
        if slot.state is SlotState.PAUSED and slot.guard <= priority:
            return (3, slot.priority, -slot.order)
        return None
