"""`swarm demo`: the configured swarm, live, with preemption off and then on."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
import httpx
import typer
import uvloop
from rich.console import Console
from rich.text import Text

from benchmarks.report import Report, Summary, figure, milliseconds, percentile, ratio
from orchestrator.cli.common import ConfigOption, fail, load, root_cause, writable_json
from orchestrator.cli.demo_phase import Cast, DemoError, Phase, phase_config, run_phase
from orchestrator.cli.figures import clock, duration, plural
from orchestrator.cli.render import joined, screen
from orchestrator.cli.rows import Classes
from orchestrator.cli.styles import FAINT, FOREGROUND
from orchestrator.cli.terminal import Screen, screen_of
from orchestrator.cli.up import STARTUP_ERRORS
from orchestrator.cli.view import SwarmState
from orchestrator.config import Config
from orchestrator.logs import logging_to

SEED = 1
REDRAW_S = 0.25
PLAIN_LINE_S = 5.0
# Drawing takes a few milliseconds of Python in a thread of its own: the event loop gets the lock back sooner.
_SWITCH_INTERVAL_S = 0.0005


class _Show:
    """What the two ways of showing have in common."""

    def __init__(self, cast: Cast, phases: Sequence[Phase]) -> None:
        self.cast = cast
        self.phases = phases

    def head(self, phase: Phase, now: float) -> list[Text]:
        """The lines above the state: the phase, and the foreground's waits, before and now."""
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(f"swarm demo  {self.phases.index(phase) + 1} of {len(self.phases)}: ", style="bold")
        title.append(phase.label, style="bold")
        if not phase.url:
            title.append("   starting the engine and the broker", style=FAINT)
        elif phase.began is None:
            title.append("   the background fills the engine", style=FAINT)
        else:
            title.append(f"   {clock(phase.elapsed(now))} of {clock(phase.seconds)}")
        title.append("   Ctrl-C stops", style=FAINT)
        return [title, *(self.waits(each, now) for each in self.phases if each.began is not None)]

    def waits(self, phase: Phase, now: float) -> Text:
        """One phase's waits in one line."""
        line = Text(no_wrap=True, overflow="ellipsis", style="" if phase.ended is None else FAINT)
        who = self.cast.foreground[0] if len(self.cast.foreground) == 1 else "foreground"
        line.append(f"{who} waits, {'on:' if phase.preemption else 'off:':<5}", style=FOREGROUND)
        waits = phase.waits(now)
        if not waits:
            return line.append("no turn yet")
        if (waiting_s := phase.waiting_s(now)) is not None:
            line.append(f"waiting {duration(waiting_s)}", style="bold yellow")
        else:
            line.append(f"last {duration(waits[-1])}")
        spread = f"   p50 {duration(percentile(waits, 50))}   max {duration(max(waits))}"
        return line.append(f"{spread}   {plural(len(waits), 'turn')}")


class Live(_Show):
    """The swarm on the alternate screen, drawn over four times a second."""

    def __init__(self, cast: Cast, phases: Sequence[Phase], terminal: Screen, classes: Classes) -> None:
        super().__init__(cast, phases)
        self._terminal = terminal
        self._classes = classes

    async def starting(self, phase: Phase) -> None:
        """Show that the next phase begins."""
        self._terminal.draw(joined(self.head(phase, anyio.current_time())))

    async def watch(self, phase: Phase) -> None:
        """Draw until cancelled."""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    raw = (await client.get(f"{phase.url}/swarm/state")).content
                    head = self.head(phase, anyio.current_time())
                    await anyio.to_thread.run_sync(self._draw, raw, head)
                await anyio.sleep(REDRAW_S)

    def _draw(self, raw: bytes, head: list[Text]) -> None:
        state = SwarmState.model_validate_json(raw)
        terminal = self._terminal
        terminal.draw(
            screen(state, terminal.width, terminal.height, classes=self._classes, head=head, cut=True)
        )


class Plain(_Show):
    """A line every few seconds, for a pipe or a log."""

    async def starting(self, phase: Phase) -> None:
        """Say that the next phase begins."""
        number = self.phases.index(phase) + 1
        typer.echo(f"{number} of {len(self.phases)}: {phase.label}; starting the engine and the broker")

    async def watch(self, phase: Phase) -> None:
        """Print until cancelled."""
        every_s = min(PLAIN_LINE_S, phase.seconds / 3)
        while True:
            await anyio.sleep(every_s)
            now = anyio.current_time()
            if phase.began is None:
                continue
            at = f"{clock(phase.elapsed(now))} of {clock(phase.seconds)}"
            rate = phase.background_rate(now)
            typer.echo(f"  {at}  {self.waits(phase, now).plain}; background {rate:.0f} tokens/s")


