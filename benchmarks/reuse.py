"""How much of its prompt an agent's next turn finds in KV, and what that is worth.

Six agents, each in a conversation as a coding agent has it: a system prompt that all of them share, a part of
their own, and with every turn the last reply and a new message. The turns come one at a time, in a seeded
order that is the same for every column, and what is put into the next prompt as the reply is a text that was
made beforehand, not what the model said: so every column gets the same bytes.

| column | what answers |
|---|---|
| `stock` | the engine alone as `llama-server` runs it: its own choice of slot, idle KV in host memory |
| `bare` | the same without the cache in host memory (`--cache-ram 0`) |
| `service` | the service with an engine of its own |

With more slots than agents everything fits. With fewer, some agent's KV has to go each time.
"""

import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agents.client import TurnResult, stream_chat
from agents.workload import filler
from benchmarks.harness import BenchError, EngineShape, real_engine, run_async, service
from benchmarks.report import Advance, Report, Summary, figure, progress_bar, ratio

COLUMNS = ("stock", "bare", "service")
LABELS = {"stock": "llama-server", "bare": "without its cache", "service": "service"}
STOCK_CACHE_MIB = 8192
"""llama-server's own default for `--cache-ram`."""
_MESSAGE_TOKENS = 8


@dataclass(frozen=True)
class ReuseSettings:
    """The conversations and the engines. Tokens are about: those of the bundled model."""

    slots: tuple[int, ...] = (8, 4)
    columns: tuple[str, ...] = COLUMNS
    agents: int = 6
    turns: int = 10
    """Of each agent."""
    system_tokens: int = 400
    agent_tokens: int = 150
    message_tokens: int = 120
    reply_tokens: int = 24
    decode_slots: int = 2
    batch_tokens: int = 64
    threads: int | None = 2
    seed: int = 1

    def quick(self) -> "ReuseSettings":
        """Short prompts, and only the case that is hard: fewer slots than agents."""
        return replace(
            self, slots=(4,), turns=3, system_tokens=120, agent_tokens=60, message_tokens=50, reply_tokens=6
        )

    def shape(self, slots: int) -> EngineShape:
        """The engine's numbers with so many slots."""
        turn = self.message_tokens + self.reply_tokens + 3 * _MESSAGE_TOKENS
        return EngineShape(
            decode_slots=min(self.decode_slots, slots),
            engine_slots=slots,
            slot_context=self.system_tokens + self.agent_tokens + self.turns * turn + 256,
            batch_tokens=self.batch_tokens,
            threads=self.threads,
        )


@dataclass
class Column:
    """What one server did with all turns. Tokens and seconds."""

    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    agents: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, agent: int, result: TurnResult) -> None:
        """Count one turn. By the service's `usage`, or the engine's `timings` where there are any."""
        prompt, cached = result.prompt_tokens, result.cached_tokens
        if result.timings is not None:
            cached = int(result.timings["cache_n"])
            prompt = cached + int(result.timings["prompt_n"])
        if result.error is not None:
            self.errors.append(result.error)
        elif prompt is None or cached is None or result.ttft_s is None:
            self.errors.append("the server did not tell how much of the prompt it had")
        else:
            self.agents.append(agent)
            self.prompt_tokens.append(prompt)
            self.cached_tokens.append(cached)
            self.first_token_s.append(result.ttft_s)

    @property
    def share(self) -> float:
        """The part of all prompt tokens that was found in KV."""
        return ratio(sum(self.cached_tokens), sum(self.prompt_tokens))

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "prompt_tokens": sum(self.prompt_tokens),
            "cached_tokens": sum(self.cached_tokens),
            "cached_share": self.share,
            "first_token_total_s": sum(self.first_token_s),
            "first_token_s": Summary.of(self.first_token_s),
            "errors": self.errors,
            "samples": {
                "agent": self.agents,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "first_token_s": self.first_token_s,
            },
        }


