"""Each decision of the scheduler as a whole list of commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

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
    Refuse,
    ReleaseRequested,
    Resume,
    Scheduler,
    Start,
    Started,
    Tick,
    TurnQueued,
    TurnView,
    Withdrawn,
)
from orchestrator.turns import IllegalTransition, Tier

BATCH, BACKGROUND, NORMAL, FOREGROUND = 0, 20, 50, 100


class Bench:
    """A scheduler with a clock that moves only when told to, and the usual ways to get a turn going."""

    def __init__(self, policy: Policy, *, ready: bool = True) -> None:
        self.scheduler = Scheduler(policy)
        self.now = 0.0
        self.seq = 0
        if ready:
            assert self.tell(EngineReady()) == []

    def tell(self, event: Event) -> list[Command]:
        """The commands that `event` leads to."""
        return self.scheduler.handle(event, self.now)

    def queue(self, turn: str, priority: int, *, kv: int = 100, agent: str | None = None) -> list[Command]:
        """A new turn, the last to arrive; its agent has the turn's name unless given."""
        self.seq += 1
        return self.tell(TurnQueued(turn, agent or turn, priority, self.seq, kv))

    def run(
        self, turn: str, priority: int, *, slot: int, used: int = 10, kv: int = 100, agent: str | None = None
    ) -> None:
        """A turn that goes straight into the free engine slot `slot` and has `used` tokens of KV."""
        assert self.queue(turn, priority, kv=kv, agent=agent) == [Claim(turn)]
        assert self.tell(Claimed(turn)) == [Start(turn, slot)]
        assert self.tell(Started(turn, used)) == []

    def turn(self, turn: str) -> TurnView:
        """How an owned turn stands."""
        return next(view for view in self.scheduler.view().owned if view.id == turn)

    def phases(self) -> dict[str, str]:
        """The phase of each owned turn."""
        return {view.id: view.phase for view in self.scheduler.view().owned}


def bench(
    decode_slots: int = 1,
    engine_slots: int | None = None,
    *,
    budget: int | None = None,
    preemption: bool = True,
    min_run_s: float = 0.0,
    max_preemptions: int = 50,
    aging_s: float = 0.0,
) -> Bench:
    """A bench with a ready engine, one spare engine slot unless given."""
    return Bench(
        Policy(
            decode_slots,
            decode_slots + 1 if engine_slots is None else engine_slots,
            kv_budget_tokens=budget,
            preemption=preemption,
            min_run_s=min_run_s,
            max_preemptions=max_preemptions,
            aging_s=aging_s,
        )
    )


# Order -------------------------------------------------------------------------------------------------


def test_first_come_first_served_within_a_class() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    for turn in ("b", "c", "d"):
        assert b.queue(turn, NORMAL) == []
    for ending, turn in (("a", "b"), ("b", "c"), ("c", "d")):
        assert b.tell(Ended(ending, 20, resident=False)) == [Claim(turn)]
        assert b.tell(Claimed(turn)) == [Start(turn, 0)]


def test_arrival_numbers_decide_not_the_order_of_the_news() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(TurnQueued("late", "late", NORMAL, 9, 100)) == []
    assert b.tell(TurnQueued("early", "early", NORMAL, 8, 100)) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("early")]


def test_a_higher_class_goes_first() -> None:
    b = bench(preemption=False)
    b.run("a", NORMAL, slot=0)
    for turn, priority in (("low", BATCH), ("mid", NORMAL), ("high", FOREGROUND)):
        assert b.queue(turn, priority) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("high")]
    assert b.tell(Claimed("high")) == [Start("high", 0)]
    assert b.tell(Ended("high", 0, resident=False)) == [Claim("mid")]


def test_a_preempted_turn_keeps_its_place_in_its_class() -> None:
    b = bench()
    b.run("first", BATCH, slot=0)
    assert b.queue("second", BATCH) == []
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("first", "fg"), Start("fg", 1)]
    assert b.tell(Paused("first", 12, resident=True)) == []
    assert b.tell(Ended("fg", 5, resident=True)) == [Resume("first", 0, Tier.RESIDENT)]


def test_news_of_a_known_turn_changes_nothing() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(TurnQueued("a", "a", FOREGROUND, 99, 100)) == []
    assert b.turn("a").priority == NORMAL
    assert b.tell(Withdrawn("a")) == []
    assert b.tell(Withdrawn("stranger")) == []
    assert b.phases() == {"a": "running"}


def test_a_turn_queued_anew_stands_only_where_it_was_queued_last() -> None:
    b = bench()
    b.run("a", FOREGROUND, slot=0)
    assert b.queue("x", FOREGROUND) == []
    assert b.tell(Withdrawn("x")) == []
    assert b.queue("y", NORMAL) == []
    assert b.queue("x", NORMAL) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("y")]


