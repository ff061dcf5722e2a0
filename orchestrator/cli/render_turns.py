"""Turns as text: a list of them, and one turn's story."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from orchestrator.cli.columns import Column, fit, layout, used
from orchestrator.cli.figures import count, duration, plain, plural, size
from orchestrator.cli.rows import short_turn
from orchestrator.cli.styles import BAD, FAINT, GOOD, PAUSED, SWAPPED, TIER_STYLES, WARNING, WIDE
from orchestrator.cli.view import TimelineEntry, TurnStory, TurnSummary

STATE_STYLES = {"running": GOOD, "paused": PAUSED, "failed": BAD, "done": FAINT, "cancelled": FAINT}
EVENT_STYLES = {
    "paused": PAUSED,
    "swapped": SWAPPED,
    "restored": SWAPPED,
    "dropped": PAUSED,
    "swap_failed": WARNING,
    "interrupted": BAD,
    "failed": BAD,
}
_MIN_WIDTH_OF_EVENTS = 20
_MIN_END = 12


def turn_lines(turns: Sequence[TurnSummary], width: int, now: float) -> Iterator[Text]:
    """A header, and a line for each turn in the order given."""
    wide = width >= WIDE
    wanted: tuple[Column[TurnSummary], ...] = (
        Column(0, "turn", "left", 26, lambda turn: plain(turn.id) if wide else short_turn(turn.id)),
        Column(0, "state", "left", 9, lambda turn: plain(turn.state)),
        Column(0, "agent", "left", 24 if wide else 14, lambda turn: plain(turn.agent)),
        Column(2, "class", "left", 16 if wide else 10, lambda turn: plain(turn.priority_class)),
        Column(0, "tokens", "right", 13, lambda turn: f"{turn.tokens_generated}/{turn.max_tokens}"),
        Column(4, "pre", "right", 5, lambda turn: f"x{turn.preemptions}" if turn.preemptions else ""),
        Column(3, "age", "right", 11, lambda turn: duration(max(0.0, now - turn.created))),
    )
    columns = layout(wanted, turns, width, _MIN_END)
    end_width = max(1, width - used(columns) - 1)
    header = " ".join(fit(column.title, cells, column.justify) for column, cells in columns)
    yield Text(f"{header}  end", style=f"bold {FAINT}", no_wrap=True)
    for turn in turns:
        line = Text(no_wrap=True, overflow="ellipsis")
        for column, cells in columns:
            style = _state_style(turn) if column.title == "state" else ""
            line.append(column.cell(turn, cells) + " ", style=style)
        end = turn.error or turn.finish_reason or ""
        line.append(" " + fit(plain(end), end_width), style=BAD if turn.error else "")
        line.rstrip()
        yield line


def turn_head(turn: TurnStory) -> Iterator[Text]:
    """What the turn is, and how far."""
    state = Text(plain(turn.state), style=_state_style(turn))
    if turn.tier and turn.state == "paused":
        state.append(f" ({plain(turn.tier)})")
    yield Text(plain(turn.id), style="bold").append("  ").append_text(state)
    about = f"{turn.agent}, {turn.priority_class or turn.priority}; {turn.api}, {turn.model}"
    yield _pair("agent", about + (f", on {turn.backend}" if turn.backend else ""))
    yield _pair(
        "tokens",
        f"prompt {count(turn.prompt_tokens)}, generated {count(turn.tokens_generated)} "
        f"of at most {count(turn.max_tokens)}",
    )
    again = f", {plural(turn.tokens_reevaluated, 'token')} re-evaluated" if turn.preemptions else ""
    yield _pair("preempted", plural(turn.preemptions, "time") + again)
    if turn.error or turn.finish_reason:
        yield _pair("end", turn.error or turn.finish_reason or "", BAD if turn.error else "")


def timeline(story: TurnStory) -> Table:
    """What happened, when after the first entry, and what it cost."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=f"bold {FAINT}")
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("what", overflow="fold", min_width=_MIN_WIDTH_OF_EVENTS)
    if not story.timeline:
        return table
    begin = story.timeline[0].t
    left_at: float | None = None
    for entry in story.timeline:
        away_s = None
        if entry.event in ("paused", "interrupted"):
            left_at = entry.t
        elif entry.event == "resumed" and left_at is not None:
            away_s, left_at = entry.t - left_at, None
        table.add_row(
            duration(entry.t - begin) if entry.t != begin else "0",
            Text(plain(entry.event).replace("_", " "), style=EVENT_STYLES.get(entry.event, "")),
            Text(what_happened(entry, away_s)),
        )
    return table


def _state_style(turn: TurnSummary) -> str:
    if turn.state == "paused":
        return TIER_STYLES.get(turn.tier or "", PAUSED)
    return STATE_STYLES.get(turn.state, "")


def what_happened(entry: TimelineEntry, away_s: float | None = None) -> str:
    """An entry's details in words; `away_s` is how long the turn had been paused."""
    known = dict(entry.details)
    parts: list[str] = []

    def take(key: str, text: str) -> None:
        value = known.pop(key, None)
        if value is not None:
            parts.append(text.format(_spoken(key, value)))

    if away_s is not None:
        parts.append(f"after {duration(away_s)}")
    for key, text in _WORDS.get(entry.event, ()):
        take(key, text)
    # Details of a newer service are shown as they are.
    parts += [f"{plain(key)} {_spoken(key, value)}" for key, value in known.items()]
    return ", ".join(parts)


_WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "queued": (("agent", "by {}"), ("priority", "as {}")),
    "claimed": (("backend", "by backend {}"),),
    "started": (
        ("slot", "in slot {}"),
        ("engine_wait_s", "{} after the command"),
        ("prompt_tokens", "prompt of {} tokens"),
        ("cached_tokens", "{} of them cached"),
    ),
    "paused": (
        ("stop_s", "stopped in {}"),
        ("tokens", "at token {}"),
        ("kv_tokens", "KV {} tokens"),
        ("by", "for {}"),
    ),
    "swapped": (
        ("kv_tokens", "KV {} tokens"),
        ("file_bytes", "in a file of {}"),
        ("stall_s", "engine stalled {}"),
    ),
    "restored": (("kv_tokens", "KV {} tokens"), ("stall_s", "engine stalled {}")),
    "swap_failed": (("error", "{}"),),
    "resumed": (
        ("tier", "KV was {}"),
        ("slot", "in slot {}"),
        ("engine_wait_s", "{} after the command"),
        ("tokens_reevaluated", "{} re-evaluated"),
        ("cached_tokens", "{} cached"),
    ),
    "interrupted": (("error", "{}"), ("tokens", "at token {}")),
    "done": (("finish_reason", "{}"), ("tokens", "{} tokens")),
    "failed": (("error", "{}"),),
    "cancelled": (("tokens", "at token {}"),),
}


def _spoken(key: str, value: object) -> str:
    """A detail's value; its key's ending tells the unit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return plain(value)
    if key.endswith("_s"):
        return duration(value)
    if key.endswith("_bytes") and isinstance(value, int):
        return size(value)
    if key.startswith("tokens_") and isinstance(value, int):
        return plural(value, "token")
    return count(value) if isinstance(value, int) else f"{value:g}"


def _pair(label: str, text: str, style: str = "") -> Text:
    return Text(f"{label:<10}", style=FAINT).append(plain(text), style=style or "default")
