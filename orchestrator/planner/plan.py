"""How many turns fit into a GPU's memory, running and paused.

What is fixed is taken off what is usable: `kv budget = usable - weights - buffers`. A turn takes
`KvShape.bytes` of its tokens, so of the budget there is left, besides the running turns,
`headroom = budget - running turns * bytes(average context)`. Paused turns stay where they are while they
fit into that; beyond it, a turn is swapped out or recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.kv_shape import UNBOUNDED_TOKENS, KvShape

#: Numbers of paused turns that the chart has a column for.
PAUSED_COLUMNS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Memory:
    """A GPU's memory in bytes: what an engine may use of it, and what of that is not KV."""

    usable: int
    weights: int
    buffers: int

    @property
    def fixed(self) -> int:
        return self.weights + self.buffers

    @property
    def kv_budget(self) -> int:
        """Bytes for KV; negative when not even the model fits."""
        return self.usable - self.fixed


@dataclass(frozen=True, slots=True)
class Load:
    """Turns that run at once, the average context of one in tokens, and that of the long paused one."""

    running: int
    context: int
    long_context: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits with one cache type. All sizes are bytes."""

    cache_type: str
    kv: KvShape
    memory: Memory
    load: Load

    @property
    def turn(self) -> int:
        """One turn of the average context."""
        return self.kv.bytes(self.load.context)

    @property
    def running(self) -> int:
        """All running turns."""
        return self.load.running * self.turn

    @property
    def headroom(self) -> int:
        """What is left for paused turns; negative when the running ones do not fit."""
        return self.memory.kv_budget - self.running

    @property
    def average_paused(self) -> int:
        """Paused turns of the average context that fit beside the running ones."""
        return max(0, self.headroom) // self.turn

    @property
    def long_turn(self) -> int:
        """One turn of the long context."""
        return self.kv.bytes(self.load.long_context)

    @property
    def long_left(self) -> int:
        """What a paused long turn leaves of the headroom; negative: by so much it does not fit."""
        return self.headroom - self.long_turn

    @property
    def longest_paused(self) -> int | None:
        """Tokens of the longest paused turn that fits; None when any does."""
        tokens = self.kv.tokens(self.headroom)
        return None if tokens == UNBOUNDED_TOKENS else tokens


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the chart: memory in use with so many paused turns, from the bottom up."""

    label: str
    weights: int
    buffers: int
    running: int
    paused: int
    over: int
    """Of the above, what is beyond the usable memory."""

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.running + self.paused

    @property
    def within(self) -> tuple[int, int, int, int]:
        """Weights, buffers, running and paused turns, each without what is beyond the usable memory."""
        room, shown = self.total - self.over, []
        for part in (self.weights, self.buffers, self.running, self.paused):
            shown.append(min(part, room))
            room -= shown[-1]
        return shown[0], shown[1], shown[2], shown[3]


def columns(plan: Plan) -> tuple[Column, ...]:
    """The columns of the chart: each number of average paused turns, then the single long one."""
    counted = [(str(number), number * plan.turn) for number in PAUSED_COLUMNS]
    return tuple(
        _column(plan, label, paused)
        for label, paused in [*counted, (f"one of {tokens_text(plan.load.long_context)}", plan.long_turn)]
    )


def _column(plan: Plan, label: str, paused: int) -> Column:
    memory = plan.memory
    total = memory.fixed + plan.running + paused
    return Column(
        label, memory.weights, memory.buffers, plan.running, paused, over=max(0, total - memory.usable)
    )


def tokens_text(tokens: int) -> str:
    """Tokens as `16k` where that is exact (k = 1,024), else as a number."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 and tokens else f"{tokens:,}"