# Victims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newcomer", [BATCH, BACKGROUND, NORMAL])
def test_equal_or_higher_priority_is_never_evicted(newcomer: int) -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.queue("b", newcomer) == []
    assert b.tell(Tick()) == []


def test_without_preemption_nothing_is_evicted() -> None:
    b = bench(preemption=False)
    b.run("a", BATCH, slot=0)
    assert b.queue("fg", FOREGROUND) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("fg")]


def _lowest_priority(b: Bench) -> str:
    b.run("v0", BACKGROUND, slot=0, used=1)
    b.run("v1", BATCH, slot=1, used=90)
    b.run("v2", NORMAL, slot=2, used=1)
    return "v1"


def _not_preempted_too_often(b: Bench) -> str:
    b.run("v0", BATCH, slot=0, used=1)
    assert b.tell(HoldRequested("v0")) == [Pause("v0", None)]
    assert b.tell(Paused("v0", 1, resident=True)) == []
    assert b.tell(ReleaseRequested("v0")) == [Resume("v0", 0, Tier.RESIDENT)]
    b.run("v1", BATCH, slot=1, used=50)
    b.run("v2", BATCH, slot=2, used=60)
    return "v1"


def _had_its_minimum_run(b: Bench) -> str:
    b.run("v0", BATCH, slot=0, used=80)
    b.now = 9.0
    b.run("v1", BATCH, slot=1, used=1)
    b.run("v2", BATCH, slot=2, used=2)
    b.now = 10.0
    return "v0"


def _least_kv(b: Bench) -> str:
    b.run("v0", BATCH, slot=0, used=30)
    b.run("v1", BATCH, slot=1, used=20)
    b.run("v2", BATCH, slot=2, used=10)
    assert b.tell(Progressed("v2", 25)) == []
    return "v1"


def _last_started(b: Bench) -> str:
    for at, turn in enumerate(("v0", "v1", "v2")):
        b.now = float(at)
        b.run(turn, BATCH, slot=at)
    return "v2"


def _name(b: Bench) -> str:
    b.run("v2", BATCH, slot=0)
    b.run("v0", BATCH, slot=1)
    b.run("v1", BATCH, slot=2)
    return "v0"


@pytest.mark.parametrize(
    "scene",
    [_lowest_priority, _not_preempted_too_often, _had_its_minimum_run, _least_kv, _last_started, _name],
)
def test_victim(scene: Callable[[Bench], str]) -> None:
    b = bench(3, 4, min_run_s=5.0, max_preemptions=1)
    if scene is not _had_its_minimum_run:
        b.scheduler.policy = Policy(3, 4, max_preemptions=1, aging_s=0.0)
    victim = scene(b)
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause(victim, "fg"), Start("fg", 3)]


def test_neither_rule_of_mercy_keeps_a_foreground_turn_waiting() -> None:
    b = bench(min_run_s=1e6, max_preemptions=0)
    b.run("a", BATCH, slot=0)
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("a", "fg"), Start("fg", 1)]


def test_an_aborted_turn_is_no_victim() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    assert b.tell(CancelRequested("a")) == [Abort("a")]
    assert b.queue("fg", FOREGROUND) == []
    assert b.tell(Ended("a", 10, resident=True)) == [Claim("fg")]


# Places ------------------------------------------------------------------------------------------------


def test_foreground_starts_in_the_spare_slot_in_the_step_that_pauses_its_victim() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("a", "fg"), Start("fg", 1)]
    assert b.phases() == {"a": "pausing", "fg": "running"}
    assert b.scheduler.view().decoding == 1


def test_without_a_spare_slot_it_starts_upon_the_victims_pause() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("a", "fg")]
    assert b.phases() == {"a": "pausing", "fg": "placed"}
    assert b.tell(Paused("a", 12, resident=True)) == [MarkDropped("a"), Start("fg", 0)]
    assert b.turn("a").tier is Tier.DROPPED
    assert b.tell(Ended("fg", 7, resident=True)) == [Resume("a", 0, Tier.DROPPED)]


def test_a_victim_that_ends_by_itself_makes_room_too() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg")]
    assert b.tell(Ended("a", 12, resident=True)) == [Start("fg", 0)]


def test_a_resident_turn_resumes_in_its_own_slot() -> None:
    b = bench(2, 4)
    b.run("a", NORMAL, slot=0)
    b.run("b", BATCH, slot=1)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("b", "fg"), Start("fg", 2)]
    assert b.tell(Paused("b", 12, resident=True)) == []
    assert (b.turn("b").tier, b.turn("b").slot) == (Tier.RESIDENT, 1)
    assert b.tell(Ended("a", 5, resident=True)) == [Resume("b", 1, Tier.RESIDENT)]
    assert b.turn("b").tier is None


def test_a_turn_that_left_no_kv_resumes_anywhere() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg"), Start("fg", 1)]
    assert b.tell(Paused("a", 12, resident=False)) == []
    assert b.turn("a").tier is Tier.DROPPED
    assert b.tell(Ended("fg", 5, resident=True)) == [Resume("a", 0, Tier.DROPPED)]


