"""What happens to turns when the KV of all of them does not fit: where it goes, and what that costs.

Twelve background clients in three classes hold conversations: each turn's prompt is everything said before
and a new message, so contexts grow from about 1,000 to 3,000 tokens and begin anew. The engine's KV holds six
of them at most, the swap folder one more, and the rest is dropped. Foreground turns come and go all the time.
The background classes come in waves: while the higher ones are away, the batch class fills the decode slots;
then each higher class takes them from the one below, whose paused KV is in the way sooner or later. All
clients are closed loops: the next turn is asked for when the last one ended, a seeded pause is over and the
class's wave is there, and every turn is generated greedily to its seeded length. When the time is over no new
turn is asked for, and all that are under way are waited for.

The layout is unified, without a `kv_budget`, because that shows most: the budget is the engine's real pool,
where a ledger that charges too little ends every running turn, and parked KV slows the running ones. With
`--layout split` each slot has its own context and a `kv_budget` is the limit.

While turns run, the service's account is compared with the engine's own figures (`ledger_check.py`).
Afterwards the turns of some conversations are generated once more by the engine alone, one at a time. Texts
of turns that were never preempted tell how much comes from decoding beside others; those of resident and
swapped ones should be no worse.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import anyio
import httpx
from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import TurnPlan, chat_body, gaps
from backends.managed import KvLayout
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
from benchmarks.ledger_check import LedgerTruth, sample_ledger
from benchmarks.report import Advance, Report, Summary, figure, milliseconds, progress_bar, ratio
from benchmarks.wait import Column
from orchestrator.turns import FINAL_STATES

CLASSES = ("normal", "background", "batch")
TIERS = ("resident", "swapped", "dropped")
NEVER = "never preempted"
IN_PROMPT = "in its prompt"
KINDS = (NEVER, IN_PROMPT, *TIERS)
_MESSAGE_TOKENS = 8
_LINE_TOKENS = 13
_SLOT_ROOM_TOKENS = 328
_FOREGROUND_TOKENS = 24
_DRAIN_BOUND_S = 900.0
_RECORD_BOUND_S = 10.0
_TICK_S = 0.5
_POLL_S = 0.05
_ERROR_PAUSE_S = 0.5
_FAILURES_KEPT = 20


@dataclass(frozen=True)
class PressureSettings:
    """What is offered, and what there is to hold it."""

    duration_s: float = 600.0
    seed: int = 1
    layout: KvLayout = "unified"
    clients: int = 4
    """Background clients of each class."""
    foreground_clients: int = 3
    foreground_gap_s: float = 2.5
    """Mean pause of a foreground client between two turns, exponentially distributed."""
    background_gap_s: float = 0.5
    """The same of the background clients."""
    waves_s: tuple[tuple[float, float], ...] = ((14.0, 45.0), (30.0, 65.0), (1.0, 1.0))
    """For each class of `CLASSES`: for how long its clients ask, at the end of each such period."""
    first_tokens: tuple[int, int] = (900, 1100)
    """Tokens of a first message, about; below of the further ones, and of each class's replies."""
    more_tokens: tuple[int, int] = (120, 240)
    reply_tokens: tuple[tuple[int, int], ...] = ((50, 80), (80, 140), (140, 200))
    context_tokens: int = 3000
    """A conversation ends before it is longer than this."""
    decode_slots: int = 4
    engine_slots: int = 14
    kv_tokens: int = 10_240
    swap_bytes: int = 56 * 1024 * 1024
    """About one conversation's KV with the bundled model: what has to go after that is dropped."""
    aging_s: float = 60.0
    threads: int | None = 2
    sample_every_s: float = 1.5
    references: int = 40
    """About how many turns are generated again."""

    def quick(self) -> "PressureSettings":
        """A quarter of the size, long enough for every tier to be used."""
        return replace(
            self,
            duration_s=45.0,
            first_tokens=(220, 280),
            more_tokens=(30, 60),
            reply_tokens=((15, 30), (30, 50), (50, 80)),
            context_tokens=750,
            kv_tokens=2048,
            swap_bytes=self.swap_bytes // 5,
            foreground_gap_s=2.0,
            waves_s=((4.0, 12.0), (8.0, 17.0), (1.0, 1.0)),
            aging_s=20.0,
            references=12,
        )

    @property
    def slot_tokens(self) -> int:
        """What the longest turn may need."""
        return self.context_tokens + _SLOT_ROOM_TOKENS

    @property
    def shape(self) -> EngineShape:
        """The engine's numbers."""
        unified = self.layout == "unified"
        return EngineShape(
            decode_slots=self.decode_slots,
            engine_slots=self.engine_slots,
            slot_context=self.slot_tokens,
            batch_tokens=16,
            threads=self.threads,
            kv_layout=self.layout,
            pool_tokens=self.kv_tokens if unified else None,
        )


