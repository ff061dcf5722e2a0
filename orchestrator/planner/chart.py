"""The plan as a picture. Needs matplotlib, which is imported here only and when it is asked for only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.planner.plan import Plan, columns, tokens_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")
_GIB = 1 << 30
_INK, _FAINT = "#1f2430", "#6b7280"
#: Weights, buffers, running, paused; the last two read apart from each other without colour, too.
_PARTS = (
    ("weights", "#39424e"),
    ("runtime buffers", "#8a94a3"),
    ("running turns", "#2a9d8f"),
    ("paused turns", "#e9c46a"),
)
_OVER = "#c1121f"
_LINES = (("#1d3557", "o"), ("#7b2cbf", "s"), ("#d9480f", "^"))
_BAR_WIDTH = 0.62


class ChartError(Exception):
    """The chart cannot be drawn; the message is one line."""


def draw(plans: Sequence[Plan], path: Path, title: str) -> None:
    """Bars of the first plan, lines of the others. Raises ChartError, OSError."""
    if path.suffix.lower() not in ENDINGS:
        raise ChartError(f"--chart: {path} does not end in {' or '.join(ENDINGS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ChartError("--chart needs matplotlib: install the [charts] extra") from None
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "swarm",
            # A dollar in a file's name is one.
            "text.parse_math": False,
            "hatch.linewidth": 1.2,
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "axes.edgecolor": _FAINT,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    ):
        figure = Figure(figsize=(9.6, 5.4), layout="constrained")
        axes = figure.subplots()
        _bars(axes, plans[0])
        for plan, (colour, marker) in zip(plans[1:], _LINES, strict=False):
            _line(axes, plan, colour, marker)
        _frame(axes, plans, title)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        # Without a date the same plan gives the same file.
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _bars(axes: Axes, plan: Plan) -> None:
    drawn = columns(plan)
    places = _places(len(drawn))
    bottoms = [0.0] * len(drawn)
    for part, (name, colour) in enumerate(_PARTS):
        heights = [column.within[part] / _GIB for column in drawn]
        label = f"{plan.load.running} {name} ({plan.cache_type})" if name == "running turns" else name
        axes.bar(places, heights, _BAR_WIDTH, bottoms, color=colour, label=label, edgecolor="white")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    over = [
        (place, column.over / _GIB, bottom)
        for place, column, bottom in zip(places, drawn, bottoms, strict=True)
        if column.over
    ]
    if over:
        axes.bar(
            [place for place, _, _ in over],
            [height for _, height, _ in over],
            _BAR_WIDTH,
            [bottom for _, _, bottom in over],
            color="#ffffff",
            edgecolor=_OVER,
            hatch="////",
            label="forced swap or recompute",
        )
    for place, column in zip(places, drawn, strict=True):
        axes.annotate(
            f"{column.total / _GIB:.2f}",
            (place, column.total / _GIB),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_OVER if column.over else _INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            zorder=5,
        )


def _line(axes: Axes, plan: Plan, colour: str, marker: str) -> None:
    drawn = columns(plan)
    places = _places(len(drawn))
    totals = [column.total / _GIB for column in drawn]
    style: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "markersize": 7,
        "markeredgecolor": "white",
    }
    axes.plot(places[:-1], totals[:-1], label=f"total with {plan.cache_type}", **style)
    axes.plot(places[-1:], totals[-1:], linestyle="none", **style)


def _places(count: int) -> list[float]:
    """The single long turn stands apart from the counted ones."""
    return [*map(float, range(count - 1)), count - 0.5]


def _frame(axes: Axes, plans: Sequence[Plan], title: str) -> None:
    plan = plans[0]
    drawn = columns(plan)
    usable = plan.memory.usable / _GIB
    axes.axhline(usable, color=_OVER, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"usable: {usable:.2f} GiB",
        (-0.5, usable),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=9,
        color=_OVER,
    )
    axes.set_xticks(_places(len(drawn)), [column.label for column in drawn])
    axes.set_xlim(-0.55, len(drawn) - 0.05)
    highest = max(max(column.total for column in columns(each)) for each in plans) / _GIB
    axes.set_ylim(0, max(highest, usable) * 1.12)
    axes.set_xlabel(
        f"paused turns, of {tokens_text(plan.load.context)} tokens each where nothing else is said"
    )
    axes.set_ylabel("GPU memory, GiB")
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
