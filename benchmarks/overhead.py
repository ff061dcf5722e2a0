"""What the service adds to an engine: time to first token, time of a short reply, CPU per token, throughput.

One engine runs by itself; the service uses it through its URL, so that a direct request and one through the
service meet the same engine. Requests are sent in pairs, one at a time, the order within a pair alternating;
each has its own number in its prompt, so that neither profits from the other's KV.

"Added" is the difference of two percentiles of one run, p95 minus p95: the percentile of the pairs'
differences would count the engine's own jitter twice.
"""

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import TurnPlan, chat_body
from benchmarks.harness import (
    BenchError,
    EngineShape,
    Service,
    real_engine,
    run_async,
    running_service,
    simulated_engine,
)
from benchmarks.report import (
    Advance,
    Report,
    Summary,
    figure,
    microseconds,
    milliseconds,
    progress_bar,
    ratio,
)

ENGINES = ("simulated", "real")
_WARMUP_PAIRS = 5
_SIMULATED_BATCH_TOKENS = 512
_PS_BOUND_S = 10.0


@dataclass(frozen=True)
class OverheadSettings:
    """What is measured, on each of `engines`."""

    engines: tuple[str, ...] = ENGINES
    pairs: int = 100
    reply_tokens: int = 12
    streams: int = 8
    stream_tokens: int = 128
    rounds: int = 3
    """How often all streams run at once, directly and through the service in turn."""
    profile: str = "reference"
    """Timing of the simulated engine."""
    shape: EngineShape = field(default_factory=EngineShape)

    def quick(self) -> "OverheadSettings":
        """Enough to see that everything works."""
        return replace(self, pairs=20, rounds=1, stream_tokens=64)


@dataclass
class Way:
    """What was measured on one way to the engine. Seconds."""

    first_tokens: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    stream_tokens: int = 0
    stream_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of all streams together."""
        return ratio(self.stream_tokens, self.stream_s)


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds, user and system, that a process and its children have used so far."""

    service_s: float
    valkey_s: float

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """What was used between two readings."""
        return CpuTimes(self.service_s - before.service_s, self.valkey_s - before.valkey_s)


@dataclass
class Overhead:
    """One engine's figures."""

    direct: Way = field(default_factory=Way)
    service: Way = field(default_factory=Way)
    service_cpu_s: float = 0.0
    valkey_cpu_s: float = 0.0

    def added_first_token_s(self, percent: str) -> float:
        """`p50` or `p95`."""
        service, direct = Summary.of(self.service.first_tokens), Summary.of(self.direct.first_tokens)
        return float(getattr(service, percent) - getattr(direct, percent))

    def added_total_s(self, percent: str) -> float:
        """`p50` or `p95`."""
        service, direct = Summary.of(self.service.totals), Summary.of(self.direct.totals)
        return float(getattr(service, percent) - getattr(direct, percent))

    @property
    def cpu_per_token_s(self) -> float:
        return ratio(self.service_cpu_s, self.service.stream_tokens)

    @property
    def valkey_per_token_s(self) -> float:
        return ratio(self.valkey_cpu_s, self.service.stream_tokens)

    @property
    def throughput(self) -> float:
        return ratio(self.service.rate, self.direct.rate)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        paths = {
            name: {
                "first_token_s": Summary.of(path.first_tokens),
                "total_s": Summary.of(path.totals),
                "stream_tokens_per_s": path.rate,
            }
            for name, path in (("direct", self.direct), ("service", self.service))
        }
        return {
            **paths,
            "added_first_token_s": {name: self.added_first_token_s(name) for name in ("p50", "p95")},
            "added_total_s": {name: self.added_total_s(name) for name in ("p50", "p95")},
            "service_cpu_per_token_s": self.cpu_per_token_s,
            "valkey_cpu_per_token_s": self.valkey_per_token_s,
            "throughput_ratio": self.throughput,
        }


