"""What an agent's last turns tell together: the lines that keep changing, and the rule for each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: One change may be an edit of the system prompt; a line that changes by itself does so again.
MIN_SEEN = 3
#: For people: English and code have about so many bytes a token.
BYTES_PER_TOKEN = 4

_HEADER = re.compile(r"x-[a-z0-9-]+:")


@dataclass(frozen=True, slots=True)
class Buster:
    """A line of an agent's instructions that keeps changing.

    `seen`: it had changed in so many of the last `turns`; `lost_bytes` of `n_bytes`: what of a prompt came
    after it and was equal, on the average of those. `rule` is the one to suggest, None without a `pattern`.
    """

    role: str
    line: int
    offset: int
    shape: str
    pattern: str | None
    rule: Literal["pin", "move"] | None
    seen: int
    turns: int
    lost_bytes: int
    n_bytes: int

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def suggested_rule(pattern: str | None) -> Literal["pin", "move"] | None:
    """A line that is called as an HTTP header says nothing to the model; any other may, and is kept."""
    if pattern is None:
        return None
    return "pin" if _HEADER.match(pattern) else "move"


def find_busters(observations: Sequence[Mapping[str, Any]]) -> list[Buster]:
    """The lines that changed at least `MIN_SEEN` times, the first in the prompt first.

    `observations`: data of `Observation`, each with its `ruled_lines`, the newest first. A line is left out
    that has not changed since more lines of the prompt are under rules than were then.
    """
    groups: dict[tuple[str, str | int], list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for age, observation in enumerate(observations):
        known = set()
        for line in observation["lines"]:
            key = (line["role"], line["pattern"] or line["line"])
            if key not in known:
                known.add(key)
                groups.setdefault(key, []).append((age, observation, line))
    found = []
    for group in groups.values():
        age, last, newest = group[0]
        cured = any(one["ruled_lines"] > last["ruled_lines"] for one in observations[:age])
        if len(group) < MIN_SEEN or cured:
            continue
        found.append(
            Buster(
                newest["role"],
                newest["line"],
                newest["offset"],
                newest["shape"],
                newest["pattern"],
                suggested_rule(newest["pattern"]),
                len(group),
                len(observations),
                sum(observation["lost_bytes"] for _, observation, _ in group) // len(group),
                sum(observation["n_bytes"] for _, observation, _ in group) // len(group),
            )
        )
    return sorted(found, key=lambda buster: buster.offset)
