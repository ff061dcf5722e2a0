"""A thousand streams, some of whose readers are slow: what that costs everybody else, and the service.

All streams are open at once and decode at once, on a simulated engine with two steps a second: the figures
are about the service, which has a core or less. Most of them are *ordinary*: a client asks, reads, and asks
again, throughout the run. The others ask for *bulky* replies: each piece carries 16 KiB, so that whoever does
not read is behind after seconds by what would be an hour of a plain reply. Phases alternate while the
ordinary streams go on:

- `all read`: the bulky streams are read as they come;
- `some slow`: half of their readers stop after the headers, half take 8 KiB a second.

Compared is what each ordinary stream received in the two kinds of phases. The service's memory is read once a
second.
"""

import asyncio
import contextlib
import itertools
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread
import orjson
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import TurnPlan, chat_body
from backends.simulated import ScriptedReply
from benchmarks.harness import BenchError, Service, run_async, running_service, simulated_engine
from benchmarks.overhead import CpuTimes, cpu_times
from benchmarks.report import Advance, Report, figure, percentile, progress_bar, ratio

ALL_READ, SOME_SLOW = "all read", "some slow"
GOAL = 0.95
_BULKY = "bulky"
_PIECE_BYTES = 16 * 1024
_BULKY_PIECES = 64
_SLOT_CONTEXT = 512
_SPARE_SLOTS = 24
_RECEIVE_BUFFER_BYTES = 32 * 1024
_SLOW_BYTES, _SLOW_EVERY_S = 2048, 0.25
_LOOK_EVERY_S = 1.0
_ARRIVALS_PER_S = 50.0
_RAMP_BOUND_S = 90.0
_PS_BOUND_S = 10.0
_MIB = 1 << 20


@dataclass(frozen=True)
class StreamsSettings:
    """How many streams, and for how long. Seconds are of one phase."""

    streams: int = 1000
    slow: int = 30
    rounds: int = 2
    read_s: float = 60.0
    slow_s: float = 90.0
    """Longer: who stops reading is cut off after about a minute."""
    settle_s: float = 10.0
    """Left out at the beginning of each phase."""
    low_tokens: int = 60
    high_tokens: int = 140
    """The ordinary turns' lengths, all equally likely."""
    seed: int = 1

    def quick(self) -> "StreamsSettings":
        """Enough to see that everything works."""
        return replace(self, streams=60, slow=6, rounds=1, read_s=10.0, slow_s=12.0, settle_s=3.0)


@dataclass
class Phase:
    """One phase: tokens a second of each ordinary stream, and the service's memory second by second."""

    kind: str
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    service_cpu_s: float = 0.0
    valkey_cpu_s: float = 0.0
    cut_off: int = 0
    """Connections of readers that had stopped, closed by the service."""
    slow_cut_off: int = 0
    """The same of readers that are slow."""

    @property
    def growth(self) -> float:
        """The mean memory of the last third over that of the third before."""
        third = len(self.resident_bytes) // 3
        if not third:
            return float("nan")
        last, before = self.resident_bytes[-third:], self.resident_bytes[-2 * third : -third]
        return ratio(sum(last), sum(before)) - 1

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "kind": self.kind,
            "seconds": self.seconds,
            "tokens_per_s": {f"p{p}": percentile(self.rates, p) for p in (5, 50, 95)},
            "resident_bytes": self.resident_bytes,
            "growth_in_last_third": self.growth,
            "service_cpu_share": ratio(self.service_cpu_s, self.seconds),
            "valkey_cpu_share": ratio(self.valkey_cpu_s, self.seconds),
            "stopped_readers_cut_off": self.cut_off,
            "slow_readers_cut_off": self.slow_cut_off,
        }


@dataclass
class Found:
    """The phases in order, and what went wrong on ordinary streams."""

    phases: list[Phase] = field(default_factory=list)
    turns: int = 0
    errors: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Phase]:
        """The phases of one kind."""
        return [phase for phase in self.phases if phase.kind == kind]

    def rates(self, kind: str) -> list[float]:
        """Tokens a second of each ordinary stream, over all phases of the kind."""
        phases = self.of(kind)
        seconds = sum(phase.seconds for phase in phases)
        each = zip(*(phase.rates for phase in phases), strict=True)
        return [
            sum(rate * phase.seconds for rate, phase in zip(one, phases, strict=True)) / seconds
            for one in each
        ]

    def kept(self, percent: float) -> float:
        """The rate at a percentile of the streams with slow readers, over that without."""
        slow, read = (percentile(self.rates(kind), percent) for kind in (SOME_SLOW, ALL_READ))
        return ratio(slow, read)


