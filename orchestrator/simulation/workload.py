"""Who asks for what, when: seeded, the same for the same seed, and apart from how fast the engine is.

A workload is a set of sources. An *open* source says when its next turn arrives, whatever becomes of the
last one (people at random, a recorded trace); a *closed* one asks again only after its last turn has ended
(an agent that works alone). Both answer one question: what comes after this moment?

Lengths are drawn in the order of a source's own turns from its own generator, so what client 3 asks in its
17th turn does not depend on the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agents.workload import Lengths, client_turns
from agents.workload import Workload as AgentWorkload


@dataclass(frozen=True, slots=True)
class Arrival:
    """One turn that is asked for.

    `shared_tokens`: how many of the leading prompt tokens the agent's previous turn's KV begins with.
    """

    at_s: float
    agent: str
    priority_class: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"an arrival at {self.at_s} s; it must be 0 or more")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"a turn of {self.prompt_tokens} prompt and {self.output_tokens} output tokens; "
                "each must be at least 1"
            )
        if not 0 <= self.shared_tokens <= self.prompt_tokens:
            raise ValueError(f"{self.shared_tokens} shared tokens of a prompt of {self.prompt_tokens}")


class Source(Protocol):
    """One stream of turns. `closed`: the next is asked for when the last has ended, else when it arrived."""

    closed: bool

    def next(self, now: float) -> Arrival | None:
        """The turn that follows, arriving at `now` or later; None when there is none."""


class Workload(Protocol):
    """What makes a run's sources, fresh ones for each run."""

    def sources(self, seed: int) -> Sequence[Source]:
        """All sources of a run with this seed."""


class Sizes(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int:
        """One of them, at least 1."""


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, rng: random.Random) -> int:
        """The same, without use of `rng`."""
        return self.tokens


@dataclass(frozen=True)
class Mixture:
    """Now from one distribution, now from another: `parts` are (share, sizes), the shares adding up to 1."""

    parts: tuple[tuple[float, Sizes], ...]

    def __post_init__(self) -> None:
        if not self.parts or abs(sum(share for share, _ in self.parts) - 1) > 1e-9:
            raise ValueError("the shares of a mixture do not add up to 1")

    def draw(self, rng: random.Random) -> int:
        """One token count."""
        point = rng.random()
        for share, sizes in self.parts[:-1]:
            if point < share:
                return sizes.draw(rng)
            point -= share
        return self.parts[-1][1].draw(rng)


#: The turn mixture of the reference figures: mean 354, ten in eleven short, one of a couple of thousand
#: tokens. docs/simulator.md says how it was found.
REFERENCE = Mixture(((0.91, Lengths(171.4, 0.7, 8, 1500)), (0.09, Lengths(2200, 0.1, 1500, 3000))))
_RESULTS = Lengths(600, 1.0, 20, 6000)


@dataclass(frozen=True)
class Several:
    """Workloads side by side."""

    parts: tuple[Workload, ...]

    def sources(self, seed: int) -> Sequence[Source]:
        """The sources of all parts."""
        return [source for part in self.parts for source in part.sources(seed)]


@dataclass(frozen=True)
class Recorded:
    """Arrivals that are known beforehand, ordered by time: a trace. The seed changes nothing."""

    arrivals: Iterable[Arrival]

    def sources(self, seed: int) -> Sequence[Source]:
        """One open source."""
        return [_Open(iter(self.arrivals))]


@dataclass(frozen=True)
class ClosedLoop:
    """`clients` of one agent, each of which asks, waits for the end of its turn, thinks, and asks again.

    `think_s` is the mean of an exponential pause. `start_s`: each begins at a random moment within so long.
    """

    agent: str
    priority_class: str
    clients: int = 1
    output: Sizes = REFERENCE
    prompt: Sizes = Fixed(32)
    think_s: float = 0.0
    start_s: float = 0.0

    def sources(self, seed: int) -> Sequence[Source]:
        """One closed source a client."""
        return [_Client(self, _rng(seed, self.agent, client)) for client in range(self.clients)]


@dataclass(frozen=True)
class Poisson:
    """Turns of one agent at random moments, `per_s` a second on average."""

    agent: str
    priority_class: str
    per_s: float
    output: Sizes = REFERENCE
    prompt: Sizes = Fixed(32)

    def sources(self, seed: int) -> Sequence[Source]:
        """One open source."""
        return [_Open(self._arrivals(_rng(seed, self.agent, "poisson")))]

    def _arrivals(self, rng: random.Random) -> Iterator[Arrival]:
        at_s = 0.0
        while True:
            at_s += rng.expovariate(self.per_s)
            yield Arrival(at_s, self.agent, self.priority_class, self.prompt.draw(rng), self.output.draw(rng))


