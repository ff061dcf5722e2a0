"""`swarm trace`: a real run's arrivals as a file that the simulator replays."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.cli.common import fail
from orchestrator.cli.figures import count, duration, plain, plural, short_count
from orchestrator.cli.service_client import (
    DEFAULT_CONFIG,
    ServiceClient,
    ServiceConfigOption,
    ServiceProblem,
    UrlOption,
    service_url,
    settings_for,
    turn_path,
)
from orchestrator.cli.turns import LIST_LIMIT
from orchestrator.cli.view import TurnStory, TurnSummary, View
from orchestrator.simulation.trace import (
    TraceError,
    TraceSummary,
    read_trace,
    summarise,
    trace_lines,
)
from orchestrator.simulation.workload import Arrival
from orchestrator.turns import FINAL_STATES

POLL_S = 20.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd])")
_LONGER = (
    f"The service lists the last {LIST_LIMIT:,} turns that ended, and forgets each policy.turn_ttl_s seconds "
    "after its end (600 unless set). For a longer run start the export before it, with --follow."
)


class _Turn(TurnSummary):
    pool: str = ""


class _Turns(View):
    turns: tuple[_Turn, ...]


def seconds(text: str | None, option: str) -> float | None:
    """A span such as 90s, 15m, 2h or 1d."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        fail(f"{option}: {text!r} is not a span such as 90s, 15m or 2h")
    return float(match[1]) * _UNITS_S[match[2]]


def arrivals(turns: Iterable[TurnSummary], shared: dict[str, int]) -> list[Arrival]:
    """The turns that generated something, by time since the first one's arrival.

    `shared` is by turn id what each found of its prompt in KV.
    """
    ordered = sorted(
        (turn for turn in turns if turn.prompt_tokens > 0 and turn.tokens_generated > 0),
        key=lambda turn: (turn.created, turn.id),
    )
    return [
        Arrival(
            at_s=round(turn.created - ordered[0].created, 6),
            agent=turn.agent,
            priority_class=turn.priority_class or str(turn.priority),
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.tokens_generated,
            shared_tokens=min(shared.get(turn.id, 0), turn.prompt_tokens),
        )
        for turn in ordered
    ]


class _Collector:
    """Ended turns of a running service, each once."""

    def __init__(self, client: ServiceClient, pool: str | None, since: float, shared: bool) -> None:
        self._client = client
        self._pool = pool
        self._since = since
        self._wants_shared = shared
        self.turns: dict[str, TurnSummary] = {}
        self.shared: dict[str, int] = {}
        self.unfinished: set[str] = set()
        self.gaps = 0
        """How often turns may have been missed: all that were listed were new."""

    def poll(self) -> None:
        """Ask once. Raises ServiceProblem."""
        listed = self._client.read(_Turns, self._client.get("/swarm/turns", {"limit": LIST_LIMIT})).turns
        chosen = [turn for turn in listed if self._pool in (None, turn.pool) and turn.created >= self._since]
        ended = [turn for turn in listed if turn.state in FINAL_STATES]
        known = bool(self.turns)
        if len(ended) >= LIST_LIMIT and not (known and any(turn.id in self.turns for turn in ended)):
            self.gaps += 1
        self.unfinished = {turn.id for turn in chosen if turn.state not in FINAL_STATES}
        for turn in chosen:
            if turn.state in FINAL_STATES and turn.id not in self.turns:
                self.turns[turn.id] = turn
                if self._wants_shared and turn.tokens_generated:
                    self.shared[turn.id] = self._cached(turn.id)

    def _cached(self, turn_id: str) -> int:
        """How much of its prompt a turn found in KV when it first started."""
        story = self._client.read(TurnStory, self._client.get(turn_path(turn_id)))
        for entry in story.timeline:
            if entry.event == "started":
                found = entry.details.get("cached_tokens")
                return found if isinstance(found, int) and found > 0 else 0
        return 0


