"""Engine slots: who sits where, whose KV is left there, and what a newcomer may take.

A slot is EMPTY, BUSY (a turn runs or is about to leave), PAUSED (a paused turn's resident KV), IDLE
(idle cache) or ERASING. Under split KV a slot is the whole account: what fits the slot fits. Under
unified KV all slots draw on one pool of `budget` tokens: a busy slot is charged with its turn's whole
reservation, a paused or idle one with what it holds, and the sum may never pass the budget, because
an engine whose pool runs out fails every running turn at once. Until the engine has picked a newcomer
up, its slot is charged with what it held before as well, if that is more; and a turn that leaves
nothing of worth may still leave cells behind, so its slot stays charged until overwritten or erased.
KV that is being saved stays where it is until that is over.

The engine fills its batch in the order of its slots: a turn in a slot *after* one in prefill gets no place
in the batch, and does not start, before that prefill is over. So the first slots (`Policy.first_slots`)
are kept for the highest class: others take them only when nothing else is left, and the highest class
takes the first it can. A prefill that is in the way all the same gives way for a while (`scheduler.py`, 7).

Under split KV it computes a step group by group, a group being turns in adjacent slots: eight turns in four
groups took a fifth longer than in one on a CPU, and each group reads all weights again. So there
(`Policy.adjacent`) a newcomer takes the slot with the most running neighbours of those that are as good
otherwise.

A newcomer whose prompt goes on from what an idle slot holds takes that slot: its agent's last turn, mostly.
Order of giving up otherwise, whoever asks: empty slots, then idle cache, then resident KV of paused turns;
among each, first what has a saved copy, then of the lowest priority, then the least recently used (idle) or,
where it can be swapped and the memory is shared, the longest (paused), else the last to come.
A paused turn of higher priority than the asker is never touched, unless it is held: an operator's
hold has no end that others could wait for. Nor is one that has its decode slot and is about to resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.prefix import Prefix, goes_on_from

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

    `guard` is the least priority of those who may take a paused turn's KV from it: ANYBODY, NOBODY or a
    priority. `prefix` and `prompt_tokens` tell what prompt its KV was made by. `copy` is the key of a saved
    file of its KV, `saving` whether that is being written, `evict` whether the slot is given up after that.
    """

    id: int
    state: SlotState = SlotState.EMPTY
    turn: str | None = None
    agent: str | None = None
    priority: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0
    prefix: Prefix = ()
    order: int = 0
    guard: float = ANYBODY
    copy: str | None = None
    saving: bool = False
    evict: bool = False

    @property
    def takeable(self) -> bool:
        """Whether a newcomer may be considered for it at all."""
        return self.state not in (SlotState.BUSY, SlotState.ERASING) and not self.saving


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as it stood when asked."""

    id: int
    state: SlotState
    turn: str | None
    agent: str | None
    priority: int
    kv_tokens: int
    copy: bool
    saving: bool


class SlotTable:
    """The slots of one engine."""

    __slots__ = ("_adjacent", "_clock", "_first", "_long_first", "_top_priority", "ledger", "slots")

    def __init__(
        self,
        engine_slots: int,
        budget: int | None,
        *,
        first: int,
        top_priority: int,
        adjacent: bool = False,
        long_first: bool = False,
    ) -> None:
        """`budget` is what all slots together may hold, in tokens; None where each has its own.

        `first` slots are kept for turns of `top_priority`. `adjacent`: neighbours are computed together.
        `long_first`: the longest paused KV gives way
        first.
        """
        self.slots = [Slot(index) for index in range(engine_slots)]
        self.ledger = Ledger(budget)
        self._first = first
        self._top_priority = top_priority
        self._adjacent = adjacent
        self._long_first = long_first and budget is not None
        self._clock = 0

    @property
    def budget(self) -> int | None:
        """What all slots together may hold, in tokens."""
        return self.ledger.budget

    def charged(self, slot: Slot) -> int:
        """Tokens charged to one slot."""
        return self.ledger.of(slot.id)

    def settle(self, slot: Slot, tokens: int) -> None:
        """Charge a busy slot with its turn's reservation only: what it held before is overwritten."""
        self.ledger.change(slot.id, tokens)

    def occupy(self, slot: Slot, *, turn: str, agent: str, priority: int, reserve: int) -> None:
        """Seat a turn that is about to run. Raises LedgerError when its reservation does not fit."""
        before = self.charged(slot)
        if slot.id in self.ledger:
            self.ledger.change(slot.id, max(reserve, before))
        else:
            self.ledger.open(slot.id, reserve)
        self._clock += 1
        slot.state = SlotState.BUSY
        slot.turn, slot.agent, slot.priority = turn, agent, priority
        slot.kv_tokens = 0
        slot.order = self._clock

    def clear(self, slot: Slot) -> None:
        """Forget everything the slot held."""
        if slot.id in self.ledger:
            self.ledger.close(slot.id)
        slot.state = SlotState.EMPTY
        slot.turn = slot.agent = slot.copy = None
        slot.priority = slot.kv_tokens = slot.prompt_tokens = 0
        slot.prefix = ()
        slot.saving = slot.evict = False

    def leave(self, slot: Slot, *, state: SlotState, kv_tokens: int) -> None:
        """A turn left the batch; its KV stays as `state` (PAUSED or IDLE), or is nothing."""
        self._clock += 1
        charged = self.charged(slot)
        free = self.ledger.free
        if kv_tokens <= 0 or (free is not None and kv_tokens > charged + free):
            # Nothing of worth, or more than was reserved and than there is: not to be built upon.
            self.clear(slot)
            if self.budget is not None and charged:
                slot.state = SlotState.IDLE
                slot.kv_tokens = charged
                self.ledger.open(slot.id, charged)
            return
        slot.state = state
        slot.kv_tokens = kv_tokens
        self.ledger.change(slot.id, kv_tokens)
        slot.order = self._clock
        slot.guard = slot.priority
        if state is SlotState.IDLE:
            slot.turn = None

    def candidate(self, agent: str, priority: int, prefix: Prefix = (), *, beyond: int = -1) -> Slot | None:
        """The slot a newcomer should take: one whose KV its prompt goes on from, else the cheapest.

        Only slots after number `beyond` are looked at.
        """
        best: Slot | None = None
        best_cost: tuple[float, ...] | None = None
        busy = SlotState.BUSY
        for slot in self.slots[beyond + 1 :]:
            if slot.state is busy or not slot.takeable:  # most are, and this is the hot path
                continue
            cost = self._cost(slot, agent, priority, prefix)
            if cost is not None and (best_cost is None or cost < best_cost):
                best, best_cost = slot, cost
        return best

    def goes_on(self, slot: Slot, agent: str, prefix: Prefix) -> int:
        """Tokens of an idle slot's KV that a prompt goes on from; 0 when it is mostly something else.

        Without anything known of the prompts, an agent's next turn is taken to go on from its last.
        """
        return self.will_go_on(slot, agent, prefix) if slot.state is SlotState.IDLE else 0

    def will_go_on(self, slot: Slot, agent: str, prefix: Prefix) -> int:
        """The same of any slot's KV, once whoever runs there has left."""
        if slot.agent is None:
            return 0
        if not prefix or not slot.prefix:
            return slot.kv_tokens if slot.agent == agent else 0
        return goes_on_from(prefix, slot.prefix, slot.prompt_tokens, slot.kv_tokens)

    def victims_for_room(self, need: int, priority: int, keep: Slot | None) -> list[Slot] | None:
        """Slots to erase so that `need` more tokens fit the pool; none when they fit already.

        None: wait, for slots that are being erased or saved or for turns that are leaving. `keep` (the
        slot the newcomer will use) is not listed: its present charge is replaced.
        """
        free = self.ledger.free
        if free is None:
            return []
        free += self.charged(keep) if keep is not None else 0
        if free >= need:
            return []
        free += sum(self.charged(s) for s in self.slots if s.state is SlotState.ERASING or s.saving)
        if free >= need:
            return None
        costs = [
            (cost, slot)
            for slot in self.slots
            if slot is not keep
            and slot.takeable
            and self.charged(slot)
            and (cost := self._cost(slot, agent="", priority=priority, prefix=())) is not None
        ]
        chosen: list[Slot] = []
        for _, slot in sorted(costs, key=lambda pair: pair[0]):
            chosen.append(slot)
            free += self.charged(slot)
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
            self.charged(slot)
            for slot in self.slots
            if slot.state is SlotState.BUSY
            or (slot.state is SlotState.PAUSED and priority < slot.guard < NOBODY)
        )

    def owners(self) -> dict[str, int]:
        """Charged tokens by what they are for; `reserved` is what running turns may still grow into."""
        found = dict.fromkeys(("running", "paused", "idle", "reserved"), 0)
        for slot in self.slots:
            charged = self.charged(slot)
            if slot.state is SlotState.BUSY:
                held = min(slot.kv_tokens, charged)
                found["running"] += held
                found["reserved"] += charged - held
            else:
                found["paused" if slot.state is SlotState.PAUSED else "idle"] += charged
        return found

    def view(self) -> tuple[SlotView, ...]:
        """All slots as they stand."""
        return tuple(
            SlotView(
                slot.id,
                slot.state,
                slot.turn,
                slot.agent,
                slot.priority,
                slot.kv_tokens,
                slot.copy is not None and not slot.saving,
                slot.saving,
            )
            for slot in self.slots
        )

    def _cost(self, slot: Slot, agent: str, priority: int, prefix: Prefix) -> tuple[float, ...] | None:
        top = priority >= self._top_priority
        kept = slot.id < self._first and not top
        dirty = slot.copy is None
        if slot.state is SlotState.IDLE and slot.agent is not None:
            shared = self.goes_on(slot, agent, prefix)
            if shared:
                return (0, -shared if prefix else 0, -slot.order)
            order = slot.id if top and self._first else slot.order
            return (2, kept, self._alone(slot), dirty, slot.priority, order)
        if slot.state in (SlotState.EMPTY, SlotState.IDLE):
            return (2 if kept else 1, kept, self._alone(slot), slot.id)
        if slot.state is SlotState.PAUSED and slot.guard <= priority:
            return (3, dirty, slot.priority, -slot.kv_tokens if self._long_first else 0, -slot.order)
        return None

    def _alone(self, slot: Slot) -> int:
        """How many neighbours that run it lacks, where that counts."""
        if not self._adjacent:
            return 0
        return 2 - sum(
            1
            for at in (slot.id - 1, slot.id + 1)
            if 0 <= at < len(self.slots) and self.slots[at].state is SlotState.BUSY
        )