# The work -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One turn of a conversation: what is added to it, and what may be answered."""

    conversation: int
    first: bool
    message: str
    max_tokens: int


def asks(settings: PressureSettings, client: str, of: str) -> Iterator[Ask]:
    """The endless turns of one background client of a class; the same for the same settings."""
    replies = settings.reply_tokens[CLASSES.index(of)]
    rng = random.Random(f"pressure/{settings.seed}/{client}")
    conversation = 0
    while True:
        context = 0
        for number in range(1_000_000):
            new = rng.randint(*(settings.first_tokens if number == 0 else settings.more_tokens))
            reply = rng.randint(*replies)
            context += new + reply + 2 * _MESSAGE_TOKENS
            if context > settings.context_tokens:
                break
            name = f"{client}.{conversation}.{number}"
            yield Ask(conversation, number == 0, notes(new, name), reply)
        conversation += 1


def notes(tokens: int, name: str) -> str:
    """A message of about so many tokens, distinct from its first word on for each name.

    Its even lines leave the model in little doubt about what it says, so that rounding, which differs with
    what else is in a batch, seldom changes a greedy reply.
    """
    lines = (f"\n- check the code of step {number} and run the test" for number in count(1))
    return name + "".join(islice(lines, max(1, tokens // _LINE_TOKENS)))


@dataclass
class Outcome:
    """One background turn. `timeline` is the service's own account of it."""

    client: str
    conversation: int
    body: dict[str, Any]
    result: TurnResult
    timeline: list[dict[str, Any]] = field(default_factory=list)

    @property
    def resumes(self) -> Counter[str]:
        """How often it was resumed from each tier."""
        return Counter(str(entry.get("tier")) for entry in self.timeline if entry["event"] == "resumed")

    @property
    def kind(self) -> str:
        """The worst tier that it was resumed from, or that its prompt was cut in two by a pause.

        The parts of such a prompt are evaluated in other batches than the whole.
        """
        resumes = self.resumes
        worst = next((tier for tier in reversed(TIERS) if resumes[tier]), NEVER)
        in_prompt = any(entry["event"] == "paused" and not entry["tokens"] for entry in self.timeline)
        return IN_PROMPT if in_prompt and worst != "dropped" else worst

    @property
    def first_pause(self) -> int:
        """How many tokens of it there were at its first pause; its length when there was none."""
        pauses = (int(entry["tokens"]) for entry in self.timeline if entry["event"] == "paused")
        return next(pauses, self.result.tokens)

    @property
    def where(self) -> tuple[str, int]:
        return self.client, self.conversation


@dataclass
class Found:
    """Everything that was measured."""

    column: Column = field(default_factory=Column)
    outcomes: list[Outcome] = field(default_factory=list)
    truth: LedgerTruth = field(default_factory=LedgerTruth)
    swap: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    drain_s: float = 0.0
    equal: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)
    """Texts that differ before the first pause already: not because of it."""
    differing: list[dict[str, Any]] = field(default_factory=list)


def run(
    settings: PressureSettings, *, json_path: Path | None = None, console: Console | None = None
) -> Found:
    """Measure, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    with progress_bar(settings.duration_s, "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: PressureSettings, advance: Advance) -> Found:
    """Run the load, then the references on the same engine."""
    found = Found()
    async with real_engine(settings.shape) as engine, json_client(engine.url) as raw:
        backend = settings.shape.external(engine)
        async with service(service_config(settings, backend)) as url:
            await _Load(settings, url, raw, found).run(advance)
        await empty_slots(raw)
        await _references(settings, raw, engine.url, found, advance)
    return found


def service_config(settings: PressureSettings, backend: Mapping[str, Any]) -> dict[str, Any]:
    """The service with an agent for each background client, and one for the foreground."""
    limits = {"swap_budget": settings.swap_bytes, "kv_bytes_per_token": _TOKEN_BYTES}
    if settings.layout == "split":
        limits["kv_budget"] = settings.kv_tokens * _TOKEN_BYTES
    agents = {
        name: {"priority": of, "max_turn_tokens": settings.slot_tokens} for name, of in _clients(settings)
    }
    return {
        "backends": [{**backend, **limits}],
        "policy": {"aging_s": settings.aging_s},
        "agents": {
            "foreground": {"priority": "foreground", "max_turn_tokens": settings.slot_tokens},
            **agents,
        },
    }


# The bundled model's: 2 x 3 KV heads x 64 x 30 layers in 16 bits.
_TOKEN_BYTES = 23_040


def _clients(settings: PressureSettings) -> list[tuple[str, str]]:
    return [(f"{of}-{number}", of) for of in CLASSES for number in range(settings.clients)]


class _Load:
    """The clients of one run."""

    def __init__(self, settings: PressureSettings, url: str, engine: httpx.AsyncClient, found: Found) -> None:
        self._settings = settings
        self._url = url
        self._engine = engine
        self._found = found
        self._foreground: list[TurnResult] = []

    async def run(self, advance: Advance) -> None:
        settings, found = self._settings, self._found
        self._begin = begin = anyio.current_time()
        self._end = begin + settings.duration_s
        async with json_client(self._url) as self._admin, anyio.create_task_group() as background:
            background.start_soon(
                sample_ledger, self._admin, self._engine, found.truth, settings.sample_every_s
            )
            background.start_soon(self._tick, begin, advance)
            with anyio.move_on_after(settings.duration_s + _DRAIN_BOUND_S):
                async with anyio.create_task_group() as clients:
                    for name, of in _clients(settings):
                        clients.start_soon(self._background, name, of)
                    for number in range(settings.foreground_clients):
                        clients.start_soon(self._foreground_client, f"f{number}")
            found.drain_s = max(0.0, anyio.current_time() - self._end)
            state = await ask(self._admin, "GET", "/swarm/state")
            found.swap, found.costs = state["backends"][0]["swap"], state["backends"][0]["costs"]
            found.counters = state["counters"]
            background.cancel_scope.cancel()
        for outcome in found.outcomes:
            if outcome.result.ended is None or outcome.result.aborted:
                outcome.result.error = f"not over {_DRAIN_BOUND_S:g} s after the end"
        results = [outcome.result for outcome in found.outcomes]
        found.column.count(self._foreground, results, begin, self._end)

    async def _tick(self, begin: float, advance: Advance) -> None:
        while True:
            advance(anyio.current_time() - begin, f"{len(self._found.outcomes)} background turns")
            await anyio.sleep(_TICK_S)

    def _over(self) -> bool:
        return anyio.current_time() >= self._end

    async def _background(self, client: str, of: str) -> None:
        messages: list[dict[str, str]] = []
        pauses = gaps(self._settings.background_gap_s, self._settings.seed, client)
        for turn, pause_s in zip(asks(self._settings, client, of), pauses, strict=False):
            on_s, period_s = self._settings.waves_s[CLASSES.index(of)]
            since = (anyio.current_time() - self._begin) % period_s
            await self._pause(max(0.0, period_s - on_s - since))
            if self._over():
                return
            body = chat_body(TurnPlan(turn.message, turn.max_tokens), exact_length=True)
            messages = body["messages"] if turn.first else [*messages, body["messages"][-1]]
            body["messages"] = messages
            outcome = Outcome(client, turn.conversation, body, TurnResult())
            self._found.outcomes.append(outcome)
            await stream_chat(
                self._url,
                body,
                {"X-Swarm-Agent": client},
                into=outcome.result,
                timeout_s=self._settings.duration_s + _DRAIN_BOUND_S,
            )
            messages = [*messages, {"role": "assistant", "content": outcome.result.text}]
            if outcome.result.turn_id is not None:
                outcome.timeline = await self._timeline(outcome.result.turn_id)
            if outcome.result.error is not None:
                await anyio.sleep(_ERROR_PAUSE_S)
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        """Not beyond the end."""
        await anyio.sleep(min(seconds, max(0.0, self._end - anyio.current_time())))

    async def _foreground_client(self, name: str) -> None:
        for number, pause_s in enumerate(gaps(self._settings.foreground_gap_s, self._settings.seed, name)):
            await anyio.sleep(pause_s)
            if self._over():
                return
            body = chat_body(TurnPlan(f"Review: {name}.{number}", _FOREGROUND_TOKENS), exact_length=True)
            result = TurnResult()
            self._foreground.append(result)
            await stream_chat(self._url, body, {"X-Swarm-Agent": "foreground"}, into=result)

    async def _timeline(self, turn: str) -> list[dict[str, Any]]:
        """The turn's whole timeline: its record ends a moment after its stream."""
        state = "unknown"
        with anyio.move_on_after(_RECORD_BOUND_S):
            while True:
                record = await ask(self._admin, "GET", f"/swarm/turns/{turn}")
                state = record["state"]
                if state in FINAL_STATES:
                    return list(record["timeline"])
                await anyio.sleep(_POLL_S)
        raise BenchError(f"turn {turn} is still {state} {_RECORD_BOUND_S:g} s after its stream ended")


# References ---------------------------------------------------------------------------------------


def sample_conversations(outcomes: Sequence[Outcome], seed: int, turns: int) -> list[Outcome]:
    """The complete turns of whole conversations, in their order, until there are enough."""
    complete = [outcome for outcome in outcomes if outcome.result.error is None]
    names = sorted({outcome.where for outcome in complete})
    random.Random(f"references/{seed}").shuffle(names)
    chosen: list[Outcome] = []
    for name in names:
        if len(chosen) >= turns:
            break
        chosen += [outcome for outcome in complete if outcome.where == name]
    return chosen


async def _references(
    settings: PressureSettings, raw: httpx.AsyncClient, url: str, found: Found, advance: Advance
) -> None:
    chosen = sample_conversations(found.outcomes, settings.seed, settings.references)
    for done, outcome in enumerate(chosen):
        advance(settings.duration_s, f"reference {done + 1} of {len(chosen)}")
        # One slot, so that a conversation's next turn finds the last one's KV: else this takes hours.
        alone = await stream_chat(url, outcome.body | {"id_slot": 0})
        if alone.error is not None:
            raise BenchError(f"the engine alone failed: {alone.error}")
        kind = outcome.kind
        found.compared[kind] += 1
        if alone.text == outcome.result.text:
            found.equal[kind] += 1
            continue
        pairs = zip(alone.text, outcome.result.text, strict=False)
        same = "".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        equal_tokens = len((await ask(raw, "POST", "/tokenize", {"content": same}))["tokens"])
        found.early[kind] += equal_tokens < outcome.first_pause
        found.differing.append(
            {
                "turn": outcome.result.turn_id,
                "client": outcome.client,
                "kind": kind,
                "tokens": outcome.result.tokens,
                "equal_tokens": equal_tokens,
                "first_pause": outcome.first_pause,
                "timeline": outcome.timeline,
            }
        )


# Report -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """What happened to the background turns' KV, by their timelines. Seconds and tokens."""

    preemptions: int
    resumes: dict[str, int]
    reevaluated: dict[str, int]
    events: dict[str, int]
    save_stalls_s: list[float]
    restore_stalls_s: list[float]
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Moves":
        """Add the timelines up."""
        events: Counter[str] = Counter()
        resumes: Counter[str] = Counter()
        reevaluated: Counter[str] = Counter()
        saves, restores = [], []
        prompt = cached = 0
        for outcome in outcomes:
            prompt += outcome.result.prompt_tokens or 0
            cached += outcome.result.cached_tokens or 0
            for entry in outcome.timeline:
                events[entry["event"]] += 1
                if entry["event"] == "resumed":
                    resumes[str(entry["tier"])] += 1
                    reevaluated[str(entry["tier"])] += entry["tokens_reevaluated"]
                elif entry["event"] == "swapped":
                    saves.append(entry["stall_s"])
                elif entry["event"] == "restored":
                    restores.append(entry["stall_s"])
        return cls(
            preemptions=events["paused"],
            resumes={tier: resumes[tier] for tier in TIERS},
            reevaluated={tier: reevaluated[tier] for tier in TIERS},
            events=dict(events),
            save_stalls_s=saves,
            restore_stalls_s=restores,
            prompt_tokens=prompt,
            cached_tokens=cached,
        )


def report(settings: PressureSettings, found: Found) -> Report:
    """The table: a row for each figure."""
    moves = Moves.of(found.outcomes)
    column, truth, swap = found.column, found.truth, found.swap
    waits = Summary.of(column.waits)
    rows: list[list[str]] = []
    for name in ("p50", "p90", "p99", "max"):
        value = getattr(waits, name)
        steps = figure(ratio(value, column.step_s), 2)
        rows.append([f"foreground wait for a slot {name}", f"{milliseconds(value)} = {steps} steps"])
    rows += [
        ["foreground turns", str(waits.n)],
        ["decode step, median", milliseconds(column.step_s)],
        ["background turns", str(len(found.outcomes))],
        ["background tokens/s", figure(column.background_rate)],
        ["prompt tokens found in KV", f"{moves.cached_tokens:,} of {moves.prompt_tokens:,}"],
        ["preemptions", str(moves.preemptions)],
    ]
    for tier in TIERS:
        again = moves.reevaluated[tier]
        rows.append([f"resumes, {tier}", f"{moves.resumes[tier]}, {again:,} tokens evaluated again"])
    stalls = moves.save_stalls_s, moves.restore_stalls_s
    longest = [milliseconds(Summary.of(each).max) for each in stalls]
    rows += [
        ["saves, restores, failures", f"{swap['saves']}, {swap['restores']}, {swap['failures']}"],
        ["longest save, restore of a turn", ", ".join(longest)],
        ["stalls of the highest class", str(swap["stalls"])],
        ["ledger: samples, slots compared", f"{truth.samples}, {truth.compared}"],
        ["  still, running, bounded", f"{truth.still}, {truth.running}, {truth.bounded}"],
        ["  mismatches, over budget", f"{truth.mismatches}, {truth.over_budget}"],
        [
            "  most charged, held, budget",
            f"{truth.most_charged_tokens:,}, {truth.most_held_tokens:,}, {truth.budget_tokens:,}",
        ],
    ]
    for kind in KINDS:
        same = f"{found.equal[kind]} of {found.compared[kind]}"
        if kind in TIERS:
            same += f", {found.early[kind]} differ before the first pause"
        rows.append([f"same text alone, {kind}", same])
    rows.append(["errors", str(len(column.errors))])
    return Report(
        bench="pressure",
        title=f"{len(_clients(settings))} background conversations, KV for {settings.kv_tokens:,} tokens",
        columns=["", settings.layout],
        rows=rows,
        notes=list(_notes(found)),
        parameters={"settings": settings, "foreground_tokens": _FOREGROUND_TOKENS},
        data={
            "column": column.data(),
            "moves": moves,
            "swap": swap,
            "costs": found.costs,
            "counters": found.counters,
            "ledger": truth,
            "drain_s": found.drain_s,
            "texts": {
                kind: {
                    "compared": found.compared[kind],
                    "equal": found.equal[kind],
                    "differ_before_first_pause": found.early[kind],
                }
                for kind in KINDS
            },
            "differing": found.differing,
            "failures": _failures(found),
        },
    )


def _failures(found: Found) -> list[dict[str, Any]]:
    failed = [outcome for outcome in found.outcomes if outcome.result.error is not None]
    return [
        {
            "turn": outcome.result.turn_id,
            "client": outcome.client,
            "error": outcome.result.error,
            "timeline": outcome.timeline,
        }
        for outcome in failed[:_FAILURES_KEPT]
    ]


def _notes(found: Found) -> Iterator[str]:
    yield "goals: no errors, no mismatches, nothing over the budget, every tier used"
    yield f"the last turn ended {found.drain_s:.0f} s after the time was over"
    if found.column.errors:
        yield f"the first error: {found.column.errors[0]}"
    if found.truth.first_mismatches:
        first = found.truth.first_mismatches[0]
        yield f"the first mismatch, sample {first['sample']}: {first['what']}"