async def _play(config: Config, folder: Path, show: Live | Plain) -> bool:
    """All phases, one after the other; False when a signal ended them early. Nothing is left running."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        finished = False
        async with anyio.create_task_group() as tasks:

            async def stop_on_signal() -> None:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

            tasks.start_soon(stop_on_signal)
            for phase in show.phases:
                await show.starting(phase)
                settings = phase_config(
                    config, folder / phase.label.replace(" ", "-"), preemption=phase.preemption
                )
                await run_phase(settings, phase, show.cast, show.watch)
            finished = True
            tasks.cancel_scope.cancel()
        return finished


def report(phases: Sequence[Phase], cast: Cast, config: Config) -> Report:
    """The table: off, on, and how they compare."""
    off, on = phases
    waits = [Summary.of(phase.waits(0.0)) for phase in phases]
    first = [Summary.of(phase.first_tokens) for phase in phases]
    rows: list[list[str]] = []
    for what, pair in (("wait for a slot", waits), ("first token", first)):
        for name in ("p50", "p90", "p99", "max"):
            before, after = (getattr(summary, name) for summary in pair)
            rows.append(
                [f"{what} {name}", milliseconds(before), milliseconds(after), _shorter(before, after)]
            )
    turns = [phase.foreground_done for phase in phases]
    rates = [phase.background_rate(0.0) for phase in phases]
    rows.append(["foreground turns done", str(turns[0]), str(turns[1]), _times(ratio(turns[1], turns[0]))])
    share = ratio(rates[1], rates[0])
    rows.append(
        [
            "background tokens/s",
            figure(rates[0]),
            figure(rates[1]),
            "-" if math.isnan(share) else f"{share:.0%}",
        ]
    )
    names = ", ".join(cast.foreground)
    notes = [f"foreground: {names}; background: {', '.join(cast.background) or 'nobody'}"]
    notes += [
        f"{phase.label}: {plural(len(phase.errors), 'turn')} failed, the first: {phase.errors[0]}"
        for phase in phases
        if phase.errors
    ]
    return Report(
        bench="demo",
        title=f"The same turns twice, {off.seconds:g} s each",
        columns=["", off.label, on.label, "ratio"],
        rows=rows,
        notes=notes,
        parameters={
            "seconds": off.seconds,
            "seed": off.seed,
            "foreground": list(cast.foreground),
            "background": list(cast.background),
            "workloads": {
                name: agent.workload.model_dump() for name, agent in config.agents.items() if agent.workload
            },
        },
        data={
            "off" if phase is off else "on": {
                "wait_s": waits[index],
                "first_token_s": first[index],
                "foreground_turns": turns[index],
                "background_tokens_per_s": rates[index],
                "errors": phase.errors,
                "samples": {"wait_s": [round(wait, 5) for wait in phase.waits(0.0)]},
            }
            for index, phase in enumerate(phases)
        },
    )


def _shorter(before: float, after: float) -> str:
    return _times(ratio(before, after))


def _times(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x"


@contextlib.contextmanager
def _state_folder(config: Config) -> Iterator[Path]:
    """A folder below the state folder; kept after a failure, whose message may point to a log in it."""
    config.redis.state_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=config.redis.state_dir))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _show(live: bool, cast: Cast, phases: Sequence[Phase], config: Config) -> Iterator[Live | Plain]:
    if not live:
        yield Plain(cast, phases)
        return
    classes = Classes({value: name for name, value in config.priorities.items()})
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with screen_of(Console(highlight=False)) as terminal:
            yield Live(cast, phases, terminal, classes)
    finally:
        sys.setswitchinterval(before)


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def demo(
        config: ConfigOption = Path("config.yaml"),
        seconds: Annotated[
            float,
            typer.Option("--seconds", "-s", min=1, max=86_400, help="Length of each of the two phases."),
        ] = 45.0,
        plain: Annotated[
            bool, typer.Option("--plain", help="Progress as lines, not as a live screen.")
        ] = False,
        json_path: Annotated[
            Path | None,
            typer.Option("--json", metavar="FILE", help="Write the figures to this file as well."),
        ] = None,
    ) -> None:
        """Run the configured swarm twice, without and with preemption, and compare the waits."""
        settings = load(config)
        writable_json(json_path)
        console = Console(highlight=False)
        try:
            cast = Cast.of(settings)
        except DemoError as error:
            fail(f"{config}: {error}")
        phases = [Phase(preemption, seconds, SEED) for preemption in (False, True)]
        began = time.monotonic()
        try:
            with (
                _state_folder(settings) as folder,
                (settings.redis.state_dir / "demo.log").open("w") as log,
                logging_to(log),
                _show(console.is_terminal and not plain, cast, phases, settings) as show,
            ):
                finished = uvloop.run(_play(settings, folder, show))
        except* (*STARTUP_ERRORS, DemoError) as group:
            fail(f"swarm demo: {root_cause(group)}", 1)
        if not finished:
            typer.echo(f"stopped after {duration(time.monotonic() - began)}", err=True)
            raise typer.Exit(130)
        _finish(report(phases, cast, settings), console, json_path)


def _finish(found: Report, console: Console, json_path: Path | None) -> None:
    try:
        found.finish(console, json_path)
    except OSError as error:
        fail(f"swarm demo: {error}", 1)
