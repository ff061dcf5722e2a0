"""Rule 6 of `memory.py`: KV of a cancelled turn is worth the step in which the engine stops it."""

from __future__ import annotations

import pytest

from orchestrator.scheduler import (
    Abort,
    CancelRequested,
    Claim,
    Claimed,
    Command,
    Discard,
    Ended,
    EngineReady,
    Event,
    HoldRequested,
    Pause,
    Paused,
    Policy,
    Prefilled,
    Prefix,
    Progressed,
    Scheduler,
    Start,
    Started,
    Stepped,
    Tick,
    TurnQueued,
)

BACKGROUND, FOREGROUND = 20, 100
PROMPT = 13_000
CHAIN = tuple(range(100, 150))


class Desk:
    """A scheduler with room for all; the first turn's prompt is in prefill in slot 0."""

    def __init__(self, reached: int = 5_000, **policy: int) -> None:
        self.scheduler = Scheduler(Policy(3, 4, **policy))  # type: ignore[arg-type]
        self.now = 0.0
        self.seq = 0
        self.tell(EngineReady())
        assert self.claimed("first", BACKGROUND, "coder", CHAIN) == [Start("first", 0)]
        self.tell(Started("first", PROMPT, 0))
        self.tell(Progressed("first", reached))

    def tell(self, event: Event) -> list[Command]:
        return self.scheduler.handle(event, self.now)

    def at(self, now: float) -> list[Command]:
        self.now = now
        return self.tell(Tick())

    def claimed(
        self, turn: str, priority: int, agent: str, prefix: Prefix = (), prompt: int = PROMPT
    ) -> list[Command]:
        self.seq += 1
        assert self.tell(TurnQueued(turn, agent, priority, self.seq, prompt + 100)) == [Claim(turn)]
        return self.tell(Claimed(turn, prefix, 100))

    def cancel(self) -> None:
        assert self.tell(CancelRequested("first")) == [Abort("first")]

    def stopped(self, kv_tokens: int = 5_064) -> list[Command]:
        return self.tell(Ended("first", kv_tokens, resident=True))


@pytest.mark.parametrize("priority", [BACKGROUND, FOREGROUND])
def test_who_asks_again_waits_for_the_slot_that_is_being_stopped(priority: int) -> None:
    desk = Desk()
    desk.cancel()
    assert desk.claimed("again", priority, "coder", CHAIN) == []
    assert desk.stopped() == [Start("again", 0)]


def test_the_longer_prompt_of_a_conversation_that_went_on_waits_too() -> None:
    desk = Desk()
    desk.cancel()
    assert desk.claimed("again", BACKGROUND, "coder", (*CHAIN, 1, 2)) == []
    assert desk.stopped() == [Start("again", 0)]


def test_without_anything_known_of_prompts_an_agent_waits_for_its_own() -> None:
    desk = Desk()
    desk.cancel()
    assert desk.claimed("other", BACKGROUND, "other") == [Start("other", 1)]
    assert desk.claimed("again", BACKGROUND, "coder") == []
    assert desk.stopped() == [Start("again", 0)]


@pytest.mark.parametrize(
    ("prefix", "why"),
    [((1, 2, 3), "another prompt"), ((*CHAIN[:5], 1), "little of it is of use, so it is left alone")],
)
def test_others_do_not_wait(prefix: Prefix, why: str) -> None:
    desk = Desk()
    desk.cancel()
    assert desk.claimed("other", BACKGROUND, "coder", prefix) == [Start("other", 1)], why


def test_for_a_few_tokens_nobody_waits() -> None:
    desk = Desk(reached=63)
    desk.cancel()
    assert desk.claimed("again", BACKGROUND, "coder", CHAIN) == [Start("again", 1)]


def test_a_turn_that_goes_on_running_is_not_waited_for() -> None:
    desk = Desk()
    assert desk.claimed("second", BACKGROUND, "coder", CHAIN) == [Start("second", 1)]


def test_a_turn_that_was_never_picked_up_leaves_nothing_to_wait_for() -> None:
    desk = Desk()
    assert desk.claimed("second", BACKGROUND, "other", (7, 8)) == [Start("second", 1)]
    desk.tell(CancelRequested("second"))
    assert desk.claimed("again", BACKGROUND, "other", (7, 8)) == [Start("again", 2)]


def test_idle_cache_that_has_as_much_is_not_passed_over() -> None:
    desk = Desk()
    assert desk.claimed("twin", BACKGROUND, "coder", CHAIN) == [Start("twin", 1)]
    desk.tell(Started("twin", PROMPT, 0))
    desk.tell(Ended("twin", PROMPT, resident=True))
    desk.cancel()
    assert desk.claimed("again", BACKGROUND, "coder", CHAIN) == [Start("again", 1)]


def test_a_step_that_takes_longer_than_the_evaluation_is_not_waited_for() -> None:
    desk = Desk()
    desk.tell(Prefilled(1_000, 0.01))
    desk.tell(Stepped(0.1))
    desk.cancel()
    assert desk.claimed("again", BACKGROUND, "coder", CHAIN) == [Start("again", 1)]


def test_no_longer_is_waited_than_the_evaluation_takes() -> None:
    """Whatever keeps the engine: at worst as much is lost as there was to save."""
    desk = Desk()
    desk.tell(Prefilled(1_000, 0.5))
    desk.cancel()
    assert desk.claimed("again", FOREGROUND, "coder", CHAIN) == []
    assert desk.at(2.4) == []
    assert desk.at(2.6) == [Start("again", 1)]


def test_a_cancel_while_it_pauses_leaves_its_kv_as_well() -> None:
    desk = Desk()
    assert desk.tell(HoldRequested("first")) == [Pause("first", None)]
    desk.tell(CancelRequested("first"))
    assert desk.claimed("again", BACKGROUND, "coder", CHAIN) == []
    assert desk.tell(Paused("first", 5_064, resident=True)) == [Discard("first"), Start("again", 0)]


def test_nothing_of_worth_is_left_and_the_turn_starts_all_the_same() -> None:
    desk = Desk()
    desk.cancel()
    assert desk.claimed("again", BACKGROUND, "coder", CHAIN) == []
    assert desk.tell(Ended("first", 0, resident=False)) == [Start("again", 0)]
