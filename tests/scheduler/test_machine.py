"""The scheduler against a model of dispatcher, broker and engine that does everything it is allowed to.

The model carries each command out, but when it likes and in any order: claims are won or lost, segments
are picked up late or never, a turn told to pause may end first, streams break by themselves, operators
hold and release, clients go away, saves and restores fail, the engine re-evaluates what it should have
kept, or dies with commands in flight. After every single event the
commands are checked against what the model knows to be true, and the scheduler's view against the rules
of `docs/architecture.md`. At the end everything is let finish, and what was accepted has to have ended
exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.scheduler import (
    Abort,
    CancelRequested,
    Claim,
    Claimed,
    ClaimLost,
    Command,
    Discard,
    Ended,
    EngineLost,
    EngineReady,
    Erase,
    Erased,
    Event,
    Forget,
    HoldRequested,
    MarkDropped,
    MarkSwapped,
    Pause,
    Paused,
    Policy,
    Prefilled,
    Progressed,
    Recovered,
    Refuse,
    ReleaseRequested,
    Restored,
    RestoreFailed,
    Resume,
    Save,
    Saved,
    SaveFailed,
    Scheduler,
    SchedulerView,
    Start,
    Started,
    Stepped,
    SwapPolicy,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.turns import IllegalTransition, Tier

PRIORITIES = (0, 20, 50, 100)
TOP = PRIORITIES[-1]
WANTING = ("waiting", "ready")
PICK = st.integers(0, 63)
TOKENS = st.integers(1, 30)
WORK = ["a turn arrives"] * 5 + ["a command ends"] * 8 + ["a turn decodes"] * 3 + ["a turn ends"] * 2
TROUBLE = [
    "time passes",
    "cancel",
    "hold",
    "release",
    "withdrawn",
    "claim lost",
    "stream breaks",
    "recovered",
    "engine lost or ready",
    "impossible news",
    "measured",
]
SWAP_BUDGETS = (None, None, 1_200, 3_500, 9_000, 100_000)
ARRIVALS = (0, 0, 0, 20, 20, 50, 50, TOP)
SPANS_S = (1.0, 61.0, 200.0)
T = TypeVar("T")


@dataclass
class Segment:
    """A turn on the engine. `told`: to pause or to abort. `lost`: the engine died under it.
    `gives_way`: it pauses for the prompt of a turn that has its place already.

    `cached`: tokens of its prompt that are in the slot before it begins. `source`: a file that has to be
    restored before that.
    """

    slot: int
    cached: int
    source: str | None
    picked_up: bool = False
    told: str = ""
    lost: bool = False
    gives_way: bool = False


@dataclass
class ModelTurn:
    """What the service knows of a turn. `departures` and `tops` are counted while it is placed."""

    id: str
    agent: str
    priority: int
    seq: int
    reserve: int
    kv: int
    where: str
    ran: bool = False
    cancelled: bool = False
    held: bool = False
    prefix: tuple[int, ...] = ()
    limit: int = 0
    segment: Segment | None = None
    ended: int = 0
    departures: int = 0
    tops: int = 0


@dataclass
class File:
    """A saved file: whose resume needs it (None: an idle cache), how much it holds, and of which slot."""

    turn: str | None
    kv: int
    slot: int
    written: bool = False
    wanted: bool = True


@dataclass
class Engine:
    """The truth about the KV: how much each slot holds, and which paused turn's it is; and the files.

    `hybrid`: whatever it is given back, it evaluates everything again.
    """

    kv: list[int]
    hybrid: bool
    paused: dict[int, str] = field(default_factory=dict)
    erasing: set[int] = field(default_factory=set)
    files: dict[str, File] = field(default_factory=dict)
    ready: bool = False

    def saving(self) -> dict[int, str]:
        """Slots that are being saved, and to which file; a lost engine saves nothing any more."""
        return {file.slot: key for key, file in self.files.items() if not file.written and file.wanted}


class SchedulerMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, ModelTurn] = {}
        self.log: list[tuple[float, Event, list[Command]]] = []
        self.now = 0.0
        self.before: dict[str, str] = {}
        self.sound = False

    @initialize(
        decode_slots=st.integers(1, 3),
        spare=st.integers(0, 2),
        budget=st.sampled_from([None, None, 60, 100, 150]),
        preemption=st.sampled_from([True, True, True, False]),
        min_run_s=st.sampled_from([0.0, 5.0]),
        max_preemptions=st.sampled_from([1, 50]),
        aging_s=st.sampled_from([0.0, 60.0]),
        swap=st.sampled_from(SWAP_BUDGETS),
        hybrid=st.sampled_from([False, False, False, True]),
        adjacent=st.booleans(),
        long_prefill=st.sampled_from([512, 8]),
        crowd=st.lists(st.tuples(st.sampled_from(PRIORITIES[:-1]), TOKENS, TOKENS), min_size=2, max_size=4),
        ready=st.sampled_from([True, True, True, False]),
    )
    def begin(
        self,
        decode_slots: int,
        spare: int,
        budget: int | None,
        preemption: bool,
        min_run_s: float,
        max_preemptions: int,
        aging_s: float,
        swap: int | None,
        hybrid: bool,
        adjacent: bool,
        long_prefill: int,
        crowd: list[tuple[int, int, int]],
        ready: bool,
    ) -> None:
        self.policy = Policy(
            decode_slots,
            decode_slots + spare,
            kv_budget_tokens=budget,
            adjacent=adjacent,
            min_shared_tokens=4,
            long_prefill_tokens=long_prefill,
            preemption=preemption,
            min_run_s=min_run_s,
            max_preemptions=max_preemptions,
            aging_s=aging_s,
            priorities=PRIORITIES,
            swap=SwapPolicy(swap, token_bytes=10, min_tokens=2) if swap is not None else None,
        )
        self.scheduler = Scheduler(self.policy)
        self.engine = Engine([0] * self.policy.engine_slots, hybrid)
        if ready:
            self.engine_ready()
        for priority, prompt, limit in crowd:
            self.arrive(priority, "abc"[prompt % 3], prompt, limit)
            while self.in_flight():
                self.in_flight()[0](True)
        self.sound = True

    # What may happen -------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(WORK + TROUBLE),
        pick=PICK,
        priority=st.sampled_from(ARRIVALS),
        prompt=TOKENS,
        limit=TOKENS,
        seconds=st.sampled_from(SPANS_S),
        odd=st.booleans(),
    )
    def step(
        self, what: str, pick: int, priority: int, prompt: int, limit: int, seconds: float, odd: bool
    ) -> None:
        """One rule for all: of several, Hypothesis would leave most runs without some."""
        match what:
            case "a turn arrives":
                self.arrive(priority, "abc"[pick % 3], prompt, limit)
            case "a command ends" if self.in_flight():
                self.pick(self.in_flight(), pick)(odd or pick % 3 == 0)
            case "a turn decodes" if running := self.segments(picked_up=True, lost=False):
                turn = self.pick(running, pick)
                turn.kv = min(turn.kv + prompt, turn.reserve)
                self.engine.kv[self.segment(turn).slot] = turn.kv
                self.tell(Progressed(turn.id, turn.kv))
            case "a turn ends" if running := self.segments(picked_up=True, lost=False):
                self.ends(self.pick(running, pick), odd)
            case "time passes":
                self.now += seconds
                self.tell(Tick())
            case "cancel" if self.alive():
                self.cancel(self.pick(self.alive(), pick))
            case "hold" if self.alive():
                turn = self.pick(self.alive(), pick)
                turn.held = turn.where != "queue" and not turn.cancelled
                self.tell(HoldRequested(turn.id))
            case "release" if held := [turn for turn in self.alive() if turn.held]:
                self.release(self.pick(held, pick))
            case "withdrawn" if self.among("waiting"):
                self.withdraw(self.pick(self.among("waiting"), pick), back=odd)
            case "claim lost" if self.among("claiming"):
                turn = self.pick(self.among("claiming"), pick)
                self.gone(turn)
                self.tell(ClaimLost(turn.id))
            case "stream breaks" if self.segments():
                self.leaves(self.pick(self.segments(), pick), keep=odd)
            case "recovered":
                turn = self.accept(priority, "a", prompt, limit, "owned")
                turn.ran = True
                self.tell(Recovered(turn.id, turn.agent, turn.priority, turn.seq, turn.reserve))
            case "engine lost or ready":
                if not self.engine.ready:
                    self.engine_ready()
                elif odd:
                    self.engine_lost()
            case "impossible news":
                turns = [turn.id for turn in self.turns.values() if self.before.get(turn.id) != "claiming"]
                turn_id = self.pick(["stranger", *turns], pick)
                before = self.scheduler.view()
                with pytest.raises(IllegalTransition):
                    self.scheduler.handle(Claimed(turn_id) if odd else ClaimLost(turn_id), self.now)
                assert self.scheduler.view() == before
            case "measured":
                self.tell(Prefilled(40 + prompt, seconds) if odd else Stepped(seconds / 1000))
            case _:
                pass  # nobody that it could happen to

    # How the model does it -------------------------------------------------------------------------

    def in_flight(self) -> list[Callable[[bool], None]]:
        """The ends of the commands in flight; each is told whether KV that it leaves is of worth."""
        return [
            *(partial(self.claim_won, turn) for turn in self.among("claiming")),
            *(partial(self.saved, key) for key, file in self.engine.files.items() if not file.written),
            *(partial(self.picked_up, turn) for turn in self.segments(picked_up=False, lost=False)),
            *(partial(self.leaves, turn) for turn in self.stopping()),
            *(partial(self.erased, slot) for slot in sorted(self.engine.erasing)),
        ]

    def arrive(self, priority: int, agent: str, prompt: int, limit: int) -> None:
        turn = self.accept(priority, agent, prompt, limit, "queue")
        self.tell(TurnQueued(turn.id, turn.agent, turn.priority, turn.seq, turn.reserve))

    def claim_won(self, turn: ModelTurn, _keep: bool) -> None:
        turn.where = "owned"
        # Half of the prompts were counted only roughly, so that more was reserved than is needed.
        turn.limit = max(1, (turn.reserve - turn.kv) // 2) if turn.seq % 20 else 0
        self.tell(Claimed(turn.id, turn.prefix, turn.limit))

    def picked_up(self, turn: ModelTurn, keep: bool) -> None:
        segment = self.segment(turn)
        if segment.source is not None:
            key, segment.source = segment.source, None
            if keep:
                segment.cached = self.engine.kv[segment.slot] = self.engine.files[key].kv
                self.tell(Restored(turn.id, segment.cached, 0.001 * segment.cached))
            else:
                segment.cached = self.engine.kv[segment.slot] = 0
                self.tell(RestoreFailed(turn.id))
            return
        segment.picked_up = True
        self.needs_no_file(turn)
        self.engine.kv[segment.slot] = turn.kv
        if turn.limit:
            turn.reserve, turn.limit = min(turn.reserve, turn.kv + turn.limit), 0
        cached = 0 if self.engine.hybrid else min(segment.cached, turn.kv)
        self.tell(Started(turn.id, turn.kv, cached))

    def saved(self, key: str, keep: bool) -> None:
        file = self.engine.files[key]
        if keep and file.wanted:
            file.written = True
        else:
            del self.engine.files[key]
        if keep:
            if not file.wanted:  # on the disk all the same
                self.engine.files[key] = file
                file.written = True
            self.tell(Saved(file.slot, key, file.kv, 500 + 10 * file.kv, 0.002 * file.kv))
            assert file.wanted or key not in self.engine.files, "nobody removes the file"
        else:
            self.tell(SaveFailed(file.slot, key))

    def erased(self, slot: int, _keep: bool) -> None:
        self.engine.erasing.discard(slot)
        self.engine.kv[slot] = 0
        self.tell(Erased(slot))

    def ends(self, turn: ModelTurn, keep: bool) -> None:
        """A turn ends by itself; the cells that it used stay in the engine."""
        keep = keep and not self.segment(turn).lost
        turn.segment = None
        self.needs_no_file(turn)
        self.gone(turn)
        self.departed(Ended(turn.id, turn.kv if keep else 0, keep))

    def leaves(self, turn: ModelTurn, keep: bool) -> None:
        """A turn leaves the batch before its end; one that was not picked up left its slot as it was."""
        segment = self.segment(turn)
        turn.segment = None
        keep = keep and not segment.lost and (segment.picked_up or segment.cached == turn.kv)
        if keep:
            self.engine.paused[segment.slot] = turn.id
        self.departed(Paused(turn.id, turn.kv if keep else 0, keep))

    def departed(self, event: Paused | Ended) -> None:
        for other in self.among("placed"):
            other.departures += 1
        self.tell(event)

    def cancel(self, turn: ModelTurn) -> None:
        turn.cancelled = True
        if turn.where == "queue":
            self.gone(turn)
        self.tell(CancelRequested(turn.id))

    def release(self, turn: ModelTurn) -> None:
        turn.held = False
        self.tell(ReleaseRequested(turn.id))

    def withdraw(self, turn: ModelTurn, *, back: bool) -> None:
        """Another backend claims the turn, and gives it back or not."""
        self.gone(turn)
        self.tell(Withdrawn(turn.id))
        if back:
            turn.where = "queue"
            turn.ended -= 1
            self.tell(TurnQueued(turn.id, turn.agent, turn.priority, turn.seq, turn.reserve))

    def engine_lost(self) -> None:
        engine = self.engine
        engine.ready = False
        engine.kv = [0] * len(engine.kv)
        for turn in self.segments():
            self.segment(turn).lost = True
        for file in engine.files.values():
            file.wanted = file.wanted and file.written
        self.tell(EngineLost())
        assert not engine.paused, "a paused turn is still believed to have KV in a lost engine"

    def engine_ready(self) -> None:
        self.engine.ready = True
        self.engine.erasing.clear()
        self.tell(EngineReady())

    # The model -------------------------------------------------------------------------------------

    def accept(self, priority: int, agent: str, prompt: int, limit: int, where: str) -> ModelTurn:
        number = len(self.turns) + 1
        reserve = prompt + limit
        if where == "owned" and self.policy.kv_budget_tokens is not None:
            reserve = min(reserve, self.policy.kv_budget_tokens)
        # Now and then the news of a turn comes after that of later ones.
        seq = 10 * number - (25 if limit % 5 == 0 else 0)
        turn = ModelTurn(f"t{number}", agent, priority, seq, reserve, prompt, where)
        # Agents share their first block, and go on from their own last turn.
        earlier = sum(other.agent == agent for other in self.turns.values())
        turn.prefix = (7, *(ord(agent) * 100 + at for at in range(earlier + 1)))
        self.turns[turn.id] = turn
        return turn

    @staticmethod
    def gone(turn: ModelTurn) -> None:
        turn.where = "gone"
        turn.ended += 1

    @staticmethod
    def pick(choices: Sequence[T], pick: int) -> T:
        return choices[pick % len(choices)]

    @staticmethod
    def segment(turn: ModelTurn) -> Segment:
        assert turn.segment is not None
        return turn.segment

    def among(self, *phases: str) -> list[ModelTurn]:
        """Turns in one of these phases, by the scheduler's view after the last event."""
        return [turn for turn in self.turns.values() if self.before.get(turn.id) in phases]

    def alive(self) -> list[ModelTurn]:
        return [turn for turn in self.turns.values() if turn.where != "gone"]

    def segments(self, *, picked_up: bool | None = None, lost: bool | None = None) -> list[ModelTurn]:
        return [
            turn
            for turn in self.turns.values()
            if (segment := turn.segment) is not None
            and picked_up in (None, segment.picked_up)
            and lost in (None, segment.lost)
        ]

    def stopping(self) -> list[ModelTurn]:
        return [turn for turn in self.segments() if self.segment(turn).told or self.segment(turn).lost]

    def tell(self, event: Event) -> None:
        """Hand one event over, carry the commands out as far as the model's books go, check all."""
        self.sound = False
        commands = self.scheduler.handle(event, self.now)
        self.log.append((self.now, event, commands))
        view = self.scheduler.view()
        phases = {turn.id: turn.phase for turn in view.owned}
        for turn in self.turns.values():
            if turn.where == "queue" and turn.id not in phases:
                phases[turn.id] = "waiting"
        assert len(set(commands)) == len(commands), "the same thing twice"
        started = set()
        for command in commands:
            match command:
                case Claim(turn_id):
                    turn = self.turns[turn_id]
                    assert self.engine.ready
                    assert turn.where == "queue" and not turn.cancelled
                    turn.where = "claiming"
                case Refuse(turn_id, need, budget):
                    assert isinstance(event, Tick) and self.turns[turn_id].where == "queue"
                    assert budget == self.policy.kv_budget_tokens
                    assert budget < need == self.turns[turn_id].reserve
                case Start(turn_id, slot, source):
                    assert not self.turns[turn_id].ran
                    started.add(turn_id)
                    if source is not None:
                        assert self.engine.files[source].written
                    self.begins(turn_id, slot, 0, source)
                case Resume(turn_id, slot, tier, source):
                    turn = self.turns[turn_id]
                    assert turn.ran
                    started.add(turn_id)
                    resident = tier is Tier.RESIDENT
                    assert (self.engine.paused.get(slot) == turn_id) == resident
                    assert (source is not None) == (tier is Tier.SWAPPED)
                    if source is not None:
                        file = self.engine.files[source]
                        assert (file.turn, file.kv, file.written) == (turn_id, turn.kv, True), "another's KV"
                    if resident:
                        del self.engine.paused[slot]
                        if isinstance(event, Paused) and event.turn == turn_id:
                            # Its stream broke and it goes straight on: nobody has left.
                            for other in self.among("placed"):
                                other.departures -= 1
                        self.needs_no_file(turn)
                    self.begins(turn_id, slot, turn.kv if resident else 0, source)
                case Pause(turn_id, by):
                    self.paused(event, turn_id, by, phases, started)
                case Abort(turn_id):
                    assert event == CancelRequested(turn_id)
                    segment = self.segment(self.turns[turn_id])
                    assert not segment.told
                    segment.told = "abort"
                case Discard(turn_id):
                    turn = self.turns[turn_id]
                    assert turn.cancelled and turn.segment is None and turn.where == "owned"
                    self.gone(turn)
                    self.forget_kv(turn_id)
                    for file in self.files_of(turn_id):
                        file.turn = None
                case MarkDropped(turn_id):
                    assert self.turns[turn_id].segment is None
                    assert turn_id in self.engine.paused.values()
                    assert not self.files_of(turn_id)
                    self.forget_kv(turn_id)
                case MarkSwapped(turn_id, key):
                    turn, file = self.turns[turn_id], self.engine.files[key]
                    assert turn.segment is None and turn_id in self.engine.paused.values()
                    assert (file.turn, file.kv, file.written) == (turn_id, turn.kv, True)
                    self.forget_kv(turn_id)
                case Save(slot, key, of):
                    assert self.engine.ready and self.policy.swap is not None
                    assert slot not in self.used_slots() and slot not in self.engine.erasing
                    assert slot not in self.engine.saving() and key not in self.engine.files
                    assert self.engine.paused.get(slot) == of
                    self.engine.files[key] = File(of, self.engine.kv[slot], slot)
                case Forget(key):
                    file = self.engine.files.pop(key)
                    assert file.written, "the file is still being written"
                    assert not any(self.segment(turn).source == key for turn in self.segments()), "in use"
                    owner = self.turns.get(file.turn or "")
                    assert (
                        owner is None
                        or not file.wanted
                        or owner.where == "gone"
                        or owner.segment
                        or owner.kv == 0
                        or (owner.id in self.engine.paused.values())
                    ), "a paused turn's only KV is removed"
                case Erase(slot):
                    may = self.policy.kv_budget_tokens is not None or self.policy.swap is not None
                    assert may or self.engine.hybrid
                    assert slot not in self.used_slots() and slot not in self.engine.erasing
                    assert slot not in self.engine.saving(), "erased while it is being saved"
                    assert slot not in self.engine.paused, "erased under a paused turn that was not told"
                    self.engine.erasing.add(slot)
        assert not started & {command.turn for command in commands if isinstance(command, Pause)}
        for turn in self.turns.values():
            if phases.get(turn.id) == "placed" and self.may_wait(turn):
                turn.departures = turn.tops = 0
        self.check_order(phases, started)
        self.before = phases
        self.check(view, phases)
        self.sound = True

    def begins(self, turn_id: str, slot: int, cached: int, source: str | None) -> None:
        turn = self.turns[turn_id]
        assert self.engine.ready
        assert turn.where == "owned" and not turn.cancelled and not turn.held and turn.segment is None
        assert slot not in self.used_slots(), "the occupant has not left"
        assert slot not in self.engine.erasing, "the slot is being erased"
        assert slot not in self.engine.paused, "a paused turn's KV is overwritten and it was not told"
        assert slot not in self.engine.saving(), "the slot is being saved"
        turn.ran = True
        turn.segment = Segment(slot, cached, source)
        if turn.priority == TOP:
            if self.policy.kv_budget_tokens is None and self.policy.swap is None:
                assert turn.departures - turn.tops <= 1, "a foreground turn waited for more than one pause"
            for other in self.among("placed"):
                other.tops += 1

    def paused(
        self, event: Event, turn_id: str, by: str | None, phases: dict[str, str], started: set[str]
    ) -> None:
        segment = self.segment(self.turns[turn_id])
        assert not segment.told
        segment.told = "pause"
        if by is None:
            assert event == HoldRequested(turn_id)
        elif by in started:
            turn, other = self.turns[turn_id], self.turns[by]
            assert self.policy.preemption
            assert segment.slot < self.segment(other).slot
            assert turn.priority < other.priority or (
                turn.priority == other.priority and turn.agent == other.agent
            )
            segment.gives_way = True
        else:
            assert self.policy.preemption
            assert self.turns[turn_id].priority < self.turns[by].priority
            assert self.before.get(by) not in ("placed", "running") or (
                isinstance(event, Paused) and event.turn == by
            )
            assert phases[by] in ("placed", "running"), "paused for a turn that was not placed"

    def may_wait(self, turn: ModelTurn) -> bool:
        """Whether a placed turn may wait although it has what it needs.

        For a prompt that goes first, or for the KV that a cancelled turn leaves in a moment.
        """
        others = [other for other in self.segments(lost=False) if not other.held]
        goes_first = any(
            other.priority > turn.priority or (other.priority == turn.priority and other.agent == turn.agent)
            for other in others
            if not self.segment(other).told
        )
        kept = any(other.cancelled for other in self.segments(picked_up=True))
        return kept or (goes_first and self.policy.preemption and self.policy.long_prefill_tokens < 512)

    def forget_kv(self, turn_id: str) -> None:
        for slot, paused in list(self.engine.paused.items()):
            if paused == turn_id:
                del self.engine.paused[slot]

    def files_of(self, turn_id: str) -> list[File]:
        return [file for file in self.engine.files.values() if file.turn == turn_id and file.wanted]

    def needs_no_file(self, turn: ModelTurn) -> None:
        """Its file is forgotten, or left to another turn that is about to begin with it."""
        for file in self.files_of(turn.id):
            file.turn = None

    def used_slots(self) -> list[int]:
        return [self.segment(turn).slot for turn in self.segments()]

    # What has to be true ---------------------------------------------------------------------------

    def check_order(self, phases: dict[str, str], started: Iterable[str]) -> None:
        """First come first served within a class; the highest class is seated first."""
        placed = [
            turn
            for turn in self.turns.values()
            if phases.get(turn.id) in ("placed", "running")
            and self.before.get(turn.id) not in ("placed", "running")
        ]
        for turn in placed:
            turn.departures = turn.tops = 0
            for other in self.turns.values():
                if other.priority == turn.priority and other.seq < turn.seq and self.fits_at_all(other):
                    if self.policy.aging_s and self.before.get(other.id) == "placed":
                        continue  # it stepped back for a newcomer, before which the aged turn was placed
                    assert phases.get(other.id) not in WANTING, f"{turn.id} overtook {other.id}"
        if self.policy.kv_budget_tokens is None:
            waits = [
                self.turns[turn_id].priority
                for turn_id, phase in phases.items()
                if phase == "placed" and not self.may_wait(self.turns[turn_id])
            ]
            for turn_id in started:
                segment = self.segment(self.turns[turn_id])
                if waits and not segment.cached and self.policy.swap is None:
                    assert max(waits) <= self.turns[turn_id].priority, "a lesser turn was seated first"

    def fits_at_all(self, turn: ModelTurn) -> bool:
        budget = self.policy.kv_budget_tokens
        return budget is None or turn.reserve <= budget

    def check(self, view: SchedulerView, phases: dict[str, str]) -> None:
        policy, engine = self.policy, self.engine
        # No turn lost, none invented.
        known = {turn.id for turn in self.turns.values() if turn.where in ("claiming", "owned")}
        assert {turn.id for turn in view.owned} == known
        assert view.waiting == sum(turn.where == "queue" for turn in self.turns.values())
        # Everybody is where the model says.
        for shown in view.owned:
            turn = self.turns[shown.id]
            assert (turn.where == "claiming") == (shown.phase == "claiming")
            assert (turn.segment is not None) == (shown.phase in ("running", "pausing"))
            if turn.segment is not None:
                assert shown.slot == turn.segment.slot and shown.tier is None
                assert (shown.phase == "pausing") == (turn.segment.told == "pause")
            elif turn.ran:
                in_slot = [slot for slot, paused in engine.paused.items() if paused == turn.id]
                assert in_slot == ([] if shown.slot is None else [shown.slot])
                saved = any(file.written for file in self.files_of(turn.id))
                below = Tier.SWAPPED if saved else Tier.DROPPED
                assert shown.tier is (Tier.RESIDENT if in_slot else below)
            if shown.phase == "held":
                assert turn.held
            if shown.phase in ("ready", "placed"):
                assert not turn.held and not turn.cancelled
        # No engine slot and no decode slot is given twice.
        used = self.used_slots()
        assert len(used) == len(set(used))
        assert {slot.id for slot in view.slots if slot.state == "busy"} == set(used)
        decoding = [turn for turn in view.owned if turn.phase in ("running", "placed")]
        assert len(decoding) == view.decoding <= policy.decode_slots
        # The KV budget holds on paper and in the engine.
        if policy.kv_budget_tokens is not None:
            assert view.kv_tokens_charged <= policy.kv_budget_tokens
            assert sum(engine.kv) <= policy.kv_budget_tokens
        if policy.swap is not None:
            assert view.swap.used_bytes <= policy.swap.budget_bytes
            assert view.swap.files == sum(file.wanted for file in engine.files.values())
        else:
            assert not engine.files
        if engine.ready:
            self.check_nobody_waits_in_vain(phases)

    def check_nobody_waits_in_vain(self, phases: dict[str, str]) -> None:
        policy = self.policy
        decoding = [
            self.turns[turn_id] for turn_id, phase in phases.items() if phase in ("running", "placed")
        ]
        claims = [turn for turn in self.among("claiming") if not turn.cancelled and not turn.held]
        free = policy.decode_slots - len(decoding)
        for priority in PRIORITIES:
            wanting = [
                turn
                for turn in self.turns.values()
                if turn.priority == priority and phases.get(turn.id) in WANTING and self.fits_at_all(turn)
            ]
            if not wanting or (policy.aging_s and priority != TOP):
                continue
            if any(
                turn.priority > priority and not turn.held and not turn.cancelled
                for turn in self.among("pausing")
            ):
                continue  # it wants its place, and with it its engine slot, back as soon as it is paused
            below = [
                turn
                for turn in decoding
                if turn.priority < priority
                and (phases[turn.id] == "placed" or (policy.preemption and not self.segment(turn).told))
            ]
            ahead = [turn for turn in claims if turn.priority >= priority]
            kept = [
                turn
                for turn in self.segments()
                if self.segment(turn).gives_way and turn.priority >= priority
                if not turn.cancelled and not turn.held
            ]
            if free + len(below) <= len(ahead) + len(kept):
                continue
            assert policy.kv_budget_tokens is not None, f"{wanting} could have been claimed or placed"
            if priority == TOP:
                # Only the memory of turns that need not yield may keep the foreground waiting.
                head = min(wanting, key=lambda turn: turn.seq)
                staying = [turn for turn in decoding if turn not in below]
                if any(turn.segment and not turn.segment.picked_up for turn in staying):
                    continue  # its slot may still be charged with what it held before
                fixed = sum(turn.reserve for turn in staying)
                coming = sum(turn.reserve for turn in ahead)
                assert fixed + coming + head.reserve > policy.kv_budget_tokens, f"{head} would have fitted"

    @invariant()
    def placed_turns_wait_for_something(self) -> None:
        """Under split KV a placed turn waits only for slots that are busy, erased or saved."""
        if not self.log or self.policy.kv_budget_tokens is not None:
            return
        view = self.scheduler.view()
        for turn in view.owned:
            if turn.phase == "placed" and turn.priority == TOP and not self.may_wait(self.turns[turn.id]):
                saves = any(slot.saving for slot in view.slots)
                assert saves or all(slot.state in ("busy", "erasing") for slot in view.slots)

    # The end ---------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.sound:  # a check has failed already
            return
        self.drain()
        for turn in self.turns.values():
            assert turn.ended == 1 or not self.fits_at_all(turn), f"{turn} did not end exactly once"
        left = [file.turn for file in self.engine.files.values() if file.turn is not None]
        assert all(self.turns[turn].where != "gone" for turn in left), "files of turns that are over"
        self.replay([(now, event) for now, event, _ in self.log], [list(cmds) for *_, cmds in self.log])

    def drain(self) -> None:
        """Everything in flight is done, every hold is released, every turn that runs finishes."""
        if not self.engine.ready:
            self.engine_ready()
        for turn in self.alive():
            if turn.held:
                self.release(turn)
        for _ in range(20 * (len(self.turns) + 1)):
            if not any(self.fits_at_all(turn) for turn in self.alive()):
                return
            length = len(self.log)
            if self.in_flight():
                self.in_flight()[0](True)
            elif self.segments():
                self.ends(self.segments()[0], keep=True)
            else:  # a restore waits for its time
                self.now += 5.0
                self.tell(Tick())
            assert len(self.log) > length, f"stuck: {self.before}, {self.scheduler.view()}"
        raise AssertionError("the scheduler does not come to rest")

    def replay(self, events: list[tuple[float, Event]], commands: list[list[Command]]) -> None:
        """The same events give the same commands; and so does the journal, which keeps less of them."""
        again = Scheduler(self.policy)
        assert [again.handle(event, now) for now, event in events] == commands
        assert again.view() == self.scheduler.view()
        journal = self.scheduler.journal
        if len(journal) < (journal.maxlen or 0):
            again = Scheduler(self.policy)
            for now, event, expected in journal:
                assert again.handle(event, now) == list(expected)


