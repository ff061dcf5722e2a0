"""Each rule of `batch_order.py` as whole lists of commands: a long prefill, and who starts behind it."""

from __future__ import annotations

import pytest

from orchestrator.scheduler import (
    CancelRequested,
    Claim,
    Claimed,
    Command,
    Discard,
    Ended,
    EngineLost,
    EngineReady,
    Event,
    HoldRequested,
    Pause,
    Paused,
    Policy,
    Prefilled,
    Prefix,
    Progressed,
    Recovered,
    Resume,
    Scheduler,
    Start,
    Started,
    TurnQueued,
)
from orchestrator.turns import Tier

BACKGROUND, NORMAL, FOREGROUND = 20, 50, 100
LIMIT = 100


class Desk:
    """A scheduler with five engine slots."""

    def __init__(self, decode_slots: int = 3, **policy: int | bool) -> None:
        self.scheduler = Scheduler(Policy(decode_slots, 5, **policy))  # type: ignore[arg-type]
        self.seq = 0
        self.tell(EngineReady())

    def tell(self, event: Event) -> list[Command]:
        return self.scheduler.handle(event, 0.0)

    def queue(self, turn: str, agent: str, priority: int, prompt: int) -> list[Command]:
        self.seq += 1
        return self.tell(TurnQueued(turn, agent, priority, self.seq, prompt + LIMIT))

    def claimed(
        self, turn: str, agent: str, priority: int, prompt: int, prefix: Prefix = ()
    ) -> list[Command]:
        """What follows from the claim of a turn whose prompt has about so many tokens."""
        assert Claim(turn) in self.queue(turn, agent, priority, prompt)
        return self.tell(Claimed(turn, prefix, LIMIT))

    def phase(self, turn: str) -> str:
        return next(view.phase for view in self.scheduler.view().owned if view.id == turn)


def big_one(desk: Desk, priority: int = NORMAL, prompt: int = 13_600, prefix: Prefix = ()) -> None:
    """An agent's large prompt is in prefill in slot 0."""
    assert desk.claimed("big", "coder", priority, prompt, prefix) == [Start("big", 0)]
    assert desk.tell(Started("big", prompt, 0)) == []
    assert desk.tell(Progressed("big", 512)) == []


def test_a_long_prefill_gives_way_to_its_agents_short_prompt_and_goes_on_after_it() -> None:
    desk = Desk()
    big_one(desk)
    assert desk.claimed("title", "coder", NORMAL, 26) == [Start("title", 1), Pause("big", "title")]
    assert desk.tell(Paused("big", 640, resident=True)) == [], "it would take the next batch again"
    assert desk.phase("big") == "placed"
    assert desk.tell(Started("title", 26, 0)) == [], "so it would if the prompt takes two batches"
    assert desk.tell(Prefilled(26, 0.1, "title")) == [Resume("big", 0, Tier.RESIDENT)]


def test_before_the_engine_has_said_anything_sizes_are_guessed() -> None:
    """A client that opens two connections at once."""
    desk = Desk()
    assert desk.claimed("big", "coder", NORMAL, 13_600) == [Start("big", 0)]
    assert desk.claimed("title", "coder", NORMAL, 26) == [Start("title", 1), Pause("big", "title")]


@pytest.mark.parametrize(
    "event",
    [Progressed("title", 26), Ended("title", 26, resident=True), HoldRequested("title")],
    ids=["progress", "end", "hold"],
)
def test_whatever_ends_the_short_prefill_lets_the_long_one_go_on(event: Event) -> None:
    desk = Desk()
    big_one(desk)
    desk.claimed("title", "coder", NORMAL, 26)
    desk.tell(Started("title", 26, 0))
    desk.tell(Paused("big", 640, resident=True))
    assert Resume("big", 0, Tier.RESIDENT) in desk.tell(event)


