"""A timeline as text: decode slots as rows, time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from orchestrator.cli.figures import duration
from orchestrator.cli.simulate_options import LABELS
from orchestrator.cli.styles import BAD, FAINT, FOREGROUND, PAUSED, one_line
from orchestrator.simulation.timeline import Timeline

_LABEL_WIDTH = 8


def timeline_text(panels: Mapping[str, Timeline], end_s: float, width: int) -> Group:
    """Decode slots as rows, time to the right: the turn in question, the newcomer, and the others."""
    room = max(20, width - _LABEL_WIDTH - 1)
    lines: list[Text] = []
    for name, timeline in panels.items():
        lines.append(one_line(LABELS[name], "bold"))
        newcomer = timeline.waits[-1]
        story = {span.turn for span in timeline.spans if span.lane == _lane_of(timeline)} - {newcomer.turn}
        for lane in range(timeline.lanes):
            cells: list[tuple[str, str]] = [(" ", "")] * room
            for span in timeline.spans:
                if span.lane == lane:
                    mine = span.turn == newcomer.turn
                    mark = (
                        ("█", FOREGROUND) if mine else ("▓", PAUSED) if span.turn in story else ("░", FAINT)
                    )
                    _fill(cells, span.start_s, span.end_s, end_s, mark)
            lines.append(_line(f"slot {lane}", cells))
        cells = [(" ", "")] * room
        _fill(cells, newcomer.start_s, newcomer.end_s, end_s, ("─", BAD))
        text = f" waits {duration(newcomer.end_s - newcomer.start_s)}"
        begin = max(at for at, (mark, _) in enumerate(cells) if mark == "─") + 1
        for at, character in enumerate(text[: max(0, room - begin)], begin):
            cells[at] = (character, BAD)
        lines.append(_line(newcomer.agent, cells))
    lines.append(_axis(end_s, room))
    lines.append(
        Text.assemble(
            " " * (_LABEL_WIDTH + 1),
            ("█", FOREGROUND),
            " foreground  ",
            ("▓", PAUSED),
            " the background turn it is about  ",
            ("░", FAINT),
            " others",
        )
    )
    return Group(*lines)


def _lane_of(timeline: Timeline) -> int | None:
    """The decode slot that the newcomer got."""
    newcomer = timeline.waits[-1].turn
    return next((span.lane for span in timeline.spans if span.turn == newcomer), None)


def _fill(
    cells: list[tuple[str, str]], start_s: float, stop_s: float, end_s: float, mark: tuple[str, str]
) -> None:
    first = min(len(cells) - 1, round(start_s / end_s * len(cells)))
    last = min(len(cells), max(first + 1, round(stop_s / end_s * len(cells))))
    cells[first:last] = [mark] * (last - first)


def _line(label: str, cells: Sequence[tuple[str, str]]) -> Text:
    return Text.assemble(f"{label:<{_LABEL_WIDTH}} ", *cells, no_wrap=True)


def _axis(end_s: float, room: int) -> Text:
    marks = [" "] * (room + 4)
    for seconds in range(0, int(end_s) + 1, 4):
        at = round(seconds / end_s * room)
        for offset, character in enumerate(f"{seconds} s" if seconds in (0, int(end_s)) else str(seconds)):
            if at + offset < room:
                marks[at + offset] = character
    return Text(" " * (_LABEL_WIDTH + 1) + "".join(marks).rstrip(), FAINT)