@dataclass(frozen=True)
class Bursty:
    """Poisson arrivals at `per_s` while on, none while off; both spans are exponential with these means."""

    agent: str
    priority_class: str
    per_s: float
    on_s: float
    off_s: float
    output: Sizes = REFERENCE
    prompt: Sizes = Fixed(32)

    def sources(self, seed: int) -> Sequence[Source]:
        """One open source."""
        return [_Open(self._arrivals(_rng(seed, self.agent, "bursty")))]

    def _arrivals(self, rng: random.Random) -> Iterator[Arrival]:
        began = 0.0
        while True:
            began += rng.expovariate(1 / self.off_s)
            ends = began + rng.expovariate(1 / self.on_s)
            at_s = began
            while (at_s := at_s + rng.expovariate(self.per_s)) < ends:
                yield Arrival(
                    at_s, self.agent, self.priority_class, self.prompt.draw(rng), self.output.draw(rng)
                )
            began = ends


@dataclass(frozen=True)
class Sessions:
    """Coding agents that work by tool calls, each upon a context that grows.

    A task is a question and then turns that each end in a tool call, `steps` of them on average: the turn's
    reply and the tool's result of `result` tokens, which takes `tool_s` on average, are what the next prompt
    adds. Between tasks an agent rests for `rest_s` on average. A context above `context_tokens` is given up,
    all but the first `system_tokens`. Each of the `agents` is an agent of its own, `NAME-1`, `NAME-2`, ...
    """

    name: str
    priority_class: str
    agents: int = 1
    system_tokens: int = 2000
    question: Sizes = Fixed(200)
    result: Sizes = _RESULTS
    output: Sizes = REFERENCE
    steps: float = 8.0
    tool_s: float = 2.0
    rest_s: float = 30.0
    context_tokens: int = 16_000

    def sources(self, seed: int) -> Sequence[Source]:
        """One closed source an agent."""
        return [
            _Session(self, f"{self.name}-{number}", _rng(seed, self.name, number))
            for number in range(1, self.agents + 1)
        ]


@dataclass(frozen=True)
class Demo:
    """What `swarm demo` lets one agent do: the same turns as its clients ask for, by the same seed.

    `prompt_tokens`: how long their prompts are taken to be. `most_tokens`: the agent's limit for a turn.
    """

    agent: str
    priority_class: str
    clients: int
    turns: AgentWorkload
    prompt_tokens: int
    most_tokens: int

    def sources(self, seed: int) -> Sequence[Source]:
        """One closed source a client."""
        return [_DemoClient(self, seed, client) for client in range(self.clients)]


def _rng(seed: int, agent: str, part: int | str) -> random.Random:
    # A text seed is hashed the same on every platform.
    return random.Random(f"simulation/{seed}/{agent}/{part}")


class _Open:
    closed = False

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals

    def next(self, now: float) -> Arrival | None:
        return next(self._arrivals, None)


class _Client:
    closed = True

    def __init__(self, plan: ClosedLoop, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng
        self._first = True

    def next(self, now: float) -> Arrival | None:
        plan, rng = self._plan, self._rng
        if self._first:
            self._first = False
            pause_s = rng.random() * plan.start_s
        else:
            pause_s = rng.expovariate(1 / plan.think_s) if plan.think_s else 0.0
        return Arrival(
            now + pause_s, plan.agent, plan.priority_class, plan.prompt.draw(rng), plan.output.draw(rng)
        )


class _DemoClient:
    closed = True

    def __init__(self, plan: Demo, seed: int, client: int) -> None:
        self._plan = plan
        self._turns = client_turns(plan.turns, seed, f"{plan.agent}-{client}")
        self._pause_s = 0.0

    def next(self, now: float) -> Arrival | None:
        turn = next(self._turns)
        at_s, self._pause_s = now + self._pause_s, turn.think_s
        plan = self._plan
        return Arrival(
            at_s,
            plan.agent,
            plan.priority_class,
            plan.prompt_tokens,
            min(turn.max_tokens, plan.most_tokens),
        )


@dataclass
class _Session:
    plan: Sessions
    agent: str
    rng: random.Random
    closed: bool = field(default=True, init=False)
    _context: int = field(default=0, init=False)
    """What the agent's last turn left: its prompt and its reply."""

    def next(self, now: float) -> Arrival | None:
        plan, rng = self.plan, self.rng
        goes_on = self._context > 0 and rng.random() * plan.steps >= 1
        pause_s = rng.expovariate(1 / mean_s) if (mean_s := plan.tool_s if goes_on else plan.rest_s) else 0.0
        added = (plan.result if goes_on else plan.question).draw(rng)
        output = plan.output.draw(rng)
        shared = self._context
        if not shared:
            prompt = plan.system_tokens + added
        elif shared + added + output > plan.context_tokens:
            shared = plan.system_tokens
            prompt = plan.system_tokens + added
        else:
            prompt = shared + added
        # The last token of a reply is never evaluated: its KV is not there.
        arrival = Arrival(now + pause_s, self.agent, plan.priority_class, prompt, output, max(0, shared - 1))
        self._context = prompt + output
        return arrival
