"""Whose prompt the engine evaluates first, where that is not whose turn it is.

The engine fills each batch in the order of its slots, so a prefill keeps those in later slots from starting
until it is over, which may take minutes. Slots are chosen with that in mind (`slots.py`), but KV that is
worth more than the order may be anywhere. What is left is mended here, by pauses that cost a batch each:

1. A long prefill gives way to a turn in a later slot that has a higher priority, or that is of the same agent
   and priority and has a quarter as much to evaluate at most: a client that asks for a title beside its
   large first prompt. Among different agents nobody gives way to an equal.
2. Who gives way keeps its decode slot from equals meanwhile, and goes on as soon as the other's prompt is
   evaluated. To go on sooner would be to take the very next batch again.
3. Nor does a long prompt start in a slot before such a turn's: it takes one further back, or waits.
4. To an equal a turn gives way `Policy.max_preemptions` times at most, all its preemptions counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.scheduler.turn import Phase, Turn

#: How many times as much an equal has to have left to give way.
GAIN = 4


def in_the_way(turn: Turn, others: Iterable[Turn], long_tokens: int) -> list[Turn]:
    """Those whose prefill should give way to the turn, which has its slot.

    Among them are those that give way to another turn already.
    """
    assert turn.slot is not None
    return [
        other
        for other in others
        if other.unevaluated >= long_tokens
        and (other.after or _evaluates(other))
        and other.slot is not None
        and other.slot.id < turn.slot.id
        and (other.priority < turn.priority or _is_little_beside(turn, other, other.unevaluated))
    ]


def behind(turn: Turn, slot_id: int, tokens: int, others: Iterable[Turn]) -> list[Turn]:
    """Those to which the turn gives way when it has `tokens` to evaluate and is to run in that slot."""
    return [
        other
        for other in others
        if other.unevaluated
        and _evaluates(other)
        and other.slot is not None
        and other.slot.id > slot_id
        and (
            other.priority > turn.priority or other.id in turn.after or _is_little_beside(other, turn, tokens)
        )
    ]


def _evaluates(turn: Turn) -> bool:
    return turn.phase is Phase.RUNNING and not turn.stopping


def _is_little_beside(turn: Turn, other: Turn, tokens: int) -> bool:
    """Whether the turn's prompt is short beside the `tokens` that another turn of its agent has left."""
    return turn.agent == other.agent and turn.priority == other.priority and GAIN * turn.unevaluated <= tokens
