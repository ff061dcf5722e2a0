"""How long an engine's work takes: the only numbers by which one simulated engine differs from another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How long an engine's work takes. Seconds; tokens.

    A step takes ``base_step_s + lane_s * lanes + running_token_s * running KV + parked_token_s * other KV
    + prefill_token_s * prompt tokens + group_s * (groups - 1)``. Lanes are the turns that decode; a turn
    whose prompt is evaluated costs by its prompt tokens in the batch, and its KV counts as running. Raises
    ValueError for a value that is negative or not finite, a step without a length, or a batch of less than
    one token.
    """

    base_step_s: float
    """A decode step without lanes or KV."""
    lane_s: float = 0.0
    """Each running lane adds."""
    running_token_s: float = 0.0
    """Each KV token of a running turn adds."""
    parked_token_s: float = 0.0
    """Each KV token that is resident but not running adds."""
    prefill_token_s: float = 0.0
    """Each prompt token in the batch adds."""
    group_s: float = 0.0
    """Each group of adjacent slots in the batch adds, but for the first: with split KV llama.cpp computes a
    step group by group (`llama_batch_allocr::split_equal`)."""
    batch_tokens: int = 512
    """Tokens of one step, decoding lanes included; these always have room."""
    save_token_s: float = 0.0
    """A save stalls every lane for so long, for each token saved."""
    restore_token_s: float = 0.0
    """A restore stalls every lane for so long, for each token restored."""
    flush_s: float = 0.0
    """From the boundary at which a victim stopped until the next step begins."""
    control_s: float = 0.0
    """The service: from an arrival until the engine has the request, if nothing else is in the way."""
    call_s: float = 0.0
    """The part of `control_s` that every call to the engine takes: from a command until it arrives there.

    With 0 a slot that a turn's end frees is filled at that same boundary, which no real service manages.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{field.name} is {value}; it must be 0 or more")
        if self.base_step_s <= 0 and self.lane_s <= 0:
            raise ValueError("base_step_s and lane_s are both 0: steps would take no time")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")

    def step_s(
        self, lanes: int, running_tokens: int, parked_tokens: int, prefill_tokens: int, groups: int = 1
    ) -> float:
        """The duration of one step; KV as it is when the step begins."""
        return (
            self.base_step_s
            + self.lane_s * lanes
            + self.running_token_s * running_tokens
            + self.parked_token_s * parked_tokens
            + self.prefill_token_s * prefill_tokens
            + self.group_s * (groups - 1)
        )


def groups_of(slots: Iterable[int]) -> int:
    """How many groups of adjacent slots these are; no slot twice."""
    found = set(slots)
    return sum(1 for slot in found if slot - 1 not in found)


class Steps(NamedTuple):
    """A row of steps with the same batch: the first takes `first_s`, each further one `growth_s` more."""

    first_s: float
    growth_s: float

    def take_s(self, count: int) -> float:
        """How long `count` steps take: an arithmetic series."""
        return count * self.first_s + self.growth_s * (count * (count - 1) // 2)

    def done_at(self, after_s: float) -> int:
        """How many whole steps are done so long after the first began."""
        if after_s <= 0:
            return 0
        first, growth = self
        if growth <= 0:
            count = int(after_s / first)
        else:
            # count * first + growth * count * (count - 1) / 2 = after
            b = first - growth / 2
            count = int((math.sqrt(b * b + 2 * growth * after_s) - b) / growth)
        # The root is rounded: it may be one off where a step ends just now.
        while count and self.take_s(count) > after_s:
            count -= 1
        while self.take_s(count + 1) <= after_s:
            count += 1
        return count
