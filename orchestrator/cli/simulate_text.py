"""A simulation's outcome as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.cli.figures import count, duration, plural
from orchestrator.cli.simulate_options import LABELS, OFF, ON, Study
from orchestrator.cli.styles import FAINT, FOREGROUND, GOOD, PAUSED, WIDE, one_line
from orchestrator.simulation.outcome import Outcome
from orchestrator.simulation.presets import QUANTILES, Published
from orchestrator.simulation.replications import Interval, interval, quantiles, worst

Results = Mapping[str, Sequence[Outcome]]
_HEADERS = ("p50", "p90", "p99")
_WAIT_HEADERS = ("turns", "wait\np50", "\np90", "\np99", "\nworst")
_CLASS_HEADERS = (*_WAIT_HEADERS, "1st token\np50", "\np99", "tokens/s")
_NARROW_HEADERS = (*_WAIT_HEADERS, "1st token\np99")


# Tables --------------------------------------------------------------------------------------------


def head(study: Study, results: Results) -> Group:
    """What was simulated, for how long."""
    lines = [one_line(study.title, "bold")]
    turns = sum(each.classes[study.top_class].wait.count for each in next(iter(results.values())))
    if study.until_s is not None:
        length = f"{plural(study.replications, 'replication')} of {duration(study.until_s)}"
    else:
        length = f"{plural(study.replications, 'replication')} of {plural(study.until_turns or 0, 'turn')}"
    lines.append(Text(f"{length}; {count(turns)} {study.top_class} turns a column"))
    return Group(*lines)


def wait_table(study: Study, results: Results) -> Table:
    """The wait for a decode slot of the highest class, beside what was published."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column(f"{study.top_class}'s wait\nfor a decode slot", no_wrap=True)
    for header in (*_HEADERS, "worst"):
        table.add_column(f"\n{header}", justify="right", no_wrap=True)
    found = {name: quantiles(runs, study.top_class, QUANTILES) for name, runs in results.items()}
    longest = {name: worst(runs, study.top_class) for name, runs in results.items()}
    for name in results:
        style = GOOD if name == ON else ""
        cells = [*map(with_half, found[name]), short(longest[name])]
        table.add_row(LABELS[name], *cells, style=style)
        published = published_of(study, name)
        if published is not None:
            said = (*published.quantiles, published.worst)
            table.add_row("  published", *map(short, said), style=FAINT)
            got = [*(each.mean for each in found[name]), longest[name]]
            table.add_row("  difference", *map(_difference, got, said), style=FAINT)
    if OFF in found and ON in found:
        ratios = [_ratio(off.mean, on.mean) for off, on in zip(found[OFF], found[ON], strict=True)]
        table.add_row("times shorter", *ratios, _ratio(longest[OFF], longest[ON]), style="bold")
    return table


def class_table(study: Study, results: Results, width: int) -> Table:
    """Every class, one line for each column."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("class", no_wrap=True)
    table.add_column("pre-\nempt", no_wrap=True)
    wide = width >= WIDE
    for header in _CLASS_HEADERS if wide else _NARROW_HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    classes = study.first.classes
    for name in sorted(classes, key=lambda each: -classes[each]):
        for place, (column, runs) in enumerate(results.items()):
            figures = [run.classes[name] for run in runs]
            turns = sum(each.turns for each in figures)
            if not turns:
                continue
            shown = with_half if wide else lambda each: short(each.mean)
            waits = quantiles(runs, name, QUANTILES)
            tokens = [interval([each.first_token.quantile(q) for each in figures]) for q in (0.5, 0.99)]
            rate = sum(run.tokens_per_s(name) for run in runs) / len(runs)
            style = FOREGROUND if name == study.top_class else ""
            table.add_row(
                Text(name if not place or (column == ON and len(results) == 1) else "", style),
                Text(column, GOOD if column == ON else ""),
                count(turns),
                *map(shown, waits),
                short(worst(runs, name)),
                *map(shown, tokens if wide else tokens[1:]),
                *([f"{rate:.1f}"] if wide else []),
            )
    return table


def remarks(study: Study, results: Results) -> list[RenderableType]:
    """What else happened, and what may be read out of it."""
    lines: list[RenderableType] = []
    for name, runs in results.items():
        seconds = sum(run.measured_s for run in runs) or math.nan
        rest = [each for each in study.first.classes if each != study.top_class]
        tokens = sum(run.tokens_per_s(*rest) for run in runs) / len(runs) if rest else 0.0
        figures = [figure for run in runs for figure in run.classes.values()]
        preemptions = sum(each.preemptions for each in figures)
        text = f"{LABELS[name]}: {tokens:.1f} tokens/s below {study.top_class}"
        if preemptions:
            resumes = {tier: sum(each.resumes[tier] for each in figures) for tier in figures[0].resumes}
            tiers = ", ".join(f"{number:,} {tier}" for tier, number in resumes.items() if number)
            lost = sum(each.lost_tokens + each.evaluated_again for each in figures)
            text += f"; {preemptions / seconds * 3600:,.0f} preemptions/h"
            text += f", resumes {tiers}; {lost / preemptions:.1f} tokens made or evaluated twice each"
        refused = sum(run.refused for run in runs)
        if refused:
            text += f"; {plural(refused, 'turn')} refused"
        lines.append(Text(text))
    lines += [Text(f"Note: {remark}", PAUSED) for remark in study.remarks]
    return lines


def published_of(study: Study, column: str) -> Published | None:
    """What was published of a column."""
    if study.preset is None:
        return None
    return study.preset.on if column == ON else study.preset.off


def short(seconds: float) -> str:
    """A duration, or a dash where there is none."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.0f} s" if 59.95 <= seconds < 999.5 else duration(seconds)


