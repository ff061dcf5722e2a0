"""What one event costs the scheduler, by size of the engine and length of the queue.

A seeded model of dispatcher and engine produces a steady mix of events: turns arrive, are claimed, start,
make progress, are paused for more important ones, resume and end, and each end brings a new arrival, so
that the number of waiting turns stays. The mix is recorded once for each size and then replayed, timed,
through a fresh scheduler that holds the same state: what is timed is the scheduler alone.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Report, Summary, figure, progress_bar, ratio
from orchestrator.scheduler import (
    Claim,
    Claimed,
    Command,
    Ended,
    EngineReady,
    Erase,
    Erased,
    Event,
    Pause,
    Paused,
    Policy,
    Progressed,
    Resume,
    Scheduler,
    Start,
    Started,
    TurnQueued,
)

PRIORITIES = (0, 20, 50, 100)
_ARRIVALS = (50, 30, 15, 5)
"""How often a turn of each of the priorities arrives, in percent."""
_BACKLOG = (50, 50, 0, 0)
"""The same for the turns that wait from the beginning: others would be served before the first is timed."""
_AGENTS = 20
_PROMPT_TOKENS = 1000
_LIMIT_TOKENS = 400
_EVENT_S = 1e-3


@dataclass(frozen=True)
class Size:
    """One row: the engine and the queue."""

    decode_slots: int
    engine_slots: int
    waiting: int
    unified: bool = False

    @property
    def name(self) -> str:
        kv = ", unified" if self.unified else ""
        return f"{self.decode_slots}/{self.engine_slots} slots, {self.waiting:,} waiting{kv}"

    @property
    def policy(self) -> Policy:
        """Unified KV holds reservations for all decode slots and a quarter more."""
        budget = self.decode_slots * (_PROMPT_TOKENS + _LIMIT_TOKENS) * 5 // 4
        return Policy(self.decode_slots, self.engine_slots, kv_budget_tokens=budget if self.unified else None)


@dataclass(frozen=True)
class SchedulerSettings:
    """How much is measured."""

    sizes: tuple[Size, ...] = (
        Size(8, 12, 10),
        Size(8, 12, 100_000),
        Size(8, 12, 10, unified=True),
        Size(64, 96, 10),
        Size(64, 96, 100_000),
    )
    events: int = 60_000
    """Events that are timed for each size."""
    batch: int = 100
    """Events between two looks at the clock."""
    warmup: int = 5_000
    """Events before the first that is timed."""
    seed: int = 1

    def quick(self) -> "SchedulerSettings":
        """Enough to see that everything works."""
        sizes = tuple(replace(size, waiting=min(size.waiting, 1000)) for size in self.sizes)
        return replace(self, sizes=sizes, events=3_000, warmup=500)


@dataclass
class Mix:
    """A recorded run: how the scheduler came to its state, and the events to be timed."""

    before: list[tuple[float, Event]] = field(default_factory=list)
    timed: list[tuple[float, Event]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Seconds for each event: over batches of all, and of single ones by what they are and lead to."""

    size: Size
    batches: Summary
    deciding: Summary
    pausing: Summary
    kinds: Mapping[str, Summary]
    shares: Mapping[str, float]


def run(
    settings: SchedulerSettings, *, json_path: Path | None = None, console: Console | None = None
) -> list[Row]:
    """Measure, print the table, write the JSON. Raises OSError."""
    rows = []
    with progress_bar(len(settings.sizes), "starting") as advance:
        for done, size in enumerate(settings.sizes):
            advance(done, size.name)
            rows.append(measure(size, settings))
    report(settings, rows).finish(console or Console(), json_path)
    return rows


def measure(size: Size, settings: SchedulerSettings) -> Row:
    """The figures of one size."""
    mix = record(size, settings)
    batches = _time_batches(_prepared(size, mix), mix.timed, settings.batch)
    took, paused = _time_each(_prepared(size, mix), mix.timed)
    kinds: dict[str, list[float]] = {}
    for (_, event), seconds in zip(mix.timed, took, strict=True):
        kinds.setdefault(type(event).__name__, []).append(seconds)
    return Row(
        size,
        Summary.of(batches),
        Summary.of([seconds for kind, each in kinds.items() if kind != "Progressed" for seconds in each]),
        Summary.of(paused),
        {kind: Summary.of(each) for kind, each in sorted(kinds.items())},
        {kind: ratio(len(each), len(took)) for kind, each in sorted(kinds.items())},
    )


def record(size: Size, settings: SchedulerSettings) -> Mix:
    """A steady mix for one size; the same for the same seed."""
    model = _Model(size, settings.seed)
    model.tell(EngineReady())
    for _ in range(size.decode_slots + size.waiting):
        model.arrive(_BACKLOG)
        model.obey()
    for _ in range(settings.warmup):
        model.step()
    mix = Mix(before=model.log)
    model.log = mix.timed
    while len(mix.timed) < settings.events:
        model.step()
    del mix.timed[settings.events :]
    return mix


