"""What a resume costs from each tier, against the length of the paused turn's context.

Everything is measured on one engine process: for each length first by hand over the engine's own HTTP API
(*raw*), then through the service, which uses the same engine by its address and the same folder for files.
Slots are emptied in between. The steps:

- *recompute*: the prompt and the tokens generated so far, evaluated from nothing; from the request until the
  first token has arrived.
- *raw swap*: the slot that holds them is saved, erased, restored into, and asked for the next token. Its
  cost is the engine's own save time, plus restore and next token as the client waits for them.
- *resident*: the turn is paused through the admin API and resumed in its own slot; from the request to
  resume until the next token has arrived.
- *swapped*: the same, but while the turn is paused another turn takes its slot, so the service has moved its
  KV to a file. Cost: the engine's own save time, plus the time from the request to resume until the next
  token has arrived. In that lie the admin call, the broker, the scheduler, the restore, and the token's way
  through the service; its parts by the turn's own timeline are in the JSON.

Both costs leave out the way of the save's request and answer, for which no turn waits. To force the swap, a
turn that is too short for a file is held in the one other slot.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import TurnPlan, chat_body, filler
from benchmarks.harness import (
    BenchError,
    EngineShape,
    ask,
    empty_slots,
    json_client,
    real_engine,
    run_async,
    service,
)
from benchmarks.report import Advance, Report, Summary, figure, milliseconds, progress_bar, ratio
from orchestrator.turns import FINAL_STATES

# What the chat template and the short system message add to a prompt, about.
_TEMPLATE_TOKENS = 22
_TOKENS_BEFORE_PAUSE = 8
_REPLY_TOKENS = 384
_STEP_BOUND_S = 180.0
_POLL_S = 0.02
# Shorter than this the service does not save a turn's KV.
_MOST_UNSAVED_TOKENS = 31
_MOST_INTRUDERS = 5
_QUIET_LOOKS = 3
_QUIET_S = 0.3
_SWAP_GOAL = 0.9


@dataclass(frozen=True)
class ResumeSettings:
    """Context lengths in tokens; those that do not fit into a slot become the longest that fits."""

    lengths: tuple[int, ...] = (500, 2000, 4000, 7000)
    repeats: int = 3
    shape: EngineShape = field(
        default_factory=lambda: EngineShape(
            decode_slots=1, engine_slots=2, slot_context=8192, batch_tokens=512, threads=2
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


@dataclass(frozen=True)
class RawSwap:
    """One swap by hand. Seconds; `_engine` is the engine's own figure, `_wall` the client's wait."""

    save_engine_s: float
    save_wall_s: float
    restore_engine_s: float
    restore_wall_s: float
    first_token_engine_s: float
    first_token_wall_s: float
    tokens_reevaluated: int

    @property
    def cost_s(self) -> float:
        return self.save_engine_s + self.restore_wall_s + self.first_token_wall_s


@dataclass(frozen=True)
class ServiceSwap:
    """One swap through the service. Seconds.

    `save_engine_s` and `restore_engine_s` are the engine's own figures, from the turn's timeline;
    `engine_wait_s` is from the scheduler's command until the engine had the turn, restore included;
    `resume_wall_s` from the client's request to resume until its next token.
    """

    save_engine_s: float
    restore_engine_s: float
    engine_wait_s: float
    resume_wall_s: float
    tokens_reevaluated: int
    file_bytes: int

    @property
    def cost_s(self) -> float:
        return self.save_engine_s + self.resume_wall_s


@dataclass
class Costs:
    """One length's figures. Seconds and tokens."""

    recompute_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    prefill_tokens: list[float] = field(default_factory=list)
    raw: list[RawSwap] = field(default_factory=list)
    resident_s: list[float] = field(default_factory=list)
    reevaluated: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    swapped: list[ServiceSwap] = field(default_factory=list)

    def _times(self, costs_s: Iterable[float]) -> float:
        return ratio(_median(self.recompute_s), _median(costs_s))

    @property
    def resident_times(self) -> float:
        """How often a resident resume fits into a recompute."""
        return self._times(self.resident_s)

    @property
    def raw_times(self) -> float:
        """How often a swap by hand fits into a recompute."""
        return self._times(swap.cost_s for swap in self.raw)

    @property
    def swapped_times(self) -> float:
        """How often the service's swap fits into a recompute."""
        return self._times(swap.cost_s for swap in self.swapped)

    @property
    def part_of_raw(self) -> float:
        """The service's ratio as a part of the one by hand."""
        return ratio(self.swapped_times, self.raw_times)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "recompute_s": Summary.of(self.recompute_s),
            "prefill_s": Summary.of(self.prefill_s),
            "prefill_tokens": _median(self.prefill_tokens),
            "resident_s": Summary.of(self.resident_s),
            "tokens_reevaluated": Summary.of(self.reevaluated),
            "pause_s": Summary.of(self.pause_s),
            "raw_swap_s": Summary.of([swap.cost_s for swap in self.raw]),
            "swapped_s": Summary.of([swap.cost_s for swap in self.swapped]),
            "resident_times_cheaper": self.resident_times,
            "raw_swap_times_cheaper": self.raw_times,
            "swapped_times_cheaper": self.swapped_times,
            "swapped_part_of_raw": self.part_of_raw,
            "samples": {
                "recompute_s": self.recompute_s,
                "prefill_s": self.prefill_s,
                "resident_s": self.resident_s,
                "pause_s": self.pause_s,
                "raw_swap": self.raw,
                "swapped": self.swapped,
            },
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
    """The costs by length."""
    found = {length: Costs() for length in settings.fitting}
    shape = settings.shape
    async with real_engine(shape) as engine, json_client(engine.url) as raw:
        for at, (length, costs) in enumerate(found.items()):
            advance(2 * at, f"swap by hand at {length:,} tokens")
            for number in range(settings.repeats):
                await _by_hand(raw, engine.url, length, f"r{number}", costs)
            await empty_slots(raw)
            advance(2 * at + 1, f"through the service at {length:,} tokens")
            # A service of its own for each length: it must not believe in KV that was erased meanwhile.
            async with service(_config(shape, shape.external(engine))) as url:
                await _through_service(url, length, settings.repeats, costs)
    return found


