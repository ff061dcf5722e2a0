"""The swarm's state as text for a terminal: pure functions, no clock, no I/O.

A screen is a list of lines that are never wrapped: columns are dropped where the width does not hold them,
and lines are drawn together where the height does not (see `LEVELS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from orchestrator.cli.columns import fit, layout, used
from orchestrator.cli.figures import count, ids, plain, plural
from orchestrator.cli.render_backend import backend_lines
from orchestrator.cli.rows import TOKENS, Classes, Row, columns, paused_row, slot_row
from orchestrator.cli.styles import BAD, FAINT, one_line
from orchestrator.cli.view import SwarmState

PROGRESS = "progress"
MIN_BAR = 6
MAX_BAR = 40


class Level(NamedTuple):
    """What is drawn together to save lines, and how many lines each backend's memory gets."""

    together: frozenset[str]
    memory: int


_EMPTY = frozenset({"empty"})
_SHOWN_BELOW = _EMPTY | {"paused"}
_ALL = _SHOWN_BELOW | {"idle"}

#: In the order in which they are tried: first to go are slots that the paused turns below already show.
#: Empty slots are always drawn together.
LEVELS = (
    Level(_EMPTY, 3),
    Level(_SHOWN_BELOW, 3),
    Level(_SHOWN_BELOW, 2),
    Level(_ALL, 2),
    Level(_ALL, 1),
    Level(_ALL, 0),
)

_COLLAPSED = {"empty": "empty slots", "paused": "paused", "idle": "idle cache"}


def screen(
    state: SwarmState,
    width: int,
    height: int | None = None,
    *,
    classes: Classes | None = None,
    head: Sequence[Text] = (),
    cut: bool = False,
) -> Group:
    """The whole state below the lines of `head`.

    `height` None shows everything. Else as much is drawn together as fits it needs, and with `cut` the rest
    is left out, with a line that says so.
    """
    classes = classes or Classes()
    for level in LEVELS:
        page = _Page(state, width, classes, level)
        if height is None or len(head) + page.height <= height:
            return joined((*head, *page.parts()))
    assert height is not None
    return joined((*head, *page.parts(height - len(head) if cut else None)))


def waits_line(state: SwarmState) -> Text:
    """How many turns wait, by class."""
    queue = state.queue
    line = one_line().append("queue", style="bold").append(f"   {plural(queue.waiting, 'turn')} waiting")
    present = [f"{plain(name)} {count(number)}" for name, number in queue.by_class.items() if number]
    return line.append(": " + ", ".join(present) if present else "", style=FAINT)


def counters_line(state: SwarmState, width: int) -> Text:
    """The counters since the pool's first turn, those that fit."""
    shown = (
        ("turns_done", "done"),
        ("turns_failed", "failed"),
        ("turns_cancelled", "cancelled"),
        ("preemptions", "preempted"),
        ("resumes", "resumed"),
        ("tokens_reevaluated", "tokens re-evaluated"),
    )
    line = one_line().append("total", style="bold").append("  ")
    for key, label in shown:
        number = state.counters.get(key)
        if number is None or (not number and key == "turns_cancelled"):
            continue
        part = f" {label} {count(number)}"
        if line.cell_len + len(part) > width:
            break
        line.append(part, style=BAD if number and key == "turns_failed" else "").append(" ")
    return line


# One page ----------------------------------------------------------------------------------------


