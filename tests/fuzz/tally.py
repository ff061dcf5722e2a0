"""What came of the requests: counts, and whatever should not have come."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_EXAMPLES = 40
MOST_SHOWN = 2000


@dataclass
class Tally:
    """Counts by endpoint and status (0: the connection was closed without a reply), and what was wrong."""

    replies: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def reply(self, endpoint: str, status: int, took_s: float) -> None:
        """One reply, or none."""
        self.replies[endpoint, status] += 1
        self.slowest_s[endpoint] = max(took_s, self.slowest_s.get(endpoint, 0.0))

    def problem(self, kind: str, example: object) -> None:
        """Something that must not be; kinds: ``hung``, ``status 500``, and whatever a check says."""
        self.problems[kind] += 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(f"{kind}: {example!r}"[:MOST_SHOWN])

    @property
    def total(self) -> int:
        """All requests."""
        return self.replies.total()

    def of_status(self, least: int, most: int) -> int:
        """Replies with a status in the range."""
        return sum(count for (_, status), count in self.replies.items() if least <= status <= most)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        endpoints: dict[str, dict[str, Any]] = {}
        for (endpoint, status), count in sorted(self.replies.items()):
            entry = endpoints.setdefault(endpoint, {"statuses": {}, "slowest_s": self.slowest_s[endpoint]})
            entry["statuses"][str(status)] = count
        return {
            "seconds": round(time.monotonic() - self.began, 1),
            "requests": self.total,
            "responses_of_500": self.of_status(500, 500),
            "other_server_errors": self.of_status(501, 599),
            "hung": self.problems["hung"],
            "problems": dict(self.problems),
            "examples": self.examples,
            "endpoints": endpoints,
        }
