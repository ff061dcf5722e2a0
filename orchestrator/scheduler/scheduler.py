"""One mutator: :meth:`Scheduler.handle`.

Theory of operation
-------------------
A turn's phase, seen from one backend::

    WAITING -> CLAIMING -> READY -> PLACED -> RUNNING -> (gone)
                             ^                  |
                             +---- PAUSING <----+
                   HELD <-> READY

WAITING turns stand in the pool's queue and belong to nobody. READY turns belong to this backend and
want a decode slot: just claimed, or paused. A PLACED turn has its decode slot and waits for an engine
slot: for one step at most, while its victim's stream closes, and not at all when there is a spare.

After every event:

1. Candidates are the oldest turns of each class, best first: by effective priority (aged), then
   arrival. One that cannot take a place is passed over, but only for candidates of higher base
   priority, which may take what it may not; so small turns never starve a large one for memory.
2. A place is a free decode slot that no outranking claim in flight will need, else that of a turn of
   strictly lower base priority: one PLACED (it steps back) or one RUNNING (it is paused). Under
   unified KV more than one may have to yield for the memory.
3. A victim is paused in the same step in which the newcomer is placed, never before: nothing is
   evicted for a turn that was not admitted.
4. A WAITING candidate is claimed when it could be placed now, with the claims in flight served first.
5. When no candidate is left that could be placed, PLACED turns get an engine slot, the most important
   first, as soon as one is free and, under unified KV, their reservation fits; what is in the way is
   given up by the rules of `memory.py`. Last, so that nothing starts only to be paused.
6. Age gives order, no rights: an aged turn preempts nothing and any newcomer above its base priority
   may preempt it. Only a turn that was passed over for it does not take the place straight back.
7. A long prefill that keeps a turn in a later engine slot from starting gives way to it for as long as that
   one's prompt takes, and keeps its decode slot from its equals: see `batch_order.py`.
"""

from __future__ import annotations

from collections import deque