def run(
    settings: OverheadSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[str, Overhead]:
    """Measure, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    with progress_bar(len(settings.engines), "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: OverheadSettings, advance: Advance) -> dict[str, Overhead]:
    """The figures of each engine."""
    found = {}
    for number, name in enumerate(settings.engines):
        advance(number, f"{name} engine")
        async with _engine(name, settings) as url, running_service(_config(name, url, settings)) as service:

            def part(share: float, done: int = number, label: str = f"{name} engine") -> None:
                advance(done + share, label)

            found[name] = await _Comparison(settings, url, service).run(part)
    return found


@asynccontextmanager
async def _engine(name: str, settings: OverheadSettings) -> AsyncIterator[str]:
    shape = settings.shape
    if name == "simulated":
        async with simulated_engine(
            shape.engine_slots, profile=settings.profile, slot_context=shape.slot_context
        ) as url:
            yield url
    else:
        async with real_engine(shape) as engine:
            yield engine.url


def _config(name: str, url: str, settings: OverheadSettings) -> dict[str, Any]:
    shape = settings.shape
    return {
        "backends": [
            {
                "name": "bench",
                "kind": "llama.cpp",
                "url": url,
                "decode_slots": shape.decode_slots,
                "kv_layout": "split",
                "batch_tokens": _SIMULATED_BATCH_TOKENS if name == "simulated" else shape.batch_tokens,
            }
        ],
        "agents": {"bench": {"priority": "normal", "max_turn_tokens": shape.slot_context}},
        "default_agent": "bench",
    }


class _Comparison:
    """One engine, directly and through the service."""

    def __init__(self, settings: OverheadSettings, engine_url: str, service: Service) -> None:
        self._settings = settings
        self._urls = {"direct": engine_url, "service": service.base_url}
        self._pid = service.pid
        self._found = Overhead()
        self._asked = 0

    async def run(self, advance: Callable[[float], None]) -> Overhead:
        settings, found = self._settings, self._found
        paths = {"direct": found.direct, "service": found.service}
        steps = _WARMUP_PAIRS + settings.pairs + settings.rounds
        for pair in range(_WARMUP_PAIRS + settings.pairs):
            for name in _alternating(pair):
                result = await self._ask(name, settings.reply_tokens)
                if pair >= _WARMUP_PAIRS:
                    paths[name].first_tokens.append(result.ttft_s or 0.0)
                    paths[name].totals.append(result.total_s or 0.0)
            advance(pair / steps)
        for number in range(settings.rounds):
            for name in _alternating(number):
                before = await anyio.to_thread.run_sync(cpu_times, self._pid)
                await self._streams(name, paths[name])
                used = (await anyio.to_thread.run_sync(cpu_times, self._pid)).since(before)
                if name == "service":
                    found.service_cpu_s += used.service_s
                    found.valkey_cpu_s += used.valkey_s
            advance((_WARMUP_PAIRS + settings.pairs + number) / steps)
        return found

    async def _streams(self, name: str, path: Way) -> None:
        results: list[TurnResult] = []

        async def one() -> None:
            results.append(await self._ask(name, self._settings.stream_tokens))

        begin = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(self._settings.streams):
                tasks.start_soon(one)
        path.stream_s += anyio.current_time() - begin
        path.stream_tokens += sum(result.tokens for result in results)

    async def _ask(self, name: str, tokens: int) -> TurnResult:
        self._asked += 1
        body = chat_body(TurnPlan(f"Review: {self._asked:05}", tokens), exact_length=True)
        result = await stream_chat(self._urls[name], body)
        if result.error is not None or result.ttft_s is None:
            raise BenchError(f"{name} request failed: {result.error or 'no text'}")
        return result


def _alternating(number: int) -> tuple[str, str]:
    return ("direct", "service") if number % 2 == 0 else ("service", "direct")


# CPU time -----------------------------------------------------------------------------------------


def cpu_times(pid: int) -> CpuTimes:
    """What a process tree has used, Valkey apart. Raises BenchError where the system does not tell.

    Resolution is 10 ms; a child that has ended is no longer counted.
    """
    processes = _from_proc() if Path("/proc/self/stat").exists() else _from_ps()
    children: dict[int, list[int]] = {}
    for child, (parent, _, _) in processes.items():
        children.setdefault(parent, []).append(child)
    service_s = valkey_s = 0.0
    left = [pid]
    while left:
        current = left.pop()
        left += children.get(current, [])
        _, name, used_s = processes.get(current, (0, "", 0.0))
        if "valkey" in name or "redis" in name:
            valkey_s += used_s
        else:
            service_s += used_s
    return CpuTimes(service_s, valkey_s)


def _from_proc() -> Mapping[int, tuple[int, str, float]]:
    """Parent, name and CPU seconds by process id, from proc_pid_stat(5): fields 2, 4, 14 and 15."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        # The name is in parentheses and may hold blanks and parentheses itself.
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        found[int(folder.name)] = (int(fields[1]), name, (int(fields[11]) + int(fields[12])) * tick_s)
    return found


def _from_ps() -> Mapping[int, tuple[int, str, float]]:
    """The same from ps, where there is no /proc; macOS gives hundredths of a second."""
    try:
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,time=,comm="],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PS_BOUND_S,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"no process times on this system: {error}") from None
    found = {}
    for line in listing.splitlines():
        pid, parent, used, *name = line.split(None, 3)
        found[int(pid)] = (int(parent), Path(name[0].strip()).name if name else "", ps_seconds(used))
    return found


def ps_seconds(text: str) -> float:
    """ps's `[[days-]hours:]minutes:seconds[.hundredths]` in seconds."""
    days, _, clock = text.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + int(days or 0) * 86_400


# Report -------------------------------------------------------------------------------------------


def report(settings: OverheadSettings, found: Mapping[str, Overhead]) -> Report:
    """The table: a row for each figure, a column for each engine."""
    both = found.values()
    reply = f"{settings.reply_tokens}-token reply"

    def row(what: str, cells: list[str]) -> list[str]:
        return [what, *cells]

    rows = []
    for percent in ("p50", "p95"):
        for way in ("direct", "service"):
            summaries = [Summary.of(getattr(each, way).first_tokens) for each in both]
            rows.append(
                row(f"first token {percent}, {way}", [milliseconds(getattr(s, percent)) for s in summaries])
            )
        rows.append(
            row(f"added {percent}", [milliseconds(each.added_first_token_s(percent), 2) for each in both])
        )
    for way in ("direct", "service"):
        medians = [Summary.of(getattr(each, way).totals).p50 for each in both]
        rows.append(row(f"{reply} p50, {way}", [milliseconds(value) for value in medians]))
    rows += [
        row("added p50", [milliseconds(each.added_total_s("p50"), 2) for each in both]),
        row("service CPU a token", [microseconds(each.cpu_per_token_s) for each in both]),
        row("Valkey CPU a token", [microseconds(each.valkey_per_token_s) for each in both]),
        row(f"{settings.streams} streams tokens/s, direct", [figure(each.direct.rate) for each in both]),
        row(f"{settings.streams} streams tokens/s, service", [figure(each.service.rate) for each in both]),
        row("service of direct", [f"{each.throughput:.1%}" for each in both]),
    ]
    return Report(
        bench="overhead",
        title=f"What the service adds, {settings.pairs} pairs of requests",
        columns=["", *(f"{name} engine" for name in found)],
        rows=rows,
        notes=[
            "goals: first token at most +3 ms p50, +8 ms p95; short reply at most +5 ms;",
            "at most 200 us of CPU a token; throughput at least 98% on the simulated engine, 93% on the real",
        ],
        parameters={"settings": settings},
        data={name: each.data() for name, each in found.items()},
    )
