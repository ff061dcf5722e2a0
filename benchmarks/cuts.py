"""Turns of every kind, cut anywhere on the real engine, and what is wrong with their replies: nothing may be.

Two engines one after the other, both with the small model: one with a chat template that knows tools, one
whose template also makes the model think first. On each the whole service. Every turn runs once
uninterrupted, then again with cuts at random places, paused and resumed through the admin API.

A place is a number of tokens that the *engine* has decoded since it took the segment up, so cuts fall into
what the client cannot see as well: a call that is held back, half a character, the start of a stop string.
0 is the prefill. The first cut of a turn is anywhere in it, evenly; the next ones follow closely, as the
same cut again and again is what a resume from text is most likely to get wrong.
"""

import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
from rich.console import Console

from backends.managed import EngineSettings, ManagedEngine
from benchmarks.cuts_turns import KINDS, Kind, Reply, chat_template, violations
from benchmarks.harness import MODEL, BenchError, ask, empty_slots, json_client, run_async, service
from benchmarks.report import Advance, Report, Summary, figure, progress_bar
from orchestrator.turns import FINAL_STATES

_STOCK_ENGINE = Path(__file__).with_name("stock_engine.py")
_CLOSE_BY = 24
_STOP_CHARS = 12
_STEP_BOUND_S = 120.0
_POLL_S = 0.01
_SLOT_CONTEXT = 2048


@dataclass(frozen=True)
class CutsSettings:
    """`cuts` in all, over the kinds in turn, at most `cuts_a_turn` of them in one turn."""

    cuts: int = 300
    cuts_a_turn: int = 5
    seed: int = 1
    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)

    def quick(self) -> "CutsSettings":
        """A few of each kind."""
        return replace(self, cuts=4 * len(self.kinds))


