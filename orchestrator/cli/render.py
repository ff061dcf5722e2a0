"""The swarm's state as text for a terminal: pure functions, no clock, no I/O.

A screen is a list of lines that are never wrapped: columns are dropped where the width does not hold them,
and lines are drawn together where the height does not (see `LEVELS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from orchestrator.cli.columns import Column, fit, layout, used
from orchestrator.cli.figures import count, duration, ids, plain, plural, size
from orchestrator.cli.view import BackendView, Kv, PausedTurn, Slot, SwarmState

NARROW = 100
WIDE = 130
MIN_BAR = 6
MAX_BAR = 40
TOKENS = "tokens"
TURN_PREFIX = "turn-"
SHORT_TURN = 8

FOREGROUND = "bold cyan"
PAUSED = "yellow"
FAINT = "bright_black"
GOOD = "green"
BAD = "bold red"

#: What may be drawn together to save lines, in this order: slots that the paused turns below already show,
#: then idle caches. Empty slots always are.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"empty"}),
    frozenset({"empty", "paused"}),
    frozenset({"empty", "paused", "idle"}),
)

# The scheduler's phases in words that say what the user sees.
_STATES = {"placed": "starting", "claiming": "starting", "ready": "starting"}
_COLLAPSED = {"empty": "empty slots", "paused": "paused", "idle": "idle cache"}


@dataclass(frozen=True)
class Classes:
    """Names of priorities, where known, and which is the highest."""

    names: Mapping[int, str] = field(default_factory=dict)

    def name(self, priority: int | None) -> str:
        if priority is None:
            return ""
        return self.names.get(priority, str(priority))

    def is_top(self, priority: int | None) -> bool:
        return bool(self.names) and priority == max(self.names)


class _Row(NamedTuple):
    """One slot or paused turn, ready for the table."""

    slot: str
    state: str
    agent: str
    priority: str
    turn: str
    tokens: int | None
    max_tokens: int | None
    kv: str
    preemptions: int | None
    style: str

    @property
    def of(self) -> str:
        if self.tokens is None:
            return ""
        return f"{self.tokens}/{self.max_tokens}" if self.max_tokens else str(self.tokens)


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
    line = _line().append("queue", style="bold").append(f"   {plural(queue.waiting, 'turn')} waiting")
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
    line = _line().append("total", style="bold").append("  ")
    for key, label in shown:
        number = state.counters.get(key)
        if number is None or (not number and key == "turns_cancelled"):
            continue
        part = f" {label} {count(number)}"
        if line.cell_len + len(part) > width:
            break
        line.append(part, style=BAD if number and key == "turns_failed" else "").append(" ")
    return line


def short_turn(turn: str) -> str:
    """A turn's id as tables show it where room is scarce; the commands take it in this form as well."""
    return plain(turn).removeprefix(TURN_PREFIX)[:SHORT_TURN]


# One page ----------------------------------------------------------------------------------------


class _Page:
    """The lines of one state at one width and level."""

    def __init__(self, state: SwarmState, width: int, classes: Classes, level: frozenset[str]) -> None:
        self._state = state
        self._width = width
        self._classes = classes
        self._heads = [_backend_lines(backend, width) for backend in state.backends]
        shown_paused = {turn.turn for turn in state.paused}
        homes: dict[str, str] = {}
        self._slots: list[list[_Row]] = []
        self._rests: list[Text | None] = []
        for backend in state.backends:
            rows: list[_Row] = []
            rest: dict[str, list[int]] = {}
            for slot in backend.slots:
                if slot.state == "paused" and slot.turn is not None:
                    homes[slot.turn] = str(slot.id)
                kept = slot.state not in level or (slot.state == "paused" and slot.turn not in shown_paused)
                if kept:
                    rows.append(self._slot(slot))
                else:
                    rest.setdefault(slot.state, []).append(slot.id)
            self._slots.append(rows)
            self._rests.append(_rest_line(rest))
        self._paused = [self._paused_turn(turn, homes.get(turn.turn, "")) for turn in state.paused]
        lines = [line for rows in (*self._slots, self._paused) for line in rows]
        in_bytes = any(slot.kv_bytes is not None for backend in state.backends for slot in backend.slots)
        wanted = _wanted(width >= WIDE, "KV" if in_bytes else "KV tokens")
        self._columns = layout(wanted, lines, width, MIN_BAR + 1)
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
        slots: list[tuple[list[_Row], int]] = []
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
                yield _line(f"  ... {plural(hidden, 'more slot')}", FAINT)
            if rest is not None:
                yield rest
        if self._paused:
            yield _line("paused", "bold").append(f"  {plural(len(self._paused), 'turn')}", style="default")
            yield from self._body(paused)
            if hidden_paused:
                yield _line(f"  ... {plural(hidden_paused, 'more turn')}", FAINT)
        yield waits_line(self._state)
        yield counters_line(self._state, self._width)

    def _slot(self, slot: Slot) -> _Row:
        top = self._classes.is_top(slot.priority)
        style = {"paused": PAUSED, "idle": FAINT, "empty": FAINT, "erasing": FAINT}.get(slot.state, "")
        return _Row(
            slot=str(slot.id),
            state=_STATES.get(slot.state, plain(slot.state)),
            agent=plain(slot.agent or ""),
            priority=plain(self._classes.name(slot.priority)) if slot.agent else "",
            turn=self._turn(slot.turn),
            tokens=slot.tokens,
            max_tokens=slot.max_tokens,
            kv=_kv(slot.kv_bytes, slot.kv_tokens),
            preemptions=slot.preemptions,
            style=style or (FOREGROUND if top else ""),
        )

    def _paused_turn(self, turn: PausedTurn, home: str) -> _Row:
        return _Row(
            slot=home,
            state="held" if turn.held else plain(turn.tier),
            agent=plain(turn.agent),
            priority=plain(self._classes.name(turn.priority)),
            turn=self._turn(turn.turn),
            tokens=turn.tokens,
            max_tokens=turn.max_tokens,
            kv=_kv(turn.kv_bytes, turn.kv_tokens),
            preemptions=turn.preemptions,
            style=PAUSED,
        )

    def _turn(self, turn: str | None) -> str:
        if turn is None:
            return ""
        return plain(turn) if self._width >= WIDE else short_turn(turn)

    def _header(self) -> Text:
        line = _line(style=f"bold {FAINT}")
        for column, width in self._columns:
            if column.title == TOKENS and self._bar_width:
                line.append(fit("progress", self._bar_width) + " ")
            line.append(fit(column.title, width, column.justify) + " ")
        line.rstrip()
        return line

    def _body(self, rows: Iterable[_Row]) -> Iterator[Text]:
        for row in rows:
            line = _line(style=row.style)
            for column, width in self._columns:
                if column.title == TOKENS and self._bar_width:
                    line.append_text(bar(row.tokens, row.max_tokens, self._bar_width)).append(" ")
                line.append(column.cell(row, width) + " ")
            line.rstrip()
            yield line


