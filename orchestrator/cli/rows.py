"""A slot or a paused turn as a row of the state's table, and the columns of that table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.cli.columns import Column
from orchestrator.cli.figures import count, duration, plain, size
from orchestrator.cli.styles import EXTRA_WIDE, FAINT, FOREGROUND, PAUSED, TIER_STYLES, WIDE
from orchestrator.cli.view import PausedTurn, Slot

TOKENS = "tokens"
TURN_PREFIX = "turn-"
SHORT_TURN = 8
TIERS = ("resident", "swapped", "dropped")

# The scheduler's phases in words that say what the user sees.
_STATES = {"placed": "starting", "claiming": "starting", "ready": "starting"}
_STATE_STYLES = {"paused": PAUSED, "idle": FAINT, "empty": FAINT, "erasing": FAINT}


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


@dataclass(frozen=True)
class Row:
    """One slot or paused turn, ready for the table; an empty text where nothing is known."""

    slot: str
    state: str
    agent: str
    priority: str
    turn: str
    tokens: int | None
    max_tokens: int | None
    kv_bytes: str
    kv_tokens: str
    file: str
    preemptions: int | None
    resumes_took: str
    resume: Mapping[str, str]
    """What a resume would take, by tier: of a paused turn the tier it is in, of a running one all three."""
    paused: bool
    style: str

    @property
    def of(self) -> str:
        """How far the turn is."""
        if self.tokens is None:
            return ""
        return f"{self.tokens}/{self.max_tokens}" if self.max_tokens else str(self.tokens)

    @property
    def next_resume(self) -> str:
        """What the resume that is to come will take."""
        return next(iter(self.resume.values()), "") if self.paused else ""


def slot_row(slot: Slot, classes: Classes, width: int, turn: PausedTurn | None = None) -> Row:
    """`turn` is the paused turn that the slot holds, where it is among the listed ones."""
    style = _STATE_STYLES.get(slot.state, "")
    file = size(turn.swap_bytes) if turn is not None and turn.swap_bytes else "yes"
    return Row(
        slot=str(slot.id),
        state=_STATES.get(slot.state, plain(slot.state)),
        agent=plain(slot.agent or ""),
        priority=plain(classes.name(slot.priority)) if slot.agent else "",
        turn=turn_id(slot.turn, width),
        tokens=slot.tokens,
        max_tokens=slot.max_tokens,
        kv_bytes=size(slot.kv_bytes) if slot.kv_bytes else "",
        kv_tokens=count(slot.kv_tokens) if slot.kv_tokens else "",
        file=file if slot.has_copy else "",
        preemptions=slot.preemptions,
        resumes_took=_took(slot.resume_cost_s),
        resume={} if slot.state == "paused" else _durations(slot.predicted_resume_s),
        paused=False,
        style=style or (FOREGROUND if classes.is_top(slot.priority) else ""),
    )


def paused_row(turn: PausedTurn, home: str, classes: Classes, width: int) -> Row:
    """`home` is the slot that holds its KV, empty for none."""
    tier = plain(turn.tier)
    # Its KV is what its file holds; left to its own column where other KV is told in tokens.
    in_file = tier == "swapped" and turn.kv_bytes is not None
    kv_bytes = turn.swap_bytes if in_file else turn.kv_bytes
    return Row(
        slot=home,
        state="held" if turn.held else tier,
        agent=plain(turn.agent),
        priority=plain(classes.name(turn.priority)),
        turn=turn_id(turn.turn, width),
        tokens=turn.tokens,
        max_tokens=turn.max_tokens,
        kv_bytes=size(kv_bytes) if kv_bytes else "",
        kv_tokens=count(turn.kv_tokens) if turn.kv_tokens and tier != "dropped" else "",
        file=size(turn.swap_bytes) if turn.swap_bytes else "",
        preemptions=turn.preemptions,
        resumes_took=_took(turn.resume_cost_s),
        resume=_durations({tier: turn.predicted_resume_s}),
        paused=True,
        style=TIER_STYLES.get(tier, PAUSED),
    )


def columns(rows: Iterable[Row], width: int) -> tuple[Column[Row], ...]:
    """The columns wanted at this width, those left out of which no row knows anything."""
    rows = tuple(rows)
    wide = width >= WIDE
    in_bytes = any(row.kv_bytes for row in rows)
    wanted: list[Column[Row]] = [
        Column(0, "slot", "right", 4, lambda row: row.slot),
        Column(0, "state", "left", 9, lambda row: row.state),
        Column(0, "agent", "left", 24 if wide else 14, lambda row: row.agent),
        Column(3, "class", "left", 16 if wide else 10, lambda row: row.priority),
        Column(4, "turn", "left", 26, lambda row: row.turn),
        Column(1, TOKENS, "right", 13, lambda row: row.of),
    ]
    if wide or not in_bytes:
        wanted.append(Column(7 if in_bytes else 2, "KV tokens", "right", 9, lambda row: row.kv_tokens))
    if in_bytes:
        wanted.append(Column(2, "KV", "right", 10, lambda row: row.kv_bytes))
    known: list[Column[Row]] = [
        Column(
            *(6, "preempted" if wide else "pre", "right", 9),
            lambda row: f"x{row.preemptions}" if row.preemptions else "",
        ),
    ]
    if wide:
        known.append(Column(10, "file", "right", 10, lambda row: row.file))
        known.append(Column(9, "resumes took", "right", 12, lambda row: row.resumes_took))
    if width >= EXTRA_WIDE:
        titles = ("next: resident", *TIERS[1:])
        known += [
            Column(5 if number == 0 else 8, title, "right", 14, _resume_from(tier))
            for number, (title, tier) in enumerate(zip(titles, TIERS, strict=True))
        ]
    else:
        known.append(Column(5, "resume", "right", 10, lambda row: row.next_resume))
    wanted += [column for column in known if any(map(column.text, rows))]
    return tuple(wanted)


def turn_id(turn: str | None, width: int) -> str:
    """A turn's id, whole where the terminal is wide."""
    if turn is None:
        return ""
    return plain(turn) if width >= WIDE else short_turn(turn)


def short_turn(turn: str) -> str:
    """A turn's id as tables show it where room is scarce; the commands take it in this form as well."""
    return plain(turn).removeprefix(TURN_PREFIX)[:SHORT_TURN]


def _resume_from(tier: str) -> Callable[[Row], str]:
    return lambda row: row.resume.get(tier, "")


def _durations(seconds: Mapping[str, float | None]) -> dict[str, str]:
    return {tier: duration(value) for tier, value in seconds.items() if value is not None}


def _took(seconds: float | None) -> str:
    return duration(seconds) if seconds else ""
