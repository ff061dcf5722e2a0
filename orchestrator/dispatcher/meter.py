"""How long decode steps take, from the gaps between tokens."""

from __future__ import annotations

SMOOTHING = 0.2
MIN_GAPS = 4


class StepMeter:
    """Gathers gaps until they are taken. `smoothed` is the step of late, None before the first."""

    __slots__ = ("_count", "_mixed", "_sum", "smoothed")

    def __init__(self) -> None:
        self.smoothed: float | None = None
        self._sum = 0.0
        self._count = 0
        self._mixed = False

    def add(self, gap_s: float) -> None:
        """Two tokens of one turn came `gap_s` apart."""
        self._sum += gap_s
        self._count += 1

    def take(self, prefilling: bool) -> float | None:
        """The mean since the last take; None for too few, or when a prefill made steps longer.

        `prefilling`: some turn's prompt is being evaluated now.
        """
        total, count, mixed = self._sum, self._count, self._mixed or prefilling
        self._sum, self._count, self._mixed = 0.0, 0, prefilling
        if mixed or count < MIN_GAPS:
            return None
        step_s = total / count
        if self.smoothed is None:
            self.smoothed = step_s
        else:
            self.smoothed += SMOOTHING * (step_s - self.smoothed)
        return step_s