def test_an_agents_own_idle_cache_is_preferred() -> None:
    b = bench(2, 3)
    b.run("a1", NORMAL, slot=0, agent="ann")
    b.run("b1", NORMAL, slot=1, agent="bob")
    assert b.tell(Ended("a1", 30, resident=True)) == []
    assert b.tell(Ended("b1", 30, resident=True)) == []
    b.run("b2", NORMAL, slot=1, agent="bob")
    b.run("a2", NORMAL, slot=0, agent="ann")


def test_idle_cache_of_the_lowest_priority_then_the_least_recent_goes_first() -> None:
    b = bench(3, 3)
    b.run("n", NORMAL, slot=0)
    b.run("x", BATCH, slot=1)
    b.run("y", BATCH, slot=2)
    for turn in ("n", "y", "x"):
        assert b.tell(Ended(turn, 30, resident=True)) == []
    b.run("1", NORMAL, slot=2)
    b.run("2", NORMAL, slot=1)
    b.run("3", NORMAL, slot=0)


def test_idle_cache_goes_before_paused_kv_and_that_of_the_lowest_priority_first() -> None:
    b = bench(2, 5)
    b.run("low", BATCH, slot=0)
    b.run("mid", BACKGROUND, slot=1)
    b.queue("f1", FOREGROUND)
    assert b.tell(Claimed("f1")) == [Pause("low", "f1"), Start("f1", 2)]
    b.queue("f2", FOREGROUND)
    assert b.tell(Claimed("f2")) == [Pause("mid", "f2"), Start("f2", 3)]
    assert b.tell(Paused("low", 10, resident=True)) == []
    assert b.tell(Paused("mid", 10, resident=True)) == []
    b.queue("f3", FOREGROUND)
    b.queue("f4", FOREGROUND)
    b.queue("f5", FOREGROUND)
    assert b.tell(HoldRequested("f1")) == [Pause("f1", None), Claim("f3")]
    assert b.tell(Claimed("f3")) == [Start("f3", 4)]
    assert b.tell(HoldRequested("f3")) == [Pause("f3", None), Claim("f4")]
    assert b.tell(Claimed("f4")) == [MarkDropped("low"), Start("f4", 0)]
    assert b.tell(Ended("f3", 9, resident=True)) == []
    assert b.tell(HoldRequested("f4")) == [Pause("f4", None), Claim("f5")]
    assert b.tell(Claimed("f5")) == [Start("f5", 4)]


def test_paused_kv_of_higher_priority_is_not_touched_unless_held() -> None:
    b = bench(1, 1)
    b.run("fg", FOREGROUND, slot=0)
    assert b.queue("n", NORMAL) == []
    assert b.tell(Paused("fg", 10, resident=True)) == [Resume("fg", 0, Tier.RESIDENT)]
    assert b.tell(HoldRequested("fg")) == [Pause("fg", None), Claim("n")]
    assert b.tell(Claimed("n")) == []
    assert b.tell(Paused("fg", 10, resident=True)) == [MarkDropped("fg"), Start("n", 0)]
    assert b.tell(ReleaseRequested("fg")) == [Pause("n", "fg")]
    assert b.tell(Paused("n", 10, resident=True)) == [MarkDropped("n"), Resume("fg", 0, Tier.DROPPED)]


def test_the_most_important_placed_turn_takes_the_first_slot_that_comes_free() -> None:
    b = bench(2, 2)
    b.run("x", BATCH, slot=0, used=10)
    b.run("y", BATCH, slot=1, used=20)
    b.queue("n", NORMAL)
    assert b.tell(Claimed("n")) == [Pause("x", "n")]
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("y", "fg")]
    assert b.tell(Paused("y", 20, resident=True)) == [MarkDropped("y"), Start("fg", 1)]
    assert b.tell(Paused("x", 10, resident=True)) == [MarkDropped("x"), Start("n", 0)]


def test_a_placed_turn_steps_back_for_a_more_important_one() -> None:
    b = bench(1, 1)
    b.run("x", BATCH, slot=0)
    b.queue("n", NORMAL)
    assert b.tell(Claimed("n")) == [Pause("x", "n")]
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == []
    assert b.phases() == {"x": "pausing", "n": "ready", "fg": "placed"}
    assert b.tell(Paused("x", 10, resident=True)) == [MarkDropped("x"), Start("fg", 0)]
    assert b.tell(Ended("fg", 0, resident=False)) == [Start("n", 0)]


# Claims ------------------------------------------------------------------------------------------------


