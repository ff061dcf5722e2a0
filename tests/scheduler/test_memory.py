"""Each rule of `memory.py` as whole lists of commands: what is saved, given up, brought back, and when."""

from __future__ import annotations

from collections.abc import Iterable

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
    Prefix,
    Progressed,
    ReleaseRequested,
    Restored,
    RestoreFailed,
    Resume,
    Save,
    Saved,
    SaveFailed,
    Scheduler,
    SlotView,
    Start,
    Started,
    Stepped,
    SwapPolicy,
    SwapView,
    Tick,
    TurnQueued,
    TurnView,
)
from orchestrator.turns import Tier

BATCH, BACKGROUND, NORMAL, FOREGROUND = 0, 20, 50, 100
STEP_S = 0.025
#: Bytes of a file of n tokens: HEAD + TOKEN * n.
HEAD, TOKEN = 1024, 100


def file_bytes(*tokens: int) -> int:
    """What files of so many tokens take together."""
    return sum(HEAD + TOKEN * each for each in tokens)


class Bench:
    """A scheduler with a folder, and a clock that moves only when told to."""

    def __init__(self, policy: Policy) -> None:
        self.scheduler = Scheduler(policy)
        self.now = 0.0
        self.seq = 0
        assert self.tell(EngineReady()) == []

    def tell(self, event: Event) -> list[Command]:
        """The commands that `event` leads to."""
        return self.scheduler.handle(event, self.now)

    def at(self, now: float, event: Event | None = None) -> list[Command]:
        """The same, later; a tick unless something else happens."""
        assert now >= self.now
        self.now = now
        return self.tell(event or Tick())

    def claimed(
        self, turn: str, priority: int, *, kv: int = 400, agent: str | None = None, prefix: Prefix = ()
    ) -> list[Command]:
        """A new turn that is claimed at once; what the claim leads to."""
        self.seq += 1
        event = TurnQueued(turn, agent or turn, priority, self.seq, kv)
        assert self.tell(event) == [Claim(turn)]
        return self.tell(Claimed(turn, prefix))

    def run(
        self,
        turn: str,
        priority: int,
        *,
        slot: int,
        used: int = 100,
        kv: int = 400,
        agent: str | None = None,
        prefix: Prefix = (),
    ) -> None:
        """A turn that goes straight into the free engine slot `slot` and has `used` tokens of KV."""
        assert self.claimed(turn, priority, kv=kv, agent=agent, prefix=prefix) == [Start(turn, slot)]
        assert self.tell(Started(turn, used)) == []

    def saved(self, slot: int, key: str, tokens: int = 100, *, stall_s: float = 0.001) -> list[Command]:
        """A save went well."""
        return self.tell(Saved(slot, key, tokens, file_bytes(tokens), stall_s))

    def pause(self, turn: str, tokens: int = 100) -> list[Command]:
        """The turn leaves the batch, and its KV stays in its slot."""
        return self.tell(Paused(turn, tokens, resident=True))

    def end(self, turn: str, tokens: int = 100) -> list[Command]:
        """The turn ends, and its KV stays in its slot."""
        return self.tell(Ended(turn, tokens, resident=True))

    def vanish(self, turn: str) -> list[Command]:
        """The turn ends and leaves nothing."""
        return self.tell(Ended(turn, 0, resident=False))

    def turn(self, turn: str) -> TurnView:
        """How an owned turn stands."""
        return next(view for view in self.scheduler.view().owned if view.id == turn)

    @property
    def swap(self) -> SwapView:
        """The folder's figures."""
        return self.scheduler.view(self.now).swap

    def slot(self, slot: int) -> SlotView:
        """How a slot stands."""
        return self.scheduler.view().slots[slot]

    def measured(self, *, prefill_s: float, save_s: float, restore_s: float, turn: str) -> None:
        """Seconds for 1,000 tokens each; `turn` has to be running, with 100 tokens of KV."""
        assert self.tell(Prefilled(1000, prefill_s)) == []
        assert self.tell(Saved(0, "elsewhere", 1000, 1, save_s)) == [Forget("elsewhere")]
        assert self.tell(Restored(turn, 1000, restore_s)) == []
        assert self.tell(Progressed(turn, 100)) == []


def bench(
    decode_slots: int = 1,
    engine_slots: int | None = None,
    *,
    budget: int | None = None,
    swap: int | None = 1 << 20,
) -> Bench:
    """A ready engine with one spare slot unless given; `swap` None: no folder."""
    policy = SwapPolicy(swap, token_bytes=TOKEN - 16) if swap is not None else None
    return Bench(
        Policy(
            decode_slots,
            decode_slots + 1 if engine_slots is None else engine_slots,
            kv_budget_tokens=budget,
            swap=policy,
            aging_s=0.0,
        )
    )


# The tiers, walked down in order -------------------------------------------------------------------------


def test_while_nobody_needs_the_room_everything_stays_resident() -> None:
    b = bench(1, 3)
    b.run("a", BATCH, slot=0)
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg"), Start("fg", 1)]
    assert b.tell(Started("fg", 60)) == []
    assert b.pause("a") == []
    for now in (10.0, 100.0, 1000.0):
        assert b.at(now) == []
    assert b.turn("a").tier is Tier.RESIDENT
    assert b.end("fg", 90) == [Resume("a", 0, Tier.RESIDENT)]
    assert b.swap.saves == 0


def test_what_has_to_go_is_swapped_and_brought_back() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Start("fg", 0)]
    assert b.turn("a").tier is Tier.SWAPPED
    assert (b.swap.files, b.swap.turns, b.swap.used_bytes) == (1, 1, file_bytes(100))
    assert b.turn("a").swap_bytes == file_bytes(100)
    assert b.tell(Started("fg", 60)) == []
    assert b.end("fg", 20) == [Resume("a", 0, Tier.SWAPPED, "kv-1")], "20 tokens are not worth a file"
    assert b.tell(Restored("a", 100, 0.001)) == []
    assert b.slot(0).kv_tokens == 100
    assert b.tell(Started("a", 101, 100)) == [Forget("kv-1")]
    assert (b.swap.files, b.swap.used_bytes, b.swap.saves, b.swap.restores) == (0, 0, 1, 1)
    assert b.scheduler.view().costs.swapped_reevaluated == 0.0