class _Page:
    """The lines of one state at one width and level."""

    def __init__(self, state: SwarmState, width: int, classes: Classes, level: Level) -> None:
        self._state = state
        self._width = width
        self._heads = [backend_lines(backend, width, level.memory) for backend in state.backends]
        paused = {turn.turn: turn for turn in state.paused}
        homes: dict[str, str] = {}
        self._slots: list[list[Row]] = []
        self._rests: list[Text | None] = []
        for backend in state.backends:
            rows: list[Row] = []
            rest: dict[str, list[int]] = {}
            for slot in backend.slots:
                turn = paused.get(slot.turn or "")
                if slot.state == "paused" and slot.turn is not None:
                    homes[slot.turn] = str(slot.id)
                kept = slot.state not in level.together or (slot.state == "paused" and turn is None)
                if kept:
                    rows.append(slot_row(slot, classes, width, turn))
                else:
                    rest.setdefault(slot.state, []).append(slot.id)
            self._slots.append(rows)
            self._rests.append(_rest_line(rest))
        self._paused = [paused_row(turn, homes.get(turn.turn, ""), classes, width) for turn in state.paused]
        rows = [row for table in (*self._slots, self._paused) for row in table]
        self._columns = layout(columns(rows, width), rows, width, MIN_BAR + 1)
        bar_width = min(MAX_BAR, width - used(self._columns) - 1)
        # Left of the tokens, if both fit.
        self._bar_width = bar_width if bar_width >= MIN_BAR else 0

    @property
    def height(self) -> int:
        """Lines on the terminal."""
        heads = sum(map(len, self._heads)) + sum(rest is not None for rest in self._rests)
        tables = sum(1 + len(rows) for rows in self._slots if rows)
        paused = 1 + len(self._paused) if self._paused else 0
        return heads + tables + paused + 2

    def parts(self, limit: int | None = None) -> Iterator[Text]:
        """What to print; with a limit, rows are left out until it is kept."""
        over = 0 if limit is None else max(0, self.height - limit)
        paused, hidden_paused = _shorten(self._paused, over)
        over -= hidden_paused - 1 if hidden_paused else 0
        slots: list[tuple[list[Row], int]] = []
        for rows in self._slots:
            kept, hidden = _shorten(rows, over)
            over -= hidden - 1 if hidden else 0
            slots.append((kept, hidden))
        for head, (rows, hidden), rest in zip(self._heads, slots, self._rests, strict=True):
            yield from head
            if rows:
                yield self._header()
                yield from self._body(rows)
            if hidden:
                yield one_line(f"  ... {plural(hidden, 'more slot')}", FAINT)
            if rest is not None:
                yield rest
        if self._paused:
            yield _tiers_line(self._state)
            yield from self._body(paused)
            if hidden_paused:
                yield one_line(f"  ... {plural(hidden_paused, 'more turn')}", FAINT)
        yield waits_line(self._state)
        yield counters_line(self._state, self._width)

    def _header(self) -> Text:
        line = one_line(style=f"bold {FAINT}")
        for column, width in self._columns:
            if column.title == TOKENS and self._bar_width:
                title = PROGRESS if len(PROGRESS) <= self._bar_width else ""
                line.append(fit(title, self._bar_width) + " ")
            line.append(fit(column.title, width, column.justify) + " ")
        line.rstrip()
        return line

    def _body(self, rows: Iterable[Row]) -> Iterator[Text]:
        for row in rows:
            line = one_line(style=row.style)
            for column, width in self._columns:
                if column.title == TOKENS and self._bar_width:
                    line.append_text(bar(row.tokens, row.max_tokens, self._bar_width)).append(" ")
                line.append(column.cell(row, width) + " ")
            line.rstrip()
            yield line


def bar(done: int | None, whole: int | None, width: int) -> Text:
    """A progress bar that reads without colours; blank where nothing is known."""
    if done is None or not whole:
        return Text(" " * width)
    halves = round(2 * width * min(max(done, 0), whole) / whole)
    full, half = divmod(halves, 2)
    return Text("━" * full + "╾" * half + "─" * (width - full - half))


def _shorten(rows: list[Row], over: int) -> tuple[list[Row], int]:
    """Leave out rows, and one more for the line that says so; at least one stays."""
    if over <= 0 or len(rows) < 3:
        return rows, 0
    kept = max(1, len(rows) - over - 1)
    return rows[:kept], len(rows) - kept


def joined(lines: Iterable[Text]) -> Group:
    """One text: cheap enough to draw four times a second beside an engine on the same cores.

    In a group, because a console that is told to print a text directly forgets that it must not be wrapped.
    """
    return Group(Text("\n", no_wrap=True, overflow="ellipsis").join(lines))


# Parts -------------------------------------------------------------------------------------------


def _tiers_line(state: SwarmState) -> Text:
    """How many turns are paused, and where their KV is."""
    line = one_line().append("paused", style="bold").append(f"  {plural(len(state.paused), 'turn')}")
    tiers = Counter(plain(turn.tier) for turn in state.paused)
    return line.append(": " + ", ".join(f"{count(number)} {tier}" for tier, number in tiers.items()), FAINT)


def _rest_line(rest: Mapping[str, list[int]]) -> Text | None:
    parts = [
        f"{_COLLAPSED[state]}: {ids(found)}" for state in _COLLAPSED if (found := sorted(rest.get(state, ())))
    ]
    return one_line(f"  {'   '.join(parts)}", FAINT) if parts else None
