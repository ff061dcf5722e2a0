"""The books of one memory balance, whatever is asked of them; and those of the engine's slots with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.scheduler import Ledger, LedgerError
from orchestrator.scheduler.slots import Slot, SlotState, SlotTable

OWNERS = st.sampled_from(["t1", "t2", "t3", 0, 1])
AMOUNTS = st.integers(-5, 60)
TOP = 100


class LedgerMachine(RuleBasedStateMachine):
    """A ledger beside a plain dictionary of what every owner holds."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str | int, int] = {}

    @initialize(budget=st.sampled_from([None, 0, 1, 50, 100]))
    def begin(self, budget: int | None) -> None:
        self.budget = budget
        self.ledger = Ledger(budget)

    @rule(owner=OWNERS, amount=AMOUNTS)
    def opens(self, owner: str | int, amount: int) -> None:
        if owner not in self.model and self.fits(0, amount):
            self.ledger.open(owner, amount)
            self.model[owner] = amount
        else:
            with pytest.raises(LedgerError):
                self.ledger.open(owner, amount)

    @rule(owner=OWNERS, amount=AMOUNTS)
    def changes(self, owner: str | int, amount: int) -> None:
        if owner in self.model and self.fits(self.model[owner], amount):
            self.ledger.change(owner, amount)
            self.model[owner] = amount
        else:
            with pytest.raises(LedgerError):
                self.ledger.change(owner, amount)

    @rule(owner=OWNERS)
    def closes(self, owner: str | int) -> None:
        if owner in self.model:
            assert self.ledger.close(owner) == self.model.pop(owner)
        else:
            with pytest.raises(LedgerError):
                self.ledger.close(owner)

    def fits(self, before: int, amount: int) -> bool:
        charged = sum(self.model.values()) + amount - before
        return amount >= 0 and (self.budget is None or charged <= self.budget)

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "ledger"):
            return
        charged = sum(self.model.values())
        assert self.ledger.charged == charged
        assert self.ledger.free == (None if self.budget is None else self.budget - charged)
        assert (self.ledger.free or 0) >= 0
        for owner in ("t1", "t2", "t3", 0, 1):
            assert self.ledger.of(owner) == self.model.get(owner, 0) >= 0
            assert (owner in self.ledger) == (owner in self.model)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_budget_below_nothing_is_refused() -> None:
    with pytest.raises(LedgerError, match="-1 is below nothing"):
        Ledger(-1)


def test_a_refusal_says_whose_account_and_what_would_become_of_it() -> None:
    ledger = Ledger(100)
    ledger.open("a", 60)
    for refused, said in (
        (lambda: ledger.open("b", 41), "b: 41 would make 101 of a budget of 100"),
        (lambda: ledger.open("a", 1), "a has an account already, of 60"),
        (lambda: ledger.change("b", 1), "b has no account"),
        (lambda: ledger.close("b"), "b has no account to release"),
        (lambda: ledger.change("a", -1), "a: -1 is below nothing"),
    ):
        with pytest.raises(LedgerError) as caught:
            refused()
        assert str(caught.value) == said
    assert (ledger.charged, ledger.of("a"), ledger.free) == (60, 60, 40)


# The engine's slots --------------------------------------------------------------------------------------


@dataclass
class ModelSlot:
    """Cells that an engine slot may hold at most, by the events it saw; `kv`: those that are known of."""

    state: SlotState = SlotState.EMPTY
    cells: int = 0
    kv: int = 0
    reserve: int = 0


