"""A run's events as JSON lines, and their replay through fresh schedulers.

Each line is ``[seconds, backend, event, its fields, [[command, its fields], ...]]``. A replay hands the
events to schedulers that know the policies only, and compares what they want with what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args

import orjson

from orchestrator.scheduler import Command, Event, Policy, Scheduler
from orchestrator.simulation.setup import SimulationError

_EVENTS = {kind.__name__: kind for kind in get_args(Union[Event])}  # noqa: UP007
_NAMES: dict[type, tuple[str, ...]] = {}


def encode(now: float, backend: str, event: Event, commands: tuple[Command, ...]) -> bytes:
    """One line, without its end."""
    name, values = _plain(event)
    return orjson.dumps([now, backend, name, values, [_plain(command) for command in commands]])


def replay(lines: Iterable[bytes], policies: Mapping[str, Policy]) -> int:
    """How many events there were. Raises SimulationError at the first that leads to other commands."""
    schedulers = {name: Scheduler(policy) for name, policy in policies.items()}
    count = 0
    for number, line in enumerate(lines, 1):
        now, backend, name, values, written = orjson.loads(line)
        arguments = [tuple(value) if isinstance(value, list) else value for value in values]
        event = _EVENTS[name](*arguments)
        wanted = orjson.loads(orjson.dumps([_plain(each) for each in schedulers[backend].handle(event, now)]))
        if wanted != written:
            raise SimulationError(f"line {number}: {name} led to {written}, and now to {wanted}")
        count += 1
    return count


def _plain(record: Any) -> tuple[str, list[Any]]:
    kind = type(record)
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(field.name for field in fields(kind))
    return kind.__name__, [getattr(record, name) for name in names]
