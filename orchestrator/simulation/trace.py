"""A trace: the arrivals of a run as JSON lines, one a turn, in the order in which they came.

```json
{"t": 12.25, "agent": "editor", "class": "foreground", "prompt": 812, "output": 96, "shared": 640}
```

`t` is seconds since the trace's begin, `prompt` and `output` are tokens. `shared`, 0 where it is left out, is
how many of the prompt's first tokens the KV of the agent's previous turn has. Nothing else may be in a line.
Times are written in whole microseconds, so that what was read is written again as the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from orchestrator.simulation.workload import Arrival

MAX_TIME_S = 1e9
MAX_TOKENS = 100_000_000
MAX_NAME = 200
MAX_LINE_BYTES = 4096
QUANTILES = (50, 90, 99)
_NEEDED = ("t", "agent", "class", "prompt", "output")
_KNOWN = frozenset((*_NEEDED, "shared"))


class TraceError(Exception):
    """A trace cannot be used; the message is one line with the line's number."""


def read_trace(path: Path) -> Iterator[Arrival]:
    """The arrivals of a file, read as they are asked for. Raises TraceError, OSError."""
    with path.open("rb") as file:
        # A line without end must not fill the memory.
        yield from parse_trace(iter(lambda: file.readline(MAX_LINE_BYTES + 2), b""), path.name)


def parse_trace(lines: Iterable[bytes], name: str = "trace") -> Iterator[Arrival]:
    """The arrivals in these lines, blank ones left out. Raises TraceError, which begins with `name`."""
    before: float | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(line)
            if before is not None and arrival.at_s < before:
                raise ValueError(f"t is {arrival.at_s:g}, before the line above ({before:g}): sort the lines")
        except ValueError as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        before = arrival.at_s
        yield arrival
    if before is None:
        raise TraceError(f"{name}: there are no turns in it")


def _arrival(line: bytes) -> Arrival:
    if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    missing = [key for key in _NEEDED if key not in record]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for key in record:
        if key not in _KNOWN:
            raise ValueError(f"unknown key {_shown(key)}; known are {', '.join((*_NEEDED, 'shared'))}")
    prompt = _tokens(record, "prompt", 1, MAX_TOKENS)
    return Arrival(
        at_s=_time(record["t"]),
        agent=_name(record, "agent"),
        priority_class=_name(record, "class"),
        prompt_tokens=prompt,
        output_tokens=_tokens(record, "output", 1, MAX_TOKENS),
        shared_tokens=_tokens(record, "shared", 0, prompt) if "shared" in record else 0,
    )


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_TIME_S:
        raise ValueError(f"t is {_shown(value)}; it must be seconds from 0 to {MAX_TIME_S:.0e}")
    return float(value)


def _tokens(record: dict[str, Any], key: str, least: int, most: int) -> int:
    value = record[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {_shown(value)}; it must be a whole number from {least} to {most}")
    return value


def _name(record: dict[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(
            f"{key} is {_shown(value)}; it must be a name of 1 to {MAX_NAME} printable characters"
        )
    return value


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def trace_lines(arrivals: Iterable[Arrival]) -> Iterator[bytes]:
    """The lines of a trace, each with its newline. Raises TraceError for what could not be read again."""
    before = 0.0
    for number, arrival in enumerate(arrivals, 1):
        at_s = round(arrival.at_s, 6)
        record: dict[str, Any] = {
            "t": int(at_s) if at_s == int(at_s) else at_s,
            "agent": arrival.agent,
            "class": arrival.priority_class,
            "prompt": arrival.prompt_tokens,
            "output": arrival.output_tokens,
        }
        if arrival.shared_tokens:
            record["shared"] = arrival.shared_tokens
        line = orjson.dumps(record) + b"\n"
        try:
            _arrival(line)
            if at_s < before:
                raise ValueError(f"t is {at_s:g}, before the turn above ({before:g})")
        except ValueError as error:
            raise TraceError(f"turn {number}: {error}") from None
        before = at_s
        yield line


def write_trace(path: Path, arrivals: Iterable[Arrival]) -> int:
    """Write a trace; how many turns it has. Raises TraceError, OSError."""
    count = 0
    with path.open("wb") as file:
        for line in trace_lines(arrivals):
            file.write(line)
            count += 1
    return count


@dataclass(frozen=True, slots=True)
class AgentPart:
    """One agent's turns in one class. Tokens; `prompts` and `outputs` are p50, p90, p99 and most."""

    agent: str
    priority_class: str
    turns: int
    output_tokens: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace asks for. `span_s` is from the first to the last arrival."""

    turns: int
    span_s: float
    prompt_tokens: int
    output_tokens: int
    parts: tuple[AgentPart, ...]
    busiest_minute: int
    """The most arrivals within a minute of the trace's clock."""

    @property
    def offered_tokens_per_s(self) -> float:
        """Generated tokens that are asked for in each second; NaN for a trace of one moment."""
        return self.output_tokens / self.span_s if self.span_s > 0 else math.nan


def summarise(arrivals: Iterable[Arrival]) -> TraceSummary:
    """Count a trace by agent and class. The sizes of all its turns are kept meanwhile."""
    sizes: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    minutes: Counter[int] = Counter()
    first = last = None
    for arrival in arrivals:
        first = arrival.at_s if first is None else first
        last = arrival.at_s
        minutes[int(arrival.at_s // 60)] += 1
        part = sizes.setdefault((arrival.priority_class, arrival.agent), [])
        part.append((arrival.prompt_tokens, arrival.output_tokens, arrival.shared_tokens))
    parts = tuple(_part(agent, of, turns) for (of, agent), turns in sorted(sizes.items()))
    return TraceSummary(
        turns=sum(part.turns for part in parts),
        span_s=(last or 0.0) - (first or 0.0),
        prompt_tokens=sum(prompt for turns in sizes.values() for prompt, _, _ in turns),
        output_tokens=sum(part.output_tokens for part in parts),
        parts=parts,
        busiest_minute=max(minutes.values(), default=0),
    )


def _part(agent: str, priority_class: str, turns: list[tuple[int, int, int]]) -> AgentPart:
    prompts, outputs, shared = (sorted(column) for column in zip(*turns, strict=True))
    return AgentPart(
        agent=agent,
        priority_class=priority_class,
        turns=len(turns),
        output_tokens=sum(outputs),
        prompts=_quantiles(prompts),
        outputs=_quantiles(outputs),
        shared_tokens=sum(shared),
    )


def _quantiles(ordered: list[int]) -> tuple[int, ...]:
    """The nearest-rank quantiles: lengths that turns have."""
    ranks = [max(1, math.ceil(len(ordered) * percent / 100)) for percent in QUANTILES]
    return (*(ordered[rank - 1] for rank in ranks), ordered[-1])
