"""`swarm simulate`: the service's scheduler under a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from orchestrator.cli.common import fail, load, root_cause, writable_json
from orchestrator.cli.figures import plain
from orchestrator.cli.simulate_options import LABELS, OFF, ON, Given, Study, understand
from orchestrator.cli.simulate_sweep import print_csv, run_grid, show_sweep, write_sweep
from orchestrator.cli.simulate_text import as_json, show
from orchestrator.cli.simulate_timeline import timeline_text
from orchestrator.cli.styles import PAUSED
from orchestrator.scheduler import Command, Event
from orchestrator.simulation import Outcome, SimulationError, simulate
from orchestrator.simulation.event_log import encode
from orchestrator.simulation.presets import PRESETS, Preset
from orchestrator.simulation.replications import replicate
from orchestrator.simulation.timeline import Timeline, record
from orchestrator.simulation.timeline_chart import TimelineChartError, draw_timelines

EXAMPLE_S = 32.0
_P90 = (
    "the published p90 with preemption equals its p50: that is not the wait of turns that arrive at random "
    "moments of a step (docs/simulator.md)"
)


def _run(study: Study, advance: Callable[[float, str], None]) -> dict[str, list[Outcome]]:
    """All columns; `advance` is told which part of everything is done."""
    results = {}
    runs = study.replications * len(study.columns)
    for place, (name, setup) in enumerate(study.columns.items()):

        def on_time(number: int, now: float, ended: int, place: int = place, name: str = name) -> None:
            whole = study.until_s if study.until_s is not None else float(study.until_turns or 1)
            part = min(1.0, (now if study.until_s is not None else ended) / whole)
            done = place * study.replications + number + part
            advance(done / runs, f"{LABELS[name]}, {number + 1} of {study.replications}")

        results[name] = replicate(
            setup,
            seed=study.seed,
            replications=study.replications,
            until_s=study.until_s,
            until_turns=study.until_turns,
            warmup_s=study.warmup_s,
            on_time=on_time,
        )
    return results


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error, gone at the end; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=1.0)

        def advance(part: float, what: str) -> None:
            progress.update(task, completed=part, description=what)

        yield advance


def _write_events(study: Study, path: Path) -> None:
    """One run's events: the first seed's, of the last column."""
    setup = list(study.columns.values())[-1]
    with path.open("wb") as file:

        def log(now: float, backend: str, event: Event, commands: tuple[Command, ...]) -> None:
            file.write(encode(now, backend, event, commands) + b"\n")

        simulate(
            setup,
            seed=study.seed,
            until_s=study.until_s,
            until_turns=study.until_turns,
            log=log,
        )


def _timelines(preset: Preset) -> dict[str, Timeline]:
    return {name: record(preset.example(preemption=name == ON), until_s=EXAMPLE_S) for name in (OFF, ON)}


def _sweep(grid: str, given: Given, csv: Path | None, chart: Path | None, as_csv: bool) -> None:
    try:
        with _progress() as advance:
            title, changing, rows = run_grid(grid, given, advance)
        try:
            write_sweep(rows, title, csv, chart)
        except OSError as error:
            _unwritable("--csv or --chart", Path(error.filename or "."), error)
    except SimulationError as error:
        _refuse(error)
    if as_csv:
        print_csv(rows)
        return
    console = Console(highlight=False)
    show_sweep(console, title, changing, rows)
    for path in (csv, chart):
        if path is not None:
            console.print(Text(f"written: {path}"), soft_wrap=True)


def _calibrate(config: Path | None, path: Path) -> None:
    """Measure the configured engine; takes about a minute and a half."""
    from backends.managed import ManagedEngineError
    from benchmarks.calibrate import run_calibration
    from benchmarks.harness import BenchError

    if config is None:
        _refuse("--calibrate goes with --config: which engine?")
    writable_json(path)
    try:
        found = run_calibration(load(config), path=path)
    except* (BenchError, ManagedEngineError, OSError) as group:
        fail(f"simulate: --calibrate: {root_cause(group)}", 1)
    console = Console(highlight=False)
    for name, value in asdict(found.model).items():
        console.print(f"  {name:<16} {value:.6g}")
    console.print(Text(f"written: {path}; use it with --engine {path}"), soft_wrap=True)


def _refuse(message: object) -> NoReturn:
    fail(f"simulate: {message}")


def _unwritable(option: str, path: Path | None, error: OSError) -> NoReturn:
    _refuse(f"{option}: {plain(path)} cannot be written: {plain(error.strerror or error)}")


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(name="simulate")
    def simulate_command(
        preset: Annotated[
            str | None, typer.Option(help=f"A whole machine with its load: {', '.join(PRESETS)}.")
        ] = None,
        config: Annotated[
            Path | None, typer.Option("--config", "-c", help="Or the swarm of a configuration file.")
        ] = None,
        engine: Annotated[
            str | None,
            typer.Option(help="With --config: a preset's engine, or the file of a calibration."),
        ] = None,
        trace: Annotated[
            Path | None, typer.Option(help="With --config: replay this trace instead of the workloads.")
        ] = None,
        pool: Annotated[
            str | None, typer.Option(help="With --config: which pool, if there are several.")
        ] = None,
        hours: Annotated[
            float | None, typer.Option(min=0.001, max=10_000, help="Simulated hours of each run.")
        ] = None,
        turns: Annotated[
            int | None, typer.Option(min=1, max=100_000_000, help="Or until so many turns have arrived.")
        ] = None,
        replications: Annotated[
            int | None, typer.Option(min=1, max=1000, help="Runs of each column, with seeds in a row.")
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 1,
        off: Annotated[bool, typer.Option("--off", help="Only without preemption.")] = False,
        on: Annotated[bool, typer.Option("--on", help="Only with preemption.")] = False,
        text: Annotated[bool, typer.Option("--text", help="Draw the preset's timeline here.")] = False,
        chart: Annotated[
            Path | None,
            typer.Option(
                "--chart",
                metavar="FILE",
                help="Draw the timeline, or the sweep, to a .png or .svg file.",
            ),
        ] = None,
        sweep: Annotated[
            str | None,
            typer.Option(
                metavar="GRID",
                help='Vary the preset or the swarm: "slots=4,8 preemption=on,off load=0.5..0.9:0.2".',
            ),
        ] = None,
        csv: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Write the sweep's rows to this file.")
        ] = None,
        calibrate: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="With --config: measure its engine, and write what --engine reads.",
            ),
        ] = None,
        events: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Write the first run's scheduler events as JSON lines."),
        ] = None,
        json_wanted: Annotated[
            bool, typer.Option("--json", help="Print the figures as JSON; a sweep as CSV.")
        ] = False,
    ) -> None:
        """How long turns wait, without preemption and with it: the same scheduler, a model engine."""
        if calibrate is not None:
            _calibrate(config, calibrate)
            return
        given = Given(preset, config, engine, pool, trace, hours, turns, replications, seed, off, on)
        if sweep is not None:
            _sweep(sweep, given, csv, chart, json_wanted)
            return
        if csv is not None:
            _refuse("--csv goes with --sweep")
        try:
            study = understand(given)
            if (text or chart is not None) and study.preset is None:
                raise SimulationError("the timeline is a preset's: give --preset")
            if chart is not None and study.preset is not None:
                try:
                    draw_timelines(_timelines(study.preset), EXAMPLE_S, chart, study.title)
                except OSError as error:
                    _unwritable("--chart", chart, error)
            if events is not None:
                try:
                    _write_events(study, events)
                except OSError as error:
                    _unwritable("--events", events, error)
            with _progress() as advance:
                results = _run(study, advance)
        except (SimulationError, TimelineChartError) as error:
            _refuse(error)
        if json_wanted:
            sys.stdout.write(orjson.dumps(as_json(study, results)).decode() + "\n")
            return
        console = Console(highlight=False)
        show(console, study, results)
        if study.preset is not None:
            if ON in results:
                console.print(Text(f"Note: {_P90}", PAUSED))
            if text:
                console.print()
                console.print(timeline_text(_timelines(study.preset), EXAMPLE_S, console.width))
        for option, path in (("timeline", chart), ("events", events)):
            if path is not None:
                console.print(Text(f"{option} written: {path}"), soft_wrap=True)