def test_claims_never_exceed_the_free_decode_slots() -> None:
    b = bench(2, 4, preemption=False)
    assert b.queue("a", NORMAL) == [Claim("a")]
    assert b.queue("b", NORMAL) == [Claim("b")]
    assert b.queue("c", NORMAL) == []
    assert b.tell(Claimed("a")) == [Start("a", 0)]
    assert b.tell(ClaimLost("b")) == [Claim("c")]
    assert b.phases() == {"a": "running", "c": "claiming"}


def test_claims_never_exceed_the_possible_victims() -> None:
    b = bench(2, 4)
    b.run("low", BATCH, slot=0)
    b.run("mid", NORMAL, slot=1)
    assert b.queue("n1", NORMAL) == [Claim("n1")]
    assert b.queue("n2", NORMAL) == []
    assert b.queue("f1", FOREGROUND) == [Claim("f1")]
    assert b.queue("f2", FOREGROUND) == [Claim("f2")]
    assert b.queue("f3", FOREGROUND) == []


def test_a_claim_in_flight_keeps_its_decode_slot_from_those_behind_it() -> None:
    b = bench(1, 2, preemption=False)
    b.run("a", NORMAL, slot=0)
    assert b.queue("fg", FOREGROUND) == []
    assert b.tell(HoldRequested("a")) == [Pause("a", None), Claim("fg")]
    assert b.tell(Paused("a", 10, resident=True)) == []
    assert b.tell(ReleaseRequested("a")) == []
    assert b.tell(Claimed("fg")) == [Start("fg", 1)]
    assert b.tell(Ended("fg", 10, resident=True)) == [Resume("a", 0, Tier.RESIDENT)]


def test_a_claim_in_flight_does_not_hold_up_a_more_important_one() -> None:
    b = bench()
    assert b.queue("low", BATCH) == [Claim("low")]
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("low")) == []
    assert b.tell(Claimed("fg")) == [Start("fg", 0)]
    assert b.tell(Ended("fg", 0, resident=False)) == [Start("low", 0)]


def test_a_lost_claim_lets_go_of_what_was_kept_for_it() -> None:
    b = bench()
    assert b.queue("low", BATCH) == [Claim("low")]
    assert b.queue("fg", FOREGROUND) == [Claim("fg")]
    assert b.tell(Claimed("low")) == []
    assert b.tell(ClaimLost("fg")) == [Start("low", 0)]
    assert b.phases() == {"low": "running"}


# Cancel ------------------------------------------------------------------------------------------------


def test_cancel_waiting() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    b.queue("w", NORMAL)
    assert b.scheduler.view().waiting == 1
    assert b.tell(CancelRequested("w")) == []
    assert b.scheduler.view().waiting == 0
    assert b.tell(Ended("a", 0, resident=False)) == []


def test_withdrawn_waiting() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    b.queue("w", NORMAL)
    b.queue("x", NORMAL)
    assert b.tell(Withdrawn("w")) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("x")]


def test_cancel_claiming() -> None:
    b = bench()
    b.queue("a", NORMAL)
    assert b.tell(CancelRequested("a")) == []
    assert b.queue("b", NORMAL) == [Claim("b")]
    assert b.tell(Claimed("a")) == [Discard("a")]
    assert b.phases() == {"b": "claiming"}


def test_cancel_claiming_and_the_claim_is_lost() -> None:
    b = bench()
    b.queue("a", NORMAL)
    assert b.tell(CancelRequested("a")) == []
    assert b.tell(ClaimLost("a")) == []
    assert b.phases() == {}


def test_cancel_ready_leaves_its_kv_as_idle_cache() -> None:
    b = bench()
    b.run("a", BATCH, slot=0, agent="ann")
    b.queue("fg", FOREGROUND)
    b.tell(Claimed("fg"))
    b.tell(Paused("a", 12, resident=True))
    assert b.phases() == {"a": "ready", "fg": "running"}
    assert b.tell(CancelRequested("a")) == [Discard("a")]
    assert b.phases() == {"fg": "running"}
    assert b.tell(Ended("fg", 5, resident=True)) == []
    b.run("a2", BATCH, slot=0, agent="ann")


def test_cancel_held() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    assert b.tell(HoldRequested("a")) == [Pause("a", None)]
    assert b.tell(Paused("a", 12, resident=True)) == []
    assert b.phases() == {"a": "held"}
    assert b.tell(CancelRequested("a")) == [Discard("a")]
    assert b.phases() == {}


def test_cancel_placed_gives_its_decode_slot_back() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg")]
    assert b.tell(CancelRequested("fg")) == [Discard("fg")]
    assert b.tell(Paused("a", 12, resident=True)) == [Resume("a", 0, Tier.RESIDENT)]


def test_cancel_running() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(CancelRequested("a")) == [Abort("a")]
    assert b.tell(CancelRequested("a")) == []
    assert b.tell(HoldRequested("a")) == []
    assert b.tell(Ended("a", 12, resident=True)) == []
    assert b.phases() == {}


def test_cancel_running_that_comes_back_paused() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(CancelRequested("a")) == [Abort("a")]
    assert b.tell(Paused("a", 12, resident=True)) == [Discard("a")]