@pytest.mark.parametrize(
    ("agent", "priority", "prompt", "gives_way"),
    [
        ("coder", NORMAL, 3_000, True),
        ("coder", NORMAL, 3_500, False),
        ("other", NORMAL, 26, False),
        ("other", BACKGROUND, 26, False),
        ("coder", BACKGROUND, 26, False),
        ("other", FOREGROUND, 26, True),
        ("other", FOREGROUND, 20_000, True),
    ],
)
def test_to_whom_it_gives_way(agent: str, priority: int, prompt: int, gives_way: bool) -> None:
    desk = Desk()
    big_one(desk)
    expected: list[Command] = [Start("late", 1)]
    if gives_way:
        expected.append(Pause("big", "late"))
    assert desk.claimed("late", agent, priority, prompt) == expected


def test_what_is_almost_done_does_not_give_way() -> None:
    desk = Desk()
    big_one(desk)
    desk.tell(Progressed("big", 13_600 - 511))
    assert desk.claimed("late", "other", FOREGROUND, 26) == [Start("late", 1)]


def test_nor_does_what_decodes() -> None:
    desk = Desk()
    big_one(desk)
    desk.tell(Prefilled(13_600, 9.0, "big"))
    assert desk.claimed("late", "other", FOREGROUND, 26) == [Start("late", 1)]


def test_in_an_earlier_slot_nobody_is_in_the_way() -> None:
    desk = Desk(first_slots=1)
    assert desk.claimed("big", "coder", NORMAL, 13_600) == [Start("big", 1)]
    assert desk.claimed("late", "other", FOREGROUND, 26) == [Start("late", 0)]


def test_what_is_found_in_the_slot_is_not_evaluated() -> None:
    """A conversation that goes on is short work, however long it is."""
    desk = Desk()
    assert desk.claimed("t1", "coder", NORMAL, 13_000, (1, 2)) == [Start("t1", 0)]
    desk.tell(Started("t1", 13_000, 0))
    desk.tell(Ended("t1", 13_050, resident=True))
    assert desk.claimed("t2", "coder", NORMAL, 13_400, (1, 2, 3)) == [Start("t2", 0)]
    assert desk.claimed("title", "coder", NORMAL, 26, (9,)) == [Start("title", 1)]


@pytest.mark.parametrize("policy", [{"preemption": False}, {"max_preemptions": 0}])
def test_without_preemption_nobody_gives_way(policy: dict[str, int]) -> None:
    desk = Desk(**policy)
    big_one(desk)
    assert desk.claimed("title", "coder", NORMAL, 26) == [Start("title", 1)]


def test_to_its_equals_it_gives_way_so_often_and_no_more() -> None:
    desk = Desk(max_preemptions=2)
    big_one(desk)
    for name in ("t1", "t2"):
        assert desk.claimed(name, "coder", NORMAL, 26) == [Start(name, 1), Pause("big", name)]
        desk.tell(Paused("big", 640, resident=True))
        desk.tell(Started(name, 26, 0))
        assert desk.tell(Ended(name, 30, resident=False)) == [Resume("big", 0, Tier.RESIDENT)]
        desk.tell(Started("big", 13_600, 640))
    assert desk.claimed("t3", "coder", NORMAL, 26) == [Start("t3", 1)]


def test_who_gives_way_waits_for_all_that_came_meanwhile() -> None:
    desk = Desk()
    big_one(desk)
    desk.claimed("t1", "coder", NORMAL, 26)
    assert desk.claimed("t2", "coder", NORMAL, 26) == [Start("t2", 2)]
    desk.tell(Paused("big", 640, resident=True))
    for name in ("t1", "t2"):
        assert desk.tell(Started(name, 26, 0)) == []
    assert desk.tell(Prefilled(26, 0.1, "t1")) == []
    assert desk.tell(Prefilled(26, 0.1, "t2")) == [Resume("big", 0, Tier.RESIDENT)]


