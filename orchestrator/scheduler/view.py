"""The scheduler's state as others see it: frozen, for `/swarm/state` and tests."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.scheduler.costs import CostView
from orchestrator.scheduler.memory import Memory
from orchestrator.scheduler.slots import SlotView
from orchestrator.scheduler.swap import SwapView
from orchestrator.scheduler.turn import ON_ENGINE, Turn, TurnView
from orchestrator.turns import Tier


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's state as it stood when asked; `owned` leaves out turns that only wait."""

    slots: tuple[SlotView, ...]
    owned: tuple[TurnView, ...]
    waiting: int
    decoding: int
    kv_tokens_charged: int
    kv_owners: dict[str, int]
    """Charged tokens by what they are for; see `SlotTable.owners`."""
    swap: SwapView
    costs: CostView


def turn_view(turn: Turn, memory: Memory) -> TurnView:
    """An owned turn as it stands."""
    return TurnView(
        turn.id,
        turn.agent,
        turn.priority,
        turn.phase.value,
        turn.slot.id if turn.slot else None,
        turn.kv_tokens,
        turn.tier if turn.ran and turn.phase not in ON_ENGINE else None,
        turn.preemptions,
        memory.swap.ledger.of(turn.file.key) if turn.file is not None else 0,
        {tier: memory.costs.resume_s(tier, turn.kv_tokens) for tier in Tier},
    )
