"""What a resume costs from each tier, against the length of the paused turn's context.

- *resident*: the turn is paused through the admin API and resumed in its own engine slot. Time is from the
  request to resume until the next token has arrived; what was evaluated again is the engine's own figure from
  the turn's timeline.
- *dropped*: the same number of prompt tokens evaluated from nothing on the bare engine, by its own timings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import TurnPlan, chat_body, filler
from benchmarks.harness import BenchError, EngineShape, real_engine, run_async, service
from benchmarks.report import Advance, Report, Summary, figure, milliseconds, progress_bar, ratio

# What the chat template and the short system message add to a prompt, about.
_TEMPLATE_TOKENS = 22
_TOKENS_BEFORE_PAUSE = 8
_REPLY_TOKENS = 384
_STEP_BOUND_S = 180.0
_POLL_S = 0.02


@dataclass(frozen=True)
class ResumeSettings:
    """Context lengths in tokens; those that do not fit into a slot become the longest that fits."""

    lengths: tuple[int, ...] = (500, 2000, 4000, 7000)
    repeats: int = 3
    shape: EngineShape = field(
        default_factory=lambda: EngineShape(
            decode_slots=1, engine_slots=2, slot_context=8192, batch_tokens=512
        )
    )

    def quick(self) -> "ResumeSettings":
        """The two short lengths, once."""
        return replace(self, lengths=self.lengths[:2], repeats=1)

    @property
    def fitting(self) -> tuple[int, ...]:
        """The lengths that are measured."""
        longest = self.shape.slot_context - _REPLY_TOKENS - 2 * _TEMPLATE_TOKENS
        return tuple(sorted({min(length, longest) for length in self.lengths}))


@dataclass
class Costs:
    """One length's figures. Seconds and tokens."""

    prefill_s: list[float] = field(default_factory=list)
    prefill_tokens: list[float] = field(default_factory=list)
    resident_s: list[float] = field(default_factory=list)
    reevaluated: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)

    @property
    def times_cheaper(self) -> float:
        """How often a resident resume fits into a recompute."""
        return ratio(Summary.of(self.prefill_s).p50, Summary.of(self.resident_s).p50)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "recompute_s": Summary.of(self.prefill_s),
            "recompute_tokens": Summary.of(self.prefill_tokens).p50,
            "resident_s": Summary.of(self.resident_s),
            "tokens_reevaluated": Summary.of(self.reevaluated),
            "pause_s": Summary.of(self.pause_s),
            "times_cheaper": self.times_cheaper,
        }