def _wanted(wide: bool, kv: str) -> tuple[Column[_Row], ...]:
    return (
        Column(0, "slot", "right", 4, lambda row: row.slot),
        Column(0, "state", "left", 9, lambda row: row.state),
        Column(0, "agent", "left", 24 if wide else 14, lambda row: row.agent),
        Column(3, "class", "left", 16 if wide else 10, lambda row: row.priority),
        Column(4, "turn", "left", 26, lambda row: row.turn),
        Column(1, TOKENS, "right", 13, lambda row: row.of),
        Column(2, kv, "right", 10, lambda row: row.kv),
        Column(
            *(5, "preempted" if wide else "pre", "right", 9),
            lambda row: f"x{row.preemptions}" if row.preemptions else "",
        ),
    )


def bar(done: int | None, whole: int | None, width: int) -> Text:
    """A progress bar that reads without colours; blank where nothing is known."""
    if done is None or not whole:
        return Text(" " * width)
    halves = round(2 * width * min(max(done, 0), whole) / whole)
    full, half = divmod(halves, 2)
    return Text("━" * full + "╾" * half + "─" * (width - full - half))


def _shorten(rows: list[_Row], over: int) -> tuple[list[_Row], int]:
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


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _backend_lines(backend: BackendView, width: int) -> list[Text]:
    """What the backend is, and how full: one line where there is room, else two."""
    name = _line().append("● " if backend.healthy else "✗ ", style=GOOD if backend.healthy else BAD)
    name.append(plain(backend.name), style="bold")
    about = [plain(backend.model or ""), plain(backend.kind)]
    if backend.pool != "default":
        about.append(f"pool {plain(backend.pool)}")
    name.append("  " + ", ".join(part for part in about if part), style=FAINT)
    if not backend.healthy:
        name.append("  not healthy: turns wait until the engine answers", style=BAD)
    if not backend.slots:
        return [name]
    load = _load(backend)
    if width < NARROW:
        return [name, _line("  ").append_text(load)]
    return [name.append("   ").append_text(load)]


def _load(backend: BackendView) -> Text:
    decoding, limit = backend.decoding_now, backend.decode_slots
    text = Text()
    text.append("decoding ", style=FAINT).append(f"{decoding}/{limit if limit is not None else '?'}")
    text.append("  slots ", style=FAINT).append(str(backend.engine_slots))
    text.append("  KV ", style=FAINT).append(_kv_load(backend.kv))
    if backend.kv.layout:
        text.append(f" {plain(backend.kv.layout)}", style=FAINT)
    text.append("  step ", style=FAINT).append(duration(backend.step_s) if backend.step_s else "-")
    return text


def _kv_load(kv: Kv) -> str:
    if kv.used_bytes is not None and kv.budget_bytes:
        return f"{size(kv.used_bytes)} of {size(kv.budget_bytes)}"
    if kv.budget_tokens:
        return f"{count(kv.used_tokens or 0)} of {count(kv.budget_tokens)} tokens"
    return "-"


def _kv(n_bytes: int | None, n_tokens: int | None) -> str:
    if n_bytes is not None:
        return size(n_bytes) if n_bytes else ""
    return count(n_tokens) if n_tokens else ""


def _rest_line(rest: Mapping[str, list[int]]) -> Text | None:
    parts = [
        f"{_COLLAPSED[state]}: {ids(found)}" for state in _COLLAPSED if (found := sorted(rest.get(state, ())))
    ]
    return _line(f"  {'   '.join(parts)}", FAINT) if parts else None
