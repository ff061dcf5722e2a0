"""The first engine slots are the highest class's: the engine fills its batch in the order of its slots."""

from __future__ import annotations

from orchestrator.scheduler import (
    Claimed,
    Command,
    Ended,
    EngineReady,
    Pause,
    Paused,
    Policy,
    Resume,
    Scheduler,
    Start,
    Started,
    TurnQueued,
)
from orchestrator.turns import Tier

BACKGROUND, FOREGROUND = 20, 100


class Desk:
    """A scheduler with three decode slots and five engine slots, of which the first is kept."""

    def __init__(self, first_slots: int = 1, engine_slots: int = 5, *, adjacent: bool = False) -> None:
        self.scheduler = Scheduler(
            Policy(decode_slots=3, engine_slots=engine_slots, first_slots=first_slots, adjacent=adjacent)
        )
        self.scheduler.handle(EngineReady(), 0.0)
        self.seq = 0

    def start(self, turn: str, priority: int, agent: str = "") -> list[Command]:
        self.seq += 1
        self.scheduler.handle(TurnQueued(turn, agent or turn, priority, self.seq, 100), 0.0)
        commands = self.scheduler.handle(Claimed(turn), 0.0)
        if any(isinstance(command, Start) for command in commands):
            self.scheduler.handle(Started(turn, 10), 0.0)
        return commands


def test_others_leave_the_first_slots_alone() -> None:
    desk = Desk()
    assert [desk.start(f"b{n}", BACKGROUND) for n in range(3)] == [[Start(f"b{n}", n + 1)] for n in range(3)]


def test_the_highest_class_takes_the_first_slot_it_can() -> None:
    desk = Desk()
    assert desk.start("f", FOREGROUND) == [Start("f", 0)]
    assert desk.start("g", FOREGROUND) == [Start("g", 1)]


def test_a_foreground_turn_comes_before_a_background_prefill_in_the_batch() -> None:
    desk = Desk()
    for n in range(3):
        desk.start(f"b{n}", BACKGROUND)
    assert desk.start("f", FOREGROUND) == [Pause("b0", "f"), Start("f", 0)]
    desk.scheduler.handle(Paused("b0", 10, resident=True), 0.0)
    assert desk.scheduler.handle(Ended("f", 20, resident=True), 0.0) == [Resume("b0", 1, Tier.RESIDENT)]


def test_others_take_a_first_slot_when_nothing_else_is_left() -> None:
    desk = Desk(first_slots=3)
    assert [desk.start(f"b{n}", BACKGROUND) for n in range(3)] == [
        [Start("b0", 3)],
        [Start("b1", 4)],
        [Start("b2", 0)],
    ]


def test_idle_cache_of_others_is_given_up_before_a_first_slot_is_taken() -> None:
    desk = Desk()
    for n in range(3):
        desk.start(f"b{n}", BACKGROUND)
    desk.scheduler.handle(Ended("b0", 10, resident=True), 0.0)
    assert desk.start("b3", BACKGROUND) == [Start("b3", 4)]
    desk.scheduler.handle(Ended("b1", 10, resident=True), 0.0)
    assert desk.start("b4", BACKGROUND) == [Start("b4", 1)]


def test_an_agents_own_idle_cache_is_worth_more_than_the_order() -> None:
    desk = Desk()
    desk.start("b0", BACKGROUND)
    desk.start("f1", FOREGROUND, agent="a")
    desk.start("f2", FOREGROUND, agent="b")
    desk.scheduler.handle(Ended("f1", 10, resident=True), 0.0)
    desk.scheduler.handle(Ended("f2", 10, resident=True), 0.0)
    assert desk.start("f3", FOREGROUND, agent="b") == [Start("f3", 2)]


# Adjacent slots are computed together -----------------------------------------------------------------


def test_the_highest_class_sits_beside_those_that_run() -> None:
    desk = Desk(first_slots=2, engine_slots=6, adjacent=True)
    for n in range(3):
        desk.start(f"b{n}", BACKGROUND)  # in slots 2, 3 and 4
    assert desk.start("f", FOREGROUND) == [Pause("b0", "f"), Start("f", 1)]


def test_a_newcomer_fills_a_gap() -> None:
    """Rather than the least recently used slot, which is 1."""
    desk = Desk(first_slots=0, engine_slots=5, adjacent=True)
    for n in range(5):
        desk.start(f"b{n}", BACKGROUND)
        if n < 2:
            desk.scheduler.handle(Ended(f"b{n}", 10, resident=True), 0.0)
    # Of no prompt anything is known, so each agent's idle cache is its own: 0 and 1 idle, 2 to 4 run.
    desk.scheduler.handle(Ended("b3", 10, resident=True), 0.0)
    assert desk.start("c", BACKGROUND) == [Start("c", 3)]
    desk.scheduler.handle(Ended("b2", 10, resident=True), 0.0)
    assert desk.start("d", BACKGROUND) == [Start("d", 2)]


def test_an_agents_own_cache_is_worth_a_gap() -> None:
    desk = Desk(first_slots=0, engine_slots=5, adjacent=True)
    for n in range(4):
        desk.start(f"b{n}", BACKGROUND)
        if n == 0:
            desk.scheduler.handle(Ended("b0", 10, resident=True), 0.0)
    desk.scheduler.handle(Ended("b1", 10, resident=True), 0.0)
    assert desk.start("again", BACKGROUND, agent="b0") == [Start("again", 0)]