def test_dropped_without_a_folder() -> None:
    b = bench(1, 1, swap=None)
    b.run("a", BATCH, slot=0)
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg")]
    assert b.pause("a") == [MarkDropped("a"), Start("fg", 0)]
    assert b.vanish("fg") == [Resume("a", 0, Tier.DROPPED)]


@pytest.mark.parametrize(
    ("swap", "used"),
    [
        pytest.param(0, 100, id="a folder of nothing"),
        pytest.param(file_bytes(100) - 1, 100, id="a byte too few"),
        pytest.param(1 << 20, 31, id="so little KV"),
    ],
)
def test_dropped_where_no_file_is_to_be_had(swap: int, used: int) -> None:
    b = bench(1, 1, swap=swap)
    b.run("a", BATCH, slot=0, used=used)
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg")]
    assert b.pause("a", used) == [MarkDropped("a"), Start("fg", 0)]


def test_dropped_where_the_folder_is_full_of_paused_turns() -> None:
    b = bench(1, 1, swap=file_bytes(100))
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 0)]
    assert b.tell(Started("n", 100)) == []
    assert b.claimed("fg", FOREGROUND) == [Pause("n", "fg")]
    assert b.pause("n") == [MarkDropped("n"), Start("fg", 0)]
    assert b.vanish("fg") == [Resume("n", 0, Tier.DROPPED)]
    assert b.vanish("n") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]


def test_dropped_where_a_swap_takes_longer_than_to_evaluate() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    b.measured(prefill_s=0.010, save_s=0.008, restore_s=0.004, turn="a")
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg")]
    assert b.pause("a") == [MarkDropped("a"), Start("fg", 0)]


def test_an_idle_cache_gives_way_before_a_paused_turn() -> None:
    b = bench(1, 2)
    b.run("x", BATCH, slot=0, used=20)
    assert b.end("x", 20) == []
    b.run("a", BATCH, slot=1)
    assert b.claimed("fg", FOREGROUND) == [Pause("a", "fg"), Start("fg", 0)]
    assert b.pause("a") == []
    assert b.turn("a").tier is Tier.RESIDENT


# What gives way under a shared budget --------------------------------------------------------------------


def parked(b: Bench, *used: int) -> None:
    """Paused turns p0, p1, ... of the lowest class in slots 0, 1, ..., each with so many tokens."""
    for at, tokens in enumerate(used):
        b.run(f"p{at}", BATCH, slot=at, used=tokens)
        assert b.tell(HoldRequested(f"p{at}")) == [Pause(f"p{at}", None)]
        assert b.pause(f"p{at}", tokens) == []
    for at in range(len(used)):
        b.tell(HoldRequested(f"p{at}"))


def test_short_paused_turns_stay_and_the_longest_goes_first() -> None:
    b = bench(3, 5, budget=1000)
    parked(b, 50, 300, 200)
    assert b.claimed("n", NORMAL, kv=500) == [Save(1, "kv-1", "p1")]
    assert b.at(1.0) == [], "one save at a time, and no more than the room takes"
    assert b.saved(1, "kv-1", 300) == [MarkSwapped("p1", "kv-1"), Erase(1)]
    assert b.tell(Erased(1)) == [Start("n", 1)]
    assert [b.turn(f"p{at}").tier for at in range(3)] == [Tier.RESIDENT, Tier.SWAPPED, Tier.RESIDENT]
    view = b.scheduler.view()
    assert view.kv_owners == {"running": 0, "paused": 250, "idle": 0, "reserved": 500}


def test_with_a_slot_for_each_the_last_to_come_goes_first() -> None:
    b = bench(3, 3)
    parked(b, 300, 50)
    b.run("p2", BATCH, slot=2, used=200)
    assert b.tell(HoldRequested("p2")) == [Pause("p2", None)]
    assert b.pause("p2", 200) == [Save(2, "kv-1", "p2")], "ahead of who may come"
    assert b.saved(2, "kv-1", 200) == []
    assert b.claimed("n", NORMAL) == [MarkSwapped("p2", "kv-1"), Start("n", 2)]


def test_as_many_are_saved_as_the_room_takes_one_after_the_other() -> None:
    b = bench(3, 5, budget=1000)
    parked(b, 50, 300, 200)
    assert b.claimed("n", NORMAL, kv=900) == [Save(1, "kv-1", "p1")]
    assert b.saved(1, "kv-1", 300) == [MarkSwapped("p1", "kv-1"), Erase(1), Save(2, "kv-2", "p2")]
    assert b.tell(Erased(1)) == []
    assert b.saved(2, "kv-2", 200) == [MarkSwapped("p2", "kv-2"), Erase(2)]
    assert b.tell(Erased(2)) == [Start("n", 1)]
    assert b.turn("p0").tier is Tier.RESIDENT


def test_idle_cache_is_erased_before_paused_kv_is_touched() -> None:
    b = bench(2, 5, budget=1000)
    b.run("x", NORMAL, slot=0, used=20)
    assert b.end("x", 20) == []
    b.run("p", BATCH, slot=1, used=300)
    assert b.tell(HoldRequested("p")) == [Pause("p", None)]
    assert b.pause("p", 300) == []
    assert b.claimed("n", NORMAL, kv=690) == [Erase(0)]
    assert b.tell(Erased(0)) == [Start("n", 0)]
    assert b.turn("p").tier is Tier.RESIDENT


def test_what_has_a_copy_goes_before_what_has_none() -> None:
    b = bench(2, 2)
    parked(b, 100)
    b.run("q", BATCH, slot=1)
    assert b.tell(HoldRequested("q")) == [Pause("q", None)]
    assert b.pause("q") == [Save(1, "kv-1", "q")]
    assert b.saved(1, "kv-1") == []
    assert b.tell(ReleaseRequested("p0")) == [Resume("p0", 0, Tier.RESIDENT)]
    assert b.tell(HoldRequested("p0")) == [Pause("p0", None)]
    assert b.pause("p0") == [], "the last to come, and the next to go but for the other's copy"
    assert b.claimed("m", NORMAL) == [MarkSwapped("q", "kv-1"), Start("m", 1)]