def _config(shape: EngineShape, backend: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "backends": [dict(backend)],
        "agents": {
            name: {"priority": "normal", "max_turn_tokens": shape.slot_context}
            for name in ("bench", "intruder")
        },
    }


# By hand ------------------------------------------------------------------------------------------


async def _by_hand(raw: httpx.AsyncClient, url: str, length: int, name: str, costs: Costs) -> None:
    await empty_slots(raw)
    # Distinct from its first word on, so that no slot holds a part of it.
    plan = TurnPlan(filler(length - _TEMPLATE_TOKENS, f"{name}-{length}"), _TOKENS_BEFORE_PAUSE)
    prompt = (await ask(raw, "POST", "/apply-template", chat_body(plan)))["prompt"]
    order = {"content": prompt, "add_special": True, "parse_special": True}
    ids: list[int] = (await ask(raw, "POST", "/tokenize", order))["tokens"]
    begun = await ask(raw, "POST", "/completion", _completion(ids, plan.max_tokens) | {"return_tokens": True})
    ids = ids + begun["tokens"]

    save, save_wall_s = await _timed(ask(raw, "POST", "/slots/0?action=save", {"filename": "raw"}))
    await ask(raw, "POST", "/slots/0?action=erase", {})
    restore, restore_wall_s = await _timed(ask(raw, "POST", "/slots/0?action=restore", {"filename": "raw"}))
    first = await _first_token(url, _completion(ids, 1))
    costs.raw.append(
        RawSwap(
            save_engine_s=float(save["timings"]["save_ms"]) / 1e3,
            save_wall_s=save_wall_s,
            restore_engine_s=float(restore["timings"]["restore_ms"]) / 1e3,
            restore_wall_s=restore_wall_s,
            first_token_engine_s=first.prefill_s,
            first_token_wall_s=first.wall_s,
            tokens_reevaluated=first.evaluated,
        )
    )
    await ask(raw, "POST", "/slots/0?action=erase", {})
    again = await _first_token(url, _completion(ids, 1) | {"cache_prompt": False})
    costs.recompute_s.append(again.wall_s)
    costs.prefill_s.append(again.prefill_s)
    costs.prefill_tokens.append(again.evaluated)