def with_half(value: Interval) -> str:
    """`757 ms ±12`: the half width in the same unit, as far as it says something."""
    if math.isnan(value.mean) or math.isnan(value.half):
        return short(value.mean)
    scale, unit = (1e3, "ms") if value.mean < 0.9995 else (1.0, "s")
    mean, half = value.mean * scale, value.half * scale
    digits = 0 if half >= 9.95 else 1 if half >= 0.095 else 2
    return f"{mean:.{digits}f} {unit} ±{half:.{digits}f}"


def _difference(got: float, said: float) -> str:
    return "-" if math.isnan(got) else f"{got / said - 1:+.0%}"


def _ratio(off: float, on: float) -> str:
    return "-" if math.isnan(off) or math.isnan(on) or on <= 0 else f"{off / on:,.0f}x"


# JSON ----------------------------------------------------------------------------------------------


def as_json(study: Study, results: Results) -> dict[str, Any]:
    """The same for programs. Seconds; `half` is half the width of the 95% interval, null for one run."""
    return {
        "title": study.title,
        "seed": study.seed,
        "replications": study.replications,
        "until_s": study.until_s,
        "until_turns": study.until_turns,
        "warmup_s": study.warmup_s,
        "columns": {name: _column(study, name, runs) for name, runs in results.items()},
        "remarks": list(study.remarks),
    }


def _column(study: Study, column: str, runs: Sequence[Outcome]) -> dict[str, Any]:
    published = published_of(study, column)
    data: dict[str, Any] = {
        "classes": {
            name: _class(runs, name)
            for name in study.first.classes
            if any(r.classes[name].turns for r in runs)
        },
        "backends": {name: [asdict(run.backends[name]) for run in runs] for name in runs[0].backends},
    }
    if published is not None:
        quantiles_s = dict(zip(_HEADERS, published.quantiles, strict=True))
        data["published_s"] = {**quantiles_s, "worst": published.worst}
    return data


def _class(runs: Sequence[Outcome], name: str) -> dict[str, Any]:
    figures = [run.classes[name] for run in runs]
    data: dict[str, Any] = {
        "turns": sum(each.turns for each in figures),
        "refused": sum(each.refused for each in figures),
        "tokens_per_s": _interval(interval([run.tokens_per_s(name) for run in runs])),
        "preemptions": sum(each.preemptions for each in figures),
        "resumes": {tier: sum(each.resumes[tier] for each in figures) for tier in figures[0].resumes},
        "evaluated_again": sum(each.evaluated_again for each in figures),
        "lost_tokens": sum(each.lost_tokens for each in figures),
    }
    for key in ("wait", "first_token", "whole"):
        sketches = [getattr(each, key) for each in figures]
        data[f"{key}_s"] = {
            header: _interval(interval([sketch.quantile(share) for sketch in sketches]))
            for header, share in zip(_HEADERS, QUANTILES, strict=True)
        } | {"worst": max((each.largest for each in sketches if each.count), default=None)}
    return data


def _interval(value: Interval) -> dict[str, float | None]:
    # orjson writes NaN as null.
    return {"mean": value.mean, "half": value.half}


def show(console: Console, study: Study, results: Results) -> None:
    """Everything but the timeline."""
    console.print(head(study, results))
    table = (
        wait_table(study, results) if study.preset is not None else class_table(study, results, console.width)
    )
    console.print(table)
    for line in remarks(study, results):
        console.print(line)
