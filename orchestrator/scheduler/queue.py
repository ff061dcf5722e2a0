"""Turns that want a place, first come first served within a priority.

One heap a priority, ordered by arrival. Removal is lazy: an entry whose turn no longer wants a place
is skipped when it comes to the top, so every operation is O(log n) whatever leaves from the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class ClassQueue:
    """Waiting turns by priority, then arrival."""

    __slots__ = ("_heaps", "_wants_place")

    def __init__(self, wants_place: Callable[[str, int, int], bool]) -> None:
        """`wants_place(turn, priority, seq)` tells whether an entry is still current."""
        self._heaps: dict[int, list[tuple[int, str]]] = {}
        self._wants_place = wants_place

    def add(self, turn: str, priority: int, seq: int) -> None:
        """Let `turn` stand at the place its arrival `seq` gives it. Adding it twice is harmless."""
        heappush(self._heaps.setdefault(priority, []), (seq, turn))

    def heads(self) -> list[tuple[int, str]]:
        """The oldest turn of each priority, highest priority first, as (priority, turn)."""
        found = []
        for priority in sorted(self._heaps, reverse=True):
            heap = self._heaps[priority]
            while heap and not self._wants_place(heap[0][1], priority, heap[0][0]):
                heappop(heap)
            if heap:
                found.append((priority, heap[0][1]))
            else:
                del self._heaps[priority]
        return found