def run(
    settings: ResumeSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[int, Costs]:
    """Measure, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    with progress_bar(2 * len(settings.fitting), "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: ResumeSettings, advance: Advance) -> dict[int, Costs]:
    """Both tiers' costs by length. One engine at a time: first the bare one, then the service's."""
    found = {length: Costs() for length in settings.fitting}
    done = 0
    async with real_engine(settings.shape) as engine:
        for length, costs in found.items():
            advance(done, f"recompute of {length:,} tokens")
            for number in range(settings.repeats):
                await _recompute(engine.url, length, f"r{number}", costs)
            done += 1
    async with service(_config(settings.shape)) as url:
        for length, costs in found.items():
            advance(done, f"resident resume at {length:,} tokens")
            for number in range(settings.repeats):
                await _pause_and_resume(url, length, f"s{number}", costs)
            done += 1
    return found


def _config(shape: EngineShape) -> dict[str, Any]:
    return {
        "backends": [{"name": "bench", "kind": "llama.cpp", "managed": shape.managed()}],
        "agents": {"bench": {"priority": "normal", "max_turn_tokens": shape.slot_context}},
        "default_agent": "bench",
    }


async def _recompute(url: str, length: int, name: str, costs: Costs) -> None:
    # Distinct from its first word on, so that no slot holds a part of it.
    plan = TurnPlan(filler(length - _TEMPLATE_TOKENS, f"{name}-{length}"), 1)
    result = await stream_chat(url, chat_body(plan, exact_length=True) | {"cache_prompt": False})
    if result.error is not None or result.timings is None:
        raise BenchError(f"the engine's prefill failed: {result.error or 'no timings'}")
    costs.prefill_s.append(float(result.timings["prompt_ms"]) / 1e3)
    costs.prefill_tokens.append(float(result.timings["prompt_n"]))


async def _pause_and_resume(url: str, length: int, name: str, costs: Costs) -> None:
    plan = TurnPlan(filler(length - _TEMPLATE_TOKENS, f"{name}-{length}"), _REPLY_TOKENS)
    result = TurnResult()
    news = anyio.Event()

    def progressed(_: TurnResult) -> None:
        nonlocal news
        news.set()
        news = anyio.Event()

    async def turn() -> None:
        await stream_chat(url, chat_body(plan, exact_length=True), into=result, on_progress=progressed)
        news.set()

    async def pieces(count: int) -> None:
        while result.pieces < count:
            if result.ended is not None:
                raise BenchError(f"the turn ended too early: {result.error or result.finish_reason}")
            await news.wait()

    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as admin,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(turn)
        with anyio.move_on_after(_STEP_BOUND_S):
            await pieces(_TOKENS_BEFORE_PAUSE)
            begin = anyio.current_time()
            path = f"/swarm/turns/{result.turn_id}"
            await _post(admin, f"{path}/preempt")
            await _event(admin, path, "paused")
            costs.pause_s.append(anyio.current_time() - begin)
            before = result.pieces
            begin = anyio.current_time()
            await _post(admin, f"{path}/resume")
            await pieces(before + 1)
            costs.resident_s.append(result.times[before] - begin)
            resumed = await _event(admin, path, "resumed")
            costs.reevaluated.append(float(resumed["tokens_reevaluated"]))
            tasks.cancel_scope.cancel()
            return
    raise BenchError(f"no pause and resume of {length} tokens within {_STEP_BOUND_S:g} s")


async def _post(admin: httpx.AsyncClient, path: str) -> None:
    try:
        reply = await admin.post(path)
    except httpx.HTTPError as error:
        raise BenchError(f"POST {path}: {error}") from None
    if reply.is_error:
        raise BenchError(f"POST {path}: HTTP {reply.status_code}: {reply.text[:200]}")


async def _event(admin: httpx.AsyncClient, path: str, name: str) -> dict[str, Any]:
    """The turn's last timeline entry of this name, once there is one; the caller bounds the wait."""
    while True:
        try:
            reply = await admin.get(path)
        except httpx.HTTPError as error:
            raise BenchError(f"GET {path}: {error}") from None
        if reply.is_error:
            raise BenchError(f"GET {path}: HTTP {reply.status_code}: {reply.text[:200]}")
        entries = [entry for entry in reply.json()["timeline"] if entry["event"] == name]
        if entries:
            return dict(entries[-1])
        await anyio.sleep(_POLL_S)


def report(settings: ResumeSettings, found: Mapping[int, Costs]) -> Report:
    """The table: a column for each length."""
    costs = list(found.values())

    def row(what: str, cells: Iterable[str]) -> list[str]:
        return [what, *cells]

    def median(samples: list[float]) -> float:
        return Summary.of(samples).p50

    rows = [
        row("resident", (milliseconds(median(each.resident_s)) for each in costs)),
        row(
            "  tokens evaluated again, most", (figure(Summary.of(each.reevaluated).max, 0) for each in costs)
        ),
        row("recompute", (milliseconds(median(each.prefill_s)) for each in costs)),
        row("  tokens evaluated", (figure(median(each.prefill_tokens), 0) for each in costs)),
        row("times cheaper", (figure(each.times_cheaper, 0) for each in costs)),
        row("pause took", (milliseconds(median(each.pause_s)) for each in costs)),
    ]
    return Report(
        bench="resume",
        title=f"Resume of a paused turn, median of {settings.repeats}",
        columns=["", *(f"{length:,} tokens" for length in found)],
        rows=rows,
        notes=["goal: a resident resume evaluates at most 2 tokens again"],
        parameters={"settings": settings},
        data={str(length): each.data() for length, each in found.items()},
    )
