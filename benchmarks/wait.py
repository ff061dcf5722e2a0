"""How long a foreground turn waits for a decode slot while background turns outnumber the slots.

Four columns in one run, each with the same seeded turns:

| column | what answers |
|---|---|
| `bare` | the llama.cpp server alone, as many slots as may decode: first come, first served |
| `off` | the service without preemption: a foreground turn is next, once a slot is free |
| `on` | the service with preemption: a background turn gives its slot back at a token boundary |
| `limit` | a bare client that starts in an idle spare slot while all decode slots are kept busy |

`limit` is what no scheduler can beat: a new turn is taken at the next step of the busy engine, and nothing
else has to happen. The wait ends when the server says that the turn has its slot (`agents/client.py`).

A column's rounds alternate with the other columns' rounds, and odd rounds go backwards, so that a machine
that gets slower during the run does not favour one column. The first seconds after each start, when all turns
began together, are not measured. Foreground turns arrive at random times, the same in every column, so that
all columns are offered the same work. A foreground turn that is under way when the time is over is waited
for: dropping it would hide the longest waits. In `limit` they use one slot; one that overlaps comes later.
"""

import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import anyio
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import Lengths, TurnPlan, Workload, chat_body, client_turns, filler
from benchmarks.harness import EngineShape, real_engine, run_async, service
from benchmarks.report import Advance, Report, Summary, figure, milliseconds, progress_bar, ratio

COLUMNS = ("bare", "off", "on", "limit")
LABELS = {
    "bare": "bare engine",
    "off": "service, no preemption",
    "on": "service, preemption",
    "limit": "limit: idle slot",
}
_LONG_PROMPT_REPLY_TOKENS = 16
_LONG_PROMPT_ROOM_TOKENS = 328
_LAST_TURN_BOUND_S = 180.0
_ERROR_PAUSE_S = 0.2
_TICK_S = 0.5
_GAP_SPREAD = 0.6


@dataclass(frozen=True)
class WaitSettings:
    """What is measured. `duration_s` is per column over all its rounds, `warmup_s` per round and extra."""

    duration_s: float = 260.0
    rounds: int = 2
    warmup_s: float = 20.0
    seed: int = 1
    columns: tuple[str, ...] = COLUMNS
    clients: int = 12
    """Background clients: 1.5 for each decode slot."""
    foreground_tokens: int = 8
    gap_s: float = 2.5
    """Mean time between the arrivals of foreground turns, uniform within 60% of it to either side.

    One person asks, and seldom before the answer to the last question: with preemption, turns do not overlap.
    """
    long_prompt_tokens: int | None = None
    """If set: every decode slot is busy, one of them always in prefill of a prompt this long."""
    shape: EngineShape = field(default_factory=EngineShape)

    def quick(self) -> "WaitSettings":
        """Too short for a p99, long enough to see that everything works."""
        return replace(self, duration_s=30.0, rounds=1, warmup_s=5.0)

    def long_prompt(self, tokens: int = 3000) -> "WaitSettings":
        """With a client that is always in prefill, in slots that hold its prompts."""
        shape = replace(self.shape, slot_context=tokens + _LONG_PROMPT_ROOM_TOKENS)
        return replace(self, long_prompt_tokens=tokens, columns=("on", "limit"), shape=shape)

    @property
    def total_s(self) -> float:
        """About how long the run takes."""
        return len(self.columns) * (self.duration_s + self.rounds * self.warmup_s)


@dataclass(frozen=True)
class Target:
    """A server under load, and what its requests need besides the turn itself."""

    url: str
    foreground_headers: Mapping[str, str] = field(default_factory=dict)
    background_headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    """The foreground always uses engine slot 0, background client N slot N + 1.

    llama.cpp fills each batch in the order of the slots: a turn in a slot *after* one that is in prefill gets
    no place in the batch, and does not start, before that prefill is over.
    """

    def background_body(self, client: int) -> dict[str, Any]:
        return {**self.body, "id_slot": client + 1} if self.pinned else dict(self.body)

    def foreground_body(self) -> dict[str, Any]:
        return {**self.body, "id_slot": 0} if self.pinned else dict(self.body)


