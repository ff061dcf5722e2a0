"""Measures a running engine for the simulator's engine model; what to make of the figures is
`orchestrator/simulation/calibrate.py`.

The engine is asked directly, through its own HTTP API, by as many streams as turns may decode; nobody else
may use it meanwhile, and what its slots held is gone afterwards. The parts:

- *prefill*: a long prompt into each slot in turn, nothing else in the batch; the engine's own time for it.
- *decode*: 1 to all lanes, with short contexts and with the long ones. From the last lane's first token to
  the first lane's last one, the steps are the moments at which tokens of any lane arrive. Slots that hold a
  long context and do not run are the parked KV.
- *mixed*: all lanes but one decode while the last one evaluates a prompt, and fewer lanes. These are the
  steps that prompts have in a busy engine; a prefill alone may take another way through an engine, and only
  counts where nothing else tells.
- *apart*: lanes in slots that are not adjacent, which an engine with split KV computes group by group.
- *save, restore*: the engine's own time, where it can.
- *flush*: all lanes decode, one stream is closed and another begun in the spare slot (in the same one where
  there is none), at evenly spread moments of the step: from the next boundary until the newcomer begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median
from typing import Any, Self

import anyio
import anyio.abc
import httpx

from agents.client import TurnResult, stream_chat
from agents.workload import filler
from benchmarks.harness import BenchError, ask, json_client
from orchestrator.simulation.calibrate import CopySample, Measurements, StepSample
from orchestrator.simulation.engine_model import groups_of

_SLOT_ROOM_TOKENS = 64
_WORD_TOKENS = 400
_LANE_BOUND_S = 120.0
_TOKEN_BOUND_S = 60.0
_IDLE_BOUND_S = 30.0
_ENDLESS_TOKENS = 100_000
_POLL_S = 0.01
_LONE_WEIGHT = 0.001

Advance = Callable[[float, str], None]
"""Tells which part of 1 is done, and what is measured now."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of the engine before it is measured: as configured, or as it says itself."""

    url: str
    lanes: int
    """How many turns decode at once, at most."""
    slots: int
    slot_context: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. The defaults take about two minutes with the bundled model on two slow cores."""

    short_tokens: int = 16
    long_tokens: int = 512
    steps: int = 24
    """Steps of each part, at least."""
    mixed_tokens: int = 512
    """Longest prompt of a mixed part."""
    copies: int = 3
    flushes: int = 12
    controls: int = 72
    """Requests at moments spread over a step. Each wait is off by up to a step; only their mean counts."""
    seed: int = 1

    def quick(self) -> Effort:
        """A third of that."""
        return Effort(long_tokens=192, steps=12, mixed_tokens=96, copies=1, flushes=6, controls=10)


def lane_counts(lanes: int) -> list[int]:
    """The numbers of lanes at which steps are measured: one, a quarter, half and all."""
    return sorted({1, max(1, lanes // 4), max(1, lanes // 2), lanes})


def apart(lanes: int, slots: int) -> list[int]:
    """So many of the slots, in as many groups as there can be, all about equally large."""
    groups = min(lanes, slots - lanes + 1)
    return [lane + lane * groups // lanes for lane in range(lanes)]


def boundaries(lanes: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """The step boundaries between two moments: when tokens of any lane arrived, those of one step as one.

    A token without text of its own leaves a hole in its lane only.
    """
    gaps = [b - a for times in lanes for a, b in pairwise(t for t in times if begin <= t <= end)]
    if not gaps:
        return []
    apart = median(gaps) / 2
    found: list[float] = []
    for moment in sorted(t for times in lanes for t in times if begin <= t <= end):
        if not found or moment - found[-1] > apart:
            found.append(moment)
    return found


class Words:
    """Token ids of common words of the model, for prompts that share nothing with each other."""

    def __init__(self, ids: Sequence[int], seed: int) -> None:
        if len(set(ids)) < 2:
            raise BenchError("the engine's tokeniser makes less than two tokens of a page of words")
        self._ids = sorted(set(ids))
        self._random = random.Random(f"words/{seed}")

    @classmethod
    async def of(cls, api: httpx.AsyncClient, seed: int) -> Self:
        """Ask the engine. Raises BenchError."""
        reply = await ask(api, "POST", "/tokenize", {"content": filler(_WORD_TOKENS, "some")})
        return cls(reply["tokens"], seed)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt of exactly so many tokens."""
        return self._random.choices(self._ids, k=tokens)