def test_cancel_pausing() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    b.tell(Claimed("fg"))
    assert b.tell(CancelRequested("a")) == []
    assert b.tell(Paused("a", 12, resident=True)) == [Discard("a")]
    assert b.phases() == {"fg": "running"}


def test_cancel_of_a_stranger_is_nothing() -> None:
    assert bench().tell(CancelRequested("stranger")) == []


# Hold and release --------------------------------------------------------------------------------------


def test_hold_and_release_of_a_running_turn() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    b.queue("b", NORMAL)
    assert b.tell(HoldRequested("a")) == [Pause("a", None), Claim("b")]
    assert b.tell(Claimed("b")) == [Start("b", 1)]
    assert b.tell(Paused("a", 12, resident=True)) == []
    assert b.tell(ReleaseRequested("a")) == []
    assert b.tell(Ended("b", 3, resident=True)) == [Resume("a", 0, Tier.RESIDENT)]


def test_release_before_the_pause_is_done() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(HoldRequested("a")) == [Pause("a", None)]
    assert b.tell(ReleaseRequested("a")) == []
    assert b.tell(Paused("a", 12, resident=True)) == [Resume("a", 0, Tier.RESIDENT)]


def test_hold_while_claiming() -> None:
    b = bench()
    b.queue("a", NORMAL)
    assert b.tell(HoldRequested("a")) == []
    assert b.tell(Claimed("a")) == []
    assert b.phases() == {"a": "held"}
    assert b.tell(ReleaseRequested("a")) == [Start("a", 0)]


def test_hold_of_a_ready_and_of_a_placed_turn() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg")]
    assert b.tell(HoldRequested("fg")) == []
    assert b.phases() == {"a": "pausing", "fg": "held"}
    assert b.tell(HoldRequested("a")) == []
    assert b.tell(Paused("a", 12, resident=True)) == []
    assert b.tell(ReleaseRequested("a")) == [Resume("a", 0, Tier.RESIDENT)]
    assert b.tell(ReleaseRequested("fg")) == [Pause("a", "fg")]


def test_hold_or_release_without_effect() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    b.queue("w", NORMAL)
    for event in (
        HoldRequested("w"),
        ReleaseRequested("w"),
        ReleaseRequested("a"),
        HoldRequested("stranger"),
        ReleaseRequested("stranger"),
    ):
        assert b.tell(event) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("w")]


# The engine's comings and goings -----------------------------------------------------------------------


def test_nothing_is_claimed_before_the_engine_is_ready() -> None:
    b = Bench(Policy(1, 2), ready=False)
    assert b.queue("a", NORMAL) == []
    assert b.queue("b", FOREGROUND) == []
    assert b.tell(EngineReady()) == [Claim("b")]


def test_engine_lost_and_ready_again() -> None:
    b = bench(2, 3)
    b.run("a", BATCH, slot=0)
    b.run("b", BATCH, slot=1, used=20)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg"), Start("fg", 2)]
    assert b.tell(Paused("a", 12, resident=True)) == []
    b.queue("g", NORMAL)
    assert b.phases()["g"] == "claiming"
    assert b.tell(EngineLost()) == [MarkDropped("a")]
    assert b.tell(Claimed("g")) == []
    assert b.tell(Paused("b", 20, resident=False)) == []
    assert b.tell(Ended("fg", 0, resident=False)) == []
    assert b.tell(EngineLost()) == []
    assert b.tell(EngineReady()) == [Start("g", 0), Resume("a", 1, Tier.DROPPED)]
    assert b.tell(Ended("g", 5, resident=False)) == [Resume("b", 0, Tier.DROPPED)]


def test_a_placed_turn_waits_again_when_the_engine_is_lost() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("a", "fg")]
    assert b.tell(EngineLost()) == []
    assert b.phases() == {"a": "pausing", "fg": "ready"}
    assert b.tell(EngineReady()) == []
    assert b.phases() == {"a": "pausing", "fg": "placed"}
    assert b.tell(Paused("a", 12, resident=False)) == [Start("fg", 0)]


def test_kv_that_a_lost_engine_is_said_to_hold_is_not_believed() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    assert b.tell(EngineLost()) == []
    assert b.tell(Paused("a", 12, resident=True)) == [MarkDropped("a")]
    assert b.tell(EngineReady()) == [Resume("a", 0, Tier.DROPPED)]


def test_idle_cache_is_gone_with_the_engine() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    assert b.tell(Ended("a", 12, resident=True)) == []
    assert b.tell(EngineLost()) == []
    assert all(slot.kv_tokens == 0 for slot in b.scheduler.view().slots)


def test_recovered_turns_are_recomputed() -> None:
    b = Bench(Policy(1, 2), ready=False)
    assert b.tell(Recovered("r", "ann", NORMAL, 1, 100)) == []
    assert b.turn("r").tier is Tier.DROPPED
    assert b.tell(EngineReady()) == [Resume("r", 0, Tier.DROPPED)]