from orchestrator.scheduler.admission import Admission
from orchestrator.scheduler.batch_order import in_the_way
from orchestrator.scheduler.commands import (
    Abort,
    Claim,
    Command,
    Discard,
    MarkDropped,
    Pause,
    Refuse,
    Resume,
    Start,
)
from orchestrator.scheduler.events import (
    CancelRequested,
    Claimed,
    ClaimLost,
    Ended,
    EngineLost,
    EngineReady,
    Erased,
    Event,
    HoldRequested,
    Paused,
    Prefilled,
    Progressed,
    Recovered,
    ReleaseRequested,
    Restored,
    RestoreFailed,
    Saved,
    SaveFailed,
    Started,
    Stepped,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.scheduler.memory import Memory
from orchestrator.scheduler.policy import Policy
from orchestrator.scheduler.queue import ClassQueue
from orchestrator.scheduler.slots import Slot
from orchestrator.scheduler.turn import ON_ENGINE, WANTS_PLACE, Phase, Turn, by_rank
from orchestrator.scheduler.view import SchedulerView, turn_view
from orchestrator.turns import IllegalTransition, Tier

JOURNAL_LENGTH = 512

#: Events after which KV may have to be moved out of the way of the next turn of the highest class.
_FREEING = (Paused, Ended, Saved, Erased, Tick)


class Scheduler:
    """Decides for one backend which turns run, yield, resume and give up KV."""

    def __init__(self, policy: Policy) -> None:
        """The engine counts as lost until the first EngineReady."""
        self.policy = policy
        self._turns: dict[str, Turn] = {}
        self._memory = Memory(policy, self._turns)
        self._slots = self._memory.slots
        self._owned: dict[str, Turn] = {}
        self._queue = ClassQueue(self._wants_place)
        self._decoding: dict[str, Turn] = {}
        self._classes: dict[int, int] = {}
        """How many of the decoding turns there are of each priority; none of none."""
        self._placed: dict[str, Turn] = {}
        self._pausing: dict[str, Turn] = {}
        self._giving_way: dict[str, Turn] = {}
        """Of those that are pausing, the ones whose decode slot is kept for them."""
        self._claiming: dict[str, Turn] = {}
        self._admission = Admission(policy, self._memory, self._decoding, self._placed, self._pausing)
        self._outsized: dict[str, Turn] = {}
        """Waiting turns that are larger than all the KV here."""
        self._grown: dict[str, tuple[float, Progressed]] = {}
        self._prefills_grown = False
        """Whether who is seated depends on those."""
        self._step = 0
        self._ready = False
        self.journal: deque[tuple[float, Event, tuple[Command, ...]]] = deque(maxlen=JOURNAL_LENGTH)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time `now` (seconds, any monotonic origin) and say what is to be done.

        Raises IllegalTransition, with the turn's recent story, when the event cannot follow what
        went before; the state is then unchanged.
        """
        commands: list[Command] = []
        self._step += 1
        match event:
            case Progressed(turn_id, kv_tokens):
                turn_or_none = self._turns.get(turn_id)
                if turn_or_none is None or turn_or_none.phase not in ON_ENGINE:
                    return commands
                if not self._progressed(turn_or_none, kv_tokens) or not self._placed:
                    self._grown[turn_id] = (now, event)
                    return commands
                self._grown.pop(turn_id, None)
                self._note_growth()
            case TurnQueued():
                self._queued(event, now)
            case Claimed(turn_id, prefix, max_tokens):
                turn = self._expect(event, turn_id, Phase.CLAIMING)
                del self._claiming[turn_id]
                turn.prefix, turn.max_tokens = prefix, max_tokens
                self._make_ready(turn, commands)
            case ClaimLost(turn_id):
                self._expect(event, turn_id, Phase.CLAIMING)
                del self._claiming[turn_id]
                self._forget(turn_id)
            case Withdrawn(turn_id):
                turn_or_none = self._turns.get(turn_id)
                if turn_or_none is not None and turn_or_none.phase is Phase.WAITING:
                    del self._turns[turn_id]
            case Recovered():
                self._recovered(event, now)
            case Started(turn_id, kv_tokens, cached_tokens):
                turn = self._expect(event, turn_id, *ON_ENGINE)
                self._seat(turn)
                turn.picked_up = True
                if self._ready:
                    self._memory.started(turn, kv_tokens, cached_tokens, commands)
                self._grown.pop(turn_id, None)
            case Paused(turn_id, kv_tokens, resident):
                turn = self._expect(event, turn_id, *ON_ENGINE)
                self._paused(turn, kv_tokens, resident, commands, now)
            case Ended(turn_id, kv_tokens, resident):
                turn = self._expect(event, turn_id, *ON_ENGINE)
                self._leave(turn)
                if self._ready:
                    self._memory.ended(turn, kv_tokens if resident else 0, commands)
                else:
                    self._memory.abandon(turn)
                    self._memory.left_behind(turn)
                self._forget(turn_id)
            case Erased(slot_id):
                self._memory.erased(self._slot(event, slot_id))
            case Saved(slot_id, key, kv_tokens, file_bytes, stall_s):
                slot = self._slot(event, slot_id)
                self._memory.saved(slot, key, kv_tokens, file_bytes, stall_s, commands)
            case SaveFailed(slot_id, key):
                self._memory.save_failed(self._slot(event, slot_id), key, commands, now)
            case Restored(turn_id, kv_tokens, stall_s):
                self._memory.restored(self._expect(event, turn_id, *ON_ENGINE), kv_tokens, stall_s)
            case RestoreFailed(turn_id):
                self._memory.restore_failed(self._expect(event, turn_id, *ON_ENGINE), commands)
            case Prefilled(tokens, seconds, turn_id_or_none):
                self._memory.costs.prefilled(tokens, seconds)
                turn_or_none = self._turns.get(turn_id_or_none or "")
                if turn_or_none is not None and turn_or_none.phase in ON_ENGINE:
                    turn_or_none.unevaluated = 0
            case Stepped(step_s):
                self._stepped(step_s)
            case CancelRequested(turn_id):
                self._cancel(turn_id, commands)
            case HoldRequested(turn_id):
                self._hold(turn_id, commands)
            case ReleaseRequested(turn_id):
                self._release(turn_id)
            case EngineLost():
                self._engine_lost(commands)
            case EngineReady():
                self._ready = True
                self._memory.engine_ready()
            case Tick():
                if self._ready:
                    self._refuse_outsized(commands)
                    self._memory.collect_rent(commands, now)
        if self._ready:
            while self._place_one(commands, now):
                pass
            if self._placed:
                self._seat_placed(commands, now)
            if isinstance(event, _FREEING):
                self._look_ahead(commands, now)
        self.journal.append((now, event, tuple(commands)))
        return commands

    def view(self, now: float = 0.0) -> SchedulerView:
        """A frozen picture for `/swarm/state` and tests."""
        owned = tuple(turn_view(turn, self._memory) for turn in self._owned.values())
        return SchedulerView(
            slots=self._slots.view(),
            owned=owned,
            waiting=len(self._turns) - len(owned),
            decoding=len(self._decoding),
            kv_tokens_charged=self._slots.ledger.charged,
            kv_owners=self._slots.owners(),
            swap=self._memory.swap.view(now),
            costs=self._memory.costs.view(),
        )

    def story(self, turn_id: str) -> list[str]:
        """The journal's lines about one turn, oldest first."""
        return [
            f"{now:.3f} {event} -> {', '.join(map(str, commands)) or 'nothing'}"
            for now, event, commands in self.journal
            if getattr(event, "turn", None) == turn_id
            or any(getattr(command, "turn", None) == turn_id for command in commands)
        ]

    # Events ----------------------------------------------------------------------------------------

    def _queued(self, event: TurnQueued, now: float) -> None:
        if event.turn not in self._turns:
            self._enlist(event, now, Phase.WAITING)

    def _recovered(self, event: Recovered, now: float) -> None:
        if event.turn in self._turns:
            self._expect(event, event.turn, Phase.WAITING)
        turn = self._enlist(event, now, Phase.READY)
        turn.ran = True
        turn.prefix = event.prefix
        self._owned[turn.id] = turn

    def _enlist(self, event: TurnQueued | Recovered, now: float, phase: Phase) -> Turn:
        turn = Turn(event.turn, event.agent, event.priority, event.seq, event.kv_tokens, now, phase)
        turn.rank = turn.priority
        turn.since = self._step
        self._turns[turn.id] = turn
        self._line_up(turn)
        return turn

    def _line_up(self, turn: Turn) -> None:
        # A turn larger than the whole KV pool would block its class here for ever; another backend may
        # have the room for it.
        if self._slots.budget is None or turn.reserve <= self._slots.budget:
            self._queue.add(turn.id, turn.priority, turn.seq)
        else:
            self._outsized[turn.id] = turn

    def _refuse_outsized(self, commands: list[Command]) -> None:
        for turn in list(self._outsized.values()):
            if self._turns.get(turn.id) is turn and turn.phase is Phase.WAITING:
                assert self._slots.budget is not None
                commands.append(Refuse(turn.id, turn.reserve, self._slots.budget))
            else:
                del self._outsized[turn.id]

    def _paused(
        self, turn: Turn, kv_tokens: int, resident: bool, commands: list[Command], now: float
    ) -> None:
        turn.kv_tokens = kv_tokens
        turn.stopping = False
        turn.since = self._step
        turn.queued_at += now - turn.started_at  # time run is not time waited
        self._leave(turn)
        if self._ready:
            self._memory.paused(turn, kv_tokens if resident else 0, commands, now)
        else:
            self._memory.abandon(turn)
            if resident and not turn.cancelled:
                commands.append(MarkDropped(turn.id))
        self._make_ready(turn, commands)

    def _progressed(self, turn: Turn, kv_tokens: int) -> bool:
        """Whether nothing is left any more of a prompt that was being evaluated."""
        turn.kv_tokens = self._seat(turn).kv_tokens = kv_tokens
        before, turn.unevaluated = turn.unevaluated, max(0, turn.prompt_tokens - kv_tokens)
        self._prefills_grown = self._prefills_grown or before != turn.unevaluated
        return before > 0 and not turn.unevaluated

    def _slot(self, event: Event, slot_id: int) -> Slot:
        if not 0 <= slot_id < len(self._slots.slots):
            raise self._illegal(f"{event}: the engine has no such slot", "")
        return self._slots.slots[slot_id]

    def _stepped(self, step_s: float) -> None:
        self._note_growth()
        running = [turn for turn in self._decoding.values() if turn.phase is Phase.RUNNING]
        parked = sum(slot.kv_tokens for slot in self._slots.slots) - sum(turn.kv_tokens for turn in running)
        self._memory.costs.stepped(
            step_s, len(running), sum(turn.kv_tokens for turn in running), max(0, parked)
        )

    def _look_ahead(self, commands: list[Command], now: float) -> None:
        """Make room that nobody needs yet; who comes right now overwrites what would be erased."""
        if self._slots.budget is not None and not self._placed and not self._claiming:
            self._memory.erase_leftovers(commands)
        if self._memory.swap.policy is None:
            return
        if max(self._classes, default=0) < self._memory.top_priority:
            self._memory.clean_ahead(commands, now)

    def _cancel(self, turn_id: str, commands: list[Command]) -> None:
        turn = self._turns.get(turn_id)
        if turn is None or turn.cancelled:
            return
        turn.cancelled = True
        match turn.phase:
            case Phase.RUNNING:
                self._memory.leaving[turn_id] = turn
                if not turn.stopping:
                    turn.stopping = True
                    commands.append(Abort(turn.id))
            case Phase.READY | Phase.HELD | Phase.PLACED:
                self._discard(turn, commands)
            case Phase.WAITING:
                del self._turns[turn_id]
            case Phase.PAUSING:
                self._memory.leaving[turn_id] = turn
            case Phase.CLAIMING:
                pass

    def _hold(self, turn_id: str, commands: list[Command]) -> None:
        turn = self._turns.get(turn_id)
        if turn is None or turn.cancelled or turn.phase is Phase.WAITING:
            return
        turn.hold = True
        if turn.phase is Phase.RUNNING and not turn.stopping:
            self._pause(turn, None, commands)
        elif turn.phase in (Phase.READY, Phase.PLACED):
            self._unplace(turn)
            self._enter(turn, Phase.HELD)

    def _release(self, turn_id: str) -> None:
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        turn.hold = False
        if turn.phase is Phase.HELD:
            turn.since = self._step
            self._enter(turn, Phase.READY)

    def _engine_lost(self, commands: list[Command]) -> None:
        self._ready = False
        self._memory.engine_lost(commands)
        for turn in list(self._placed.values()):
            self._step_back(turn)

    # Placing ---------------------------------------------------------------------------------------

    def _place_one(self, commands: list[Command], now: float) -> bool:
        """Claim or place the best candidate that can be; False when there is none."""
        heads = self._queue.heads()
        if not heads:
            return False
        free = self.policy.decode_slots - len(self._decoding)
        lowest = min(self._classes, default=0)
        if free <= 0 and heads[0][0] <= lowest:
            return False
        blocked: int | None = None
        for turn in self._candidates(heads, now):
            if blocked is not None and turn.priority <= blocked:
                continue
            if free <= 0 and turn.priority <= lowest:
                continue
            ahead = self._ahead_of(turn) if self._claiming else ()
            short = len(ahead) + 1 - free + (self._kept_from(turn) if self._giving_way else 0)
            below = self._admission.below(turn) if short > 0 or self._slots.budget is not None else []
            if short > len(below):
                pass
            elif turn.phase is Phase.WAITING:
                if self._admission.has_room(turn, below, ahead):
                    self._claim(turn, commands)
                    return True
            else:
                if below:
                    self._note_growth()
                yielding = self._admission.who_yields(turn, int(short > 0), below, ahead, now)
                if yielding is not None:
                    self._admit(turn, yielding, commands, now)
                    return True
            blocked = turn.priority
        return False

    def _candidates(self, heads: list[tuple[int, str]], now: float) -> list[Turn]:
        found = []
        for priority, turn_id in heads:
            turn = self._turns[turn_id]
            turn.rank = self.policy.effective_priority(priority, now - turn.queued_at)
            found.append(turn)
        if len(found) > 1:
            found.sort(key=by_rank)
        return found

    def _ahead_of(self, turn: Turn) -> list[Turn]:
        """Claims in flight that are to be served before `turn`."""
        waiting = turn.phase is Phase.WAITING
        return [
            other
            for other in self._claiming.values()
            if (other.rank > turn.rank or (other.rank == turn.rank and (waiting or other.seq < turn.seq)))
            and not other.cancelled
            and not other.hold
        ]

    def _kept_from(self, turn: Turn) -> int:
        """Decode slots that a place for `turn` must leave to those that give way to somebody's prompt."""
        return sum(
            other.priority >= turn.priority and not other.cancelled and not other.hold
            for other in self._giving_way.values()
        )

    def _claim(self, turn: Turn, commands: list[Command]) -> None:
        turn.phase = Phase.CLAIMING
        self._owned[turn.id] = self._claiming[turn.id] = turn
        commands.append(Claim(turn.id))

    def _admit(self, turn: Turn, yielding: list[Turn], commands: list[Command], now: float) -> None:
        for other in yielding:
            if other.phase is Phase.RUNNING:
                self._pause(other, turn.id, commands)
            else:
                self._step_back(other)
        self._enter(turn, Phase.PLACED)
        turn.placed_in = self._step
        turn.placed_at = now
        self._decoding[turn.id] = turn
        self._classes[turn.priority] = self._classes.get(turn.priority, 0) + 1
        self._placed[turn.id] = turn

    def _seat_placed(self, commands: list[Command], now: float) -> None:
        if self._prefills_grown:
            self._note_growth()
        placed = list(self._placed.values())
        if len(placed) > 1:  # of equals the short prompts first, so that no long one starts only to give way
            placed.sort(key=lambda turn: (-turn.priority, self._memory.to_evaluate(turn, turn.slot)))
        for turn in placed:
            stalls = self._memory.swap.policy is not None and self._memory.top_decodes(turn)
            slot = self._memory.seat(turn, commands, now, stalls)
            if slot is not None:
                self._run(turn, slot, commands, now, stalls)

    def _run(self, turn: Turn, slot: Slot, commands: list[Command], now: float, stalls: bool) -> None:
        tier = self._memory.occupy(turn, slot, commands, stalls)
        turn.phase = Phase.RUNNING
        turn.after.clear()
        turn.started_at = now
        turn.picked_up = False
        del self._placed[turn.id]
        source = turn.source.key if turn.source is not None else None
        if turn.ran:
            commands.append(Resume(turn.id, slot.id, tier, source))
        else:
            turn.ran = True
            commands.append(Start(turn.id, slot.id, source))
        self._make_way(turn, commands)

    def _make_way(self, turn: Turn, commands: list[Command]) -> None:
        """Pause the prefills that the engine would put before the turn's."""
        if not self.policy.preemption or not self._memory.costs.works(Tier.RESIDENT):
            return
        if not self._giving_way and not any(
            other.unevaluated for other in self._decoding.values() if other is not turn
        ):
            return
        others = [*self._decoding.values(), *self._giving_way.values()]
        for other in in_the_way(turn, others, self.policy.long_prefill_tokens):
            if other.preemptions >= self.policy.max_preemptions:
                continue
            if other.phase is Phase.RUNNING:
                self._pause(other, turn.id, commands)
                self._giving_way[other.id] = other
            else:
                other.preemptions += 1
            other.after.add(turn.id)

    def _pause(self, turn: Turn, by: str | None, commands: list[Command]) -> None:
        turn.phase = Phase.PAUSING
        turn.stopping = True
        turn.preemptions += 1
        self._give_decode_slot_back(turn)
        self._pausing[turn.id] = turn
        commands.append(Pause(turn.id, by))

    def _note_growth(self) -> None:
        """Put the latest Progressed of each turn into the journal: what follows depends on them."""
        self.journal.extend((at, event, ()) for at, event in self._grown.values())
        self._grown.clear()
        self._prefills_grown = False

    # Bookkeeping -----------------------------------------------------------------------------------

    def _make_ready(self, turn: Turn, commands: list[Command]) -> None:
        if turn.cancelled:
            self._discard(turn, commands)
        else:
            self._enter(turn, Phase.HELD if turn.hold else Phase.READY)

    def _enter(self, turn: Turn, phase: Phase) -> None:
        """Go to a phase in which the turn is not on the engine, and guard the KV it left there."""
        turn.phase = phase
        if turn.slot is not None:
            turn.slot.guard = turn.guard()
        if phase is Phase.READY:
            self._line_up(turn)

    def _step_back(self, turn: Turn) -> None:
        self._unplace(turn)
        self._enter(turn, Phase.READY)

    def _discard(self, turn: Turn, commands: list[Command]) -> None:
        self._unplace(turn)
        self._memory.left_behind(turn)
        self._forget(turn.id)
        commands.append(Discard(turn.id))

    def _unplace(self, turn: Turn) -> None:
        self._placed.pop(turn.id, None)
        self._give_decode_slot_back(turn)

    def _give_decode_slot_back(self, turn: Turn) -> None:
        if self._decoding.pop(turn.id, None) is not None:
            left = self._classes.pop(turn.priority) - 1
            if left:
                self._classes[turn.priority] = left

    def _leave(self, turn: Turn) -> None:
        """The turn is out of the batch; its slot is the memory's to settle."""
        self._seat(turn)
        self._give_decode_slot_back(turn)
        self._pausing.pop(turn.id, None)
        self._giving_way.pop(turn.id, None)
        self._memory.leaving.pop(turn.id, None)
        self._grown.pop(turn.id, None)

    def _seat(self, turn: Turn) -> Slot:
        if turn.slot is None:
            raise self._illegal(f"turn {turn.id} has no engine slot in phase {turn.phase}", turn.id)
        return turn.slot

    def _forget(self, turn_id: str) -> None:
        del self._turns[turn_id]
        self._owned.pop(turn_id, None)

    def _wants_place(self, turn_id: str, priority: int, seq: int) -> bool:
        turn = self._turns.get(turn_id)
        return (
            turn is not None and turn.phase in WANTS_PLACE and turn.seq == seq and turn.priority == priority
        )

    def _expect(self, event: Event, turn_id: str, *phases: Phase) -> Turn:
        turn = self._turns.get(turn_id)
        if turn is None or turn.phase not in phases:
            phase = "unknown" if turn is None else turn.phase.value
            allowed = " or ".join(phases)
            raise self._illegal(f"{event} in phase {phase}; it may follow {allowed}", turn_id)
        return turn

    def _illegal(self, what: str, turn_id: str) -> IllegalTransition:
        return IllegalTransition("\n  ".join([what, *self.story(turn_id)]))