# A failure takes minutes to shrink.
TestSchedulerMachine = pytest.mark.timeout(600)(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, print_blob=True
)


@pytest.mark.parametrize("seed", range(100))
def test_long_walks(seed: int) -> None:
    """The same machine on longer, denser runs than Hypothesis makes; nothing shrinks them."""
    dice = random.Random(seed)
    machine = SchedulerMachine()
    machine.begin(
        decode_slots=dice.randint(1, 3),
        spare=dice.randint(0, 2),
        budget=dice.choice([None, None, 60, 100, 150]),
        preemption=dice.random() < 0.8,
        min_run_s=dice.choice([0.0, 5.0]),
        max_preemptions=dice.choice([1, 50]),
        aging_s=dice.choice([0.0, 60.0]),
        swap=dice.choice(SWAP_BUDGETS),
        hybrid=dice.random() < 0.2,
        adjacent=seed % 2 == 0,
        long_prefill=dice.choice([512, 8]),
        crowd=[(dice.choice(PRIORITIES[:-1]), dice.randint(1, 30), dice.randint(1, 30)) for _ in range(4)],
        ready=True,
    )
    for _ in range(150):
        machine.step(
            what=dice.choice(WORK + TROUBLE),
            pick=dice.randint(0, 63),
            priority=dice.choice(ARRIVALS),
            prompt=dice.randint(1, 30),
            limit=dice.randint(1, 30),
            seconds=dice.choice(SPANS_S),
            odd=dice.random() < 0.5,
        )
        machine.placed_turns_wait_for_something()
    machine.teardown()
