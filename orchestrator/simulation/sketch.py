"""Quantiles of any number of values in little memory."""

from __future__ import annotations

import math

#: Quantiles are exact to this part of their value.
ACCURACY = 1e-3
_RATIO = math.log((1 + ACCURACY) / (1 - ACCURACY))


class Sketch:
    """Counts of values by size, each bucket two thousandths wide; count, mean and extremes are exact.

    Values below a nanosecond count as 0. Memory grows with the logarithm of the range, not with the count.
    """

    __slots__ = ("_buckets", "_zeros", "count", "largest", "smallest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = -math.inf
        self._zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count one value, 0 or more."""
        self.count += 1
        self.total += value
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)
        if value < 1e-9:
            self._zeros += 1
        else:
            bucket = math.ceil(math.log(value) / _RATIO)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """NaN without values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The value at rank (count - 1) * share, rounded up; NaN without values."""
        if not self.count:
            return math.nan
        rank = math.ceil((self.count - 1) * share - 1e-9)
        if rank >= self.count - 1:
            return self.largest
        seen = self._zeros
        if rank < seen:
            return 0.0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if rank < seen:
                middle = math.exp((bucket - 0.5) * _RATIO)
                return min(max(middle, self.smallest), self.largest)
        return self.largest
