"""What this backend's memory work costs, as measured: prefill, save, restore, and parked KV.

Nothing is assumed: a figure that nobody has measured is None, and a choice that needs it is made the way
that the design prefers (keep, then swap, then drop).

The decode step is fitted as ``a + b*lanes + c*running_tokens + d*parked_tokens`` by least squares over
what was seen, older samples fading. `d` is the *parking tax*: what a token of KV that nobody decodes costs
every step. It is large under a unified layout, where each lane's attention runs over the whole pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.turns import Tier

SMOOTHING = 0.2
FADING = 0.998
MIN_PREFILL_TOKENS = 32
MIN_SAMPLES = 50
#: A resume that finds less than this of its KV did not work as a resume.
WORKS_FROM = 0.1
FAILURES_TO_DEMOTE = 2
#: Tokens that any resume evaluates again: the last one, and one that its reader never got.
ALWAYS_AGAIN = 2
#: A tier that did not work is tried again once it was passed over so often; twice as often each time.
PASSES_BEFORE_RETRY, MOST_PASSES = 16, 256
#: How much of what is parked has to have varied by itself, before its price can be told from a step's own.
VARIED_FROM = 1e-3
_FEATURES = 4


@dataclass(frozen=True, slots=True)
class CostView:
    """The figures as they stood when asked, each None until measured. Seconds per token of KV."""

    prefill_s: float | None
    save_s: float | None
    restore_s: float | None
    parked_step_s: float | None
    step_s: float | None
    resident_reevaluated: float | None
    swapped_reevaluated: float | None


class _Rate:
    """Seconds per token, smoothed."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        if tokens <= 0 or not 0 <= seconds < math.inf:
            return
        rate = seconds / tokens
        self.value = rate if self.value is None else self.value + SMOOTHING * (rate - self.value)