def test_running_foreground_kv_is_never_touched() -> None:
    b = bench(2, 2, budget=1000)
    b.run("fg", FOREGROUND, slot=0, used=500, kv=600)
    b.run("a", BATCH, slot=1, used=100, kv=250)
    for at, priority in enumerate((NORMAL, FOREGROUND)):
        turn = f"n{at}"
        b.seq += 1
        commands = b.tell(TurnQueued(turn, turn, priority, b.seq, 500))
        assert commands == [], "all that may go would not make the room"
        assert b.at(100.0 * at) == []
    assert b.turn("fg").phase == "running"


# 1. Neither save nor restore while the highest class decodes ---------------------------------------------


def crowded() -> Bench:
    """A foreground turn decodes in slot 0; `n` has its decode slot and slot 1 holds `a`, paused for it."""
    b = bench(2, 2)
    b.run("fg", FOREGROUND, slot=0)
    b.run("a", BATCH, slot=1)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == []
    return b


def test_a_save_waits_for_the_foreground_to_be_done() -> None:
    b = crowded()
    assert b.at(1.9) == []
    assert b.vanish("fg") == [Start("n", 0), Resume("a", 1, Tier.RESIDENT)]
    assert b.swap.saves == b.swap.stalls == 0


def test_a_save_is_forced_after_the_patience_and_counted() -> None:
    b = crowded()
    assert b.at(1.999) == []
    assert b.at(2.0) == [Save(1, "kv-1", "a")]
    assert b.swap.stalls == 1
    assert b.saved(1, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 1)]


def test_a_restore_waits_and_is_forced_and_counted_likewise() -> None:
    b = crowded()
    assert b.at(2.0) == [Save(1, "kv-1", "a")]
    assert b.saved(1, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 1)]
    b.now = 10.0
    assert b.vanish("n") == []
    assert b.at(11.9) == []
    assert b.at(12.0) == [Resume("a", 1, Tier.SWAPPED, "kv-1")]
    assert b.swap.stalls == 2


def test_a_restore_that_waited_goes_on_as_soon_as_the_foreground_is_done() -> None:
    b = crowded()
    assert b.at(2.0) == [Save(1, "kv-1", "a")]
    assert b.saved(1, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 1)]
    assert b.vanish("n") == []
    assert b.vanish("fg") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]
    assert b.swap.stalls == 1


def test_for_another_of_the_highest_class_memory_forces_it_at_once() -> None:
    b = bench(2, 2)
    b.run("f1", FOREGROUND, slot=0)
    b.run("a", BATCH, slot=1)
    assert b.claimed("f2", FOREGROUND) == [Pause("a", "f2")]
    assert b.pause("a") == [Save(1, "kv-1", "a")]
    assert b.swap.stalls == 1
    assert b.saved(1, "kv-1") == [MarkSwapped("a", "kv-1"), Start("f2", 1)]


@pytest.mark.parametrize("known", [True, False])
def test_a_restore_for_the_highest_class_is_forced_at_once_where_it_is_known_to_pay(known: bool) -> None:
    b = bench(2, 2)
    if known:
        b.scheduler._memory.costs.restored(1000, 0.001)
        b.tell(Prefilled(1000, 10.0))
    b.run("f1", FOREGROUND, slot=0, agent="ann", prefix=(1, 2))
    assert b.end("f1") == []
    b.run("b1", BATCH, slot=1, agent="bob")
    assert b.tell(HoldRequested("b1")) == [Pause("b1", None)]
    assert b.pause("b1") == [Save(0, "kv-1", None)]
    assert b.saved(0, "kv-1") == []
    b.run("c1", FOREGROUND, slot=0, agent="cid", prefix=(8, 9))
    assert b.claimed("f2", FOREGROUND, agent="ann", prefix=(1, 2, 3)) == [Save(1, "kv-2", "b1")]
    assert b.saved(1, "kv-2") == [MarkSwapped("b1", "kv-2"), Start("f2", 1, "kv-1" if known else None)]
    assert b.swap.stalls == 1 + known


# 2. Cleaning ahead ---------------------------------------------------------------------------------------


def cleaned() -> Bench:
    """`a` runs in slot 0; slot 1, with the foreground's cache, has a copy and is free to take."""
    b = bench(1, 2)
    b.run("a", BATCH, slot=0)
    assert b.claimed("f1", FOREGROUND) == [Pause("a", "f1"), Start("f1", 1)]
    assert b.tell(Started("f1", 60)) == []
    assert b.pause("a") == []
    assert b.end("f1", 90) == [Resume("a", 0, Tier.RESIDENT), Save(1, "kv-1", None)]
    assert b.swap.stalls == 0
    assert b.saved(1, "kv-1", 90) == []
    assert b.slot(1).copy
    return b


def test_the_next_foreground_turn_starts_in_the_step_of_its_claim() -> None:
    b = cleaned()
    assert b.claimed("f2", FOREGROUND) == [Pause("a", "f2"), Start("f2", 1)]
    assert b.swap.saves == 1


def test_cleaning_comes_to_rest() -> None:
    b = cleaned()
    for now in (1.0, 2.0, 3.0):
        assert b.at(now) == []


def test_nothing_is_cleaned_while_the_foreground_decodes() -> None:
    b = bench(2, 3)
    b.run("fg", FOREGROUND, slot=0)
    b.run("a", BATCH, slot=1)
    assert b.end("a") == []
    b.run("b", BATCH, slot=2)
    assert b.end("b") == []
    assert b.at(100.0) == []
    assert b.end("fg") == [Save(1, "kv-1", None)]


def test_a_cleaned_paused_turn_goes_on_in_its_slot() -> None:
    b = bench(1, 2)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.tell(Started("n", 50)) == []
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == []
    assert (b.turn("a").tier, b.turn("a").slot) == (Tier.RESIDENT, 0)
    assert b.vanish("n") == [Forget("kv-1"), Resume("a", 0, Tier.RESIDENT)], "it grows beyond its copy"
    assert b.swap.files == 0


def test_a_turn_whose_kv_is_being_copied_goes_on_after_that() -> None:
    b = bench(1, 2)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.vanish("n") == []
    assert b.turn("a").phase == "placed"
    assert b.saved(0, "kv-1") == [Forget("kv-1"), Resume("a", 0, Tier.RESIDENT)]


