"""How fast the broker is on the embedded Valkey: each transition, and the two hops that a turn waits for.

One caller measures latency; `workers` callers at once measure throughput. The hops are measured as the
service makes them: a blocked reader of the pool's events, and the pub/sub reader that gateways use.
"""

import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from redis.asyncio import Redis
from rich.console import Console

from benchmarks.harness import BenchError, run_async
from benchmarks.report import Advance, Report, Summary, figure, microseconds, progress_bar, ratio
from orchestrator.broker import Broker, Lease, LogAppend, OutputReader, delta_entry, timeline_entry
from orchestrator.broker.embedded import EmbeddedValkey
from orchestrator.turns import TurnRequest, TurnSize, TurnState

POOL = "bench"
BACKEND = "engine"
GATEWAY = "gateway"
OPERATIONS = ("submit", "claim", "advance", "append")
HOPS = ("submit to events", "append to subscriber")
_LEASE_MS = 3_600_000
_HOP_BOUND_S = 5.0
_MAX_WAITING = 1_000_000


@dataclass(frozen=True)
class BrokerSettings:
    """How much is measured."""

    turns: int = 2000
    workers: int = 16
    body_bytes: int = 2048
    """Size of each turn's request."""

    def quick(self) -> "BrokerSettings":
        """Enough to see that everything works."""
        return replace(self, turns=200)


@dataclass
class Timings:
    """One operation. `alone_s`: each call's time with one caller; `rate`: calls per second with many."""

    alone_s: list[float] = field(default_factory=list)
    rate: float = float("nan")

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {"latency_s": Summary.of(self.alone_s), "calls_per_s": self.rate}