def _completion(ids: list[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt": ids,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "id_slot": 0,
        "cache_prompt": True,
    }


@dataclass(frozen=True)
class _FirstToken:
    wall_s: float
    prefill_s: float
    evaluated: int


async def _first_token(url: str, body: Mapping[str, Any]) -> _FirstToken:
    result = await stream_chat(url, {**body, "stream": True}, path="/completion")
    if result.error is not None or result.timings is None or result.ttft_s is None:
        raise BenchError(f"the engine did not generate a token: {result.error or 'no text, or no timings'}")
    timings = result.timings
    return _FirstToken(result.ttft_s, float(timings["prompt_ms"]) / 1e3, int(timings["prompt_n"]))


async def _timed(call: Any) -> tuple[dict[str, Any], float]:
    begin = anyio.current_time()
    reply: dict[str, Any] = await call
    return reply, anyio.current_time() - begin


# Through the service ------------------------------------------------------------------------------


async def _through_service(url: str, length: int, repeats: int, costs: Costs) -> None:
    """All resident resumes first: the swapped ones need a turn that occupies the other slot."""
    async with json_client(url) as admin:
        for number in range(repeats):
            async with _Turn.begun(url, admin, "bench", _plan(length, f"s{number}")) as turn:
                begin = anyio.current_time()
                await turn.pause()
                costs.pause_s.append(anyio.current_time() - begin)
                await _until_quiet(admin)
                costs.resident_s.append(await turn.resume())
                resumed = await turn.event("resumed", "resident")
                costs.reevaluated.append(float(resumed["tokens_reevaluated"]))
        async with _Turn.begun(url, admin, "intruder", TurnPlan("Go", _REPLY_TOKENS), tokens=1) as other:
            await other.pause()
            await _check_unsaved(admin, other)
            for number in range(repeats):
                async with _Turn.begun(url, admin, "bench", _plan(length, f"t{number}")) as turn:
                    costs.swapped.append(await _swapped(url, admin, turn))


def _plan(length: int, name: str) -> TurnPlan:
    return TurnPlan(filler(length - _TEMPLATE_TOKENS, f"{name}-{length}"), _REPLY_TOKENS)


async def _swapped(url: str, admin: httpx.AsyncClient, turn: "_Turn") -> ServiceSwap:
    await turn.pause()
    for number in range(_MOST_INTRUDERS):
        # A copy that the service makes ahead of time keeps the slot from being taken while it is made.
        await _until_quiet(admin)
        if await turn.tier() == "swapped":
            break
        body = chat_body(TurnPlan(f"Go {number}", 2), exact_length=True)
        result = await stream_chat(url, body, {"X-Swarm-Agent": "intruder"}, timeout_s=_STEP_BOUND_S)
        if result.error is not None:
            raise BenchError(f"the turn that was to take the slot failed: {result.error}")
    else:
        raise BenchError(f"turn {turn.id} is {await turn.tier()} after {_MOST_INTRUDERS} turns took its slot")
    saved = await turn.event("swapped")
    wall_s = await turn.resume()
    resumed = await turn.event("resumed", "swapped")
    restored = await turn.event("restored")
    return ServiceSwap(
        save_engine_s=saved["stall_s"],
        restore_engine_s=restored["stall_s"],
        engine_wait_s=resumed["engine_wait_s"],
        resume_wall_s=wall_s,
        tokens_reevaluated=resumed["tokens_reevaluated"],
        file_bytes=saved["file_bytes"],
    )


class _Turn:
    """A turn that runs until the context ends."""

    def __init__(self, admin: httpx.AsyncClient) -> None:
        self._admin = admin
        self._result = TurnResult()
        self._news = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def begun(
        cls,
        url: str,
        admin: httpx.AsyncClient,
        agent: str,
        plan: TurnPlan,
        *,
        tokens: int = _TOKENS_BEFORE_PAUSE,
    ) -> AsyncIterator["_Turn"]:
        """Once it has made so many tokens; the turn is cancelled at the end."""
        turn = cls(admin)
        body = chat_body(plan, exact_length=True)
        headers = {"X-Swarm-Agent": agent}

        async def stream() -> None:
            await stream_chat(url, body, headers, into=turn._result, on_progress=turn._progressed)
            turn._news.set()

        with anyio.move_on_after(_STEP_BOUND_S) as bound:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream)
                await turn._pieces(tokens)
                yield turn
                tasks.cancel_scope.cancel()
        if bound.cancelled_caught:
            raise BenchError(f"no pause and resume within {_STEP_BOUND_S:g} s: {turn._result.error or ''}")
        await turn._gone()

    def _progressed(self, _: TurnResult) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def _pieces(self, count: int) -> None:
        while self._result.pieces < count:
            if self._result.ended is not None:
                said = self._result.error or self._result.finish_reason
                raise BenchError(f"the turn ended too early: {said}")
            await self._news.wait()

    @property
    def id(self) -> str:
        return self._result.turn_id or "?"

    async def pause(self) -> None:
        """Hold the turn; returns once it is paused."""
        await ask(self._admin, "POST", f"/swarm/turns/{self.id}/preempt")
        await self.event("paused")

    async def resume(self) -> float:
        """Seconds from the request until the next token has arrived."""
        before = self._result.pieces
        begin = anyio.current_time()
        await ask(self._admin, "POST", f"/swarm/turns/{self.id}/resume")
        await self._pieces(before + 1)
        return self._result.times[before] - begin

    async def tier(self) -> str | None:
        record = await ask(self._admin, "GET", f"/swarm/turns/{self.id}")
        tier: str | None = record["tier"]
        return tier

    async def event(self, name: str, tier: str | None = None) -> dict[str, Any]:
        """The last timeline entry of this name, once there is one; it must be of the tier, if given."""
        while True:
            timeline = (await ask(self._admin, "GET", f"/swarm/turns/{self.id}"))["timeline"]
            entries = [entry for entry in timeline if entry["event"] == name]
            if entries:
                break
            await anyio.sleep(_POLL_S)
        entry: dict[str, Any] = entries[-1]
        if tier is not None and entry.get("tier") != tier:
            raise BenchError(f"turn {self.id} resumed from {entry.get('tier')}, not {tier}: {timeline}")
        return entry

    async def _gone(self) -> None:
        """Until the service has noticed that the client left: else its slot is not free."""
        state = ""
        with anyio.move_on_after(_STEP_BOUND_S):
            while True:
                state = (await ask(self._admin, "GET", f"/swarm/turns/{self.id}"))["state"]
                if state in FINAL_STATES:
                    return
                await anyio.sleep(_POLL_S)
        raise BenchError(f"turn {self.id} is still {state} after its client left")