def test_nobody_else_takes_the_room_of_the_next_foreground_turn() -> None:
    """It starts at once, where else it would wait for a victim, a save and an erase."""
    b = bench(2, 4, budget=1000)
    b.run("f1", FOREGROUND, slot=0, kv=100)
    assert b.vanish("f1") == [Erase(0)]
    assert b.tell(Erased(0)) == []
    b.run("a", BATCH, slot=0, kv=500)
    assert b.claimed("b", BATCH, kv=400) == [Start("b", 1)], "as far as both have room"
    assert b.claimed("f2", FOREGROUND, kv=100) == [Pause("a", "f2"), Start("f2", 2)]


def test_the_room_kept_free_is_a_small_part_and_starves_nobody() -> None:
    b = bench(2, 4, budget=1000)
    b.run("f1", FOREGROUND, slot=0, kv=900)
    assert b.vanish("f1") == [Erase(0)]
    assert b.tell(Erased(0)) == []
    b.run("a", BATCH, slot=0, kv=870)
    assert b.vanish("a") == [Erase(0)]
    assert b.tell(Erased(0)) == []
    b.run("whole", BATCH, slot=0, kv=1000)


def test_under_a_shared_budget_room_is_made_ahead_as_well() -> None:
    """As much as the last foreground turn needed; erasing it takes a call too."""
    b = bench(1, 4, budget=1000)
    b.run("a", BATCH, slot=0, used=350)
    assert b.claimed("f1", FOREGROUND, kv=550) == [Pause("a", "f1"), Start("f1", 1)]
    assert b.tell(Started("f1", 60)) == []
    assert b.pause("a", 350) == []
    assert b.vanish("f1") == [Erase(1)]
    assert b.tell(Erased(1)) == [Resume("a", 0, Tier.RESIDENT)]
    assert b.claimed("n", NORMAL, kv=390) == [Pause("a", "n"), Start("n", 1)]
    assert b.tell(Started("n", 60)) == []
    assert b.pause("a", 350) == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1", 350) == [MarkSwapped("a", "kv-1"), Erase(0)]
    assert b.tell(Erased(0)) == []
    assert b.claimed("f2", FOREGROUND, kv=550) == [Pause("n", "f2"), Start("f2", 0)]


# 3. Idle cache on the way of the highest class -----------------------------------------------------------


def dirty_cache() -> Bench:
    """A foreground turn decodes in slot 0, and slot 1 holds an idle cache that has no copy."""
    b = bench(2, 2)
    b.run("f1", FOREGROUND, slot=0)
    b.run("x", BATCH, slot=1)
    assert b.end("x") == []
    return b


def test_idle_cache_is_given_up_for_the_foreground_without_a_save() -> None:
    b = dirty_cache()
    assert b.claimed("f2", FOREGROUND) == [Start("f2", 1)]
    assert b.swap.saves == 0


def test_idle_cache_is_saved_before_others_take_its_slot() -> None:
    b = dirty_cache()
    assert b.claimed("n", NORMAL) == []
    assert b.vanish("f1") == [Start("n", 0), Save(1, "kv-1", None)]


# 4. Rent -------------------------------------------------------------------------------------------------


def taxed(priority: int, *, tax: float = 5e-6) -> Bench:
    """`long` is paused with 2,000 tokens, which slow each step by a measured tax; a turn `n` runs.

    To save and restore 2,000 tokens takes 30 ms; at 10 ms more for a step of 30 ms that is due after 90 ms.
    """
    b = bench(1, 3, budget=8000)
    b.run("long", BATCH, slot=0, kv=3000)
    b.measured(prefill_s=2.0, save_s=0.010, restore_s=0.005, turn="long")
    for tokens in range(100, 2001, 20):
        assert b.tell(Progressed("long", tokens)) == []
        assert b.tell(Stepped(STEP_S)) == []
    assert b.claimed("n", priority, kv=1000) == [Pause("long", "n"), Start("n", 1)]
    assert b.tell(Started("n", 100)) == []
    assert b.pause("long", 2000) == []
    for tokens in range(100, 901, 10):
        assert b.tell(Progressed("n", tokens)) == []
        assert b.tell(Stepped(STEP_S + 2000 * tax)) == []
    return b


def test_parked_kv_that_has_cost_its_swap_is_swapped() -> None:
    b = taxed(NORMAL)
    assert b.scheduler.view().costs.parked_step_s == pytest.approx(5e-6, rel=0.01)
    assert b.at(0.05) == []
    assert b.at(0.20) == [Save(0, "kv-1", "long")]
    assert b.at(0.21) == []
    assert b.saved(0, "kv-1", 2000) == [MarkSwapped("long", "kv-1"), Erase(0)]
    assert b.tell(Erased(0)) == []
    assert b.turn("long").tier is Tier.SWAPPED
    assert b.vanish("n") == [Resume("long", 0, Tier.SWAPPED, "kv-1"), Erase(1)]


def test_parked_kv_that_costs_nothing_stays() -> None:
    b = taxed(NORMAL, tax=0.0)
    for now in (1.0, 100.0, 1000.0):
        assert b.at(now) == []
    assert b.turn("long").tier is Tier.RESIDENT


def test_a_turn_that_gets_its_place_while_its_rent_is_collected_goes_on_in_its_slot() -> None:
    b = taxed(NORMAL)
    assert b.at(0.20) == [Save(0, "kv-1", "long")]
    assert b.vanish("n") == []
    assert b.saved(0, "kv-1", 2000) == [Forget("kv-1"), Resume("long", 0, Tier.RESIDENT), Erase(1)]
    assert b.tell(Started("long", 2000, 1999)) == []
    assert b.end("long", 2100)[-1:] != [Erase(0)], "what was to be given up then is forgotten"


def test_rent_is_not_collected_while_the_foreground_decodes() -> None:
    b = taxed(FOREGROUND)
    for now in (0.2, 10.0, 100.0):
        assert b.at(now) == []
    assert b.vanish("n") == [Resume("long", 0, Tier.RESIDENT), Erase(1)]
    assert b.swap.saves == 1, "the one that was measured elsewhere"


def test_where_nothing_can_be_swapped_there_is_no_rent() -> None:
    b = taxed(NORMAL)
    assert b.tell(SaveFailed(2, "elsewhere")) == []
    assert b.at(1.0) == []
    assert b.at(5.0) == [Save(0, "kv-1", "long")]


