"""The timeline as a picture. Needs matplotlib, which is imported here only and when it is asked for only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.simulation.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")
_INK, _FAINT, _OTHERS = "#1f2430", "#6b7280", "#c9d1d9"
_STORY, _NEWCOMER, _WAIT = "#e9c46a", "#2a9d8f", "#c1121f"
_TITLES = {"off": "no preemption", "on": "token-boundary preemption"}
_HEIGHT = 0.72


class TimelineChartError(Exception):
    """The chart cannot be drawn; the message is one line."""


def draw_timelines(panels: Mapping[str, Timeline], end_s: float, path: Path, title: str) -> None:
    """One panel under the other, on one time axis. Raises TimelineChartError, OSError."""
    if path.suffix.lower() not in ENDINGS:
        raise TimelineChartError(f"--chart: {path} does not end in {' or '.join(ENDINGS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise TimelineChartError("--chart needs matplotlib: install the [charts] extra") from None
    style = {
        "svg.hashsalt": "swarm",
        "text.parse_math": False,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
        for axes, (name, timeline) in zip(drawn[:, 0], panels.items(), strict=True):
            _panel(axes, timeline, _TITLES[name], end_s)
        drawn[-1, 0].set_xlabel("seconds")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        handles, labels = drawn[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _panel(axes: Axes, timeline: Timeline, title: str, end_s: float) -> None:
    waited = timeline.waits[-1]
    lane = next(span.lane for span in timeline.spans if span.turn == waited.turn) or 0
    story = [span for span in timeline.spans if span.lane == lane and span.turn != waited.turn]
    newcomer = [span for span in timeline.spans if span.turn == waited.turn]
    others = [span for span in timeline.spans if span not in story and span not in newcomer]
    _bars(axes, others, _OTHERS, "other background turns")
    _bars(axes, story, _STORY, "the background turn it is about")
    _bars(axes, newcomer, _NEWCOMER, "foreground turn")
    row = timeline.lanes
    axes.barh(
        [row],
        [waited.end_s - waited.start_s],
        _HEIGHT,
        [waited.start_s],
        color="#ffffff",
        edgecolor=_WAIT,
        hatch="////",
        label="foreground turn waits",
    )
    wait_s = waited.end_s - waited.start_s
    shown = f"{wait_s:.1f} s" if wait_s >= 1 else f"{wait_s * 1000:.0f} ms"
    axes.annotate(
        f"waits {shown}",
        (waited.end_s, row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=_WAIT,
        fontsize=9,
    )
    for span in story:
        axes.annotate(
            f"{span.end_s - span.start_s:.1f} s",
            ((span.start_s + min(span.end_s, end_s)) / 2, lane),
            ha="center",
            va="center",
            fontsize=8,
        )
    axes.set_yticks([*range(row), row], [*(f"slot {number}" for number in range(row)), "waiting"], fontsize=8)
    axes.set_ylim(row + 0.6, -0.6)
    axes.set_xlim(0, end_s)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)


def _bars(axes: Axes, spans: list[Span], colour: str, label: str) -> None:
    axes.barh(
        [float(span.lane or 0) for span in spans],
        [span.end_s - span.start_s for span in spans],
        _HEIGHT,
        [span.start_s for span in spans],
        color=colour,
        edgecolor="white",
        label=label,
    )
