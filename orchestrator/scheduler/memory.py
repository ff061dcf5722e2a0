"""Where KV is, what gives way, and where it goes: the slots, the swap folder and what they cost.

The tiers, walked down in order
-------------------------------
1. *Resident*: paused KV and idle cache stay in their engine slots while nobody needs the room.
2. *Swapped*: what has to go is saved to a file first, where that costs less than to evaluate it again.
3. *Dropped*: where there is no folder, no room in it, or it fails.

What gives way first is the order of `slots.py`. The rules about when:

1. A save or a restore stalls every running turn, so neither happens while a turn of the highest class
   decodes, unless memory forces it: for another turn of that class, or for one that has waited
   `patience_s` with a decode slot in hand. Those are counted (`SwapTable.stalls`).
2. So that a turn of the highest class finds a place that costs nothing, one is *cleaned* ahead of it while
   none decodes: the KV that would have to give way gets a copy, and keeps its slot until somebody comes.
   Where all slots share a budget, what has a copy is erased as far as such a turn needs the room.
   And no other turn is admitted into the room that the last one of that class had.
3. Idle cache is not saved to make room for a turn of the highest class; it is the first thing to give up.
4. Parked KV that has slowed the running turns by as much as its swap would take is swapped: a long pause
   of a long turn, under a layout that taxes it (`Costs.rent_due`).
5. A new turn begins with the KV that its prompt shares most with, wherever that is: an idle slot, a file,
   or a slot that is saved for the purpose, if that takes all running turns together less time than its
   evaluation takes it. While the costs are unknown, only for turns below the highest class.
6. KV of a turn that was cancelled is there once the engine has stopped it, after the batch under way. Who
   goes on from it waits for that, as a client does that gives up and asks again: the step that it waits
   takes less time than evaluating it all in another slot, or the wait ends.
7. Where resumes from a tier find nothing of their KV, the tier is passed over, and tried again now and then
   (`Costs.works`).
"""

from __future__ import annotations

from orchestrator.scheduler.batch_order import behind
from orchestrator.scheduler.commands import Command, Erase, Forget, MarkDropped, MarkSwapped, Save
from orchestrator.scheduler.costs import Costs
from orchestrator.scheduler.policy import Policy
from orchestrator.scheduler.prefix import goes_on_from, shared_tokens
from orchestrator.scheduler.slots import Slot, SlotState, SlotTable
from orchestrator.scheduler.swap import SwapFile, SwapTable
from orchestrator.scheduler.turn import Phase, Turn
from orchestrator.turns import Tier

#: At most this part of a shared budget is kept free for the highest class.
HEADROOM_SHARE = 8