def run(
    settings: BrokerSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[str, Timings]:
    """Measure, print the table, write the JSON. Raises BenchError, EmbeddedValkeyError, OSError."""
    with progress_bar(len(OPERATIONS) * 2 + len(HOPS), "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: BrokerSettings, advance: Advance) -> dict[str, Timings]:
    """The figures of each operation and hop."""
    found = {name: Timings() for name in (*OPERATIONS, *HOPS)}
    async with _broker() as (broker, url):
        lease = await broker.acquire(POOL, BACKEND, "bench", _LEASE_MS)
        if lease is None:
            raise BenchError("the embedded server's lease is taken")
        calls = _Calls(broker, lease, settings)
        for done, (name, call) in enumerate(calls.each(1)):
            advance(done, name)
            for number in range(settings.turns):
                begin = time.perf_counter()
                await call(number)
                found[name].alone_s.append(time.perf_counter() - begin)
        for done, (name, call) in enumerate(calls.each(2), len(OPERATIONS)):
            advance(done, f"{name}, {settings.workers} callers")
            found[name].rate = await _throughput(call, settings)
        for done, name in enumerate(HOPS, len(OPERATIONS) * 2):
            advance(done, name)
            hop = _submit_to_events if name == HOPS[0] else _append_to_subscriber
            found[name].alone_s += await hop(broker, lease, url, settings)
    return found


@asynccontextmanager
async def _broker() -> AsyncIterator[tuple[Broker, str]]:
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        async with EmbeddedValkey(Path(folder)) as server, Redis.from_url(server.url) as client:
            yield Broker(client), server.url


class _Calls:
    """Each operation as a function of the turn's number, in the order of a turn's life."""

    def __init__(self, broker: Broker, lease: Lease, settings: BrokerSettings) -> None:
        self._broker = broker
        self._lease = lease
        self._settings = settings
        self._delta = delta_entry({"content": " token"}, 1, [1234])

    def each(self, series: int) -> list[tuple[str, Callable[[int], Awaitable[Any]]]]:
        """Operations on turns of their own: those of another series are others."""
        broker, lease = self._broker, self._lease

        def turn(number: int) -> str:
            return f"turn-{series}-{number}"

        async def submit(number: int) -> None:
            request = turn_request(turn(number), self._settings.body_bytes)
            await broker.submit(request, max_waiting=_MAX_WAITING)

        async def claim(number: int) -> None:
            if await broker.claim(lease, turn(number)) is None:
                raise BenchError(f"turn {number} could not be claimed")

        async def advance(number: int) -> None:
            await broker.advance(lease, turn(number), TurnState.RUNNING, timeline_entry("started", slot=1))

        async def append(number: int) -> None:
            await broker.append(lease, [LogAppend(turn(number), GATEWAY, 0, [self._delta])])

        return list(zip(OPERATIONS, (submit, claim, advance, append), strict=True))


def turn_request(turn: str, body_bytes: int) -> TurnRequest:
    """A turn as the gateway would submit it."""
    return TurnRequest(
        id=turn,
        pool=POOL,
        agent="bench",
        priority=50,
        priority_class="normal",
        api="chat",
        model="bench",
        body=b'{"messages": [{"role": "user", "content": "' + b"x" * body_bytes + b'"}]}',
        stream=True,
        size=TurnSize(prompt_tokens=100, max_tokens=354, exact=True),
        gateway=GATEWAY,
        created=time.time(),
    )


async def _throughput(call: Callable[[int], Awaitable[Any]], settings: BrokerSettings) -> float:
    numbers = iter(range(settings.turns))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    begin = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(settings.workers):
            tasks.start_soon(worker)
    return ratio(settings.turns, time.perf_counter() - begin)


async def _submit_to_events(broker: Broker, lease: Lease, url: str, settings: BrokerSettings) -> list[float]:
    """From the call of submit until a blocked reader has the event: how soon a dispatcher knows of a turn."""
    seen: dict[str, float] = {}
    news = anyio.Event()

    async def read(*, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        nonlocal news
        async with Redis.from_url(url, socket_timeout=None) as client:
            reader = Broker(client)
            after, _ = await reader.snapshot(POOL)
            task_status.started()
            while True:
                after, events = await reader.events(POOL, after, 1000)
                now = time.perf_counter()
                seen.update({event.turn: now for event in events})
                news.set()
                news = anyio.Event()

    took = []
    async with anyio.create_task_group() as tasks:
        await tasks.start(read)
        for number in range(settings.turns):
            turn = f"hop-{number}"
            begin = time.perf_counter()
            await broker.submit(turn_request(turn, settings.body_bytes), max_waiting=_MAX_WAITING)
            with anyio.fail_after(_HOP_BOUND_S):
                while turn not in seen:
                    await news.wait()
            took.append(seen[turn] - begin)
        tasks.cancel_scope.cancel()
    return took


async def _append_to_subscriber(
    broker: Broker, lease: Lease, url: str, settings: BrokerSettings
) -> list[float]:
    """From the call of append until the gateway's reader hands the entry out: what a token waits."""
    turn = "hop-0"
    if await broker.claim(lease, turn) is None:
        raise BenchError("the turn could not be claimed")
    took = []
    async with Redis.from_url(url, socket_timeout=None) as subscriber, anyio.create_task_group() as tasks:
        reader = OutputReader(broker, subscriber, GATEWAY)
        await tasks.start(reader.run)
        async with reader.open(POOL, turn) as stream:
            for number in range(settings.turns):
                entry = delta_entry({"content": " token"}, 1, [number])
                begin = time.perf_counter()

                async def append(number: int = number, entry: bytes = entry) -> None:
                    await broker.append(lease, [LogAppend(turn, GATEWAY, number, [entry])])

                async with anyio.create_task_group() as call:
                    call.start_soon(append)
                    if not await stream.next(_HOP_BOUND_S):
                        raise BenchError(f"entry {number} did not reach the subscriber")
                    took.append(time.perf_counter() - begin)
        tasks.cancel_scope.cancel()
    return took


def report(settings: BrokerSettings, found: Mapping[str, Timings]) -> Report:
    """The table: a row for each operation and hop."""
    rows = []
    for name, timings in found.items():
        summary = Summary.of(timings.alone_s)
        cells = [microseconds(value) for value in (summary.p50, summary.p90, summary.p99, summary.max)]
        rows.append([name, *cells, figure(timings.rate, 0)])
    return Report(
        bench="broker",
        title=f"Broker on the embedded Valkey, {settings.turns:,} turns",
        columns=["", "p50", "p90", "p99", "max", f"calls/s, {settings.workers} callers"],
        rows=rows,
        notes=["latency with one caller; caller and server share this machine's cores"],
        parameters={"settings": settings},
        data={name: timings.data() for name, timings in found.items()},
    )