@dataclass
class Found:
    """One kind's outcome. `reevaluated`: tokens, of each resume; `same`: turns equal to the uninterrupted."""

    turns: int = 0
    same: int = 0
    cuts: int = 0
    tokens: int = 0
    reevaluated: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def run(
    settings: CutsSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[str, Found]:
    """Cut, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    with progress_bar(settings.cuts, "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: CutsSettings, advance: Advance) -> dict[str, Found]:
    """The outcome by kind."""
    kinds = [kind for kind in KINDS if kind.name in settings.kinds]
    found = {kind.name: Found() for kind in kinds}
    chance = random.Random(settings.seed)
    for thinking in (False, True):
        here = [kind for kind in kinds if kind.thinking is thinking]
        if not here:
            continue
        async with (
            template_engine(thinking=thinking) as engine,
            service(config(engine)) as url,
            Cutter(url, engine.url) as cutter,
        ):
            for kind in here:
                outcome, at = found[kind.name], kinds.index(kind)
                share = settings.cuts * (at + 1) // len(kinds) - settings.cuts * at // len(kinds)
                while outcome.cuts < share:
                    await one_turn(
                        cutter, kind, outcome, chance, min(settings.cuts_a_turn, share - outcome.cuts)
                    )
                    advance(sum(other.cuts for other in found.values()), kind.name)
    return found


@asynccontextmanager
async def template_engine(*, thinking: bool) -> AsyncIterator[ManagedEngine]:
    """The real engine with one of the bench's chat templates. Raises ManagedEngineError."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name:
        folder = Path(name)
        template = folder / "template.jinja"
        template.write_text(chat_template(thinking=thinking))
        settings = EngineSettings(
            model=MODEL,
            decode_slots=2,
            engine_slots=3,
            context=3 * _SLOT_CONTEXT,
            batch_tokens=64,
            threads=2,
            command=(sys.executable, "-P", str(_STOCK_ENGINE), "--chat-template-file", str(template)),
        )
        async with ManagedEngine(settings, folder, name="bench") as engine:
            yield engine


def config(engine: ManagedEngine) -> dict[str, Any]:
    """The service's configuration in front of that engine."""
    backend = {"name": "bench", "url": engine.url, "decode_slots": 2, "kv_layout": "split"}
    return {
        "server": {"header_wait_s": 0},  # replies begin at once: their heads name the turn
        "backends": [{**backend, "batch_tokens": 64}],
        "agents": {"bench": {"priority": "normal", "max_turn_tokens": _SLOT_CONTEXT}},
        "default_agent": "bench",
    }


async def one_turn(cutter: "Cutter", kind: Kind, found: Found, chance: random.Random, most: int) -> None:
    """One turn of a kind, uninterrupted and then cut at most so often, added to what was found."""
    body = kind.body(found.turns)
    # Both find the same KV of the prompt: evaluated in other batches it would be rounded otherwise.
    await cutter.stream({**body, "max_tokens": 1})
    whole = await cutter.stream(body)
    if kind.stop:
        middle = len(whole.content) // 2
        body["stop"] = [whole.content[middle : middle + _STOP_CHARS], "never said"]
        whole = await cutter.stream(body)
    wrong = violations(kind, whole, whole, body)
    if kind.stop and whole.finish_reasons != ["stop"]:
        wrong.append("it does not end at its stop string")
    if wrong:
        raise BenchError(f"{kind.name}, uninterrupted: {wrong[0]}")
    first = 0 if kind.fresh else chance.randrange(whole.tokens)
    if kind.fresh:
        await cutter.empty_slots()
    lengths = [first, *(chance.randrange(_CLOSE_BY) for _ in range(most - 1))]
    cut = await cutter.stream(body, lengths)
    timeline = await cutter.timeline(cut.turn)
    found.turns += 1
    found.same += cut.said() == whole.said()
    found.tokens += cut.tokens
    found.cuts += sum(line["event"] == "paused" for line in timeline)
    found.reevaluated += [line["tokens_reevaluated"] for line in timeline if line["event"] == "resumed"]
    found.violations += [
        f"turn {found.turns}, cut after {lengths}: {what}" for what in violations(kind, cut, whole, body)
    ]


class Cutter:
    """A client of the service that also looks at its engine, and pauses turns where it wants."""

    def __init__(self, url: str, engine_url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=_STEP_BOUND_S)
        self._engine = json_client(engine_url)

    async def __aenter__(self) -> "Cutter":
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()
            await self._engine.aclose()

    async def stream(self, body: Mapping[str, Any], lengths: list[int] | None = None) -> Reply:
        """Run a greedy turn to its end; `lengths`: the tokens after which each of its segments is cut.

        Raises BenchError. The turn must be the only one on its engine.
        """
        reply = Reply()
        order = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        with anyio.fail_after(_STEP_BOUND_S):
            async with self._client.stream("POST", "/v1/chat/completions", json=order) as response:
                reply.turn = response.headers.get("x-swarm-turn", "")
                if response.status_code != 200:
                    reply.error = (await response.aread()).decode()
                    return reply
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._cut, reply.turn, lengths or [])
                    async for line in response.aiter_lines():
                        reply.take(line)
                    tasks.cancel_scope.cancel()
        return reply

    async def empty_slots(self) -> None:
        """Let the engine forget all prompts."""
        await empty_slots(self._engine)

    async def timeline(self, turn: str) -> list[dict[str, Any]]:
        """What happened to a turn."""
        return list((await ask(self._client, "GET", f"/swarm/turns/{turn}"))["timeline"])

    async def _cut(self, turn: str, lengths: list[int]) -> None:
        for length in lengths:
            await self._until_decoded(length)
            # It may end just now; then there is nothing to pause, or to resume.
            await self._client.post(f"/swarm/turns/{turn}/preempt")
            if not await self._until_paused(turn):
                return
            await self._client.post(f"/swarm/turns/{turn}/resume")

    async def _until_decoded(self, tokens: int) -> None:
        while True:
            for slot in await ask(self._engine, "GET", "/slots"):
                if slot["is_processing"] and slot["next_token"][0]["n_decoded"] >= tokens:
                    return
            await anyio.sleep(_POLL_S)

    async def _until_paused(self, turn: str) -> bool:
        while True:
            state = (await ask(self._client, "GET", f"/swarm/turns/{turn}"))["state"]
            if state == "paused" or state in FINAL_STATES:
                return bool(state == "paused")
            await anyio.sleep(_POLL_S)


def report(settings: CutsSettings, found: Mapping[str, Found]) -> Report:
    """The table and the JSON."""
    rows = [
        [
            name,
            str(kind.turns),
            str(kind.cuts),
            f"{kind.same} of {kind.turns}",
            figure(Summary.of(kind.reevaluated).p50, 0),
            figure(Summary.of(kind.reevaluated).max, 0),
            str(len(kind.violations)),
        ]
        for name, kind in found.items()
    ]
    wrong = [f"{name}: {what}" for name, kind in found.items() for what in kind.violations]
    cuts = sum(kind.cuts for kind in found.values())
    return Report(
        bench="cuts",
        title=f"{cuts} cuts at random places, {len(wrong)} violations",
        columns=(
            "turn",
            "turns",
            "cuts",
            "same as uninterrupted",
            "re-evaluated p50",
            "max",
            "violations",
        ),
        rows=rows,
        notes=[
            "re-evaluated: tokens that a resume evaluated though they had been before",
            *wrong[:20],
        ],
        parameters=asdict(settings),
        data={
            name: {**asdict(kind), "reevaluated_summary": Summary.of(kind.reevaluated)}
            for name, kind in found.items()
        },
    )