# 5. What a new turn begins with --------------------------------------------------------------------------

SYSTEM: Prefix = (1, 2)
ANN: Prefix = (*SYSTEM, 11, 12, 13)
BOB: Prefix = (*SYSTEM, 21, 22, 23)


def in_a_file(*, used: int = 300) -> Bench:
    """Ann's last turn is an idle cache in the file kv-1 alone; slot 0 is free but for a few tokens."""
    b = bench(1, 1)
    assert b.claimed("a1", NORMAL, kv=1000, agent="ann", prefix=ANN) == [Start("a1", 0)]
    assert b.tell(Started("a1", used)) == []
    assert b.end("a1", used) == [Save(0, "kv-1", None)]
    assert b.saved(0, "kv-1", used) == []
    assert b.claimed("z", NORMAL, agent="zoe", prefix=(77,)) == [Start("z", 0)]
    assert b.tell(Started("z", 5)) == []
    assert b.end("z", 5) == []
    assert (b.swap.files, b.swap.turns) == (1, 0)
    return b


def test_it_goes_on_in_its_agents_idle_slot() -> None:
    b = bench(1, 3)
    b.run("a1", NORMAL, slot=0, agent="ann", prefix=ANN)
    assert b.end("a1", 300) == []
    b.run("b1", NORMAL, slot=1, agent="bob", prefix=(9, 8))
    assert b.end("b1", 300) == []
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0)]


def test_in_its_own_slot_it_needs_no_copy() -> None:
    b = bench(1, 1)
    b.run("a1", NORMAL, slot=0, agent="ann", prefix=ANN)
    assert b.end("a1", 300) == [Save(0, "kv-1", None)]
    assert b.saved(0, "kv-1", 300) == []
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Forget("kv-1"), Start("a2", 0)]
    assert b.swap.files == 0


def test_it_waits_for_a_save_of_its_own_cache() -> None:
    b = bench(1, 1)
    b.run("a1", NORMAL, slot=0, agent="ann", prefix=ANN)
    assert b.end("a1", 300) == [Save(0, "kv-1", None)]
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == []
    assert b.saved(0, "kv-1", 300) == [Forget("kv-1"), Start("a2", 0)]


def test_it_goes_on_from_its_agents_file() -> None:
    b = in_a_file()
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0, "kv-1")]
    assert b.tell(Restored("a2", 300, 0.001)) == []
    assert b.tell(Started("a2", 350, 300)) == [Forget("kv-1")], "its KV contains the file's"
    assert (b.swap.files, b.swap.restores) == (0, 1)


def test_it_begins_with_what_it_shares_with_another_agents_file() -> None:
    b = in_a_file()
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 0, "kv-1")]
    assert b.tell(Restored("b1", 300, 0.001)) == []
    assert b.tell(Started("b1", 250, 120)) == [], "Ann goes on from it still"
    assert b.swap.files == 1
    assert b.vanish("b1") == []
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0, "kv-1")]


@pytest.mark.parametrize(
    ("prefix", "kv", "why"),
    [
        ((5, 6), 400, "it shares nothing"),
        ((), 400, "nothing is known of its prompt"),
        ((1, 99), 400, "60 tokens are too few"),
        (BOB, 299, "the file is larger than its reservation"),
    ],
)
def test_it_begins_with_nothing(prefix: Prefix, kv: int, why: str) -> None:
    b = in_a_file()
    b = bench(1, 1, budget=2000) if kv < 300 else b
    if kv < 300:
        b.run("a1", NORMAL, slot=0, kv=1000, agent="ann", prefix=ANN, used=300)
        assert b.end("a1", 300) == [Save(0, "kv-1", None)]
        assert b.saved(0, "kv-1", 300) == []
    assert b.claimed("b1", NORMAL, kv=kv, agent="bob", prefix=prefix) == [Start("b1", 0)], why


@pytest.mark.parametrize(("prefill_s", "source"), [(2.0, "kv-1"), (0.130, None)])
def test_a_file_is_used_where_that_takes_less_time_than_to_evaluate(
    prefill_s: float, source: str | None
) -> None:
    """120 tokens are gained, 300 restored: 1.5 ms and a step of 25 ms against 240 or 15.6 ms."""
    b = in_a_file()
    b.run("m", NORMAL, slot=0)
    b.measured(prefill_s=prefill_s, save_s=0.010, restore_s=0.005, turn="m")
    assert b.tell(Stepped(STEP_S)) == []
    assert b.vanish("m") == []
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 0, source)]


def live(*, prefill_s: float | None = None) -> Bench:
    """Ann's idle cache of 300 tokens is in slot 0 and has no copy; slot 1 is free."""
    b = bench(1, 3)
    b.run("m", NORMAL, slot=0)
    if prefill_s is not None:
        b.measured(prefill_s=prefill_s, save_s=0.010, restore_s=0.005, turn="m")
        assert b.tell(Stepped(STEP_S)) == []
    assert b.vanish("m") == []
    b.run("a1", NORMAL, slot=0, agent="ann", prefix=ANN, used=300)
    assert b.end("a1", 300) == []
    return b


@pytest.mark.parametrize("prefill_s", [None, 2.0])
def test_a_slot_is_saved_for_what_it_shares(prefill_s: float | None) -> None:
    b = live(prefill_s=prefill_s)
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Save(0, "kv-1", None)]
    assert b.saved(0, "kv-1", 300) == [Start("b1", 1, "kv-1")]
    assert b.tell(Restored("b1", 300, 0.001)) == []
    assert b.tell(Started("b1", 250, 120)) == []
    assert b.slot(0).copy


def test_a_slot_is_not_saved_where_that_does_not_pay() -> None:
    b = live(prefill_s=0.400)  # 48 ms, against 4.5 ms and two steps
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 1)]
    assert b.swap.saves == 1, "the one that was measured elsewhere"


def test_its_source_is_not_given_up_for_the_cache_in_its_slot() -> None:
    """There is room for one file: the one that the turn is to begin with, or that of a stranger's cache."""
    swap = SwapPolicy(file_bytes(300), token_bytes=TOKEN - 16)
    b = Bench(Policy(1, 2, first_slots=1, swap=swap))
    b.run("a1", NORMAL, slot=1, agent="ann", prefix=ANN, used=300)
    assert b.end("a1", 300) == []
    assert b.claimed("z", NORMAL, prefix=(9,)) == [Save(1, "kv-1", None)]
    assert b.saved(1, "kv-1", 300) == [Start("z", 1)]
    assert b.tell(Started("z", 100)) == []
    assert b.end("z", 100) == []
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 1, "kv-1")]


