"""The same run with other seeds, and how sure its figures are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.simulation.outcome import Outcome
from orchestrator.simulation.setup import Setup
from orchestrator.simulation.simulation import simulate

#: Student's t for 95% by degrees of freedom, 1 to 30.
_T95 = (
    *(
        12.706,
        4.303,
        3.182,
        2.776,
        2.571,
        2.447,
        2.365,
        2.306,
        2.262,
        2.228,
        2.201,
        2.179,
        2.160,
        2.145,
        2.131,
    ),
    *(
        2.120,
        2.110,
        2.101,
        2.093,
        2.086,
        2.080,
        2.074,
        2.069,
        2.064,
        2.060,
        2.056,
        2.052,
        2.048,
        2.045,
        2.042,
    ),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over replications and half the width of its 95% confidence interval (Student's t).

    `half` is NaN for a single replication.
    """

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def within(self, low: float, high: float) -> bool:
        """Whether all of it lies between these, both included."""
        return low <= self.low and self.high <= high


def interval(values: Sequence[float]) -> Interval:
    """The interval of values from independent replications; NaN where one has no value."""
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    if count < 2:
        return Interval(mean, math.nan)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    t = _T95[count - 2] if count - 2 < len(_T95) else 1.96 + 2.4 / (count - 1)
    return Interval(mean, t * deviation / math.sqrt(count))


def replicate(
    setup: Setup,
    *,
    seed: int,
    replications: int,
    until_s: float | None = None,
    until_turns: int | None = None,
    warmup_s: float = 0.0,
    on_time: Callable[[int, float, int], None] | None = None,
) -> list[Outcome]:
    """Runs with the seeds `seed`, `seed + 1`, ...; `on_time` is told which run, its time and its turns."""
    outcomes = []
    for number in range(replications):

        def progress(now: float, ended: int, number: int = number) -> None:
            if on_time is not None:
                on_time(number, now, ended)

        outcomes.append(
            simulate(
                setup,
                seed=seed + number,
                until_s=until_s,
                until_turns=until_turns,
                warmup_s=warmup_s,
                on_time=progress,
            )
        )
    return outcomes


def quantiles(outcomes: Sequence[Outcome], name: str, shares: Sequence[float]) -> list[Interval]:
    """The waits of one class: an interval for each of these quantiles, of the replications' own."""
    return [interval([each.classes[name].wait.quantile(share) for each in outcomes]) for share in shares]


def worst(outcomes: Sequence[Outcome], name: str) -> float:
    """The longest wait of one class; NaN without turns. No interval: more runs find longer ones."""
    return max(
        (each.classes[name].wait.largest for each in outcomes if each.classes[name].wait.count),
        default=math.nan,
    )