class Costs:
    """Running estimates; pure and deterministic."""

    def __init__(self) -> None:
        self._prefill, self._save, self._restore = _Rate(), _Rate(), _Rate()
        self._lost: dict[Tier, float | None] = {Tier.RESIDENT: None, Tier.SWAPPED: None}
        self.another_engine()
        self._moments = [[0.0] * (_FEATURES + 1) for _ in range(_FEATURES)]
        self._samples = 0
        self._parked_step_s: float | None = None
        self._step_s: float | None = None

    def another_engine(self) -> None:
        """What did not work may work now: another build, or other options."""
        self._failed = {Tier.RESIDENT: 0, Tier.SWAPPED: 0}
        self._passed = {Tier.RESIDENT: 0, Tier.SWAPPED: 0}
        self._passes = {Tier.RESIDENT: PASSES_BEFORE_RETRY, Tier.SWAPPED: PASSES_BEFORE_RETRY}

    # What was measured -------------------------------------------------------------------------------

    def prefilled(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were evaluated in that time, whatever else was in the batch."""
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._prefill.add(tokens, seconds)

    def saved(self, tokens: int, seconds: float) -> None:
        """A save stalled the engine for that long."""
        self._save.add(tokens, seconds)

    def restored(self, tokens: int, seconds: float) -> None:
        """A restore stalled the engine for that long."""
        self._restore.add(tokens, seconds)

    def resumed(self, tier: Tier, held: int, cached: int) -> None:
        """A resume of a turn whose KV of `held` tokens was in `tier` found `cached` of them."""
        if tier is Tier.DROPPED or held <= 0:
            return
        lost = 1.0 - min(cached, held) / held
        before = self._lost[tier]
        self._lost[tier] = lost if before is None else before + SMOOTHING * (lost - before)
        if cached < WORKS_FROM * held and held - cached > ALWAYS_AGAIN:
            self._failed[tier] += 1
        else:
            self._failed[tier] = 0
            self._passes[tier] = PASSES_BEFORE_RETRY

    def passed_over(self, tier: Tier) -> None:
        """A turn's KV would have gone to `tier`, had it worked."""
        self._passed[tier] += 1
        if self._passed[tier] >= self._passes[tier]:
            self._passed[tier] = 0
            self._passes[tier] = min(2 * self._passes[tier], MOST_PASSES)
            self._failed[tier] = FAILURES_TO_DEMOTE - 1

    def stepped(self, step_s: float, lanes: int, running_tokens: int, parked_tokens: int) -> None:
        """A decode step as it was seen, with that much in the batch and beside it."""
        if not 0 <= step_s < math.inf:
            return
        self._step_s = step_s if self._step_s is None else self._step_s + SMOOTHING * (step_s - self._step_s)
        # In thousands of tokens, so that the four columns are of like size.
        row = (1.0, float(lanes), running_tokens / 1e3, parked_tokens / 1e3, step_s)
        for i, line in enumerate(self._moments):
            for j in range(_FEATURES + 1):
                line[j] = FADING * line[j] + row[i] * row[j]
        self._samples += 1
        self._parked_step_s = None

    # What follows from it ----------------------------------------------------------------------------

    def works(self, tier: Tier) -> bool:
        """Whether resumes from `tier` find their KV; taken as true until they did not, twice running.

        Then it is tried again now and then: see `passed_over`.
        """
        return tier is Tier.DROPPED or self._failed[tier] < FAILURES_TO_DEMOTE

    def parked_step_s(self) -> float | None:
        """Seconds that one parked token adds to each decode step.

        None while nothing was parked, or always the same.
        """
        if self._samples < MIN_SAMPLES:
            return None
        if self._parked_step_s is None and (slope := _last_slope(self._moments)) is not None:
            self._parked_step_s = max(0.0, slope / 1e3)
        return self._parked_step_s

    def prefill_s(self, tokens: int) -> float | None:
        """To evaluate so many prompt tokens."""
        return None if self._prefill.value is None else self._prefill.value * tokens

    def swap_s(self, tokens: int, *, saved: bool = False) -> float | None:
        """To save and restore so many tokens; only the restore when they are `saved` already."""
        save_s = 0.0 if saved else self._save.value
        if save_s is None or self._restore.value is None:
            return None
        return (save_s + self._restore.value) * tokens

    def step_s(self) -> float:
        """The decode step of late, 0 before the first."""
        return self._step_s or 0.0

    def swap_pays(self, tokens: int) -> bool:
        """Whether saving KV and restoring it later beats evaluating it again."""
        swap_s, prefill_s = self.swap_s(tokens), self.prefill_s(tokens)
        return self.works(Tier.SWAPPED) and (swap_s is None or prefill_s is None or swap_s < prefill_s)

    def resume_s(self, tier: Tier, tokens: int) -> float | None:
        """What a resume with so many tokens of KV will cost until its first new token."""
        if self._step_s is None:
            return None
        prefill_s = self.prefill_s(tokens)
        if tier is Tier.DROPPED:
            return None if prefill_s is None else prefill_s + self._step_s
        again = (self._lost[tier] or 0.0) * (prefill_s or 0.0)
        moved = self.swap_s(tokens, saved=True) if tier is Tier.SWAPPED else 0.0
        return None if moved is None else moved + again + self._step_s

    def rent_due(self, tokens: int, parked_s: float) -> bool:
        """Whether parked KV has by now cost the running turns as much as moving it out and back would.

        The rent-or-buy rule: who switches when the rent paid equals the price pays at most twice what
        hindsight would have. Rent accrues each step.
        """
        tax, swap_s = self.parked_step_s(), self.swap_s(tokens)
        if not tax or not self._step_s or swap_s is None:
            return False
        return tax * tokens * (parked_s / self._step_s) > swap_s

    def view(self) -> CostView:
        """A frozen picture."""
        return CostView(
            prefill_s=self._prefill.value,
            save_s=self._save.value,
            restore_s=self._restore.value,
            parked_step_s=self.parked_step_s(),
            step_s=self._step_s,
            resident_reevaluated=self._lost[Tier.RESIDENT],
            swapped_reevaluated=self._lost[Tier.SWAPPED],
        )


def _last_slope(moments: list[list[float]]) -> float | None:
    """Least squares from the normal equations, by elimination: the coefficient of the last column.

    None when that column is all but a combination of the others. A little weight towards zero keeps one
    of those that never varied from getting a wild coefficient.
    """
    rows = [list(line) for line in moments]
    last = len(rows) - 1
    for i in range(last):
        rows[i][i] += 1e-6 * (1.0 + rows[i][i])
        for k in range(i + 1, last + 1):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, last + 2):
                rows[k][j] -= factor * rows[i][j]
    if rows[last][last] <= VARIED_FROM * moments[last][last]:
        return None
    return rows[last][last + 1] / rows[last][last]
