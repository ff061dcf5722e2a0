"""The plan as tables and bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.cli.figures import count, size
from orchestrator.cli.styles import BAD, FAINT, GOOD, PAUSED, one_line
from orchestrator.config.checks import parse_size
from orchestrator.planner.advice import Advice
from orchestrator.planner.plan import Column, Memory, Plan, columns, tokens_text

_GIB, _MIB = 1 << 30, 1 << 20
#: Weights, buffers, running, paused: character, style and name.
_PARTS = (
    ("█", FAINT, "weights"),
    ("▓", "white", "buffers"),
    ("▒", GOOD, "running"),
    ("░", PAUSED, "paused"),
)
_OVER = ("/", BAD, "forced swap or recompute")
_LIMIT, _MARKS = "│", ("◆", "●", "▲")
_LABEL_WIDTH, _TOTAL_WIDTH = 10, 9


def gib(n_bytes: int) -> str:
    """Bytes in GiB with two decimals; small ones as they are elsewhere."""
    return f"{n_bytes / _GIB:.2f} GiB" if abs(n_bytes) >= _GIB // 10 else size(n_bytes)


def table(plans: Sequence[Plan]) -> Table:
    """One row a cache type: what fits."""
    load = plans[0].load
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    shown.add_column("cache\ntype", no_wrap=True)
    for header in (
        f"one running\nturn ({tokens_text(load.context)})",
        f"{load.running} running\nturns",
        "free for\npaused",
        f"{tokens_text(load.context)} turns\nthat fit",
        f"one paused\nturn of {tokens_text(load.long_context)}",
        "longest\n(tokens)",
    ):
        shown.add_column(header, justify="right", no_wrap=True)
    for plan in plans:
        long_left = f"{gib(plan.long_left)} left"
        shown.add_row(
            plan.cache_type,
            gib(plan.turn),
            gib(plan.running),
            gib(plan.headroom) if plan.headroom >= 0 else Text(f"-{gib(-plan.headroom)}", BAD),
            str(plan.average_paused),
            long_left if plan.long_left >= 0 else Text(f"{gib(-plan.long_left)} over", BAD),
            "any" if plan.longest_paused is None else count(plan.longest_paused),
        )
    return shown


def head(memory: Memory, name: str, per_token: str) -> Group:
    """What is planned for, and what the units mean."""
    if memory.kv_budget >= 0:
        budget = f"{gib(memory.kv_budget)} for KV"
    else:
        budget = f"{gib(-memory.kv_budget)} too much before any KV"
    return Group(
        one_line(name, "bold"),
        Text(
            f"{gib(memory.usable)} usable - {gib(memory.weights)} weights"
            f" - {gib(memory.buffers)} buffers = {budget}"
        ),
        Text(f"KV per token: {per_token}"),
        Text("k = 1,024 tokens, GiB = 2^30 bytes", FAINT),
    )


def chart(plans: Sequence[Plan], width: int) -> RenderableType:
    """The bars of the first plan, with a mark where the other ones end, `width` characters wide."""
    drawn = [columns(plan) for plan in plans[: len(_MARKS) + 1]]
    usable = plans[0].memory.usable
    largest = max(usable, *(column.total for each in drawn for column in each))
    cells = max(10, width - _LABEL_WIDTH - _TOTAL_WIDTH - 3)
    lines: list[RenderableType] = [
        Text(f"GPU memory with so many paused turns ({plans[0].cache_type})", "bold")
    ]
    for index, column in enumerate(drawn[0]):
        if index == len(drawn[0]) - 1:
            lines.append(Text(" " * (_LABEL_WIDTH + 1) + _limit_line(usable, largest, cells), BAD))
        marks: dict[int, str] = {}
        for other, mark in zip(drawn[1:], _MARKS, strict=False):
            cell = _cell(other[index].total, largest, cells)
            while cell in marks:
                cell += 1
            marks[cell] = mark
        line = Text(f"{column.label:>{_LABEL_WIDTH}} ", no_wrap=True)
        line.append_text(_bar(column, usable, largest, cells, marks))
        line.append(
            f" {column.total / _GIB:.2f}".rjust(_TOTAL_WIDTH - 3) + " GiB", BAD if column.over else ""
        )
        lines.append(line)
    over = [_OVER] if any(column.over for column in drawn[0]) else []
    others = [(mark, "bold", plan.cache_type) for plan, mark in zip(plans[1:], _MARKS, strict=False)]
    limit = (_LIMIT, BAD, f"usable, {gib(usable)}")
    return Group(*lines, *_legend([*_PARTS, *over, *others, limit], width))


def _legend(entries: Sequence[tuple[str, str, str]], width: int) -> list[Text]:
    """Lines of whole entries."""
    lines = [Text()]
    for character, style, name in entries:
        if lines[-1].cell_len and lines[-1].cell_len + len(name) + 4 > width:
            lines.append(Text())
        lines[-1].append("  " if lines[-1].cell_len else "").append(character, style).append(f" {name}")
    return lines


def _cell(n_bytes: int, largest: int, cells: int) -> int:
    return round(n_bytes * (cells - 2) / largest)


def _limit_line(usable: int, largest: int, cells: int) -> str:
    return " " * _cell(usable, largest, cells) + _LIMIT


def _bar(column: Column, usable: int, largest: int, cells: int, marks: dict[int, str]) -> Text:
    """Each part ends in the cell of the sum up to it, so that rounding does not add up."""
    bar, limit = Text(), _cell(usable, largest, cells)
    ends, total = [], 0
    for part, (character, style, _) in zip(column.within, _PARTS, strict=True):
        total += part
        ends.append((_cell(total, largest, cells), character, style))
    if column.over:
        # However little it is, it is seen.
        ends.append((max(limit + 2, _cell(column.total, largest, cells)), _OVER[0], _OVER[1]))
    for cell in range(cells):
        character, style = next(((text, style) for end, text, style in ends if cell < end), (" ", ""))
        if cell in marks:
            character, style = marks[cell], "bold"
        elif cell == limit:
            character, style = _LIMIT, BAD
        bar.append(character, style)
    return bar


def advice_lines(advice: Advice, model: Path | None) -> list[str]:
    """The advice as a command line and as lines of `config.yaml`; printed as they are, to be copied."""
    name, cache, memory = str(model or "MODEL.gguf"), advice.plan.cache_type, advice.plan.memory
    layout = "--kv-unified" if advice.layout == "unified" else "--no-kv-unified"
    types = "" if cache in ("f16", "given") else f" -ctk {cache} -ctv {cache} -fa on"
    keys = "" if cache in ("f16", "given") else f", cache_type_k: {cache}, cache_type_v: {cache}"
    quoted = (
        name
        if name.replace("/", "").replace(".", "").replace("-", "").replace("_", "").isalnum()
        else repr(name)
    )
    return [
        f"llama-server -m {quoted} -np {advice.engine_slots} -c {advice.context} {layout}{types} \\",
        "  -b 256 -ub 256 --no-cache-idle-slots --slots --metrics --slot-save-path /dev/shm/swarm-kv/",
        "",
        "backends:",
        "  - name: gpu",
        "    managed:",
        "      command: [llama-server]",
        f"      model: {quoted}",
        f"      decode_slots: {advice.decode_slots}",
        f"      engine_slots: {advice.engine_slots}",
        f"      context: {advice.context}",
        f"      kv_layout: {advice.layout}",
        "      batch_tokens: 256",
        *(f"      {pair}" for pair in keys.split(", ") if pair),
        f"    vram: {{usable: {_exact(memory.usable)}, weights: {_exact(memory.weights, up=True)}, "
        f"buffers: {_exact(memory.buffers, up=True)}}}",
        f"    swap_budget: {_exact(advice.swap_bytes, up=True)}",
    ]


def _exact(n_bytes: int, *, up: bool = False) -> str:
    """A size as the configuration reads it: exactly where that is short, else in whole MiB."""
    short = f"{n_bytes / _GIB:g}GiB"
    if parse_size(short) == n_bytes:
        return short
    return f"{-(-n_bytes // _MIB) if up else n_bytes // _MIB}MiB"
