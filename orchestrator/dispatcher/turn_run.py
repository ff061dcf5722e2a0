"""One turn in a dispatcher's hands: its generation, its output log, what its segments cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson

from backends.protocol import Generation, ReplySoFar
from orchestrator.broker import DELTA, END, ERROR, STATUS, TurnRecord, delta_entry, status_entry
from orchestrator.turns import Tier


@dataclass(slots=True)
class TurnRun:
    """A claimed turn until its end. It is the sink its generation writes to.

    `entries` is the whole output log as this process knows it, of which the first `flushed` are in
    Redis. Times are monotonic seconds: `commanded_at` is when its segment was decided, `asked_at` when the
    engine was asked, a restore before that being over. `tier`: where the segment's KV was, None for a first
    one; `evaluating`: the prompt tokens it had to evaluate; `resume_cost_s`: from command to token, over all
    resumes. `evaluated`: the most tokens of prompt and reply that were ever evaluated; only these can be
    evaluated again, the rest of a prompt that was cut is new. `held`: tokens that were generated and not
    forwarded when it was cut; those that the next prompt does not have are generated again. `parts`: pieces
    of the reply. `failures`: how often in a row the engine broke it off without `progress` in between.
    """

    record: TurnRecord
    channel: str
    on_output: Callable[[TurnRun], None]
    on_started: Callable[[TurnRun, int, int], None]
    on_step: Callable[[float], None]
    on_first_delta: Callable[[TurnRun], None]
    generation: Generation | None = None
    entries: list[bytes] = field(default_factory=list)
    flushed: int = 0
    settled: anyio.Event = field(default_factory=anyio.Event)
    books: anyio.Lock = field(default_factory=anyio.Lock)
    scope: anyio.CancelScope | None = None
    running: bool = False
    aborted: bool = False
    slot: int = -1
    tier: Tier | None = None
    commanded_at: float = 0.0
    asked_at: float = 0.0
    evaluating: int = 0
    evaluated: int = 0
    held: int = 0
    resume_cost_s: float = 0.0
    preempted_by: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    n_tokens: int = 0
    preemptions: int = 0
    reevaluated: int = 0
    parts: int = 0
    failures: int = 0
    progress_at_failure: int = -1
    last_delta: float = 0.0

    @property
    def id(self) -> str:
        return self.record.request.id

    @property
    def kv_tokens(self) -> int:
        """Tokens of its prompt and reply that its segment has evaluated, as far as known."""
        if self.last_delta or self.generation is None:
            return self.prompt_tokens + self.n_tokens
        return self.generation.evaluated_tokens

    @property
    def progress(self) -> int:
        """Grows with every piece of the reply, and when more of prompt and reply is evaluated than ever.

        Not when a prompt is evaluated up to the same place again.
        """
        return self.parts + self.evaluated

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine picked the segment up."""
        self.last_delta = 0.0
        self.evaluating = prompt_tokens - cached_tokens
        self.on_started(self, prompt_tokens, cached_tokens)

    def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
        """A piece of the reply."""
        now = time.monotonic()
        if not self.last_delta:
            self.on_first_delta(self)
        elif n_tokens == 1:
            self.on_step(now - self.last_delta)
        self.last_delta = now
        self.n_tokens += n_tokens
        self.parts += 1
        self.put(delta_entry(part, n_tokens, tokens))

    def status(self, status: str, **details: Any) -> None:
        """Tell the gateway what happens to the turn."""
        self.put(status_entry(status, **details))

    def put(self, entry: bytes) -> None:
        """Append one entry to the output log."""
        self.entries.append(entry)
        self.on_output(self)


@dataclass(frozen=True, slots=True)
class Replay:
    """What an output log tells about a turn that somebody else ran: its reply so far, or its end.

    `prompt_tokens` and `cached_tokens` are the first segment's, 0 when the engine never picked it up.
    """

    so_far: ReplySoFar
    prompt_tokens: int
    cached_tokens: int
    ended: list[Any] | None


def replay(log: list[bytes]) -> Replay:
    """Read an output log back."""
    parts: list[dict[str, Any]] = []
    tokens: list[int] = []
    n_tokens = 0
    known = True
    ended = None
    started: dict[str, Any] = {}
    for line in log:
        entry = orjson.loads(line)
        if entry[0] == DELTA:
            _, part, count, ids = entry
            parts.append(part)
            tokens += ids
            n_tokens += count
            known = known and len(ids) == count
        elif entry[0] == STATUS and entry[1] == "started":
            started = entry[2]
        elif entry[0] in (END, ERROR):
            ended = entry
    return Replay(
        ReplySoFar(parts, tokens if known else None, n_tokens),
        started.get("prompt_tokens", 0),
        started.get("cached_tokens", 0),
        ended,
    )