class SlotsMachine(RuleBasedStateMachine):
    """Slots and their ledger beside a model of the engine's cells, for any sequence of what turns do."""

    @initialize(budget=st.sampled_from([None, 60, 120]), slots=st.integers(1, 4))
    def begin(self, budget: int | None, slots: int) -> None:
        self.budget = budget
        self.table = SlotTable(slots, budget, first=0, top_priority=TOP)
        self.model = [ModelSlot() for _ in range(slots)]
        self.turns = 0

    @rule(pick=st.integers(0, 3), reserve=st.integers(0, 70))
    def occupies(self, pick: int, reserve: int) -> None:
        slot, model = self.pick(pick)
        if model.state is SlotState.BUSY:
            return
        self.turns += 1
        wanted = max(reserve, model.cells)
        if self.budget is not None and self.cells() - model.cells + wanted > self.budget:
            before = self.table.view(), self.table.ledger.charged
            with pytest.raises(LedgerError):
                self.occupy(slot, reserve)
            assert (self.table.view(), self.table.ledger.charged) == before
            return
        self.occupy(slot, reserve)
        model.state, model.cells, model.kv, model.reserve = SlotState.BUSY, wanted, 0, reserve

    @rule(pick=st.integers(0, 3), used=st.integers(0, 70))
    def is_picked_up(self, pick: int, used: int) -> None:
        slot, model = self.pick(pick)
        if model.state is not SlotState.BUSY:
            return
        self.table.settle(slot, model.reserve)
        model.cells = model.reserve
        model.kv = slot.kv_tokens = min(used, model.reserve)

    @rule(pick=st.integers(0, 3), kv=st.integers(0, 80), idle=st.booleans())
    def leaves(self, pick: int, kv: int, idle: bool) -> None:
        """`kv` may be more than was reserved, which a turn that was counted wrongly leaves."""
        slot, model = self.pick(pick)
        if model.state is not SlotState.BUSY:
            return
        state = SlotState.IDLE if idle else SlotState.PAUSED
        self.table.leave(slot, state=state, kv_tokens=kv)
        fits = self.budget is None or self.cells() - model.cells + kv <= self.budget
        if kv and fits:
            model.state, model.cells, model.kv = state, kv, kv
        elif self.budget is None:
            model.state, model.cells, model.kv = SlotState.EMPTY, 0, 0
        elif model.cells:  # cells may be left behind
            model.state, model.kv = SlotState.IDLE, model.cells
            assert slot.agent is None
        else:
            model.state = SlotState.EMPTY

    @rule(pick=st.integers(0, 3))
    def is_cleared(self, pick: int) -> None:
        slot, model = self.pick(pick)
        if model.state is SlotState.BUSY:
            return
        self.table.clear(slot)
        model.state, model.cells, model.kv = SlotState.EMPTY, 0, 0

    def pick(self, pick: int) -> tuple[Slot, ModelSlot]:
        at = pick % len(self.model)
        return self.table.slots[at], self.model[at]

    def occupy(self, slot: Slot, reserve: int) -> None:
        self.table.occupy(slot, turn=f"t{self.turns}", agent="a", priority=20, reserve=reserve)

    def cells(self) -> int:
        return sum(model.cells for model in self.model)

    @invariant()
    def the_books_are_the_engines_count(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        assert table.ledger.charged == self.cells() == sum(table.charged(slot) for slot in table.slots)
        if self.budget is not None:
            assert table.ledger.charged <= self.budget
        owners = table.owners()
        assert sum(owners.values()) == table.ledger.charged
        assert all(tokens >= 0 for tokens in owners.values())
        for state, key in ((SlotState.PAUSED, "paused"), (SlotState.IDLE, "idle")):
            assert owners[key] == sum(model.cells for model in self.model if model.state is state)
        busy = [model for model in self.model if model.state is SlotState.BUSY]
        assert owners["running"] == sum(min(model.kv, model.cells) for model in busy)
        for slot, model, shown in zip(table.slots, self.model, table.view(), strict=True):
            assert (shown.id, shown.state, shown.kv_tokens) == (slot.id, model.state, model.kv)
            assert shown.turn is None or shown.state in (SlotState.BUSY, SlotState.PAUSED)
            assert (shown.agent is None) == (
                shown.state is SlotState.EMPTY or (slot.turn is None and slot.agent is None)
            )
            assert not shown.copy and not shown.saving


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_turn_that_reserves_nothing_leaves_no_account_behind() -> None:
    table = SlotTable(1, 100, first=0, top_priority=TOP)
    for turn in ("a", "b"):
        table.occupy(table.slots[0], turn=turn, agent="a", priority=0, reserve=0)
        table.settle(table.slots[0], 0)
        table.leave(table.slots[0], state=SlotState.IDLE, kv_tokens=0)
    assert table.ledger.charged == 0
