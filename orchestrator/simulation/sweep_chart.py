"""A sweep as lines: figures against one of its parameters, and the chart of them.

The chart needs matplotlib, which is imported here only and when it is asked for only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.simulation.sweep import SweepRow, cell
from orchestrator.simulation.sweep_grid import PARAMETERS, SweepError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of the chart: at each `x` the mean over replications, the least and the most."""

    label: str
    x: tuple[float, ...]
    mean: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]


def axis(rows: Sequence[SweepRow]) -> str:
    """What the chart's x axis shows: the number that takes the most values, by the order of the columns."""
    numbers = [name for name in PARAMETERS if name not in ("preemption", "kv")]
    return max(numbers, key=lambda name: len({getattr(row, name) for row in rows}))


def series(rows: Sequence[SweepRow], figure: str) -> list[Series]:
    """The figure against `axis`, a line for each combination of what else changes."""
    across = axis(rows)
    others = [name for name in PARAMETERS if name != across and len({getattr(row, name) for row in rows}) > 1]
    lines: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for row in rows:
        value = float(getattr(row, figure))
        if not math.isnan(value):
            line = lines.setdefault(tuple(getattr(row, name) for name in others), {})
            line.setdefault(float(getattr(row, across)), []).append(value)
    return [
        Series(
            ", ".join(
                f"{_NAMES.get(name, name)} {cell(value)}" for name, value in zip(others, key, strict=True)
            ),
            tuple(sorted(line)),
            tuple(fmean(line[x]) for x in sorted(line)),
            tuple(min(line[x]) for x in sorted(line)),
            tuple(max(line[x]) for x in sorted(line)),
        )
        for key, line in lines.items()
    ]


def _label(names: Sequence[str], values: Sequence[Any]) -> str:
    parts = zip(names, values, strict=True)
    return ", ".join(f"{_NAMES.get(name, name)} {cell(value)}" for name, value in parts)


_NAMES = {
    "slots": "decode slots",
    "spare": "spare slots",
    "load": "background load",
    "min_run_s": "minimum run, s",
    "max_preemptions": "most preemptions",
    "aging_s": "aging, s",
    "kv": "KV",
}
_PANELS = (
    ("wait_p99_s", "foreground wait p99, s", True),
    ("background_tokens_per_s", "background tokens/s", False),
)
_COLOURS = ("#1d3557", "#d9480f", "#2a9d8f", "#7b2cbf", "#e9c46a", "#39424e")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_MOST_LINES = 24
_MOST_TICKS = 12


def draw_sweep(rows: Sequence[SweepRow], path: Path, title: str = "") -> None:
    """Two panels over one axis. Raises SweepError, OSError."""
    if path.suffix.lower() not in ENDINGS:
        raise SweepError(f"{path} does not end in {' or '.join(ENDINGS)}")
    if not rows:
        raise SweepError("there is nothing to draw: the sweep has no rows")
    drawn = [(series(rows, figure), label, logarithmic) for figure, label, logarithmic in _PANELS]
    if len(drawn[0][0]) > _MOST_LINES:
        raise SweepError(f"the chart would have {len(drawn[0][0])} lines; vary less than that at once")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SweepError("a chart needs matplotlib: install the [charts] extra") from None
    with matplotlib.rc_context({"svg.hashsalt": "swarm", "text.parse_math": False}):
        figure = Figure(figsize=(9.6, 7.2), layout="constrained")
        panels = figure.subplots(len(drawn), 1, sharex=True)
        for axes, (lines, label, logarithmic) in zip(panels, drawn, strict=True):
            _panel(axes, lines, label, logarithmic)
        across = axis(rows)
        panels[-1].set_xlabel(_NAMES.get(across, across))
        panels[0].set_title(title, fontsize=11, loc="left")
        handles, labels = panels[0].get_legend_handles_labels()
        if any(labels):
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        # Without a date the same sweep gives the same file.
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _panel(axes: Axes, lines: Sequence[Series], label: str, logarithmic: bool) -> None:
    for at, line in enumerate(lines):
        colour, marker = _COLOURS[at % len(_COLOURS)], _MARKERS[at // len(_COLOURS) % len(_MARKERS)]
        axes.plot(line.x, line.mean, color=colour, marker=marker, label=line.label, markeredgecolor="white")
        if line.least != line.most:
            axes.fill_between(line.x, line.least, line.most, color=colour, alpha=0.15, linewidth=0)
    if logarithmic and any(value > 0 for line in lines for value in line.mean):
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(axis="y", which="minor", labelsize=8)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    points = sorted({value for line in lines for value in line.x})
    if len(points) <= _MOST_TICKS:
        axes.set_xticks(points)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