# 6. Tiers that do not work -------------------------------------------------------------------------------


def hybrid(*, swap: int | None = 1 << 20, engine_slots: int = 3) -> Bench:
    """An engine that evaluated everything again on two resident resumes of `a`, which runs in slot 0."""
    b = bench(1, engine_slots, swap=swap)
    b.run("a", BATCH, slot=0)
    for _ in range(2):
        assert b.tell(HoldRequested("a")) == [Pause("a", None)]
        assert b.pause("a") == []
        assert b.tell(ReleaseRequested("a")) == [Resume("a", 0, Tier.RESIDENT)]
        assert b.tell(Started("a", 101, 0)) == []
    assert b.scheduler.view().costs.resident_reevaluated == 1.0
    return b


def test_resident_kv_that_is_of_no_use_goes_to_a_file_at_once() -> None:
    b = hybrid()
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Erase(0)]
    assert b.tell(Erased(0)) == []
    assert b.vanish("n") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]


@pytest.mark.parametrize("swap", [None, 0])
def test_resident_kv_that_is_of_no_use_is_dropped_at_once_without_a_folder(swap: int | None) -> None:
    b = hybrid(swap=swap)
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.pause("a") == [MarkDropped("a"), Erase(0)]
    assert b.tell(Erased(0)) == []
    assert b.vanish("n") == [Resume("a", 0, Tier.DROPPED)]


def test_it_is_dropped_when_its_save_fails() -> None:
    b = hybrid()
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.tell(SaveFailed(0, "kv-1")) == [MarkDropped("a"), Erase(0)]


def test_it_goes_to_a_file_after_the_save_that_is_under_way() -> None:
    b = hybrid(engine_slots=4)
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.tell(Started("n", 100)) == []
    assert b.claimed("m", NORMAL + 1) == [Pause("n", "m"), Start("m", 2)]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.pause("n") == []
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Erase(0)]
    assert b.tell(Erased(0)) == []
    assert b.at(1.0) == [Save(1, "kv-2", "n")]
    assert b.saved(1, "kv-2") == [MarkSwapped("n", "kv-2"), Erase(1)]


def test_it_goes_to_a_file_after_the_foreground_is_done() -> None:
    b = hybrid(engine_slots=4)
    assert b.tell(HoldRequested("a")) == [Pause("a", None), *()]
    b.run("fg", FOREGROUND, slot=1)
    assert b.pause("a") == []
    assert b.at(100.0) == []
    assert b.vanish("fg") == []
    assert b.at(101.0) == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Erase(0)]


def swapped(b: Bench, turn: str, cached: int) -> None:
    """`a` is swapped for `turn`, which leaves again, and finds `cached` of its 100 tokens."""
    assert b.claimed(turn, NORMAL) == [Pause("a", turn)]
    (save,) = b.pause("a")
    assert isinstance(save, Save)
    assert b.saved(0, save.key) == [MarkSwapped("a", save.key), Start(turn, 0)]
    assert b.vanish(turn) == [Resume("a", 0, Tier.SWAPPED, save.key)]
    assert b.tell(Restored("a", 100, 0.001)) == []
    assert b.tell(Started("a", 101, cached)) == [Forget(save.key)]


def test_files_of_no_use_are_no_longer_made() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    for turn, cached in (("n1", 100), ("n2", 5), ("n3", 5)):
        swapped(b, turn, cached)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [MarkDropped("a"), Start("n", 0)]


@pytest.mark.parametrize("tier", [Tier.RESIDENT, Tier.SWAPPED])
def test_a_tier_that_did_not_work_is_tried_again_some_day(tier: Tier) -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    if tier is Tier.SWAPPED:
        swapped(b, "n2", 5)
        swapped(b, "n3", 5)
    else:
        b = hybrid(swap=None)
    tried = []
    for day in range(100):
        b.claimed(f"d{day}", NORMAL)
        commands = b.pause("a")
        if tier is Tier.SWAPPED and isinstance(commands[0], Save):
            tried.append(day)
            b.saved(0, commands[0].key)
        elif tier is Tier.RESIDENT and not any(isinstance(command, Erase) for command in commands):
            tried.append(day)
        else:
            assert MarkDropped("a") in commands
        for command in commands:
            if isinstance(command, Erase):
                b.tell(Erased(command.slot))
        b.vanish(f"d{day}")
        b.tell(Started("a", 101, 0))
    assert 2 <= len(tried) <= 4 and tried[0] >= 14, "twice as seldom each time"


# Failures ------------------------------------------------------------------------------------------------


def test_a_save_that_fails_under_pressure_drops_the_kv_and_others_are_not_tried_for_a_while() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.tell(SaveFailed(0, "kv-1")) == [MarkDropped("a"), Start("n", 0)]
    assert (b.swap.failures, b.swap.files, b.swap.used_bytes, b.swap.paused_until) == (1, 0, 0, 5.0)
    assert b.tell(Started("n", 100)) == []
    b.now = 4.9
    assert b.claimed("fg", FOREGROUND) == [Pause("n", "fg")]
    assert b.pause("n") == [MarkDropped("n"), Start("fg", 0)]
    assert b.vanish("fg") == [Resume("n", 0, Tier.DROPPED)]
    assert b.tell(Started("n", 101, 0)) == []
    b.now = 5.0
    assert b.claimed("f2", FOREGROUND) == [Pause("n", "f2")]
    assert b.pause("n") == [Save(0, "kv-2", "n")]
    assert b.tell(SaveFailed(0, "kv-2")) == [MarkDropped("n"), Start("f2", 0)]
    assert b.swap.paused_until == 15.0


def test_an_engine_that_comes_back_may_save_again_at_once() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    b.tell(SaveFailed(0, "kv-1"))
    assert b.swap.paused_until is not None
    b.tell(EngineLost())
    b.tell(EngineReady())
    assert b.swap.paused_until is None