class Memory:
    """All KV of one backend. Turns are the scheduler's; here only their `slot`, `file`, `source` change."""

    def __init__(self, policy: Policy, turns: dict[str, Turn]) -> None:
        self.top_priority = max(policy.priorities)
        self.slots = SlotTable(
            policy.engine_slots,
            policy.kv_budget_tokens,
            first=policy.first_slots,
            adjacent=policy.adjacent,
            top_priority=self.top_priority,
            long_first=policy.swap is not None,
        )
        self.swap = SwapTable(policy.swap)
        self.costs = Costs()
        self._policy = policy
        self._patience_s = policy.swap.patience_s if policy.swap is not None else 0.0
        self._turns = turns
        self.leaving: dict[str, Turn] = {}
        """Cancelled turns that the engine has not stopped yet."""
        self._top_reserve = 0

    # A place for a turn ------------------------------------------------------------------------------

    def seat(self, turn: Turn, commands: list[Command], now: float, stalls: bool) -> Slot | None:
        """The engine slot in which the turn can run now, its `source` set; None: wait.

        What is in the way is given up; `stalls`: a turn of the highest class is decoding.
        """
        slot = turn.slot or self.slots.candidate(turn.agent, turn.priority, turn.prefix)
        if slot is None or slot.saving or self._own_is_being_saved(turn):
            return None
        if self._own_is_being_stopped(turn, slot, now):
            return None
        slot = self._in_order(turn, slot)
        if slot is None:
            return None
        waits = stalls and turn.priority < self.top_priority and now - turn.placed_at < self._patience_s
        source: SwapFile | None = None
        if turn.slot is None and self.swap.policy is not None:
            source, first = self._source(turn, slot, now)
            if (
                first is None
                and not self._goes_on(slot, turn)
                and self._worth_saving(slot, turn, now, source)
            ):
                first = slot
            if (source is not None or first is not None) and waits:
                return None
            if first is not None:
                self._save(first, commands, stalls, keep=source)
                return None
        need = turn.reserve + self.headroom(turn)
        victims = self.slots.victims_for_room(need, turn.priority, slot)
        if victims is None:
            return None
        if victims:
            dirty = [victim for victim in victims if self._worth_saving(victim, turn, now, source)]
            if dirty and waits:
                return None
            for victim in victims:
                if victim not in dirty:
                    self._erase(victim, commands)
            if dirty:
                self._save(dirty[0], commands, stalls, keep=source)
            return None
        turn.source = source
        return slot

    def top_decodes(self, but: Turn | None = None) -> bool:
        """Whether a turn of the highest class other than `but` is decoding: saves and restores stall it."""
        return any(
            slot.state is SlotState.BUSY
            and slot.priority >= self.top_priority
            and (turn := self._turns[slot.turn or ""]).phase is Phase.RUNNING
            and turn is not but
            for slot in self.slots.slots
        )

    def headroom(self, turn: Turn) -> int:
        """Tokens of a shared budget that have to stay free beside the turn: the next foreground turn's.

        Making room takes the engine a step for each call, which nobody of the highest class should wait for.
        """
        budget = self.slots.budget
        if budget is None or turn.priority >= self.top_priority:
            return 0
        headroom = min(self._top_reserve, budget // HEADROOM_SHARE)
        return headroom if turn.reserve + headroom <= budget else 0

    def occupy(self, turn: Turn, slot: Slot, commands: list[Command], stalls: bool) -> Tier:
        """Seat the turn; where the KV is that its segment begins with."""
        turn.unevaluated = self.to_evaluate(turn, slot)
        tier = Tier.RESIDENT if turn.slot is slot else Tier.DROPPED
        source, turn.source = turn.source, None
        if tier is Tier.RESIDENT:
            self._forget_file(turn, commands)  # it grows beyond its copy now
        else:
            copy = self.swap.copy_of(slot)
            if source is None and copy is not None and copy.idle and self._goes_on(slot, turn):
                self.swap.remove(copy, commands)
            self.give_up(slot, commands)
        kv_tokens = turn.kv_tokens if tier is Tier.RESIDENT else 0
        self.slots.occupy(slot, turn=turn.id, agent=turn.agent, priority=turn.priority, reserve=turn.reserve)
        slot.kv_tokens = kv_tokens
        slot.prefix = turn.prefix
        turn.slot = slot
        if source is not None:
            tier = Tier.SWAPPED
            source.readers += 1
            turn.source = source
            self.swap.touch(source)
            self.swap.stalls += stalls
        if turn.ran:
            turn.resumed_from = (tier, turn.kv_tokens)
        if turn.priority >= self.top_priority:
            self._top_reserve = turn.reserve
        return tier

    def give_up(self, slot: Slot, commands: list[Command]) -> None:
        """Take a slot's KV away from whoever left it there."""
        file = self.swap.copy_of(slot)
        if file is not None:
            self.swap.detach(file)
        if slot.state is SlotState.PAUSED and slot.turn is not None:
            turn = self._turns[slot.turn]
            turn.slot = slot.turn = None
            if file is not None:
                commands.append(MarkSwapped(turn.id, file.key))
            else:
                commands.append(MarkDropped(turn.id))
                if self.swap.policy is not None and not self.costs.works(Tier.SWAPPED):
                    self.costs.passed_over(Tier.SWAPPED)

    # What turns do -----------------------------------------------------------------------------------

    def started(self, turn: Turn, kv_tokens: int, cached: int | None, commands: list[Command]) -> None:
        """The engine has the turn's prompt: what it began with is known to have worked or not."""
        slot = turn.slot
        assert slot is not None
        turn.kv_tokens = turn.prompt_tokens = slot.kv_tokens = slot.prompt_tokens = kv_tokens
        turn.unevaluated = 0 if cached is None else max(0, kv_tokens - cached)
        if turn.max_tokens:
            # What was reserved for a prompt that nobody had counted is given back.
            turn.reserve = min(turn.reserve, kv_tokens + turn.max_tokens)
            turn.max_tokens = 0
        self.slots.settle(slot, turn.reserve)
        if turn.resumed_from is not None and cached is not None:
            tier, held = turn.resumed_from
            self.costs.resumed(tier, min(held, kv_tokens), cached)
        turn.resumed_from = None
        source = self._release_source(turn)
        if source is not None and source.idle and source.slot is None:
            contains = goes_on_from(turn.prefix, source.prefix, source.prompt_tokens, source.kv_tokens)
            if contains or not source.prefix:  # or it failed
                self.swap.remove(source, commands)
        self._forget_file(turn, commands)

    def paused(self, turn: Turn, kv_tokens: int, commands: list[Command], now: float) -> None:
        """The turn left the batch, its KV in its slot if it is worth something."""
        turn.paused_at = now
        turn.resumed_from = None
        self._release_source(turn)
        slot = turn.slot
        assert slot is not None
        self.slots.leave(slot, state=SlotState.PAUSED, kv_tokens=kv_tokens)
        if slot.state is not SlotState.PAUSED:
            turn.slot = None
            if kv_tokens > 0 and turn.tier is Tier.DROPPED and not turn.cancelled:
                commands.append(MarkDropped(turn.id))
            return
        self._forget_file(turn, commands)
        if not self.costs.works(Tier.RESIDENT) and not turn.cancelled:
            self.costs.passed_over(Tier.RESIDENT)
            if not self.worth_a_file(slot, now):
                self._erase(slot, commands)
            elif self.swap.writing is None and not self.top_decodes():  # else on one of the next ticks
                slot.evict = True
                self._save(slot, commands, stalls=False)

    def ended(self, turn: Turn, kv_tokens: int, commands: list[Command]) -> None:
        """The turn left the engine for good."""
        turn.resumed_from = None
        self._release_source(turn)
        self._forget_file(turn, commands)
        assert turn.slot is not None
        self.slots.leave(turn.slot, state=SlotState.IDLE, kv_tokens=kv_tokens)
        turn.slot = None

    def left_behind(self, turn: Turn) -> None:
        """A turn that did not run ends: its KV, wherever it is, becomes its agent's idle cache."""
        if turn.file is not None:
            turn.file.turn = None
            turn.file = None
        if turn.slot is not None:
            self.slots.leave(turn.slot, state=SlotState.IDLE, kv_tokens=turn.slot.kv_tokens)
            turn.slot = None

    def engine_ready(self) -> None:
        """The engine is there, for the first time or again."""
        self.costs.another_engine()
        self.swap.another_engine()

    def engine_lost(self, commands: list[Command]) -> None:
        """All KV in the engine is gone; what is in files stays."""
        if self.swap.writing is not None:
            file = self.swap.writing
            if file.turn is not None:
                self._turns[file.turn].file = None
            if file.key in self.swap.files:
                self.swap.remove(file, commands)
            self.swap.writing = None  # its answer may take long, and others need not wait for it
        for slot in self.slots.slots:
            if slot.state is SlotState.BUSY:
                continue
            self.give_up(slot, commands)
            self.slots.clear(slot)

    def abandon(self, turn: Turn) -> None:
        """The turn's segment ended on an engine that was lost meanwhile."""
        turn.resumed_from = None
        self._release_source(turn)
        assert turn.slot is not None
        self.slots.clear(turn.slot)
        turn.slot = None

    # What the engine reports -------------------------------------------------------------------------

    def erased(self, slot: Slot) -> None:
        """An erase is over."""
        if slot.state is SlotState.ERASING:
            self.slots.clear(slot)

    def saved(
        self,
        slot: Slot,
        key: str,
        kv_tokens: int,
        file_bytes: int,
        stall_s: float,
        commands: list[Command],
    ) -> None:
        """A save is over."""
        self.costs.saved(kv_tokens, stall_s)
        file = self.swap.written(key, kv_tokens, file_bytes)
        if file is None:
            commands.append(Forget(key))
            return
        if slot.copy != key:
            return
        slot.saving = False
        if slot.evict:
            slot.evict = False
            self._evict(slot, commands)

    def save_failed(self, slot: Slot, key: str, commands: list[Command], now: float) -> None:
        """A save did not work; the slot has what it had."""
        file = self.swap.failed(key, now)
        if file is None:
            return
        if file.turn is not None:
            self._turns[file.turn].file = None
        slot.saving = slot.evict = False
        if not self.costs.works(Tier.RESIDENT) and slot.state is SlotState.PAUSED:
            self._evict(slot, commands)

    def restored(self, turn: Turn, kv_tokens: int, stall_s: float) -> None:
        """A restore is over."""
        self.swap.restores += 1
        self.costs.restored(kv_tokens, stall_s)
        if turn.slot is not None:
            turn.slot.kv_tokens = kv_tokens

    def restore_failed(self, turn: Turn, commands: list[Command]) -> None:
        """The file that the turn's segment should have begun with is of no use."""
        self.swap.failures += 1
        if turn.resumed_from is not None:
            tier, held = turn.resumed_from
            self.costs.resumed(tier, held, 0)
        turn.resumed_from = None
        source = self._release_source(turn)
        if source is None:
            return
        source.prefix = ()  # nobody else begins with it
        if source.turn == turn.id:
            source.turn = turn.file = None
        if source.idle and source.key in self.swap.files:
            self.swap.remove(source, commands)

    # Ahead of time -----------------------------------------------------------------------------------

    def clean_ahead(self, commands: list[Command], now: float) -> None:
        """See to a place for the next turn of the highest class; called while none of them decodes."""
        if self.swap.writing is not None or not self.swap.usable(now):
            return
        slot = self.slots.candidate("", self.top_priority)
        if slot is None:
            return
        if self.worth_a_file(slot, now):
            self._save(slot, commands, stalls=False)
            return
        victims = self.slots.victims_for_room(self._top_reserve, self.top_priority, slot) or []
        dirty = next((victim for victim in victims if self.worth_a_file(victim, now)), None)
        if dirty is not None:
            self._save(dirty, commands, stalls=False)
            return
        for victim in victims:
            if victim.copy is not None:
                self._erase(victim, commands)

    def erase_leftovers(self, commands: list[Command]) -> None:
        """Free nobody's cells, which are charged all the same, before somebody needs the room."""
        for slot in self.slots.slots:
            if slot.state is SlotState.IDLE and slot.agent is None:
                self._erase(slot, commands)

    def collect_rent(self, commands: list[Command], now: float) -> None:
        """Swap what has been parked for so long that it would have been cheaper to swap it at once.

        Or what is of no use where it is.
        """
        useless = not self.costs.works(Tier.RESIDENT)
        for slot in self.slots.slots:
            if slot.state is not SlotState.PAUSED or slot.saving or slot.turn is None:
                continue
            turn = self._turns[slot.turn]
            if turn.phase is Phase.PLACED:
                continue
            if not useless and not self.costs.rent_due(slot.kv_tokens, now - turn.paused_at):
                continue
            if self.swap.copy_of(slot) is not None:
                self._erase(slot, commands)
            elif self.swap.writing is None and self.worth_a_file(slot, now) and not self.top_decodes():
                slot.evict = True
                self._save(slot, commands, stalls=False)

    # Choices -----------------------------------------------------------------------------------------

    def worth_a_file(self, slot: Slot, now: float, keep: SwapFile | None = None) -> bool:
        """Whether the slot holds KV that should be saved before it is given up, at no cost to `keep`."""
        policy = self.swap.policy
        return (
            policy is not None
            and slot.copy is None
            and slot.agent is not None
            and slot.state in (SlotState.PAUSED, SlotState.IDLE)
            and slot.kv_tokens >= policy.min_tokens
            and self.swap.usable(now)
            and self.costs.swap_pays(slot.kv_tokens)
            and self.swap.could_hold(slot, keep)
        )

    def _worth_saving(self, slot: Slot, turn: Turn, now: float, keep: SwapFile | None) -> bool:
        if slot.state is SlotState.IDLE and turn.priority >= self.top_priority:
            return False
        return self.worth_a_file(slot, now, keep)

    def _own_is_being_saved(self, turn: Turn) -> bool:
        """Whether the KV that the turn goes on from is there in a moment."""
        writing = self.swap.writing
        return writing is not None and writing.slot is not None and self._goes_on(writing.slot, turn)

    def _own_is_being_stopped(self, turn: Turn, slot: Slot, now: float) -> bool:
        """Whether the turn should not start in `slot`, as a cancelled turn leaves KV that saves it more.

        It saves the turn at least the time that is waited for it: at worst that is lost once.
        """
        if turn.ran or not self.leaving:
            return False
        here = self.slots.goes_on(slot, turn.agent, turn.prefix)
        coming = max(
            (
                self.slots.will_go_on(other.slot, turn.agent, turn.prefix)
                for other in self.leaving.values()
                if other.picked_up and other.slot is not None
            ),
            default=0,
        )
        if coming - here < self._policy.min_shared_tokens:
            return False
        saved_s = self.costs.prefill_s(coming - here)
        return saved_s is None or max(self.costs.step_s(), now - turn.placed_at) < saved_s

    def _in_order(self, turn: Turn, slot: Slot) -> Slot | None:
        """Where the turn keeps nobody from starting who goes first: there, or further back; None: wait.

        See `batch_order.py`.
        """
        tokens = self.to_evaluate(turn, slot)
        if tokens < self._policy.long_prefill_tokens or not self._policy.preemption:
            return slot
        busy = (self._turns[other.turn or ""] for other in self.slots.slots if other.state is SlotState.BUSY)
        first = behind(turn, slot.id, tokens, busy)
        if first and turn.slot is None and not self._goes_on(slot, turn):
            last = max(other.slot.id for other in first if other.slot is not None)
            further = self.slots.candidate(turn.agent, turn.priority, turn.prefix, beyond=last)
            if further is not None:
                return further
        waits = False
        for other in first:
            if other.priority == turn.priority and other.id not in turn.after:
                if turn.preemptions >= self._policy.max_preemptions:
                    continue
                turn.preemptions += 1
                turn.after.add(other.id)
            waits = True
        return None if waits else slot

    def to_evaluate(self, turn: Turn, slot: Slot | None) -> int:
        """About how many tokens of its prompt the engine has to evaluate when the turn runs in `slot` now."""
        prompt = max(turn.prompt_tokens, turn.kv_tokens) or turn.reserve - turn.max_tokens
        if slot is None:
            held = 0
        elif turn.slot is slot:
            held = turn.kv_tokens
        elif turn.source is not None:
            held = turn.source.kv_tokens
        else:
            held = 0 if turn.ran else self.slots.goes_on(slot, turn.agent, turn.prefix)
        return max(1, prompt - held)

    def _goes_on(self, slot: Slot, turn: Turn) -> bool:
        return not turn.ran and self.slots.goes_on(slot, turn.agent, turn.prefix) > 0

    def _source(self, turn: Turn, slot: Slot, now: float) -> tuple[SwapFile | None, Slot | None]:
        """What the turn's segment should begin with in `slot`: a file, or a slot to save first."""
        most = turn.reserve if self.slots.budget is not None else 1 << 62
        if turn.ran:
            file = turn.file if turn.tier is Tier.SWAPPED else None
            return (file if file is not None and file.kv_tokens <= most else None), None
        if not turn.prefix or not self.costs.works(Tier.SWAPPED):
            return None, None
        here = 0
        if slot.state is SlotState.IDLE:
            here = shared_tokens(turn.prefix, slot.prefix, slot.prompt_tokens, slot.kv_tokens)
        top = turn.priority >= self.top_priority
        tokens, file = self.swap.best_for(turn.prefix, most)
        if file is not None and not self._pays(tokens - here, file.kv_tokens, saved=True, unknown=not top):
            tokens, file = 0, None
        best, best_tokens = None, max(tokens, here)
        for other in self.slots.slots:
            if other is slot or other.kv_tokens > most or not self.worth_a_file(other, now):
                continue
            if other.turn is not None and self._turns[other.turn].phase is Phase.PLACED:
                continue  # it is about to go on
            shared = shared_tokens(turn.prefix, other.prefix, other.prompt_tokens, other.kv_tokens)
            gain = shared - best_tokens
            if self._pays(gain, other.kv_tokens, saved=False, unknown=not top):
                best, best_tokens = other, shared
        return (None, best) if best is not None else (file, None)

    def _pays(self, gain: int, moved: int, *, saved: bool, unknown: bool) -> bool:
        """Whether to bring KV in stalls all who run, and the newcomer, for less than its evaluation takes.

        Each call to the engine waits for the step under way. `unknown`: the answer without figures.
        """
        if gain < self._policy.min_shared_tokens:
            return False
        swap_s, prefill_s = self.costs.swap_s(moved, saved=saved), self.costs.prefill_s(gain)
        if swap_s is None or prefill_s is None:
            return unknown
        stalled = 1 + sum(slot.state is SlotState.BUSY for slot in self.slots.slots)
        return stalled * swap_s + (1 if saved else 2) * self.costs.step_s() < prefill_s

    # Deeds -------------------------------------------------------------------------------------------

    def _save(self, slot: Slot, commands: list[Command], stalls: bool, keep: SwapFile | None = None) -> None:
        if self.swap.writing is not None:
            return
        file = self.swap.write(slot, commands, keep)
        slot.saving = True
        if slot.turn is not None:
            self._turns[slot.turn].file = file
        self.swap.stalls += stalls
        commands.append(Save(slot.id, file.key, slot.turn))

    def _evict(self, slot: Slot, commands: list[Command]) -> None:
        """Erase the slot, unless its turn is about to go on in it."""
        turn = self._turns.get(slot.turn or "")
        if turn is None or turn.phase is not Phase.PLACED:
            self._erase(slot, commands)

    def _erase(self, slot: Slot, commands: list[Command]) -> None:
        self.give_up(slot, commands)
        slot.state = SlotState.ERASING
        slot.copy = None
        commands.append(Erase(slot.id))

    def _release_source(self, turn: Turn) -> SwapFile | None:
        source, turn.source = turn.source, None
        if source is not None:
            source.readers -= 1
        return source

    def _forget_file(self, turn: Turn, commands: list[Command]) -> None:
        file, turn.file = turn.file, None
        if file is None:
            return
        file.turn = None
        if file.slot is not None:
            file.slot.saving = False
            self.swap.detach(file)
        if not file.readers and file.key in self.swap.files:
            self.swap.remove(file, commands)
