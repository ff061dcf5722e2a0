"""What came of a run: one row a turn, sums for classes and backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.simulation.sketch import Sketch


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn, when it is over. Times are seconds of the simulation's clock.

    `wait_s`: from the arrival until the first step with a token of it begins, its wait for a decode slot;
    `first_token_s`: from the arrival until its first token. `evaluated_again`: tokens that its resumes had to
    evaluate although an earlier segment had. `lost_tokens`: made in a step that was under way when it was
    stopped, and made again after it. A refused turn has neither backend nor waits.
    """

    number: int
    agent: str
    priority_class: str
    backend: str | None
    arrival_s: float
    wait_s: float | None
    first_token_s: float | None
    end_s: float
    prompt_tokens: int
    output_tokens: int
    generated_tokens: int
    cached_tokens: int
    evaluated_again: int
    lost_tokens: int
    preemptions: int
    resident_resumes: int
    swapped_resumes: int
    dropped_resumes: int
    refused: bool = False


@dataclass(slots=True)
class ClassFigures:
    """Turns of one class that arrived in the measured time; its sketches are in seconds."""

    wait: Sketch = field(default_factory=Sketch)
    first_token: Sketch = field(default_factory=Sketch)
    whole: Sketch = field(default_factory=Sketch)
    turns: int = 0
    refused: int = 0
    preemptions: int = 0
    evaluated_again: int = 0
    lost_tokens: int = 0
    resumes: dict[str, int] = field(default_factory=lambda: {"resident": 0, "swapped": 0, "dropped": 0})
    measured_tokens: int = 0
    """Tokens generated within the measured time, by whichever turns."""

    def add(self, row: TurnRow) -> None:
        """Count a turn that is over."""
        self.turns += 1
        if row.refused:
            self.refused += 1
            return
        if row.wait_s is not None:
            self.wait.add(row.wait_s)
        if row.first_token_s is not None:
            self.first_token.add(row.first_token_s)
        self.whole.add(row.end_s - row.arrival_s)
        self.preemptions += row.preemptions
        self.evaluated_again += row.evaluated_again
        self.lost_tokens += row.lost_tokens
        self.resumes["resident"] += row.resident_resumes
        self.resumes["swapped"] += row.swapped_resumes
        self.resumes["dropped"] += row.dropped_resumes


@dataclass(slots=True)
class BackendFigures:
    """What one engine did from the beginning until the last turn's end. Seconds; tokens."""

    steps: int = 0
    busy_s: float = 0.0
    """In steps, saves and restores and flushes; the rest it stood idle."""
    stalled_s: float = 0.0
    """In saves and restores."""
    flushed_s: float = 0.0
    lane_s: float = 0.0
    """Decoding lanes times seconds of their steps."""
    generated: int = 0
    evaluated: int = 0
    """Prompt tokens."""
    cached: int = 0
    """Prompt tokens found in the slot."""
    saves: int = 0
    restores: int = 0
    erases: int = 0
    swapped: int = 0
    dropped: int = 0
    """Paused turns whose KV was given up."""
    stalls: int = 0
    """Saves and restores while a turn of the highest class decoded, as the scheduler counts them."""
    claims_lost: int = 0
    most_lanes: int = 0
    most_kv_tokens: int = 0
    most_batch_tokens: int = 0
    most_swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run.

    `measured_s` is the time in which turns had to arrive to be counted, and tokens to be generated; `end_s`
    when the last turn was over. `events`: how many the schedulers handled.
    """

    seed: int
    measured_s: float
    end_s: float
    arrived: int
    ended: int
    refused: int
    events: int
    classes: dict[str, ClassFigures]
    backends: dict[str, BackendFigures]

    def tokens_per_s(self, *classes: str) -> float:
        """Generated in the measured time, by turns of these classes, all of them without."""
        chosen = classes or tuple(self.classes)
        tokens = sum(self.classes[name].measured_tokens for name in chosen)
        return tokens / self.measured_s if self.measured_s > 0 else 0.0


RowSink = Callable[[TurnRow], None]