def test_files_that_cannot_be_restored_are_no_longer_made() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    for turn in ("n1", "n2", "n3", "n4", "n5"):
        assert b.claimed(turn, NORMAL) == [Pause("a", turn)]
        (command, *_) = b.pause("a")
        if isinstance(command, MarkDropped):
            return
        assert isinstance(command, Save)
        assert b.saved(0, command.key) == [MarkSwapped("a", command.key), Start(turn, 0)]
        assert b.vanish(turn) == [Resume("a", 0, Tier.SWAPPED, command.key)]
        assert b.tell(RestoreFailed("a")) == [Forget(command.key)]
        assert b.tell(Started("a", 101, 0)) == []
    raise AssertionError("saved five times for nothing")


def test_a_restore_that_fails_costs_a_recompute() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 0)]
    assert b.vanish("n") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]
    assert b.tell(RestoreFailed("a")) == [Forget("kv-1")]
    assert b.tell(Started("a", 101, 0)) == []
    assert (b.swap.files, b.swap.failures) == (0, 1)
    assert b.turn("a").phase == "running"
    assert b.scheduler.view().costs.swapped_reevaluated == 1.0, "a file that is of no use found nothing"


def only_in_a_file() -> Bench:
    """`p` is held and its KV in the file kv-1 alone; `y` runs in slot 0, and slot 1 is free."""
    b = bench(2, 2)
    b.run("p", BATCH, slot=0, kv=1000, agent="ann", prefix=ANN, used=300)
    assert b.tell(HoldRequested("p")) == [Pause("p", None)]
    assert b.pause("p", 300) == []
    b.run("x", NORMAL, slot=1, prefix=(9,))
    assert b.claimed("y", NORMAL, prefix=(8,)) == [Save(0, "kv-1", "p")]
    assert b.saved(0, "kv-1", 300) == [MarkSwapped("p", "kv-1"), Start("y", 0)]
    assert b.tell(Started("y", 10)) == []
    assert b.vanish("x") == []
    return b


def test_a_reader_of_another_turns_file_leaves_it_there() -> None:
    b = only_in_a_file()
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 1, "kv-1")]
    assert b.tell(Restored("b1", 300, 0.001)) == []
    assert b.tell(Started("b1", 250, 120)) == []
    assert b.turn("p").tier is Tier.SWAPPED
    assert b.vanish("b1") == []
    assert b.tell(ReleaseRequested("p")) == [Resume("p", 1, Tier.SWAPPED, "kv-1")]


def test_a_file_that_failed_another_reader_is_still_its_owners() -> None:
    b = only_in_a_file()
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 1, "kv-1")]
    assert b.tell(RestoreFailed("b1")) == []
    assert b.tell(Started("b1", 250, 0)) == []
    assert b.vanish("b1") == []
    assert b.claimed("b2", NORMAL, agent="ben", prefix=BOB) == [Start("b2", 1)], "nobody else is sent there"
    assert b.vanish("b2") == []
    assert b.tell(ReleaseRequested("p")) == [Resume("p", 1, Tier.SWAPPED, "kv-1")]
    assert b.tell(RestoreFailed("p")) == [Forget("kv-1")]
    assert b.tell(Started("p", 301, 0)) == []
    assert b.swap.files == 0


def two_readers() -> Bench:
    """`p` and Bob's turn `b1` are both about to be restored from kv-1."""
    b = only_in_a_file()
    assert b.vanish("y") == []
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Start("b1", 0, "kv-1")]
    assert b.tell(ReleaseRequested("p")) == [Resume("p", 1, Tier.SWAPPED, "kv-1")]
    return b


def test_a_file_with_two_readers_is_forgotten_after_both() -> None:
    b = two_readers()
    assert b.tell(RestoreFailed("p")) == [], "the other reads it still"
    assert b.swap.turns == 0
    assert b.tell(RestoreFailed("b1")) == [Forget("kv-1")]
    assert b.swap.files == 0


def test_a_file_that_failed_its_owner_is_forgotten_after_its_other_reader() -> None:
    b = two_readers()
    assert b.tell(RestoreFailed("p")) == []
    assert b.tell(Started("p", 301, 0)) == []
    assert b.tell(Restored("b1", 300, 0.001)) == []
    assert b.tell(Started("b1", 250, 120)) == [Forget("kv-1")]
    assert b.swap.files == 0


def test_a_file_that_its_owner_grew_out_of_is_left_to_its_other_reader() -> None:
    b = two_readers()
    assert b.tell(Restored("p", 300, 0.001)) == []
    assert b.tell(Started("p", 301, 300)) == []
    assert (b.swap.files, b.swap.turns) == (1, 0)
    assert b.tell(Restored("b1", 300, 0.001)) == []
    assert b.tell(Started("b1", 250, 120)) == []
    assert (b.swap.files, b.swap.turns) == (1, 0), "an idle cache, and the first to go"


def test_a_copy_that_is_read_while_its_turn_goes_on_is_no_copy_any_more() -> None:
    b = bench(2, 3)
    b.run("p", BATCH, slot=0, kv=1000, agent="ann", prefix=ANN, used=300)
    b.run("x", BATCH, slot=1, used=20, prefix=(9,))
    assert b.end("x", 20) == []
    assert b.tell(HoldRequested("p")) == [Pause("p", None)]
    assert b.pause("p", 300) == []
    assert b.claimed("b1", NORMAL, agent="bob", prefix=BOB) == [Save(0, "kv-1", "p")]
    assert b.saved(0, "kv-1", 300) == [Start("b1", 2, "kv-1")]
    assert b.tell(ReleaseRequested("p")) == [Resume("p", 0, Tier.RESIDENT)], "kv-1 is being read"
    assert b.tell(Restored("b1", 300, 0.001)) == []
    b.tell(Started("b1", 250, 120))
    assert b.tell(Started("p", 301, 300)) == []
    assert b.tell(Progressed("p", 600)) == []
    assert not b.slot(0).copy
    assert b.tell(HoldRequested("p")) == [Pause("p", None)]
    assert b.pause("p", 600)[:1] != [MarkSwapped("p", "kv-1")]
    assert not b.slot(0).copy, "the file has half of it"
    assert b.turn("p").swap_bytes == 0


# The engine's comings and goings -------------------------------------------------------------------------