def _remarks(collector: _Collector, kept: list[Arrival]) -> Iterable[str]:
    if kept:
        span = duration(kept[-1].at_s)
        yield f"{plural(len(kept), 'turn')} over {span}, begun with the first one's arrival"
    if left := len(collector.turns) - len(kept):
        yield f"left out: {plural(left, 'turn')} that ended without a token"
    if collector.unfinished:
        yield f"left out: {plural(len(collector.unfinished), 'turn')} not over yet"
    if collector.gaps:
        yield f"turns may be missing. {_LONGER}"


def _table(summary: TraceSummary) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("class", "agent"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "prompt p50 p90 p99 max", "output p50 p90 p99 max"):
        table.add_column(name, justify="right")
    for part in summary.parts:
        sizes = ("  ".join(map(short_count, part.prompts)), "  ".join(map(short_count, part.outputs)))
        table.add_row(plain(part.priority_class), plain(part.agent), count(part.turns), *sizes)
    return table


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    group = typer.Typer(no_args_is_help=True, help="Record a run's arrivals for the simulator.")
    app.add_typer(group, name="trace")

    @group.command(help=f"Write the turns of a running service as a trace. {_LONGER}")
    def export(
        output: Annotated[
            Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
        ] = None,
        pool: Annotated[str | None, typer.Option(help="Turns of this pool only.")] = None,
        since: Annotated[
            str | None, typer.Option(help="Turns that arrived within this span before now, as 90s, 15m, 2h.")
        ] = None,
        follow: Annotated[
            str | None, typer.Option(help="Go on for so long, or until Ctrl-C, and collect what ends.")
        ] = None,
        shared: Annotated[
            bool,
            typer.Option(
                "--shared",
                help="With what each turn found of its prompt in KV, at least; asks for every turn.",
            ),
        ] = False,
        config: ServiceConfigOption = None,
        url: UrlOption = None,
    ) -> None:
        since_s, follow_s = seconds(since, "--since"), seconds(follow, "--follow")
        settings = settings_for(config, url)
        begin = 0.0 if since_s is None else time.time() - since_s
        try:
            with ServiceClient(service_url(settings, url), config=config or DEFAULT_CONFIG) as client:
                collector = _Collector(client, pool, begin, shared)
                _collect(collector, follow_s)
        except ServiceProblem as problem:
            fail(str(problem), 1)
        kept = arrivals(collector.turns.values(), collector.shared)
        for remark in _remarks(collector, kept):
            typer.echo(remark, err=True)
        if not kept:
            fail("trace export: no turn has ended with a token yet; nothing is written", 1)
        try:
            raw = b"".join(trace_lines(kept))
            if output is None:
                sys.stdout.write(raw.decode())
            else:
                output.write_bytes(raw)
        except (TraceError, OSError) as error:
            fail(f"trace export: {plain(getattr(error, 'strerror', None) or error)}", 1)

    @group.command()
    def show(file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")]) -> None:
        """What a trace asks for: turns, lengths and load."""
        try:
            summary = summarise(read_trace(file))
        except TraceError as error:
            fail(f"trace show: {error}", 1)
        except OSError as error:
            fail(f"trace show: {plain(file)} cannot be read: {error.strerror or error}", 1)
        console = Console(highlight=False)
        console.print(_table(summary))
        console.print(
            f"{plural(summary.turns, 'turn')} over {duration(summary.span_s)}, at most "
            f"{summary.busiest_minute:,} in a minute; {count(summary.prompt_tokens)} prompt and "
            f"{count(summary.output_tokens)} output tokens"
        )
        if summary.span_s > 0:
            offered = summary.offered_tokens_per_s
            console.print(f"asked for: {offered:,.1f} output tokens/s on average")


def _collect(collector: _Collector, follow_s: float | None) -> None:
    """Once, or again and again until the time is over or the user says so. Raises ServiceProblem."""
    collector.poll()
    if follow_s is None:
        return
    end = time.monotonic() + follow_s
    try:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
            try:
                collector.poll()
            except ServiceProblem as problem:
                # What was collected in hours is worth more than the end of it.
                typer.echo(f"stopped early: {problem}", err=True)
                return
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