def test_recovered_takes_over_a_turn_that_was_thought_to_wait() -> None:
    b = bench()
    b.run("a", NORMAL, slot=0)
    b.queue("r", NORMAL)
    assert b.tell(Recovered("r", "r", FOREGROUND, 2, 100)) == [
        Pause("a", "r"),
        Resume("r", 1, Tier.DROPPED),
    ]
    assert b.scheduler.view().waiting == 0


# Unified KV --------------------------------------------------------------------------------------------


def test_unified_the_reservation_has_to_fit() -> None:
    b = bench(3, 3, budget=250)
    b.run("a", NORMAL, slot=0)
    b.run("b", NORMAL, slot=1)
    assert b.scheduler.view().kv_tokens_charged == 200
    assert b.queue("c", NORMAL) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("c")]
    assert b.tell(Claimed("c")) == [Start("c", 0)]


def test_a_turn_larger_than_all_the_kv_is_refused_with_each_tick() -> None:
    b = bench(2, 2, budget=250)
    assert b.queue("large", FOREGROUND, kv=251) == []
    assert b.queue("small", BACKGROUND) == [Claim("small")]
    assert b.tell(Tick()) == [Refuse("large", 251, 250)]
    assert b.tell(Tick()) == [Refuse("large", 251, 250)]
    assert b.tell(Withdrawn("large")) == []
    assert b.tell(Tick()) == []


def test_unified_idle_cache_is_erased_before_paused_kv() -> None:
    b = bench(2, 4, budget=300)
    b.run("idle", NORMAL, slot=0)
    assert b.tell(Ended("idle", 60, resident=True)) == []
    b.run("low", BATCH, slot=1)
    b.run("mid", BACKGROUND, slot=2)
    assert b.queue("fg", FOREGROUND, kv=140) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("low", "fg")]
    assert b.tell(Paused("low", 20, resident=True)) == [Erase(0)]
    assert b.tell(Erased(0)) == [Start("fg", 0)]
    assert b.turn("low").tier is Tier.RESIDENT
    assert b.scheduler.view().kv_tokens_charged == 140 + 20 + 100


def test_unified_paused_kv_is_erased_when_idle_cache_is_not_enough() -> None:
    b = bench(1, 4, budget=200)
    b.run("idle", NORMAL, slot=0)
    assert b.tell(Ended("idle", 60, resident=True)) == []
    b.run("low", BATCH, slot=1)
    assert b.queue("fg", FOREGROUND, kv=150) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("low", "fg")]
    assert b.tell(Paused("low", 80, resident=True)) == [Erase(0), MarkDropped("low"), Erase(1)]
    assert b.tell(Tick()) == []
    assert b.tell(Erased(0)) == []
    assert b.tell(Erased(1)) == [Start("fg", 0)]
    assert b.scheduler.view().kv_tokens_charged == 150
    assert b.tell(Erased(1)) == []


def test_unified_waiting_for_an_erasure_does_not_ask_for_more() -> None:
    b = bench(2, 5, budget=200)
    for slot, turn in enumerate(("i", "j")):
        b.run(turn, NORMAL, slot=slot, kv=60)
    for turn in ("i", "j"):
        assert b.tell(Ended(turn, 60, resident=True)) == []
    assert b.queue("n", NORMAL, kv=120) == [Claim("n")]
    assert b.tell(Claimed("n")) == [Erase(0)]
    assert b.tell(Tick()) == []
    assert b.tell(Erased(0)) == [Start("n", 0)]


def test_unified_as_many_yield_as_the_memory_needs_and_no_more() -> None:
    b = bench(3, 5, budget=300)
    b.run("x", BATCH, slot=0, used=10, kv=50)
    b.run("y", BATCH, slot=1, used=20, kv=150)
    assert b.queue("fg", FOREGROUND, kv=200) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == [Pause("y", "fg")]
    assert b.tell(Paused("y", 20, resident=True)) == [Start("fg", 2)]
    assert b.phases() == {"x": "running", "y": "ready", "fg": "running"}


def test_unified_without_preemption_memory_is_waited_for() -> None:
    b = bench(3, 5, budget=300, preemption=False)
    b.run("x", BATCH, slot=0, kv=150)
    assert b.queue("fg", FOREGROUND, kv=200) == []
    assert b.tell(Ended("x", 10, resident=True)) == [Claim("fg")]


def test_unified_a_slot_is_charged_with_what_it_held_until_the_newcomer_is_picked_up() -> None:
    b = bench(2, 2, budget=200)
    b.run("a", NORMAL, slot=0)
    b.run("b", NORMAL, slot=1)
    assert b.tell(Ended("a", 90, resident=True)) == []
    assert b.queue("c", NORMAL, kv=20) == [Claim("c")]
    assert b.tell(Claimed("c")) == [Start("c", 0)]
    assert b.scheduler.view().kv_tokens_charged == 190
    assert b.tell(Started("c", 5)) == []
    assert b.scheduler.view().kv_tokens_charged == 120


