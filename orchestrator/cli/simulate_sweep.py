"""`swarm simulate --sweep`: the grid, its table on the terminal, its CSV and chart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.cli.common import load
from orchestrator.cli.figures import duration, plain
from orchestrator.cli.simulate_config import sweep_base
from orchestrator.cli.simulate_options import Given, check_source, engine_model, preset_of
from orchestrator.simulation import SimulationError
from orchestrator.simulation.sweep import Base, SweepRow, cell, csv_text, run_sweep
from orchestrator.simulation.sweep_chart import draw_sweep
from orchestrator.simulation.sweep_grid import PARAMETERS, SweepError, parse_sweep

SWEEP_HOURS = 1.0


def run_grid(
    grid: str, given: Given, advance: Callable[[float, str], None]
) -> tuple[str, tuple[str, ...], list[SweepRow]]:
    """Title, what changes, and the rows. Raises SimulationError."""
    title, base = _base(given)
    try:
        sweep = parse_sweep(grid)
        runs = sweep.runs
        rows = list(
            run_sweep(
                sweep,
                base,
                until_s=(given.hours or SWEEP_HOURS) * 3600,
                seed=given.seed,
                advance=lambda done, what: advance(done / runs, what),
            )
        )
    except SweepError as error:
        raise SimulationError(str(error)) from None
    return title, sweep.changing, rows


def _base(given: Given) -> tuple[str, Base]:
    check_source(given)
    if given.trace is not None or given.turns is not None:
        raise SimulationError("--sweep has its own load and length: leave --trace and --turns out")
    if given.config is not None:
        config = load(given.config)
        return plain(given.config), sweep_base(config, engine_model(given.engine), given.pool)
    machine = preset_of(given)
    return machine.title, machine.base()


def write_sweep(rows: list[SweepRow], title: str, csv: Path | None, chart: Path | None) -> None:
    """Raises SimulationError for what cannot be drawn, OSError."""
    if csv is not None:
        csv.write_text(csv_text(rows))
    if chart is not None:
        try:
            draw_sweep(rows, chart, title)
        except SweepError as error:
            raise SimulationError(str(error)) from None


def show_sweep(console: Console, title: str, changing: tuple[str, ...], rows: list[SweepRow]) -> None:
    """A line for each replication: what was varied, the highest class's waits, what the others got."""
    varied = [name for name in PARAMETERS if name in changing]
    table = Table(title=plain(title), title_justify="left", box=None, pad_edge=False)
    for name in (*varied, "wait p50", "p99", "worst", "background tok/s", "preempted"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(cell(getattr(row, name)) for name in varied),
            *(duration(value) for value in (row.wait_p50_s, row.wait_p99_s, row.wait_max_s)),
            f"{row.background_tokens_per_s:.1f}",
            str(row.preemptions),
        )
    console.print(table)


def print_csv(rows: list[SweepRow]) -> None:
    """The CSV on standard output."""
    sys.stdout.write(csv_text(rows))