@dataclass
class Column:
    """What one column measured, its rounds together. Seconds, tokens per second."""

    waits: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    background_tokens: float = 0.0
    foreground_tokens: float = 0.0
    long_prompts: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The decode step: the median gap between two tokens of a background stream."""
        return median(self.steps) if self.steps else float("nan")

    @property
    def mean_step_s(self) -> float:
        """The mean gap, without those over ten medians: in them the turn was paused."""
        longest = 10 * self.step_s
        short = [gap for gap in self.steps if gap <= longest]
        return sum(short) / len(short) if short else float("nan")

    @property
    def background_rate(self) -> float:
        return ratio(self.background_tokens, self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second of background and foreground together."""
        return ratio(self.background_tokens + self.foreground_tokens, self.seconds)

    def count(
        self, foreground: Sequence[TurnResult], background: Sequence[TurnResult], start: float, end: float
    ) -> None:
        """Add turns that ran between two `time.monotonic()` moments, and what arrived between them."""
        self.seconds += end - start
        for result in foreground:
            if result.error is not None:
                self.errors.append(f"foreground: {result.error}")
            elif result.wait_s is None or result.ttft_s is None:
                self.errors.append("foreground: the server did not tell when the turn started")
            else:
                self.waits.append(result.wait_s)
                self.first_tokens.append(result.ttft_s)
        self.errors += [f"background: {result.error}" for result in background if result.error]
        for result in background:
            times = [moment for moment in result.times if start <= moment < end]
            self.steps += [after - before for before, after in pairwise(times)]
        self.background_tokens += _tokens_between(background, start, end)
        self.foreground_tokens += _tokens_between(foreground, start, end)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "wait_s": Summary.of(self.waits),
            "first_token_s": Summary.of(self.first_tokens),
            "step_s": {"median": self.step_s, "mean": self.mean_step_s, "p99": Summary.of(self.steps).p99},
            "background_tokens_per_s": self.background_rate,
            "tokens_per_s": self.rate,
            "seconds": self.seconds,
            "long_prompts": self.long_prompts,
            "errors": self.errors,
            "samples": {
                "wait_s": [round(wait, 5) for wait in self.waits],
                "first_token_s": [round(first, 5) for first in self.first_tokens],
            },
        }