def test_unified_a_turn_that_leaves_nothing_of_worth_may_leave_cells_behind() -> None:
    b = bench(2, 3, budget=150)
    b.run("a", NORMAL, slot=0)
    assert b.tell(Ended("a", 0, resident=False)) == [Erase(0)]
    assert b.scheduler.view().kv_tokens_charged == 100
    b.run("b", NORMAL, slot=1, kv=40)
    assert b.queue("c", NORMAL, kv=100) == [Claim("c")]
    assert b.tell(Claimed("c")) == []
    assert b.tell(Erased(0)) == [Start("c", 0)]


def test_unified_a_turn_about_to_resume_keeps_its_kv() -> None:
    b = bench(3, 3, budget=300)
    b.run("idle", NORMAL, slot=0, kv=120)
    assert b.tell(Ended("idle", 120, resident=True)) == []
    b.run("n", NORMAL, slot=1)
    assert b.tell(HoldRequested("n")) == [Pause("n", None)]
    assert b.tell(Paused("n", 60, resident=True)) == []
    b.run("m", NORMAL, slot=2)
    assert b.tell(ReleaseRequested("n")) == [Erase(0)]
    assert b.queue("fg", FOREGROUND, kv=60) == [Claim("fg")]
    assert b.tell(Claimed("fg")) == []
    assert b.tell(Erased(0)) == [Start("fg", 0), Resume("n", 1, Tier.RESIDENT)]


def test_unified_a_turn_larger_than_the_pool_is_left_to_others() -> None:
    b = bench(1, 2, budget=100)
    assert b.queue("huge", FOREGROUND, kv=101) == []
    assert b.queue("fits", FOREGROUND, kv=100) == [Claim("fits")]
    assert b.scheduler.view().waiting == 1
    assert b.tell(Withdrawn("huge")) == []
    assert b.scheduler.view().waiting == 0


def test_unified_a_large_turn_is_not_starved_by_smaller_ones_behind_it() -> None:
    b = bench(3, 3, budget=200, preemption=False)
    b.run("a", NORMAL, slot=0, kv=150)
    assert b.queue("large", NORMAL, kv=100) == []
    assert b.queue("small", NORMAL, kv=10) == []
    assert b.queue("smaller", BATCH, kv=1) == []
    assert b.tell(Ended("a", 0, resident=False)) == [
        Claim("large"),
        Claim("small"),
        Claim("smaller"),
    ]


# Aging -------------------------------------------------------------------------------------------------


def aged(now: float, *, preemption: bool) -> Bench:
    """A foreground turn runs; a batch turn has waited since 0, a normal one for a second before `now`."""
    b = bench(1, 3, preemption=preemption, aging_s=60.0)
    b.run("a", FOREGROUND, slot=0)
    assert b.queue("old", BATCH) == []
    b.now = now - 1.0
    assert b.queue("new", NORMAL) == []
    b.now = now
    return b


@pytest.mark.parametrize("preemption", [False, True])
@pytest.mark.parametrize(("now", "first"), [(100.0, "new"), (121.0, "old")])
def test_age_gives_order(now: float, first: str, preemption: bool) -> None:
    b = aged(now, preemption=preemption)
    assert b.tell(Ended("a", 0, resident=False)) == [Claim(first)]


def test_age_is_no_right_to_preempt() -> None:
    b = bench(aging_s=60.0)
    b.run("a", BACKGROUND, slot=0)
    assert b.queue("old", BATCH) == []
    b.now = 1e6
    assert b.tell(Tick()) == []


def test_age_never_reaches_the_highest_class() -> None:
    b = bench(1, 3, preemption=False, aging_s=60.0)
    b.run("a", FOREGROUND, slot=0)
    assert b.queue("old", NORMAL) == []
    b.now = 1e6
    assert b.queue("fg", FOREGROUND) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("fg")]


def test_a_turn_passed_over_for_an_aged_one_does_not_take_the_place_straight_back() -> None:
    b = aged(121.0, preemption=True)
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("old")]
    assert b.tell(Claimed("old")) == [Start("old", 0)]
    assert b.tell(Tick()) == []


def test_age_is_no_shield_from_a_newcomer() -> None:
    b = aged(121.0, preemption=True)
    assert b.tell(Withdrawn("new")) == []
    assert b.tell(Ended("a", 0, resident=False)) == [Claim("old")]
    assert b.tell(Claimed("old")) == [Start("old", 0)]
    assert b.queue("newer", NORMAL) == [Claim("newer")]
    assert b.tell(Claimed("newer")) == [Pause("old", "newer"), Start("newer", 1)]


