"""The turns that synthetic agents ask for: seeded, endless, the same sequence whenever it is replayed.

The turn mixture of the reference measurements has a mean of 354 generated tokens and a heavy tail up to a
couple of thousand; its exact shape is not published. Here a length is lognormal, clipped to [8, 2200] and
rounded, with the spread sigma = 0.9 and the location solved so that the mean *after* clipping is 354:

| mean | median | p90 | p99 | max | share at max |
|---|---|---|---|---|---|
| 354 | 240 | 761 | 1949 | 2200 | 0.7% |

At 39 tokens/s these are turns of 6 s (median), 20 s (p90), 50 s (p99) and 56 s. Another mean scales the whole
distribution, limits included, so its shape stays.

Clients are closed loops: each asks, waits for the end of the reply, thinks, and asks again. What client 3
asks in its 17th turn follows from the seed alone, whatever the other clients do and however fast the server
is, so that each column of a bench replays the same turns.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

REFERENCE_MEAN_TOKENS = 354.0
REFERENCE_MIN_TOKENS = 8
REFERENCE_MAX_TOKENS = 2200
REFERENCE_SIGMA = 0.9

_NORMAL = NormalDist()
_SYSTEM = "Code."


@dataclass(frozen=True)
class Lengths:
    """How many tokens a turn generates: lognormal with spread `sigma`, clipped to [`low`, `high`].

    `mean` is that of the clipped distribution. With `sigma` 0 each turn has the mean, rounded. Raises
    ValueError unless 1 <= low < mean < high, or low <= mean <= high with `sigma` 0.
    """

    mean: float = REFERENCE_MEAN_TOKENS
    sigma: float = REFERENCE_SIGMA
    low: int = REFERENCE_MIN_TOKENS
    high: int = REFERENCE_MAX_TOKENS

    def __post_init__(self) -> None:
        inside = self.low < self.mean < self.high if self.sigma else self.low <= self.mean <= self.high
        if self.low < 1 or self.sigma < 0 or not inside:
            raise ValueError(f"no such lengths: {self}")

    @classmethod
    def heavy(cls, mean: float = REFERENCE_MEAN_TOKENS) -> "Lengths":
        """The reference mixture, scaled to another mean."""
        scale = mean / REFERENCE_MEAN_TOKENS
        low = min(REFERENCE_MIN_TOKENS, max(1, round(REFERENCE_MIN_TOKENS * scale)))
        if mean <= low:
            return cls.fixed(max(1.0, mean))
        return cls(mean, REFERENCE_SIGMA, low, max(round(REFERENCE_MAX_TOKENS * scale), math.ceil(mean) + 1))

    @classmethod
    def fixed(cls, tokens: float) -> "Lengths":
        """Turns of one length."""
        return cls(tokens, 0.0, 1, max(1, math.ceil(tokens)))

    @cached_property
    def location(self) -> float:
        """The mean of the logarithm before clipping, by bisection: the clipped mean grows with it."""
        if not self.sigma:
            return math.log(self.mean)
        below, above = math.log(self.low) - 8 * self.sigma, math.log(self.high) + 8 * self.sigma
        for _ in range(80):
            middle = (below + above) / 2
            if self._clipped_mean(middle) < self.mean:
                below = middle
            else:
                above = middle
        return (below + above) / 2

    def _clipped_mean(self, location: float) -> float:
        """E[min(max(X, low), high)] of a lognormal X: mass at both limits, and the partial mean between."""
        to_low = (math.log(self.low) - location) / self.sigma
        to_high = (math.log(self.high) - location) / self.sigma
        between = _NORMAL.cdf(to_high - self.sigma) - _NORMAL.cdf(to_low - self.sigma)
        return (
            self.low * _NORMAL.cdf(to_low)
            + self.high * (1 - _NORMAL.cdf(to_high))
            + math.exp(location + self.sigma**2 / 2) * between
        )

    def quantile(self, share: float) -> int:
        """The length that this share of turns does not exceed, 0 < share < 1."""
        return self._clip(self.location + self.sigma * _NORMAL.inv_cdf(share))

    def draw(self, rng: random.Random) -> int:
        """One turn's length."""
        return self._clip(rng.normalvariate(self.location, self.sigma))

    def _clip(self, logarithm: float) -> int:
        return min(self.high, max(self.low, round(math.exp(logarithm))))


@dataclass(frozen=True)
class Workload:
    """What each client of one agent does, over and over.

    `think_s` is the mean of an exponentially distributed pause after each reply; 0 asks again at once.
    `prompt` begins every turn's prompt; what follows makes the turn distinct.
    """

    lengths: Lengths = Lengths()
    think_s: float = 0.0
    prompt: str = "Review:"


@dataclass(frozen=True)
class TurnPlan:
    """One turn to ask for, and how long to think after its reply."""

    prompt: str
    max_tokens: int
    think_s: float = 0.0


def client_turns(workload: Workload, seed: int, client: int | str) -> Iterator[TurnPlan]:
    """The endless sequence of one client's turns; the same for the same arguments, on every platform."""
    # A text seed is hashed the same everywhere, and never makes (1, 11) and (11, 1) the same stream.
    rng = random.Random(f"turns/{seed}/{client}")
    turn = 0
    while True:
        tokens = workload.lengths.draw(rng)
        think_s = rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0
        yield TurnPlan(f"{workload.prompt} {client}.{turn}", tokens, think_s)
        turn += 1


def gaps(mean_s: float, seed: int, name: str) -> Iterator[float]:
    """Endless exponentially distributed gaps in seconds: with them, arrivals are at random times."""
    rng = random.Random(f"gaps/{seed}/{name}")
    while True:
        yield rng.expovariate(1 / mean_s)


def filler(tokens: int, name: str) -> str:
    """A text of about `tokens` tokens of code-like words, distinct from its first word on for each name.

    Common English words with their blank are one token for byte-pair tokenisers, SmolLM2's included.
    """
    rng = random.Random(f"filler/{name}")
    return name + "".join(f" {rng.choice(_WORDS)}" for _ in range(tokens))


def chat_body(plan: TurnPlan, *, exact_length: bool = False, system: str = _SYSTEM) -> dict[str, Any]:
    """The streaming chat request for a turn, sampled greedily, with usage counts at its end.

    `exact_length` asks llama.cpp to generate past the end-of-text token, so that the turn has the planned
    length whatever the model thinks. The short system message replaces the template's own longer one.
    """
    body: dict[str, Any] = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": plan.prompt}],
        "max_tokens": plan.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if exact_length:
        body["ignore_eos"] = True
    return body


_WORDS = (
    *("return", "value", "test", "list", "file", "name", "data", "code", "line", "type", "class", "function"),
    *("call", "error", "result", "index", "loop", "string", "number", "key", "path", "user", "time", "write"),
    *("read", "open", "close", "check", "set", "get", "add", "remove", "update", "start", "stop"),
)