def test_files_outlive_the_engine() -> None:
    b = bench(1, 2)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n"), Start("n", 1)]
    assert b.tell(Started("n", 100)) == []
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == []
    assert b.tell(EngineLost()) == [MarkSwapped("a", "kv-1")]
    assert b.tell(Paused("n", 0, resident=False)) == []
    assert b.tell(EngineReady()) == [Resume("n", 0, Tier.DROPPED)]
    assert b.vanish("n") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]


def test_idle_caches_in_files_outlive_the_engine() -> None:
    b = in_a_file()
    assert b.tell(EngineLost()) == []
    assert b.tell(EngineReady()) == []
    assert b.claimed("a2", NORMAL, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0, "kv-1")]


def test_the_engine_is_lost_while_a_turn_is_restored() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.saved(0, "kv-1") == [MarkSwapped("a", "kv-1"), Start("n", 0)]
    assert b.vanish("n") == [Resume("a", 0, Tier.SWAPPED, "kv-1")]
    assert b.tell(EngineLost()) == []
    assert b.tell(Paused("a", 0, resident=False)) == []
    assert b.turn("a").tier is Tier.SWAPPED
    assert b.tell(EngineReady()) == [Resume("a", 0, Tier.SWAPPED, "kv-1")]


@pytest.mark.parametrize("well", [True, False])
def test_the_engine_is_lost_while_a_slot_is_saved(well: bool) -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.tell(EngineLost()) == [MarkDropped("a")]
    assert (b.swap.files, b.swap.used_bytes) == (0, 0)
    late = Saved(0, "kv-1", 100, file_bytes(100), 0.001) if well else SaveFailed(0, "kv-1")
    assert b.tell(late) == ([Forget("kv-1")] if well else [])
    assert b.tell(EngineReady()) == [Start("n", 0)]


def test_a_save_that_a_lost_engine_still_owes_holds_up_no_other() -> None:
    b = bench(1, 1)
    b.run("a", BATCH, slot=0)
    assert b.claimed("n", NORMAL) == [Pause("a", "n")]
    assert b.pause("a") == [Save(0, "kv-1", "a")]
    assert b.tell(EngineLost()) == [MarkDropped("a")]
    assert b.tell(EngineReady()) == [Start("n", 0)]
    assert b.tell(Started("n", 100)) == []
    assert b.claimed("fg", FOREGROUND) == [Pause("n", "fg")]
    assert b.pause("n") == [Save(0, "kv-2", "n")]
    assert b.saved(0, "kv-1") == [Forget("kv-1")], "the answer of the one that was lost"
    assert b.saved(0, "kv-2") == [MarkSwapped("n", "kv-2"), Start("fg", 0)]


# Cancels -------------------------------------------------------------------------------------------------


def test_the_file_of_a_cancelled_turn_is_its_agents_idle_cache() -> None:
    b = bench(1, 1)
    b.run("a1", BATCH, slot=0, agent="ann", prefix=ANN, kv=1000, used=300)
    assert b.claimed("n", NORMAL, prefix=(9,)) == [Pause("a1", "n")]
    assert b.pause("a1", 300) == [Save(0, "kv-1", "a1")]
    assert b.saved(0, "kv-1", 300) == [MarkSwapped("a1", "kv-1"), Start("n", 0)]
    assert b.tell(CancelRequested("a1")) == [Discard("a1")]
    assert (b.swap.files, b.swap.turns) == (1, 0)
    assert b.vanish("n") == []
    assert b.claimed("a2", BATCH, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0, "kv-1")]


def test_a_turn_that_is_cancelled_while_it_is_saved_leaves_an_idle_cache_too() -> None:
    b = bench(1, 1)
    b.run("a1", BATCH, slot=0, agent="ann", prefix=ANN, kv=1000, used=300)
    assert b.claimed("n", NORMAL, prefix=(9,)) == [Pause("a1", "n")]
    assert b.pause("a1", 300) == [Save(0, "kv-1", "a1")]
    assert b.tell(CancelRequested("a1")) == [Discard("a1")]
    assert b.saved(0, "kv-1", 300) == [Start("n", 0)]
    assert b.vanish("n") == []
    assert b.claimed("a2", BATCH, agent="ann", prefix=(*ANN, 14)) == [Start("a2", 0, "kv-1")]


# The example that an engine without this rule does not survive -------------------------------------------


def complete(b: Bench, turns: Iterable[str], commands: list[Command]) -> list[str]:
    """Carry out commands, each running turn to its limit of 2,400 tokens; the order in which they end."""
    ended: list[str] = []
    running: list[str] = []
    waiting = list(commands)
    while waiting or running:
        if not waiting:
            waiting += b.end(turn := running.pop(0), 2400)
            ended.append(turn)
            continue
        match waiting.pop(0):
            case Claim(turn):
                waiting += b.tell(Claimed(turn))
            case Start(turn) | Resume(turn):
                running.append(turn)
                assert len(running) <= 2, "the pool holds two at their limits"
                waiting += b.tell(Started(turn, 1500))
                waiting += b.tell(Progressed(turn, 2400))
            case Pause(turn):
                running.remove(turn)
                waiting += b.pause(turn, 2400)
            case Save(slot, key):
                waiting += b.saved(slot, key, 2400)
            case Erase(slot):
                waiting += b.tell(Erased(slot))
            case _:
                pass
        assert b.scheduler.view().kv_tokens_charged <= 6144
    assert sorted(ended) == sorted(turns)
    return ended


@pytest.mark.parametrize("swap", [None, 1 << 20])
@pytest.mark.parametrize("priorities", [(NORMAL, NORMAL, NORMAL), (BATCH, BATCH, FOREGROUND), (0, 20, 50)])
def test_three_turns_of_2400_in_a_pool_of_6144(swap: int | None, priorities: tuple[int, ...]) -> None:
    b = bench(3, 4, budget=6144, swap=swap)
    commands: list[Command] = []
    for at, priority in enumerate(priorities):
        commands += b.tell(TurnQueued(f"t{at}", f"t{at}", priority, at, 2400))
    assert commands == [Claim("t0"), Claim("t1")] + [Claim("t2")] * (priorities[2] > priorities[0])
    complete(b, ("t0", "t1", "t2"), commands)
    assert b.scheduler.view().owned == ()