def run(settings: StreamsSettings, *, json_path: Path | None = None, console: Console | None = None) -> Found:
    """Measure, print the table, write the JSON. Raises BenchError, OSError."""
    seconds = settings.rounds * (settings.read_s + settings.slow_s)
    with progress_bar(seconds, "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: StreamsSettings, advance: Advance) -> Found:
    """All phases, on one engine and one service."""
    slots = settings.streams + _SPARE_SLOTS
    async with (
        simulated_engine(
            slots, profile="crowd", slot_context=_SLOT_CONTEXT, scripts=[bulky_reply()]
        ) as engine_url,
        running_service(_config(engine_url, settings)) as service,
    ):
        return await _Crowd(settings, service).run(advance)


def bulky_reply() -> ScriptedReply:
    """Short texts, each with a field that clients ignore."""
    delta = {"content": "a", "padding": "x" * _PIECE_BYTES}
    return ScriptedReply(_BULKY, (delta,) * _BULKY_PIECES)


def _config(engine_url: str, settings: StreamsSettings) -> dict[str, Any]:
    return {
        "backends": [
            {
                "name": "bench",
                "kind": "llama.cpp",
                "url": engine_url,
                "decode_slots": settings.streams,
                "kv_layout": "split",
                "batch_tokens": 8192,
            }
        ],
        "policy": {"turn_ttl_s": 60},
        "agents": {"bench": {"priority": "normal", "max_turn_tokens": _SLOT_CONTEXT // 2}},
        "default_agent": "bench",
    }


def bulky_body(number: int) -> dict[str, Any]:
    """The request for a bulky reply. Only the engine's chat endpoint plays scripts, and tools need that."""
    tool = {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object"}}}
    body = chat_body(TurnPlan(f"{_BULKY} {number}", 2 * _BULKY_PIECES))
    return {**body, "tools": [tool]}


class _Crowd:
    """The clients, and what they receive."""

    def __init__(self, settings: StreamsSettings, service: Service) -> None:
        self._settings = settings
        self._service = service
        self._found = Found()
        self._ordinary = [_Ordinary() for _ in range(settings.streams - settings.slow)]
        self._numbers = itertools.count()

    async def run(self, advance: Advance) -> Found:
        settings = self._settings
        kinds = [(ALL_READ, settings.read_s), (SOME_SLOW, settings.slow_s)] * settings.rounds
        done = 0.0
        async with anyio.create_task_group() as tasks:
            for number, client in enumerate(self._ordinary):
                tasks.start_soon(self._ask_on, number, client)
                await anyio.sleep(1 / _ARRIVALS_PER_S)
            await self._all_started()
            for kind, seconds in kinds:
                advance(done, kind)
                await self._phase(Phase(kind), seconds)
                done += seconds
            tasks.cancel_scope.cancel()
        return self._found

    async def _ask_on(self, number: int, client: "_Ordinary") -> None:
        """An ordinary client, until cancelled."""
        chance = random.Random(f"streams/{self._settings.seed}/{number}")
        found = self._found
        while True:
            tokens = chance.randint(self._settings.low_tokens, self._settings.high_tokens)
            body = chat_body(TurnPlan(f"Review {number:05}", tokens), exact_length=True)
            client.begin()
            result = await stream_chat(self._service.base_url, body, into=client.turn)
            found.turns += 1
            if result.error is not None:
                found.errors.append(result.error)
                await anyio.sleep(1)  # an error that comes at once must not become a flood

    async def _all_started(self) -> None:
        with anyio.move_on_after(_RAMP_BOUND_S):
            while not all(client.received() for client in self._ordinary):
                if self._found.errors:
                    raise BenchError(f"a stream failed: {self._found.errors[0]}")
                await anyio.sleep(_LOOK_EVERY_S)
            return
        silent = sum(not client.received() for client in self._ordinary)
        raise BenchError(f"{silent} streams had no token after {_RAMP_BOUND_S:g} s")

    async def _phase(self, phase: Phase, seconds: float) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(self._settings.slow):
                if phase.kind == ALL_READ:
                    tasks.start_soon(self._read_on)
                elif number % 2:
                    tasks.start_soon(self._read_nothing, phase)
                else:
                    tasks.start_soon(self._read_slowly, phase)
            await anyio.sleep(self._settings.settle_s)
            cpu = await self._cpu()
            received = [client.received() for client in self._ordinary]
            begin = anyio.current_time()
            while (left := begin + seconds - self._settings.settle_s - anyio.current_time()) > 0:
                await anyio.sleep(min(left, _LOOK_EVERY_S))
                phase.resident_bytes.append(resident_bytes(self._service.pid))
            phase.seconds = anyio.current_time() - begin
            phase.rates = [
                (client.received() - before) / phase.seconds
                for client, before in zip(self._ordinary, received, strict=True)
            ]
            used = (await self._cpu()).since(cpu)
            phase.service_cpu_s, phase.valkey_cpu_s = used.service_s, used.valkey_s
            tasks.cancel_scope.cancel()
        self._found.phases.append(phase)

    async def _cpu(self) -> CpuTimes:
        return await anyio.to_thread.run_sync(cpu_times, self._service.pid)

    async def _read_on(self) -> None:
        """A reader of bulky replies that keeps up, until cancelled."""
        while True:
            body = bulky_body(next(self._numbers))
            result = await stream_chat(self._service.base_url, body)
            if result.error is not None:
                self._found.errors.append(result.error)
                await anyio.sleep(1)

    async def _read_nothing(self, phase: Phase) -> None:
        """Readers that stop after the headers, one after the other, until cancelled."""
        while True:
            async with self._asked() as connection:
                await asyncio.get_running_loop().sock_recv(connection, 64)
                while not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # noqa: ASYNC110
                    await anyio.sleep(_LOOK_EVERY_S)
            phase.cut_off += 1

    async def _read_slowly(self, phase: Phase) -> None:
        """Readers that take a little at a time, one after the other, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            end = b""
            async with self._asked() as connection:
                with contextlib.suppress(OSError):
                    while piece := await loop.sock_recv(connection, _SLOW_BYTES):
                        end = (end + piece)[-16:]
                        if end.endswith(b"0\r\n\r\n"):
                            break
                        await anyio.sleep(_SLOW_EVERY_S)
            if not end.endswith(b"0\r\n\r\n"):
                phase.slow_cut_off += 1

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[socket.socket]:
        """A connection with small buffers on which a bulky reply was asked for."""
        address = urlsplit(self._service.base_url)
        body = orjson.dumps(bulky_body(next(self._numbers)))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            await loop.sock_connect(connection, (address.hostname, address.port))
            await loop.sock_sendall(connection, head.encode() + body)
            yield connection


class _Ordinary:
    """One ordinary client's count."""

    def __init__(self) -> None:
        self._before = 0
        self.turn = TurnResult()

    def begin(self) -> None:
        """A new turn."""
        self._before += self.turn.pieces
        self.turn = TurnResult()

    def received(self) -> int:
        """Pieces of text, over all turns."""
        return self._before + self.turn.pieces


def resident_bytes(pid: int) -> int:
    """A process's memory. Raises BenchError where the system does not tell."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise BenchError("the service has ended")
    except FileNotFoundError:
        return _resident_by_ps(pid)


def _resident_by_ps(pid: int) -> int:
    """The same where there is no /proc."""
    try:
        listing = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PS_BOUND_S,
        )
        return int(listing.stdout) * 1024
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BenchError(f"the service's memory is not known: {error}") from None


# Report -------------------------------------------------------------------------------------------


def _cells(found: Found) -> Iterator[list[str]]:
    """The rows of the table."""
    sides = [found.of(kind) for kind in (ALL_READ, SOME_SLOW)]
    for percent in (50, 5):
        rates = [figure(percentile(found.rates(kind), percent), 3) for kind in (ALL_READ, SOME_SLOW)]
        yield [f"tokens/s of an ordinary stream, p{percent}", *rates, f"{found.kept(percent):.1%}"]
    means = [ratio(sum(sum(p.rates) for p in side), len(side)) for side in sides]
    yield [
        "tokens/s of all ordinary streams",
        *(figure(mean, 0) for mean in means),
        f"{ratio(means[1], means[0]):.1%}",
    ]
    most = [max(max(phase.resident_bytes) for phase in side) for side in sides]
    yield [
        "service's memory, most",
        *(f"{n_bytes / _MIB:,.0f} MiB" for n_bytes in most),
        f"{ratio(most[1], most[0]):.1%}",
    ]
    growth = [max(phase.growth for phase in side) for side in sides]
    yield ["growth in a phase's last third", *(f"{share:+.1%}" for share in growth), ""]
    cpu = [ratio(sum(p.service_cpu_s for p in side), sum(p.seconds for p in side)) for side in sides]
    yield ["service's share of a core", *(f"{share:.0%}" for share in cpu), ""]
    yield ["stopped readers cut off", *(str(sum(p.cut_off for p in side)) for side in sides), ""]
    yield ["slow readers cut off", *(str(sum(p.slow_cut_off for p in side)) for side in sides), ""]


def report(settings: StreamsSettings, found: Found) -> Report:
    """The table: a row for each figure, a column for each kind of phase."""
    kept = min(found.kept(50), found.kept(5))
    return Report(
        bench="streams",
        title=f"{settings.streams:,} streams, {settings.slow} of them read slowly or not at all",
        columns=["", ALL_READ, SOME_SLOW, "ratio"],
        rows=list(_cells(found)),
        notes=[
            f"others' speed with slow readers: {kept:.1%} (goal {GOAL:.0%}), "
            f"{found.turns:,} turns, {len(found.errors)} errors (goal 0)",
        ],
        parameters={"settings": settings},
        data={
            "phases": [phase.data() for phase in found.phases],
            "tokens_per_s": {kind: found.rates(kind) for kind in (ALL_READ, SOME_SLOW)},
            "kept": {"p50": found.kept(50), "p5": found.kept(5)},
            "turns": found.turns,
            "errors": found.errors,
        },
    )