@dataclass(eq=False)
class _Lane:
    """A stream that decodes in one slot until it is stopped."""

    slot: int
    result: TurnResult = field(default_factory=TurnResult)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Calibrator:
    """Measures one engine. Each part adds its samples to what `measurements` gives."""

    def __init__(self, engine: Engine, effort: Effort, api: httpx.AsyncClient, words: Words) -> None:
        self._engine = engine
        self._effort = effort
        self._api = api
        self._words = words
        self._held: dict[int, list[int]] = {}
        """What each slot holds after the last part that told."""
        self._news = anyio.Event()
        self._steps: list[StepSample] = []
        self._saves: list[CopySample] = []
        self._restores: list[CopySample] = []
        self._flushes: list[float] = []
        self._calls: list[float] = []

    @property
    def measurements(self) -> Measurements:
        """All that was measured so far."""
        return Measurements(
            batch_tokens=self._engine.batch_tokens,
            steps=tuple(self._steps),
            saves=tuple(self._saves),
            restores=tuple(self._restores),
            flushes_s=tuple(self._flushes),
            calls_s=tuple(self._calls),
        )

    async def run(self, advance: Advance) -> Measurements:
        """All parts. Raises BenchError."""
        engine, effort = self._engine, self._effort
        counts = lane_counts(engine.lanes)
        for at, lanes in enumerate(counts):
            advance(0.2 * at / len(counts), f"decode, {lanes} short")
            await self.decode(range(lanes), effort.short_tokens)
        for lanes in sorted({min(engine.lanes, (engine.slots + 1) // 2), engine.lanes}):
            slots = apart(lanes, engine.slots)
            if groups_of(slots) > 1:
                advance(0.2, f"decode, {lanes} apart")
                await self.decode(slots, effort.short_tokens)
        long_tokens = min(effort.long_tokens, engine.slot_context - _SLOT_ROOM_TOKENS - 4 * effort.steps)
        if long_tokens > 2 * effort.short_tokens:
            for slot in range(engine.lanes):
                advance(0.2 + 0.3 * slot / engine.lanes, f"prefill, slot {slot}")
                await self.prefill(slot, long_tokens)
            for at, lanes in enumerate(counts):
                advance(0.5 + 0.2 * at / len(counts), f"decode, {lanes} long")
                await self.decode(range(lanes), long_tokens)
        advance(0.7, "save and restore")
        await self.copies()
        for lanes in sorted({1, engine.lanes // 2, engine.lanes - 1} - {0, engine.lanes}):
            advance(0.75, f"prefill beside {lanes}")
            await self.mixed(lanes)
        advance(0.85, "flush")
        await self.flushes()
        await self.idle()
        advance(1.0, "measured")
        return self.measurements

    # Parts -----------------------------------------------------------------------------------------

    async def decode(self, slots: Sequence[int], context: int) -> None:
        """These slots decode with contexts of about so many tokens; those that slots hold are used."""
        lanes, groups = len(slots), groups_of(slots)
        tokens = self._effort.steps + 2 * lanes
        running: list[_Lane] = []
        contexts: list[int] = []
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for slot in slots:
                held = self._held.get(slot, [])
                prompt = held if len(held) == context else self._words.prompt(context)
                self._held[slot] = prompt
                contexts.append(len(prompt))
                running.append(self._begin(tasks, slot, prompt, tokens))
        results = [self._checked(lane.result) for lane in running]
        begin = max(result.first_token or begun for result in results)
        end = min(result.last_token or begun for result in results)
        found = boundaries([result.times for result in results], begin, end)
        steps = len(found) - 1
        if lanes == 1 and results[0].pieces > 1:
            # With nobody beside it, a token without text of its own would be a step of twice the length.
            steps = round(steps * (results[0].tokens - 1) / (results[0].pieces - 1))
        if steps < 2:
            raise BenchError(f"{lanes} lanes did not decode side by side; give the engine longer contexts")
        middle = (begin + end) / 2
        grown = sum(sum(1 for moment in result.times if moment < middle) for result in results)
        self._add(
            f"decode, {lanes} x {context}" + (f" in {groups} groups" if groups > 1 else ""),
            (found[-1] - found[0]) / steps,
            lanes=lanes,
            running=sum(contexts) + grown,
            parked=self._parked(slots),
            steps=steps,
            groups=groups,
        )

    async def prefill(self, slot: int, tokens: int) -> None:
        """One prompt with the engine to itself."""
        prompt = self._words.prompt(tokens)
        result = await self._alone(slot, prompt, 1)
        steps = -(-tokens // self._engine.batch_tokens)
        self._held[slot] = prompt
        if slot not in (0, self._engine.lanes - 1):
            return  # one like the other, but for the parked KV
        self._add(
            f"prefill, {tokens} in slot {slot}",
            _prompt_s(result) / steps,
            lanes=0,
            running=tokens / 2,
            parked=self._parked([slot]),
            prefill=tokens / steps,
            steps=steps,
            weight=_LONE_WEIGHT,
        )

    async def mixed(self, lanes: int) -> None:
        """So many lanes decode, the last one evaluates a prompt; nothing where the batch has no room."""
        engine, effort = self._engine, self._effort
        last = engine.lanes - 1
        room = engine.batch_tokens - lanes
        tokens = min(effort.mixed_tokens, room * effort.steps, engine.slot_context - _SLOT_ROOM_TOKENS)
        if room < 1 or tokens < 2:
            return
        steps = -(-tokens // room)
        short = effort.short_tokens
        async with anyio.create_task_group() as tasks:
            running = []
            for slot in range(lanes):
                self._held[slot] = self._words.prompt(short)
                running.append(self._begin(tasks, slot, self._held[slot], self._endless(short)))
            for lane in running:
                await self._more(lane, 3)
            self._held[last] = self._words.prompt(tokens)
            result = await self._alone(last, self._held[last], 1)
            done = sum(lane.result.pieces for lane in running)
            tasks.cancel_scope.cancel()
        self._add(
            f"mixed, {lanes} decode, prompt of {tokens}",
            _prompt_s(result) / steps,
            lanes=lanes,
            running=lanes * short + done - lanes * steps / 2 + tokens / 2,
            parked=self._parked([*range(lanes), last]),
            prefill=tokens / steps,
            steps=steps,
            groups=groups_of([*range(lanes), last]),
        )
        await self.idle()

    async def copies(self) -> None:
        """Saves and restores of slot 0; nothing where the engine refuses them."""
        for number in range(self._effort.copies):
            name = f"calibrate-{number % 2}"
            try:
                saved = await ask(self._api, "POST", "/slots/0?action=save", {"filename": name})
                restored = await ask(self._api, "POST", "/slots/0?action=restore", {"filename": name})
                self._saves.append(CopySample(int(saved["n_saved"]), saved["timings"]["save_ms"] / 1e3))
                restored_s = restored["timings"]["restore_ms"] / 1e3
                self._restores.append(CopySample(int(restored["n_restored"]), restored_s))
            except (BenchError, KeyError, TypeError, ValueError):
                return

    async def flushes(self) -> None:
        """Newcomers while all lanes decode and one of them is stopped."""
        engine, effort = self._engine, self._effort
        short = effort.short_tokens
        step_s = self._steps[-1].step_s
        async with anyio.create_task_group() as tasks:
            running = [
                self._begin(tasks, slot, self._words.prompt(short), self._endless(short))
                for slot in range(engine.lanes)
            ]
            spare = engine.lanes if engine.slots > engine.lanes else None
            for lane in running:
                await self._more(lane, 3)
            for phase in phases(effort.flushes):
                victim, witness = running[0], running[-1]
                await self._more(witness, 1)
                if len(witness.result.times) > 3:
                    step_s = median(b - a for a, b in pairwise(witness.result.times[-6:]))
                await anyio.sleep(phase * step_s)
                slot = victim.slot if spare is None else spare
                asked = anyio.current_time()
                victim.scope.cancel()
                newcomer = self._begin(tasks, slot, self._words.prompt(short), self._endless(short))
                await self._more(newcomer, 2)
                if spare is not None:
                    spare = victim.slot
                running = [*running[1:], newcomer]
                others = [lane.result.times for lane in running[:-1]] or [victim.result.times]
                boundary = min((t for times in others for t in times if t >= asked), default=None)
                started = newcomer.result.started
                if boundary is not None and started is not None:
                    self._flushes.append(max(0.0, started - boundary))
                    self._calls.append(started - asked - (1 - phase) * step_s)
            tasks.cancel_scope.cancel()

    async def idle(self) -> None:
        """Return once no slot decodes. Raises BenchError."""
        with anyio.move_on_after(_IDLE_BOUND_S):
            while True:
                if not any(slot["is_processing"] for slot in await ask(self._api, "GET", "/slots")):
                    return
                await anyio.sleep(_POLL_S)
        raise BenchError(f"the engine did not come to rest within {_IDLE_BOUND_S:g} s")

    # Streams ---------------------------------------------------------------------------------------

    def _begin(self, tasks: anyio.abc.TaskGroup, slot: int, prompt: Sequence[int], tokens: int) -> _Lane:
        lane = _Lane(slot)
        tasks.start_soon(self._stream, lane, completion(prompt, tokens) | {"id_slot": slot})
        return lane

    async def _stream(self, lane: _Lane, body: Mapping[str, Any]) -> None:
        with lane.scope:
            await stream_chat(
                self._engine.url,
                body,
                path="/completion",
                into=lane.result,
                on_progress=self._progressed,
                timeout_s=_LANE_BOUND_S,
            )
        self._progressed(lane.result)

    async def _alone(self, slot: int, prompt: Sequence[int], tokens: int) -> TurnResult:
        body = completion(prompt, tokens) | {"id_slot": slot}
        url = self._engine.url
        return self._checked(await stream_chat(url, body, path="/completion", timeout_s=_LANE_BOUND_S))

    def _progressed(self, result: TurnResult) -> None:
        self._news.set()

    async def _more(self, lane: _Lane, pieces: int) -> None:
        """Return once the lane has made so many more tokens. Raises BenchError."""
        wanted = lane.result.pieces + pieces
        with anyio.move_on_after(_TOKEN_BOUND_S):
            while lane.result.pieces < wanted:
                if lane.result.error is not None or lane.result.ended is not None:
                    break
                self._news = anyio.Event()
                await self._news.wait()
            else:
                return
        raise BenchError(f"a stream of the calibration stopped: {lane.result.error or 'no more tokens'}")

    def _endless(self, prompt_tokens: int) -> int:
        """As many tokens as a slot has room for: the stream is stopped long before."""
        return max(1, min(_ENDLESS_TOKENS, self._engine.slot_context - prompt_tokens - 8))

    @staticmethod
    def _checked(result: TurnResult) -> TurnResult:
        # A token may be without text, of which `times` then says nothing, but not of its end.
        if result.error is not None or result.finish_reason is None:
            raise BenchError(f"the engine did not generate: {result.error or 'the reply has no end'}")
        return result

    # Samples ---------------------------------------------------------------------------------------

    def _parked(self, running: Sequence[int]) -> int:
        """KV of the slots that do not run."""
        return sum(len(held) for slot, held in self._held.items() if slot not in running)

    def _add(
        self,
        what: str,
        step_s: float,
        *,
        lanes: int,
        running: float,
        parked: float,
        prefill: float = 0.0,
        steps: int,
        weight: float = 1.0,
        groups: int = 1,
    ) -> None:
        self._steps.append(StepSample(what, step_s, lanes, running, parked, prefill, steps, weight, groups))


def completion(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """llama.cpp's own request for exactly so many tokens after this prompt."""
    return {
        "prompt": list(prompt),
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
        "return_progress": True,
        "stream": True,
    }


def phases(number: int) -> Iterator[float]:
    """Moments of a step, evenly spread over it and in an order that is not ascending."""
    stride = next(stride for stride in count(max(1, round(number * 0.618))) if _coprime(stride, number))
    return ((at * stride % number + 0.5) / number for at in range(number))


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _prompt_s(result: TurnResult) -> float:
    """The engine's own time for a prompt, else what the client saw."""
    timings = result.timings or {}
    if timings.get("prompt_ms"):
        return float(timings["prompt_ms"]) / 1e3
    if result.first_token is None or result.started is None:
        raise BenchError("the engine does not tell how long it took for a prompt")
    return result.first_token - result.started


async def measure_engine(engine: Engine, effort: Effort, advance: Advance) -> Measurements:
    """All parts on an engine that nobody else uses. Raises BenchError."""
    async with json_client(engine.url) as api:
        for slot in await ask(api, "GET", "/slots"):
            if slot.get("is_processing"):
                raise BenchError("the engine is at work: stop the service and whatever else uses it first")
        words = await Words.of(api, effort.seed)
        return await Calibrator(engine, effort, api, words).run(advance)


async def measure_step(engine: Engine, effort: Effort) -> StepSample:
    """One part only: all lanes decode short contexts. Raises BenchError."""
    async with json_client(engine.url) as api:
        words = await Words.of(api, effort.seed)
        calibrator = Calibrator(engine, effort, api, words)
        await calibrator.idle()
        await calibrator.decode(range(engine.lanes), effort.short_tokens)
        return calibrator.measurements.steps[0]
