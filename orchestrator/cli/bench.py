"""`swarm bench`: the benches of the project, each with its own options.

A bench is the module `benchmarks.NAME` with `NameSettings`, a frozen dataclass with `quick()`, and
`run(settings, json_path=..., console=...)`. It is imported when it is asked for only.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from backends.managed import ManagedEngineError
from orchestrator.broker.embedded import EmbeddedValkeyError
from orchestrator.cli.common import fail, root_cause, writable_json

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file as well.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Short: shows that it works, not what it costs.")]


def _bench(name: str) -> Any:
    """The bench's module."""
    return import_module(f"benchmarks.{name}")


def _settings(name: str, quick: bool, **changes: Any) -> Any:
    """The bench's settings with what the user gave; None is what was not given."""
    settings = getattr(_bench(name), f"{name.title()}Settings")()
    if quick:
        settings = settings.quick()
    return replace(settings, **{key: value for key, value in changes.items() if value is not None})


def _run(name: str, settings: Any, json_path: Path | None) -> None:
    """Run it; what goes wrong is one line and exit code 1."""
    writable_json(json_path)
    from benchmarks.harness import BenchError

    try:
        _bench(name).run(settings, json_path=json_path)
    except* (BenchError, ManagedEngineError, EmbeddedValkeyError, OSError) as group:
        fail(f"bench {name}: {root_cause(group)}", 1)


