"""The scheduler against a model of dispatcher, broker and engine that does everything it is allowed to.

The model carries each command out, but when it likes and in any order: claims are won or lost, segments
are picked up late or never, a turn told to pause may end first, streams break by themselves, operators
hold and release, clients go away, the engine dies with commands in flight. After every single event the
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
    HoldRequested,
    MarkDropped,
    Pause,
    Paused,
    Policy,
    Progressed,
    Recovered,
    ReleaseRequested,
    Resume,
    Scheduler,
    SchedulerView,
    Start,
    Started,
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
]
ARRIVALS = (0, 0, 0, 20, 20, 50, 50, TOP)
SPANS_S = (1.0, 61.0, 200.0)
T = TypeVar("T")


@dataclass
class Segment:
    """A turn on the engine. `told`: to pause or to abort. `lost`: the engine died under it."""

    slot: int
    resident: bool
    picked_up: bool = False
    told: str = ""
    lost: bool = False


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
    segment: Segment | None = None
    ended: int = 0
    departures: int = 0
    tops: int = 0


@dataclass
class Engine:
    """The truth about the KV: how much each slot holds, and which paused turn's it is."""

    kv: list[int]
    paused: dict[int, str] = field(default_factory=dict)
    erasing: set[int] = field(default_factory=set)
    ready: bool = False


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
        crowd: list[tuple[int, int, int]],
        ready: bool,
    ) -> None:
        self.policy = Policy(
            decode_slots,
            decode_slots + spare,
            kv_budget_tokens=budget,
            preemption=preemption,
            min_run_s=min_run_s,
            max_preemptions=max_preemptions,
            aging_s=aging_s,
            priorities=PRIORITIES,
        )
        self.scheduler = Scheduler(self.policy)
        self.engine = Engine([0] * self.policy.engine_slots)
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
            case _:
                pass  # nobody that it could happen to

    # How the model does it -------------------------------------------------------------------------

    def in_flight(self) -> list[Callable[[bool], None]]:
        """The ends of the commands in flight; each is told whether KV that it leaves is of worth."""
        return [
            *(partial(self.claim_won, turn) for turn in self.among("claiming")),
            *(partial(self.picked_up, turn) for turn in self.segments(picked_up=False, lost=False)),
            *(partial(self.leaves, turn) for turn in self.stopping()),
            *(partial(self.erased, slot) for slot in sorted(self.engine.erasing)),
        ]

    def arrive(self, priority: int, agent: str, prompt: int, limit: int) -> None:
        turn = self.accept(priority, agent, prompt, limit, "queue")
        self.tell(TurnQueued(turn.id, turn.agent, turn.priority, turn.seq, turn.reserve))

    def claim_won(self, turn: ModelTurn, _keep: bool) -> None:
        turn.where = "owned"
        self.tell(Claimed(turn.id))

    def picked_up(self, turn: ModelTurn, _keep: bool) -> None:
        segment = self.segment(turn)
        segment.picked_up = True
        self.engine.kv[segment.slot] = turn.kv
        self.tell(Started(turn.id, turn.kv))

    def erased(self, slot: int, _keep: bool) -> None:
        self.engine.erasing.discard(slot)
        self.engine.kv[slot] = 0
        self.tell(Erased(slot))

    def ends(self, turn: ModelTurn, keep: bool) -> None:
        """A turn ends by itself; the cells that it used stay in the engine."""
        keep = keep and not self.segment(turn).lost
        turn.segment = None
        self.gone(turn)
        self.departed(Ended(turn.id, turn.kv if keep else 0, keep))

    def leaves(self, turn: ModelTurn, keep: bool) -> None:
        """A turn leaves the batch before its end; one that was not picked up left its slot as it was."""
        segment = self.segment(turn)
        turn.segment = None
        keep = keep and not segment.lost and (segment.picked_up or segment.resident)
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
                case Start(turn_id, slot):
                    assert not self.turns[turn_id].ran
                    started.add(turn_id)
                    self.begins(turn_id, slot, False)
                case Resume(turn_id, slot, resident):
                    assert self.turns[turn_id].ran
                    started.add(turn_id)
                    assert (self.engine.paused.get(slot) == turn_id) == resident
                    if resident:
                        del self.engine.paused[slot]
                        if isinstance(event, Paused) and event.turn == turn_id:
                            # Its stream broke and it goes straight on: nobody has left.
                            for other in self.among("placed"):
                                other.departures -= 1
                    self.begins(turn_id, slot, resident)
                case Pause(turn_id, by):
                    self.paused(event, turn_id, by, phases)
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
                case MarkDropped(turn_id):
                    assert self.turns[turn_id].segment is None
                    assert turn_id in self.engine.paused.values()
                    self.forget_kv(turn_id)
                case Erase(slot):
                    assert self.policy.kv_budget_tokens is not None
                    assert slot not in self.used_slots() and slot not in self.engine.erasing
                    assert slot not in self.engine.paused, "erased under a paused turn that was not told"
                    self.engine.erasing.add(slot)
        assert not started & {command.turn for command in commands if isinstance(command, Pause)}
        self.check_order(phases, started)
        self.before = phases
        self.check(view, phases)
        self.sound = True

    def begins(self, turn_id: str, slot: int, resident: bool) -> None:
        turn = self.turns[turn_id]
        assert self.engine.ready
        assert turn.where == "owned" and not turn.cancelled and not turn.held and turn.segment is None
        assert slot not in self.used_slots(), "the occupant has not left"
        assert slot not in self.engine.erasing, "the slot is being erased"
        assert slot not in self.engine.paused, "a paused turn's KV is overwritten and it was not told"
        turn.ran = True
        turn.segment = Segment(slot, resident)
        if turn.priority == TOP:
            if self.policy.kv_budget_tokens is None:
                assert turn.departures - turn.tops <= 1, "a foreground turn waited for more than one pause"
            for other in self.among("placed"):
                other.tops += 1

    def paused(self, event: Event, turn_id: str, by: str | None, phases: dict[str, str]) -> None:
        segment = self.segment(self.turns[turn_id])
        assert not segment.told
        segment.told = "pause"
        if by is None:
            assert event == HoldRequested(turn_id)
        else:
            assert self.policy.preemption
            assert self.turns[turn_id].priority < self.turns[by].priority
            assert self.before.get(by) not in ("placed", "running") or (
                isinstance(event, Paused) and event.turn == by
            )
            assert phases[by] in ("placed", "running"), "paused for a turn that was not placed"

    def forget_kv(self, turn_id: str) -> None:
        for slot, paused in list(self.engine.paused.items()):
            if paused == turn_id:
                del self.engine.paused[slot]

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
            waits = [self.turns[turn_id].priority for turn_id, phase in phases.items() if phase == "placed"]
            for turn_id in started:
                segment = self.segment(self.turns[turn_id])
                if waits and not segment.resident:
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
                assert shown.tier is (Tier.RESIDENT if in_slot else Tier.DROPPED)
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
            if free + len(below) <= len(ahead):
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
        """Under split KV a placed turn waits only while every engine slot is busy."""
        if not self.log or self.policy.kv_budget_tokens is not None:
            return
        view = self.scheduler.view()
        for turn in view.owned:
            if turn.phase == "placed" and turn.priority == TOP:
                assert all(slot.state == "busy" for slot in view.slots)

    # The end ---------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.sound:  # a check has failed already
            return
        self.drain()
        for turn in self.turns.values():
            assert turn.ended == 1 or not self.fits_at_all(turn), f"{turn} did not end exactly once"
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


@pytest.mark.parametrize("seed", range(60))
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