async def _until_quiet(admin: httpx.AsyncClient) -> None:
    """Until no save was begun or ended for a while: one that is under way would be measured as well."""
    seen, looks = None, 0
    with anyio.move_on_after(_STEP_BOUND_S):
        while looks < _QUIET_LOOKS:
            swap = (await ask(admin, "GET", "/swarm/state"))["backends"][0]["swap"]
            now = (swap["saves"], swap["files"], swap["failures"])
            seen, looks = now, looks + 1 if now == seen else 0
            await anyio.sleep(_QUIET_S)


async def _check_unsaved(admin: httpx.AsyncClient, turn: _Turn) -> None:
    paused = await turn.event("paused")
    if paused["kv_tokens"] > _MOST_UNSAVED_TOKENS:
        raise BenchError(f"the model's chat template is too long: {paused['kv_tokens']} tokens for one word")


# Report -------------------------------------------------------------------------------------------


def _median(samples: Iterable[float]) -> float:
    return Summary.of(list(samples)).p50


def report(settings: ResumeSettings, found: Mapping[int, Costs]) -> Report:
    """The table: a column for each length."""
    costs = list(found.values())

    def row(what: str, cells: Iterable[str]) -> list[str]:
        return [what, *cells]

    def raw(name: str) -> Iterable[str]:
        return (milliseconds(_median(getattr(swap, name) for swap in each.raw)) for each in costs)

    def swapped(name: str) -> Iterable[str]:
        return (milliseconds(_median(getattr(swap, name) for swap in each.swapped)) for each in costs)

    def most(counts: Iterable[float]) -> str:
        return figure(Summary.of(list(counts)).max, 0)

    rows = [
        row("recompute", (milliseconds(_median(each.recompute_s)) for each in costs)),
        row("  tokens evaluated", (figure(_median(each.prefill_tokens), 0) for each in costs)),
        row("resident", (milliseconds(_median(each.resident_s)) for each in costs)),
        row("  tokens evaluated again, most", (most(each.reevaluated) for each in costs)),
        row("  times cheaper", (figure(each.resident_times, 0) for each in costs)),
        row("swap by hand", raw("cost_s")),
        row("  save, engine's time", raw("save_engine_s")),
        row("  restore, until answered", raw("restore_wall_s")),
        row("  next token", raw("first_token_wall_s")),
        row(
            "  tokens evaluated again, most", (most(s.tokens_reevaluated for s in each.raw) for each in costs)
        ),
        row("  times cheaper", (figure(each.raw_times, 0) for each in costs)),
        row("swapped", swapped("cost_s")),
        row("  save, engine's time", swapped("save_engine_s")),
        row("  resume until next token", swapped("resume_wall_s")),
        row("    of that restore, engine's time", swapped("restore_engine_s")),
        row(
            "  tokens evaluated again, most",
            (most(s.tokens_reevaluated for s in each.swapped) for each in costs),
        ),
        row("  times cheaper", (figure(each.swapped_times, 0) for each in costs)),
        row("swapped against by hand", (_percent(each.part_of_raw) for each in costs)),
        row("pause took", (milliseconds(_median(each.pause_s)) for each in costs)),
    ]
    return Report(
        bench="resume",
        title=f"Resume of a paused turn, median of {settings.repeats}",
        columns=["", *(f"{length:,} tokens" for length in found)],
        rows=rows,
        notes=[
            "goal: a resident resume evaluates at most 2 tokens again",
            f"goal: a swap through the service is at least {_SWAP_GOAL:.0%} as many times cheaper than a "
            "recompute as one by hand",
        ],
        parameters={"settings": settings},
        data={str(length): each.data() for length, each in found.items()},
    )


def _percent(part: float) -> str:
    return "-" if part != part else f"{part:.0%}"
