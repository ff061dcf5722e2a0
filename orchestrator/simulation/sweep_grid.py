"""Which grid of simulations a sweep is, read from words such as

```
slots=4,8,12 load=0.5..0.95:0.15 preemption=on,off kv=f16,q8_0 replications=5
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any

MAX_VALUES = 100
MAX_RUNS = 5000
MAX_REPLICATIONS = 1000


class SweepError(Exception):
    """A sweep cannot be read, run or drawn; the message is one line."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the grid; None: as it is without the sweep.

    `slots` decode slots and `spare` engine slots beyond them. `kv`: what KV is kept in. `load`: what the
    background asks for, as a part of all that the decode slots could do; of a configured swarm, how many
    times its clients.
    """

    slots: int | None = None
    spare: int | None = None
    preemption: bool | None = None
    load: float | None = None
    kv: str | None = None
    min_run_s: float | None = None
    max_preemptions: int | None = None
    aging_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values of each parameter; one with no values stays as it is. `replications` of each point."""

    values: Mapping[str, tuple[Any, ...]]
    replications: int = 1

    def points(self) -> Iterator[Point]:
        """All combinations, the last parameter changing fastest, in the order of `Point`'s fields."""
        names = [name for name in PARAMETERS if name in self.values]
        for chosen in product(*(self.values[name] for name in names)):
            yield Point(**dict(zip(names, chosen, strict=True)))

    @property
    def runs(self) -> int:
        """How many simulations it takes."""
        return math.prod(len(values) for values in self.values.values()) * self.replications

    @property
    def changing(self) -> tuple[str, ...]:
        """The parameters with more than one value."""
        return tuple(name for name in PARAMETERS if len(self.values.get(name, ())) > 1)


PARAMETERS = tuple(each.name for each in fields(Point))


def parse_sweep(text: str) -> Sweep:
    """Read `name=values` words. Values are separated by commas; `a..b:step` is a range with both ends.

    Raises SweepError.
    """
    values: dict[str, tuple[Any, ...]] = {}
    replications = 1
    for word in text.split():
        name, equals, given = word.partition("=")
        if not equals or name not in (*_READERS, "replications"):
            known = ", ".join((*_READERS, "replications"))
            raise SweepError(f"sweep: {word!r} is not one of {known}, with = and its values")
        if name in values or (name == "replications" and replications > 1):
            raise SweepError(f"sweep: {name} is given twice")
        found = tuple(_READERS.get(name, _replications)(name, item) for item in _items(name, given))
        if len(set(found)) < len(found):
            raise SweepError(f"sweep: {name} has a value twice: {given}")
        if name == "replications":
            if len(found) > 1:
                raise SweepError("sweep: replications is one number")
            replications = found[0]
        else:
            values[_FIELDS.get(name, name)] = found
    if not values:
        raise SweepError("sweep: nothing to vary; give for instance slots=4,8 load=0.5..0.9:0.1")
    sweep = Sweep(values, replications)
    if sweep.runs > MAX_RUNS:
        raise SweepError(f"sweep: {sweep.runs:,} simulations; at most {MAX_RUNS:,} are run at once")
    return sweep


def _items(name: str, given: str) -> list[str]:
    items: list[str] = []
    for part in given.split(","):
        items += _range(name, part) if ".." in part else [part.strip()]
    if not all(items):
        raise SweepError(f"sweep: {name} has an empty value: {given!r}")
    if len(items) > MAX_VALUES:
        raise SweepError(f"sweep: {name} has {len(items)} values; at most {MAX_VALUES} are taken")
    return items


def _range(name: str, part: str) -> list[str]:
    first_text, _, rest = part.partition("..")
    last_text, _, step_text = rest.partition(":")
    try:
        first, last, step = Decimal(first_text), Decimal(last_text), Decimal(step_text or "1")
        if not (first.is_finite() and last.is_finite() and step.is_finite()):
            raise InvalidOperation
    except InvalidOperation:
        raise SweepError(f"sweep: {name}={part} is not a range such as 0.5..0.9:0.1") from None
    if step <= 0 or last < first:
        raise SweepError(f"sweep: {name}={part} leads nowhere; a range goes up")
    if (last - first) / step >= MAX_VALUES:
        raise SweepError(f"sweep: {name}={part} has more than {MAX_VALUES} values")
    return [str(first + number * step) for number in range(int((last - first) / step) + 1)]


def _whole(low: int, high: int) -> Callable[[str, str], int]:
    def read(name: str, item: str) -> int:
        if not item.isascii() or not item.isdigit() or not low <= int(item) <= high:
            raise SweepError(f"sweep: {name} is {item!r}; it must be a whole number from {low} to {high}")
        return int(item)

    return read


def _number(low: float, high: float) -> Callable[[str, str], float]:
    def read(name: str, item: str) -> float:
        try:
            value = float(item)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise SweepError(f"sweep: {name} is {item!r}; it must be a number from {low:g} to {high:g}")
        return value

    return read


def _switch(name: str, item: str) -> bool:
    if item not in ("on", "off"):
        raise SweepError(f"sweep: {name} is {item!r}; it must be on or off")
    return item == "on"


def _word(name: str, item: str) -> str:
    if not item.isascii() or not item.replace("_", "").isalnum() or len(item) > 20:
        raise SweepError(f"sweep: {name} is {item!r}; it must be a cache type such as f16 or q8_0")
    return item


_READERS: dict[str, Callable[[str, str], Any]] = {
    "slots": _whole(1, 1024),
    "spare": _whole(0, 1024),
    "preemption": _switch,
    "load": _number(0.01, 10),
    "kv": _word,
    "min_run": _number(0, 3600),
    "max_preemptions": _whole(0, 1_000_000),
    "aging": _number(0, 86_400),
}
_FIELDS = {"min_run": "min_run_s", "aging": "aging_s"}
_replications = _whole(1, MAX_REPLICATIONS)