def test_no_equal_takes_its_decode_slot_meanwhile() -> None:
    desk = Desk(decode_slots=2)
    big_one(desk)
    desk.claimed("title", "coder", NORMAL, 26)
    assert desk.queue("equal", "other", NORMAL, 26) == []
    assert desk.queue("lesser", "third", BACKGROUND, 26) == []
    desk.tell(Started("title", 26, 0))
    desk.tell(Prefilled(26, 0.1, "title"))
    assert desk.tell(Paused("big", 640, resident=True)) == [Resume("big", 0, Tier.RESIDENT)]


def test_one_of_higher_priority_takes_it() -> None:
    desk = Desk(decode_slots=2)
    big_one(desk)
    desk.claimed("title", "coder", NORMAL, 26)
    assert desk.claimed("urgent", "other", FOREGROUND, 26) == [Start("urgent", 2)]
    desk.tell(Paused("big", 640, resident=True))
    assert desk.phase("big") == "ready"


def test_cancelled_or_held_it_keeps_nothing() -> None:
    desk = Desk(decode_slots=2)
    big_one(desk)
    desk.claimed("title", "coder", NORMAL, 26)
    assert desk.tell(CancelRequested("big")) == []
    assert desk.queue("equal", "other", NORMAL, 26) == [Claim("equal")]
    assert desk.tell(Paused("big", 640, resident=True)) == [Discard("big")]
    desk = Desk(decode_slots=2)
    big_one(desk)
    desk.claimed("title", "coder", NORMAL, 26)
    desk.tell(HoldRequested("big"))
    assert desk.queue("equal", "other", NORMAL, 26) == [Claim("equal")]
    desk.tell(Paused("big", 640, resident=True))
    assert desk.phase("big") == "held"


def test_a_long_prompt_does_not_start_before_one_of_higher_priority() -> None:
    """The foreground goes on in its own slot, so it cannot have the first one."""
    desk = Desk()
    assert desk.claimed("b", "drudge", BACKGROUND, 26) == [Start("b", 0)]
    assert desk.claimed("f1", "editor", FOREGROUND, 26, (1,)) == [Start("f1", 1)]
    desk.tell(Started("f1", 26, 0))
    desk.tell(Ended("f1", 30, resident=True))
    desk.tell(Ended("b", 0, resident=False))
    assert desk.claimed("f2", "editor", FOREGROUND, 3_000, (1, 2)) == [Start("f2", 1)]
    assert desk.claimed("big", "drudge", BACKGROUND, 9_000, (7,)) == [Start("big", 2)], "behind it"
    assert desk.claimed("small", "other", BACKGROUND, 26, (8,)) == [Start("small", 0)], "no long one"


def test_for_kv_in_an_earlier_slot_it_waits() -> None:
    desk = Desk()
    assert desk.claimed("b1", "drudge", BACKGROUND, 9_000, (7,)) == [Start("b1", 0)]
    desk.tell(Started("b1", 9_000, 0))
    desk.tell(Prefilled(9_000, 9.0, "b1"))
    assert desk.claimed("f", "editor", FOREGROUND, 3_000, (1,)) == [Start("f", 1)]
    desk.tell(Started("f", 3_000, 0))
    desk.tell(Ended("b1", 9_050, resident=True))
    assert desk.claimed("b2", "drudge", BACKGROUND, 9_900, (7, 8)) == []
    assert desk.tell(Prefilled(3_000, 2.0, "f")) == [Start("b2", 0)]


def test_two_that_are_seated_in_one_step_need_no_pause() -> None:
    desk = Desk()
    desk.tell(EngineLost())
    desk.tell(Recovered("big", "coder", NORMAL, 1, 13_600))
    desk.tell(Recovered("title", "coder", NORMAL, 2, 26))
    assert desk.tell(EngineReady()) == [
        Resume("title", 0, Tier.DROPPED),
        Resume("big", 1, Tier.DROPPED),
    ]
