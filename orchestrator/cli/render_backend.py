"""A backend above its table: what it is, how full its memory is, and what moving KV costs.

The lines about memory come in the order of their worth, so a screen that is short of lines takes the first
few; what is wrong is always shown. A part that does not fit its line is left out with all that follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from orchestrator.cli.figures import count, duration, plain, plural, short_count, size
from orchestrator.cli.styles import BAD, FAINT, GOOD, NARROW, PAUSED, WIDE, one_line
from orchestrator.cli.view import BackendView, CostFigures, Kv, Swap

MEMORY_LINES = 3
MIN_STACK = 12
MAX_STACK = 40

_INDENT = 2
_LABEL = 6

#: Who KV is charged to: how that part of the bar looks, with and without colours.
OWNERS = {
    "running": ("█", GOOD),
    "paused": ("▓", PAUSED),
    "idle": ("▒", FAINT),
    "reserved": ("░", "cyan"),
}
_FREE = "·"


def backend_lines(backend: BackendView, width: int, details: int = MEMORY_LINES) -> list[Text]:
    """What it is and how full, in one line where there is room, else two; then `details` lines at most.

    One more says that swap is suspended, if it is.
    """
    name = one_line().append("● " if backend.healthy else "✗ ", style=GOOD if backend.healthy else BAD)
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
        first = [name, one_line(" " * _INDENT).append_text(load)]
    else:
        first = [name.append("   ").append_text(load)]
    swap = _swap_line(backend.swap, width)
    urgent = backend.swap is not None and backend.swap.paused_until_s is not None
    rest = (_kv_line(backend.kv, width), None if urgent else swap, _cost_line(backend.costs, width))
    shown = [text for text in rest if text is not None][:details]
    return [*first, *([swap] if urgent and swap is not None else []), *shown]


def _load(backend: BackendView) -> Text:
    decoding, limit = backend.decoding_now, backend.decode_slots
    text = Text()
    text.append("decoding ", style=FAINT).append(f"{decoding}/{limit if limit is not None else '?'}")
    text.append("  slots ", style=FAINT).append(str(backend.engine_slots))
    text.append("  KV ", style=FAINT).append(_used(backend.kv))
    if backend.kv.layout:
        text.append(f" {plain(backend.kv.layout)}", style=FAINT)
    text.append("  step ", style=FAINT).append(duration(backend.step_s) if backend.step_s else "-")
    if backend.swap is not None and not backend.swap.enabled:
        text.append("  swap off", style=FAINT)
    return text


def _used(kv: Kv) -> str:
    if kv.used_bytes is not None and kv.budget_bytes:
        return f"{size(kv.used_bytes)} of {size(kv.budget_bytes)}"
    if kv.budget_tokens:
        return f"{count(kv.used_tokens or 0)} of {count(kv.budget_tokens)} tokens"
    return "-"


def _kv_line(kv: Kv, width: int) -> Text | None:
    """What is promised of the KV, and to whom; the owners' tokens add up to it."""
    if kv.charged_tokens is None or not kv.budget_tokens:
        return None
    wide = width >= WIDE
    shown = count if wide else short_count
    charged = f"{shown(kv.charged_tokens)} of {shown(kv.budget_tokens)}" + (" tokens" if wide else "")
    if wide and kv.charged_bytes is not None and kv.budget_bytes:
        charged += f", {size(kv.charged_bytes)} of {size(kv.budget_bytes)}"
    owners = [name for name in OWNERS if kv.owners.get(name)]
    parts = [Text("charged ", FAINT).append(charged, style="default")]
    for name in owners:
        mark, style = OWNERS[name]
        part = Text(f"{mark} " if wide else "", style)
        parts.append(part.append(f"{name} ", style=FAINT).append(shown(kv.owners[name]), style="default"))
    text = _packed("KV", parts, width)
    room = width - text.cell_len - 2
    if wide and room >= MIN_STACK:
        text.append("  ").append_text(stack(kv, min(room, MAX_STACK)))
    return text


def stack(kv: Kv, width: int) -> Text:
    """The budget as a bar: what each owner holds, and what is free. It reads without colours."""
    text, total, cells = Text(), 0, 0
    budget = max(kv.budget_tokens or 0, kv.charged_tokens or 0, 1)
    for name, (mark, style) in OWNERS.items():
        total += kv.owners.get(name, 0)
        until = min(width, round(width * total / budget))
        text.append(mark * (until - cells), style=style)
        cells = max(cells, until)
    return text.append(_FREE * (width - cells), style=FAINT)


def _swap_line(swap: Swap | None, width: int) -> Text | None:
    if swap is None or not swap.enabled:
        return None
    wide = width >= WIDE
    parts = []
    if swap.paused_until_s is not None:
        wait = duration(max(0.0, swap.paused_until_s))
        parts.append(Text(f"suspended after failures for {wait}", BAD))
    used = size(swap.used_bytes) + (f" of {size(swap.budget_bytes)}" if swap.budget_bytes else "")
    files = f" in {plural(swap.files, 'file')}" + (f" of {plural(swap.turns, 'turn')}" if wide else "")
    parts.append(Text(used).append(files, style=FAINT))
    parts += [
        _figure("saved", swap.saves),
        _figure("restored", swap.restores),
        _figure("failed", swap.failures, BAD if swap.failures else ""),
        _figure("foreground stalls" if wide else "stalls", swap.stalls),
    ]
    return _packed("swap", parts, width)


def _cost_line(costs: CostFigures, width: int) -> Text | None:
    """What was measured so far; nothing before anything was."""
    wide = width >= WIDE
    parts = []
    if costs.prefill_tokens_per_s is not None:
        rate = f"{costs.prefill_tokens_per_s:,.0f}" + (" tokens/s" if wide else "/s")
        parts.append(Text("prefill ", FAINT).append(rate, style="default"))
    prices = [
        (name, f"{sign}{duration(seconds)}{unit}")
        for name, seconds, sign, unit in (
            ("save", costs.save_s_per_1k_tokens, "", ""),
            ("restore", costs.restore_s_per_1k_tokens, "", ""),
            ("resident", costs.resident_s_per_1k_tokens, "+", " a step" if wide else ""),
        )
        if seconds is not None
    ]
    for number, (name, price) in enumerate(prices):
        lead = ("per 1,000 tokens: " if wide else "per 1k: ") if number == 0 else ""
        parts.append(Text(f"{lead}{name} ", FAINT).append(price, style="default"))
    lost = (("resident", costs.resident_reevaluated), ("swapped", costs.swapped_reevaluated))
    for number, (tier, share) in enumerate([pair for pair in lost if pair[1] is not None]):
        lead = "re-evaluated: " if number == 0 else ""
        parts.append(Text(f"{lead}{tier} ", FAINT).append(f"{share:.0%}", style="default"))
    return _packed("cost", parts, width) if parts else None


def _figure(label: str, number: int, style: str = "") -> Text:
    return Text(f"{label} ", style or FAINT).append(count(number), style=style or "default")


def _packed(label: str, parts: Iterable[Text], width: int) -> Text:
    """A labelled line with the first part and as many more as fit."""
    text = one_line(" " * _INDENT).append(f"{label:<{_LABEL}}", style=FAINT)
    for number, part in enumerate(_fitting(parts, width - _INDENT - _LABEL)):
        text.append("  " if number else "").append_text(part)
    return text


def _fitting(parts: Iterable[Text], room: int) -> Iterator[Text]:
    for number, part in enumerate(parts):
        room -= part.cell_len
        if room < 0 and number:
            return
        room -= 2
        yield part