def _words(text: str | None, option: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        fail(f"{option}: {', '.join(unknown) or 'nothing'} is not among {', '.join(known)}")
    return words


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**9 for word in words):
        fail(f"{option}: {text!r} is not a list of whole numbers such as 500,2000")
    return tuple(map(int, words))


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    group = typer.Typer(no_args_is_help=True, help="Measure; each bench prints one table.")
    app.add_typer(group, name="bench")

    @group.command()
    def wait(
        json_path: JsonFile = None,
        quick: Quick = False,
        seconds: Annotated[
            float | None, typer.Option(min=1, max=86_400, help="Measured seconds for each column.")
        ] = None,
        rounds: Annotated[int | None, typer.Option(min=1, max=100, help="Rounds of the columns.")] = None,
        clients: Annotated[int | None, typer.Option(min=1, max=1000, help="Background clients.")] = None,
        columns: Annotated[
            str | None, typer.Option(help="Which of bare, off, on, limit; with commas.")
        ] = None,
        long_prompt: Annotated[
            int | None,
            typer.Option(min=100, max=100_000, help="With one client always in prefill of so many tokens."),
        ] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the turns.")] = None,
    ) -> None:
        """The foreground's wait for a slot: bare engine, service without and with preemption."""
        chosen = _words(columns, "--columns", _bench("wait").COLUMNS)
        settings = _settings("wait", quick)
        if long_prompt is not None:
            settings = settings.long_prompt(long_prompt)
        changes = {
            "duration_s": seconds,
            "rounds": rounds,
            "clients": clients,
            "columns": chosen,
            "seed": seed,
        }
        changes = {key: value for key, value in changes.items() if value is not None}
        _run("wait", replace(settings, **changes), json_path)

    @group.command()
    def overhead(
        json_path: JsonFile = None,
        quick: Quick = False,
        engines: Annotated[
            str | None, typer.Option(help="Which engines, with commas; default: all of them.")
        ] = None,
        pairs: Annotated[int | None, typer.Option(min=1, max=100_000, help="Pairs of single turns.")] = None,
        streams: Annotated[int | None, typer.Option(min=1, max=1000, help="Concurrent streams.")] = None,
    ) -> None:
        """What the service adds to the engine: time to first token, throughput, CPU."""
        chosen = _words(engines, "--engines", _bench("overhead").ENGINES)
        _run(
            "overhead", _settings("overhead", quick, engines=chosen, pairs=pairs, streams=streams), json_path
        )

    @group.command()
    def resume(
        json_path: JsonFile = None,
        quick: Quick = False,
        lengths: Annotated[str | None, typer.Option(help="Context lengths in tokens, with commas.")] = None,
        repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Repeats of each.")] = None,
    ) -> None:
        """What a pause and a resume cost, by context length and tier."""
        chosen = _numbers(lengths, "--lengths")
        _run("resume", _settings("resume", quick, lengths=chosen, repeats=repeats), json_path)

    @group.command()
    def pressure(
        json_path: JsonFile = None,
        quick: Quick = False,
        seconds: Annotated[
            float | None, typer.Option(min=1, max=86_400, help="For how long turns are asked for.")
        ] = None,
        layout: Annotated[str | None, typer.Option(help="The engine's KV: unified or split.")] = None,
        references: Annotated[
            int | None, typer.Option(min=0, max=100_000, help="About how many turns are generated again.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the turns.")] = None,
    ) -> None:
        """Turns whose KV does not fit: tiers, costs, and the ledger against the engine's own figures."""
        if layout not in (None, "unified", "split"):
            fail(f"--layout: {layout!r} is neither unified nor split")
        changes = {"duration_s": seconds, "layout": layout, "references": references, "seed": seed}
        _run("pressure", _settings("pressure", quick, **changes), json_path)

    @group.command()
    def reuse(
        json_path: JsonFile = None,
        quick: Quick = False,
        slots: Annotated[str | None, typer.Option(help="Numbers of engine slots, with commas.")] = None,
        columns: Annotated[
            str | None, typer.Option(help="Which of stock, bare, service; with commas.")
        ] = None,
        turns: Annotated[int | None, typer.Option(min=1, max=1000, help="Turns of each agent.")] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the turns.")] = None,
    ) -> None:
        """How much of their prompts agents' turns find in KV: the engine alone, and the service."""
        chosen = _words(columns, "--columns", _bench("reuse").COLUMNS)
        changes = {"slots": _numbers(slots, "--slots"), "columns": chosen, "turns": turns, "seed": seed}
        _run("reuse", _settings("reuse", quick, **changes), json_path)

    @group.command()
    def truth(
        json_path: JsonFile = None,
        quick: Quick = False,
        seconds: Annotated[
            float | None, typer.Option(min=20, max=86_400, help="For how long turns arrive.")
        ] = None,
        repeat: Annotated[int | None, typer.Option(min=1, max=100, help="Runs on the real engine.")] = None,
        load: Annotated[
            float | None, typer.Option(min=0.1, max=2, help="Part of all decode slots that turns take.")
        ] = None,
        preemption: Annotated[bool | None, typer.Option("--preemption/--no-preemption")] = None,
        trace: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Replay these turns; see `swarm trace`.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the turns.")] = None,
    ) -> None:
        """The same turns on the real engine and in the simulator, and how far they are apart."""
        changes = {"duration_s": seconds, "repeat": repeat, "load": load, "preemption": preemption}
        _run("truth", _settings("truth", quick, **changes, trace=trace, seed=seed), json_path)

    @group.command()
    def streams(
        json_path: JsonFile = None,
        quick: Quick = False,
        streams: Annotated[int | None, typer.Option(min=2, max=1000, help="Streams in all.")] = None,
        slow: Annotated[
            int | None, typer.Option(min=1, max=999, help="How many of them are read slowly or not at all.")
        ] = None,
        rounds: Annotated[int | None, typer.Option(min=1, max=100, help="Rounds of both phases.")] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the turns.")] = None,
    ) -> None:
        """What readers that are slow, or do not read at all, cost everybody else."""
        settings = _settings("streams", quick, streams=streams, slow=slow, rounds=rounds, seed=seed)
        if settings.slow >= settings.streams:
            fail(f"--slow: {settings.slow} of {settings.streams} streams leaves no others")
        _run("streams", settings, json_path)

    @group.command()
    def cuts(
        json_path: JsonFile = None,
        quick: Quick = False,
        cuts: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Cuts in all.")] = None,
        kinds: Annotated[str | None, typer.Option(help="Which kinds of turns, with commas.")] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the places.")] = None,
    ) -> None:
        """Turns cut anywhere on the real engine, and what is wrong with their replies."""
        known = tuple(kind.name for kind in _bench("cuts").KINDS)
        changes = {"cuts": cuts, "kinds": _words(kinds, "--kinds", known), "seed": seed}
        _run("cuts", _settings("cuts", quick, **changes), json_path)

    @group.command()
    def scheduler(
        json_path: JsonFile = None,
        quick: Quick = False,
        events: Annotated[
            int | None, typer.Option(min=100, max=100_000_000, help="Timed events for each size.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="Seed of the events.")] = None,
    ) -> None:
        """The scheduler's time for each event, by slots and waiting turns."""
        _run("scheduler", _settings("scheduler", quick, events=events, seed=seed), json_path)

    @group.command()
    def broker(
        json_path: JsonFile = None,
        quick: Quick = False,
        turns: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Turns.")] = None,
        workers: Annotated[int | None, typer.Option(min=1, max=1000, help="Concurrent callers.")] = None,
    ) -> None:
        """The broker's time for each operation, and its throughput."""
        _run("broker", _settings("broker", quick, turns=turns, workers=workers), json_path)