def test_time_run_is_not_time_waited() -> None:
    b = bench(1, 3, aging_s=60.0)
    b.run("long", BATCH, slot=0)
    b.now = 1000.0
    b.queue("fg", FOREGROUND)
    assert b.tell(Claimed("fg")) == [Pause("long", "fg"), Start("fg", 1)]
    assert b.tell(Paused("long", 12, resident=True)) == []
    assert b.queue("n", NORMAL) == []
    assert b.tell(Ended("fg", 0, resident=False)) == [Claim("n")]


# Illegal events ----------------------------------------------------------------------------------------


def illegal_events() -> Sequence[tuple[str, Event]]:
    """Events that may not follow: the turn's phase, the event."""
    on_engine = ("running", "pausing")
    cases: list[tuple[str, Event]] = []
    for phase in ("unknown", "waiting", "claiming", "ready", "held", "placed", *on_engine):
        if phase != "claiming":
            cases += [(phase, Claimed(phase)), (phase, ClaimLost(phase))]
        if phase not in on_engine:
            cases += [
                (phase, Started(phase, 1)),
                (phase, Paused(phase, 1, resident=True)),
                (phase, Ended(phase, 1, resident=True)),
            ]
        if phase not in ("unknown", "waiting"):
            cases.append((phase, Recovered(phase, "x", NORMAL, 1, 10)))
    return [*cases, ("unknown", Erased(-1)), ("unknown", Erased(99))]


def every_phase() -> Bench:
    """A turn in each phase, named after it."""
    b = bench(4, 4)
    b.run("held", NORMAL, slot=0)
    assert b.tell(HoldRequested("held")) == [Pause("held", None)]
    assert b.tell(Paused("held", 10, resident=True)) == []
    b.run("running", FOREGROUND, slot=1)
    b.run("other", FOREGROUND, slot=2)
    b.run("low", BATCH, slot=3, used=50)
    assert b.queue("pausing", BATCH) == [Claim("pausing")]
    assert b.tell(Claimed("pausing")) == [MarkDropped("held"), Start("pausing", 0)]
    assert b.tell(Started("pausing", 10)) == []
    assert b.queue("placed", FOREGROUND) == [Claim("placed")]
    assert b.tell(Claimed("placed")) == [Pause("pausing", "placed")]
    assert b.queue("claiming", FOREGROUND) == [Claim("claiming")]
    assert b.tell(Recovered("ready", "x", NORMAL, 90, 10)) == []
    assert b.queue("waiting", NORMAL) == []
    phases = b.phases()
    del phases["other"], phases["low"]
    assert phases == {phase: phase for phase in phases}
    assert len(phases) == 6
    assert b.scheduler.view().waiting == 1
    return b


@pytest.mark.parametrize(("phase", "event"), illegal_events())
def test_an_illegal_event_raises_with_the_story_and_changes_nothing(phase: str, event: Event) -> None:
    b = every_phase()
    before = b.scheduler.view()
    journal = list(b.scheduler.journal)
    with pytest.raises(IllegalTransition) as caught:
        b.tell(event)
    message = str(caught.value)
    assert str(event) in message
    for line in b.scheduler.story(phase):
        assert line in message
    assert b.scheduler.view() == before
    assert list(b.scheduler.journal) == journal


def test_the_story_tells_of_events_and_commands() -> None:
    b = bench()
    b.run("a", BATCH, slot=0)
    assert b.tell(Progressed("a", 15)) == []
    b.queue("fg", FOREGROUND)
    b.now = 1.5
    b.tell(Claimed("fg"))
    assert b.scheduler.story("a") == [
        "0.000 TurnQueued(turn='a', agent='a', priority=0, seq=1, kv_tokens=100) -> Claim(turn='a')",
        "0.000 Claimed(turn='a', max_tokens=0) -> Start(turn='a', slot=0, source=None)",
        "0.000 Started(turn='a', kv_tokens=10, cached_tokens=None) -> nothing",
        "0.000 Progressed(turn='a', kv_tokens=15) -> nothing",
        "1.500 Claimed(turn='fg', max_tokens=0) -> Pause(turn='a', by='fg'), "
        "Start(turn='fg', slot=1, source=None)",
    ]


def test_progress_of_a_turn_that_is_not_on_the_engine_is_nothing() -> None:
    b = every_phase()
    before = b.scheduler.view()
    for phase in ("unknown", "waiting", "claiming", "ready", "held", "placed"):
        assert b.tell(Progressed(phase, 77)) == []
    assert b.scheduler.view() == before
    assert b.tell(Progressed("running", 77)) == []
    assert b.turn("running").kv_tokens == 77


# Policy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode_slots", "engine_slots"), [(0, 1), (2, 1)])
def test_impossible_sizes_are_refused(decode_slots: int, engine_slots: int) -> None:
    with pytest.raises(ValueError, match="slots is"):
        Policy(decode_slots, engine_slots)
