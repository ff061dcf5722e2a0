"""What every bench reports with: percentiles, one table, one JSON with the machine, a progress bar.

A table goes to the bench's console; progress goes to stderr, so that redirected output holds only the table.
"""

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

SCHEMA = 1


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of 100 lie, interpolated between neighbours; NaN without values.

    With n values the p-th percentile is at rank (n - 1) * p / 100, as numpy's default: p99 of fewer than
    a hundred values lies next to the worst one.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Summary:
    """A distribution in a few figures, in the unit of its values; NaN without values."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Summarise; the order of the values does not matter."""
        ordered = sorted(values)
        return cls(
            n=len(ordered),
            mean=sum(ordered) / len(ordered) if ordered else math.nan,
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            max=ordered[-1] if ordered else math.nan,
        )


@dataclass(frozen=True)
class Report:
    """One bench's outcome.

    `rows` are cells as shown; `notes` are lines below the table; `data` is the JSON's `results`:
    plain values, dataclasses, and NaN for what was not measured (null in the JSON).
    """

    bench: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    parameters: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> Table:
        """The table, numbers to the right."""
        table = Table(title=self.title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for at, name in enumerate(self.columns):
            table.add_column(name, justify="left" if at == 0 else "right", no_wrap=at == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def finish(self, console: Console, json_path: Path | None) -> None:
        """Print the table and the notes, and write the JSON if a path is given. Raises OSError."""
        console.print(self.table())
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
        if json_path is not None:
            write_json(json_path, self)
            console.print(f"written: {json_path}", highlight=False, soft_wrap=True)


def machine() -> dict[str, Any]:
    """Where and when a bench ran: enough to judge a figure, nothing that names the host or its user."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpus": os.cpu_count(),
        "cpus_available": available,
        "cpu": _cpu_name(),
        "memory_bytes": _memory_bytes(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, report: Report) -> None:
    """Write a report with its machine; missing folders are made. Raises OSError."""
    document = {
        "schema": SCHEMA,
        "bench": report.bench,
        "machine": machine(),
        "parameters": report.parameters,
        "results": report.data,
        "notes": list(report.notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # orjson writes NaN as null, and dataclasses as objects.
    raw = orjson.dumps(document, default=_plain, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    path.write_bytes(raw + b"\n")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Summary):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not for a report")


def _cpu_name() -> str | None:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, None)
    except OSError:
        return platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


# Cells --------------------------------------------------------------------------------------------


def milliseconds(seconds: float, digits: int = 1) -> str:
    """Seconds as `12.3 ms`, or as `4.56 s` from ten seconds on; a dash for what was not measured."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) >= 10 else f"{seconds * 1e3:,.{digits}f} ms"


def microseconds(seconds: float) -> str:
    """Seconds as `123 us`; a dash for what was not measured."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:,.0f} us"


def figure(value: float, digits: int = 1) -> str:
    """A plain number; a dash for what was not measured."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN where that has no meaning."""
    return part / whole if whole and not math.isnan(whole) else math.nan


# Progress -----------------------------------------------------------------------------------------


Advance = Callable[[float, str], None]
"""Tells how far a bench is, in the unit of the bar's total, and what it does now."""


@contextmanager
def progress_bar(total: float, label: str, *, shown: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr; nothing at all where that is not a terminal.

    Redrawn twice a second: a bench shares its cores with what it measures.
    """
    console = Console(stderr=True)
    if not shown or not console.is_terminal or os.environ.get("TERM") == "dumb" or sys.stderr.closed:
        yield _silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(done: float, label: str) -> None:
            bar.update(task, completed=min(done, total), description=label)

        yield advance


def _silent(done: float, label: str) -> None:
    pass