def run(
    settings: WaitSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[str, Column]:
    """Measure, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    with progress_bar(settings.total_s, "starting") as advance:
        columns = run_async(measure, settings, advance)
    report(settings, columns).finish(console or Console(), json_path)
    return columns


async def measure(settings: WaitSettings, advance: Advance) -> dict[str, Column]:
    """All columns' figures, in the settings' order."""
    columns = {name: Column() for name in settings.columns}
    done_s = 0.0
    for number in range(settings.rounds):
        order = list(columns) if number % 2 == 0 else list(reversed(columns))
        for name in order:
            advance(done_s, LABELS[name])
            async with target(name, settings) as server:
                measured = _Round(settings, server, columns[name], settings.seed + number)
                await measured.run(_part(advance, done_s, LABELS[name]))
            done_s += settings.warmup_s + settings.duration_s / settings.rounds
    return columns


@asynccontextmanager
async def target(column: str, settings: WaitSettings) -> AsyncIterator[Target]:
    """Start what the column measures."""
    shape = settings.shape
    progress = {"return_progress": True}
    if column == "bare":
        async with real_engine(shape, shape.decode_slots) as engine:
            yield Target(engine.url, body=progress)
    elif column == "limit":
        async with real_engine(shape) as engine:
            yield Target(engine.url, body=progress, pinned=True)
    else:
        async with service(service_config(shape, preemption=column == "on")) as url:
            yield Target(url, {"X-Swarm-Agent": "foreground"}, {"X-Swarm-Agent": "background"})


def service_config(shape: EngineShape, *, preemption: bool) -> dict[str, Any]:
    """The service with its own engine, a foreground and a background agent, both without keys."""
    limit = {"max_turn_tokens": shape.slot_context}
    return {
        "backends": [{"name": "bench", "kind": "llama.cpp", "managed": shape.managed()}],
        "policy": {"preemption": preemption},
        "agents": {
            "foreground": {"priority": "foreground", **limit},
            "background": {"priority": "background", **limit},
        },
    }


class _Round:
    """One round of one column: background clients without end, and foreground turns for a time."""

    def __init__(self, settings: WaitSettings, target: Target, column: Column, seed: int) -> None:
        self._settings = settings
        self._target = target
        self._column = column
        self._seed = seed
        self._background: list[TurnResult] = []
        self._foreground: list[TurnResult] = []
        self._foreground_slot = anyio.Lock()

    async def run(self, advance: Callable[[float], None]) -> None:
        settings = self._settings
        duration_s = settings.duration_s / settings.rounds
        begin = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick, begin, settings.warmup_s + duration_s, advance)
            for client, turns in enumerate(self._clients()):
                tasks.start_soon(self._background_client, client, turns)
            await anyio.sleep(settings.warmup_s)
            start = anyio.current_time()
            await self._foreground_arrivals(start + duration_s)
            tasks.cancel_scope.cancel()
        self._column.count(self._foreground, self._background, start, start + duration_s)

    def _clients(self) -> Iterator[Iterator[TurnPlan]]:
        settings = self._settings
        filled = self._target.pinned or settings.long_prompt_tokens is not None
        clients = settings.shape.decode_slots if filled else settings.clients
        for client in range(clients):
            if settings.long_prompt_tokens is not None and client == clients - 1:
                yield self._long_prompts(settings.long_prompt_tokens)
            else:
                yield client_turns(Workload(), self._seed, client)

    def _long_prompts(self, tokens: int) -> Iterator[TurnPlan]:
        for turn in count():
            # A distinct first word: nothing of the turn before can be found in the engine's cache.
            yield TurnPlan(filler(tokens, f"{self._seed}.{turn}"), _LONG_PROMPT_REPLY_TOKENS)

    async def _background_client(self, client: int, turns: Iterator[TurnPlan]) -> None:
        target = self._target
        for plan in turns:
            body = chat_body(plan, exact_length=True) | target.background_body(client)
            result = TurnResult()
            self._background.append(result)
            await stream_chat(target.url, body, target.background_headers, into=result)
            if len(plan.prompt) > self._settings.shape.slot_context:
                self._column.long_prompts += 1
            if result.error is not None:
                await anyio.sleep(_ERROR_PAUSE_S)
            await anyio.sleep(plan.think_s)

    async def _foreground_arrivals(self, end: float) -> None:
        """Start turns at times that do not depend on how long the ones before took."""
        settings = self._settings
        lengths = Lengths.fixed(settings.foreground_tokens)
        turns = client_turns(Workload(lengths), self._seed, "f")
        at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            rng = random.Random(f"arrivals/{self._seed}")
            for plan in turns:
                at += settings.gap_s * rng.uniform(1 - _GAP_SPREAD, 1 + _GAP_SPREAD)
                if at >= end:
                    return
                await anyio.sleep_until(at)
                tasks.start_soon(self._foreground_turn, plan, end - at + _LAST_TURN_BOUND_S)

    async def _foreground_turn(self, plan: TurnPlan, bound_s: float) -> None:
        target = self._target
        async with self._foreground_slot if target.pinned else nullcontext():
            body = chat_body(plan, exact_length=True) | target.foreground_body()
            result = await stream_chat(target.url, body, target.foreground_headers, timeout_s=bound_s)
        self._foreground.append(result)


def _tokens_between(results: Sequence[TurnResult], start: float, end: float) -> float:
    """Tokens that arrived in a span: the pieces in it, times the tokens a piece had in complete turns."""
    complete = [result for result in results if result.error is None and not result.aborted]
    pieces = sum(result.pieces for result in complete)
    scale = sum(result.tokens for result in complete) / pieces if pieces else 1.0
    return scale * sum(1 for result in results for moment in result.times if start <= moment < end)


def _part(advance: Advance, done_s: float, label: str) -> Callable[[float], None]:
    return lambda passed_s: advance(done_s + passed_s, label)


async def _tick(begin: float, total_s: float, advance: Callable[[float], None]) -> None:
    while (passed_s := anyio.current_time() - begin) < total_s:
        advance(passed_s)
        await anyio.sleep(_TICK_S)


# Report -------------------------------------------------------------------------------------------


def report(settings: WaitSettings, columns: Mapping[str, Column]) -> Report:
    """The table: a row for each figure, a column for each server."""
    waits = {name: Summary.of(column.waits) for name, column in columns.items()}
    first = {name: Summary.of(column.first_tokens) for name, column in columns.items()}
    rows: list[list[str]] = []
    for what, summaries in (("wait for a slot", waits), ("first token", first)):
        for figure_name in ("p50", "p90", "p99", "max"):
            cells = [milliseconds(getattr(summaries[name], figure_name)) for name in columns]
            rows.append([f"{what} {figure_name}", *cells])
    rows += [
        ["foreground turns", *(str(waits[name].n) for name in columns)],
        ["decode step, median", *(milliseconds(column.step_s) for column in columns.values())],
        ["decode step, mean", *(milliseconds(column.mean_step_s) for column in columns.values())],
        ["background tokens/s", *(figure(column.background_rate) for column in columns.values())],
        ["all tokens/s", *(figure(column.rate) for column in columns.values())],
        ["errors", *(str(len(column.errors)) for column in columns.values())],
    ]
    if settings.long_prompt_tokens is not None:
        rows.append(["long prompts done", *(str(column.long_prompts) for column in columns.values())])
    found = bars(columns)
    title = f"Foreground wait, {settings.shape.decode_slots} decode slots"
    if settings.long_prompt_tokens is not None:
        title += f", one background turn always in prefill ({settings.long_prompt_tokens:,} tokens)"
    return Report(
        bench="wait",
        title=title,
        columns=["", *(LABELS[name] for name in columns)],
        rows=rows,
        notes=[*_bar_lines(found, settings), *_error_lines(columns)],
        parameters={"settings": settings, "lengths": Lengths()},
        data={"columns": {name: column.data() for name, column in columns.items()}, "bars": found},
    )


def bars(columns: Mapping[str, Column]) -> dict[str, float]:
    """The figures that the goals are about, those whose columns were measured."""
    waits = {name: Summary.of(column.waits) for name, column in columns.items()}
    found: dict[str, float] = {}
    if "on" not in columns:
        return found
    found["p99_wait_in_steps"] = ratio(waits["on"].p99, columns["on"].step_s)
    if "off" in columns:
        for name in ("p50", "p90", "p99", "max"):
            found[f"{name}_times_shorter"] = ratio(getattr(waits["off"], name), getattr(waits["on"], name))
        found["background_throughput"] = ratio(columns["on"].background_rate, columns["off"].background_rate)
        found["all_throughput"] = ratio(columns["on"].rate, columns["off"].rate)
    if "limit" in columns:
        for name in ("p50", "p90", "p99", "max"):
            found[f"{name}_over_limit_s"] = getattr(waits["on"], name) - getattr(waits["limit"], name)
    return found


def _bar_lines(found: Mapping[str, float], settings: WaitSettings) -> Iterator[str]:
    steps = 1.5 if settings.long_prompt_tokens is None else 4
    if "p99_wait_in_steps" in found:
        p99 = found["p99_wait_in_steps"]
        yield f"p99 wait: {p99:.2f} decode steps of the same column (goal: at most {steps:g})"
    if "p99_times_shorter" in found:
        p50, p99, worst = (found[f"{name}_times_shorter"] for name in ("p50", "p99", "max"))
        yield (
            f"against no preemption: p50 {p50:.0f}, p99 {p99:.0f}, max {worst:.0f} times shorter "
            "(goal: p99 at least 150)"
        )
    if "p99_over_limit_s" in found:
        over = ", ".join(
            f"{name} {found[f'{name}_over_limit_s'] * 1e3:+.1f} ms" for name in ("p50", "p90", "p99", "max")
        )
        yield f"over the limit: {over} (goal: at most +8 ms)"
    if "background_throughput" in found:
        yield (
            f"throughput against no preemption: background {found['background_throughput']:.1%} "
            f"(goal: at least 98%), with the foreground's {found['all_throughput']:.1%}"
        )


def _error_lines(columns: Mapping[str, Column]) -> Iterator[str]:
    for name, column in columns.items():
        if column.errors:
            yield f"{LABELS[name]}: {len(column.errors)} errors, the first: {column.errors[0]}"