def _prepared(size: Size, mix: Mix) -> Scheduler:
    scheduler = Scheduler(size.policy)
    for now, event in mix.before:
        scheduler.handle(event, now)
    gc.collect()
    return scheduler


def _time_batches(scheduler: Scheduler, events: Sequence[tuple[float, Event]], batch: int) -> list[float]:
    handle = scheduler.handle
    clock = time.perf_counter
    took = []
    for first, end in pairwise(range(0, len(events) + 1, batch)):
        chosen = events[first:end]
        begin = clock()
        for now, event in chosen:
            handle(event, now)
        took.append((clock() - begin) / batch)
    return took


def _time_each(
    scheduler: Scheduler, events: Sequence[tuple[float, Event]]
) -> tuple[list[float], list[float]]:
    """The time of each event, and of those that led to a pause once more."""
    handle = scheduler.handle
    clock = time.perf_counter
    took: list[float] = []
    paused: list[float] = []
    for now, event in events:
        begin = clock()
        commands = handle(event, now)
        took.append(clock() - begin)
        if any(isinstance(command, Pause) for command in commands):
            paused.append(took[-1])
    return took, paused


class _Model:
    """A dispatcher whose commands end at once, and an engine whose turns go on as the dice say."""

    def __init__(self, size: Size, seed: int) -> None:
        self.scheduler = Scheduler(size.policy)
        self.random = random.Random(seed)
        self.log: list[tuple[float, Event]] = []
        self.commands: deque[Command] = deque()
        self.running: dict[str, int] = {}
        self.kv: dict[str, int] = {}
        self.now = 0.0
        self.arrived = 0

    def tell(self, event: Event) -> None:
        self.now += _EVENT_S
        self.log.append((self.now, event))
        self.commands.extend(self.scheduler.handle(event, self.now))

    def arrive(self, weights: Sequence[int] = _ARRIVALS) -> None:
        self.arrived += 1
        turn = f"turn-{self.arrived}"
        priority = self.random.choices(PRIORITIES, weights)[0]
        agent = f"agent-{priority}-{self.random.randrange(_AGENTS)}"
        self.kv[turn] = _PROMPT_TOKENS
        self.tell(TurnQueued(turn, agent, priority, self.arrived, _PROMPT_TOKENS + _LIMIT_TOKENS))

    def obey(self) -> None:
        while self.commands:
            match self.commands.popleft():
                case Claim(turn):
                    self.tell(Claimed(turn))
                case Start(turn) | Resume(turn):
                    self.running[turn] = self.kv[turn]
                    self.tell(Started(turn, self.kv[turn]))
                case Pause(turn):
                    self.kv[turn] = self.running.pop(turn)
                    self.tell(Paused(turn, self.kv[turn], resident=True))
                case Erase(slot):
                    self.tell(Erased(slot))
                case _:
                    pass

    def step(self) -> None:
        turn = self.random.choice(list(self.running))
        if self.random.random() < 0.7:
            self.running[turn] += 1
            self.tell(Progressed(turn, self.running[turn]))
        else:
            self.tell(Ended(turn, self.running.pop(turn), resident=True))
            del self.kv[turn]
            self.obey()
            self.arrive()
        self.obey()


def report(settings: SchedulerSettings, rows: Sequence[Row]) -> Report:
    """The table: a row for each size."""
    return Report(
        bench="scheduler",
        title="Scheduler: microseconds for each event",
        columns=("engine and queue", "p50", "p99", "decide p50", "decide p99", "pause p50"),
        rows=[
            (
                row.size.name,
                *(
                    figure(seconds * 1e6)
                    for seconds in (
                        row.batches.p50,
                        row.batches.p99,
                        row.deciding.p50,
                        row.deciding.p99,
                        row.pausing.p50,
                    )
                ),
            )
            for row in rows
        ],
        notes=[
            f"p50, p99: batches of {settings.batch} events. decide: single events, progress left out.",
            "pause: single events that led to a pause.",
            f"{settings.events:,} events for each row, seed {settings.seed}.",
        ],
        parameters={
            "events": settings.events,
            "batch": settings.batch,
            "warmup": settings.warmup,
            "seed": settings.seed,
        },
        data={"rows": [_json(row) for row in rows]},
    )


def _json(row: Row) -> dict[str, Any]:
    return {
        "decode_slots": row.size.decode_slots,
        "engine_slots": row.size.engine_slots,
        "waiting": row.size.waiting,
        "unified_kv": row.size.unified,
        "event_s": row.batches,
        "deciding_event_s": row.deciding,
        "pausing_event_s": row.pausing,
        "kinds_s": row.kinds,
        "shares": row.shares,
    }