def run(
    settings: ReuseSettings, *, json_path: Path | None = None, console: Console | None = None
) -> dict[tuple[int, str], Column]:
    """Measure, print the table, write the JSON. Raises BenchError, ManagedEngineError, OSError."""
    turns = len(settings.slots) * len(settings.columns) * settings.agents * settings.turns
    with progress_bar(turns, "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: ReuseSettings, advance: Advance) -> dict[tuple[int, str], Column]:
    """Every column's figures for every number of slots."""
    found: dict[tuple[int, str], Column] = {}
    done = 0
    for slots in settings.slots:
        for name in settings.columns:
            column = found[slots, name] = Column()
            async with _server(name, settings.shape(slots), settings) as url:
                for agent, body in turns(settings):
                    advance(done, f"{LABELS[name]}, {slots} slots")
                    headers = {"X-Swarm-Agent": agent_name(agent)} if name == "service" else {}
                    column.add(agent, await stream_chat(url, body, headers))
                    done += 1
    check_same_prompts(found)
    return found


@asynccontextmanager
async def _server(name: str, shape: EngineShape, settings: ReuseSettings) -> AsyncIterator[str]:
    if name == "service":
        async with service(service_config(shape, settings.agents)) as url:
            yield url
    else:
        cache_mib = STOCK_CACHE_MIB if name == "stock" else 0
        async with real_engine(shape, stock_cache_mib=cache_mib) as engine:
            yield engine.url


def service_config(shape: EngineShape, agents: int) -> dict[str, Any]:
    """The service with its own engine and agents of one class."""
    limits = {"priority": "normal", "max_turn_tokens": shape.slot_context}
    return {
        "backends": [{"name": "bench", "kind": "llama.cpp", "managed": shape.managed()}],
        "agents": {agent_name(number): limits for number in range(agents)},
    }


def agent_name(number: int) -> str:
    """What the service knows an agent by."""
    return f"agent-{number}"


def order(settings: ReuseSettings) -> Iterator[int]:
    """Which agent is next: rounds of all agents, each in another seeded order."""
    rng = random.Random(f"reuse/{settings.seed}")
    for _ in range(settings.turns):
        agents = list(range(settings.agents))
        rng.shuffle(agents)
        yield from agents


def turns(settings: ReuseSettings) -> Iterator[tuple[int, dict[str, Any]]]:
    """All turns in their order: the agent and its request."""
    seed = settings.seed
    system = filler(settings.system_tokens, f"Rules {seed}:")
    messages: dict[int, list[dict[str, str]]] = {}
    for agent in order(settings):
        said = messages.setdefault(agent, [{"role": "system", "content": system}])
        number = len(said) // 2
        if number == 0:
            message = filler(settings.agent_tokens + settings.message_tokens, f"Task {seed}.{agent}:")
        else:
            message = filler(settings.message_tokens, f"Next {seed}.{agent}.{number}:")
        said.append({"role": "user", "content": message})
        yield (
            agent,
            {
                "messages": list(said),
                "max_tokens": settings.reply_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        reply = filler(settings.reply_tokens, f"Done {seed}.{agent}.{number}:")
        said.append({"role": "assistant", "content": reply})


def check_same_prompts(found: Mapping[tuple[int, str], Column]) -> None:
    """Raises BenchError: prompts of different lengths cannot be compared."""
    complete = [column.prompt_tokens for column in found.values() if not column.errors]
    if any(prompts != complete[0] for prompts in complete):
        raise BenchError("the columns counted different numbers of prompt tokens for the same prompts")


def report(settings: ReuseSettings, found: Mapping[tuple[int, str], Column]) -> Report:
    """The table: a row for each number of slots and server."""
    rows = []
    for (slots, name), column in found.items():
        rows.append(
            [
                f"{slots} slots, {LABELS[name]}",
                figure(sum(column.prompt_tokens), 0),
                figure(sum(column.cached_tokens), 0),
                f"{column.share:.1%}",
                f"{sum(column.first_token_s):.1f} s",
                str(len(column.errors)),
            ]
        )
    return Report(
        bench="reuse",
        title=f"{settings.agents} agents, {settings.turns} turns each, one at a time",
        columns=["", "prompt tokens", "found in KV", "part", "all times to first token", "errors"],
        rows=rows,
        notes=list(_notes(settings, found)),
        parameters={"settings": settings, "stock_cache_mib": STOCK_CACHE_MIB},
        data={
            str(slots): {name: found[slots, name].data() for name in settings.columns}
            for slots in settings.slots
        },
    )


def _notes(settings: ReuseSettings, found: Mapping[tuple[int, str], Column]) -> Iterator[str]:
    for slots in settings.slots:
        if (slots, "service") not in found:
            continue
        served = sum(found[slots, "service"].cached_tokens)
        for name in ("stock", "bare"):
            if (slots, name) in found:
                part = ratio(served, sum(found[slots, name].cached_tokens))
                yield (
                    f"{slots} slots: the service finds {part:.1%} of what {LABELS[name]!r} finds "
                    "(goal: at least 100%)"
                )
    for (slots, name), column in found.items():
        if column.errors:
            yield f"{slots} slots, {LABELS[name]}: {len(column.errors)} errors, the first: {column.errors[0]}"
