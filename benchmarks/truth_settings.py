"""What the truth bench replays: its settings, its trace, and the service's configuration for both."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agents.workload import Lengths, gaps
from benchmarks.calibration import Effort
from benchmarks.harness import BenchError, EngineShape
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.trace import TraceError, read_trace
from orchestrator.simulation.workload import Arrival

FOREGROUND, BACKGROUND = "foreground", "background"
CALIBRATE_S = 120.0
DRAIN_BOUND_S = 300.0
_GAP_SPREAD = 0.6


@dataclass(frozen=True)
class TruthSettings:
    """What is replayed, and on what."""

    duration_s: float = 300.0
    """In which turns arrive; those under way at its end are waited for."""
    seed: int = 1
    repeat: int = 1
    """Real runs of the same trace."""
    load: float = 0.9
    """The part of all decode slots' time that the turns are to take, by the calibrated model."""
    mean_tokens: float = 118.0
    """Mean reply of a background turn: a third of the reference mixture's, in its shape."""
    prompt_tokens: tuple[int, int] = (8, 24)
    foreground_tokens: int = 8
    foreground_prompt_tokens: tuple[int, int] = (8, 24)
    foreground_gap_s: float = 1.5
    """Mean time between foreground turns, uniform within 60% of it to either side."""
    lead_in_s: float = 15.0
    """No foreground turn comes before: at the begin all background turns evaluate their prompts at once."""
    preemption: bool = True
    trace: Path | None = None
    """Replay this trace instead, for as long as it lasts; its classes are the service's own."""
    shape: EngineShape = field(default_factory=lambda: EngineShape(slot_context=1024))
    effort: Effort = field(default_factory=lambda: Effort(long_tokens=192))
    """How the engine is measured: with contexts as long as the trace's, since steps are not quite linear."""

    def quick(self) -> "TruthSettings":
        """About two minutes in all: shows that it works, with too few turns for a p99."""
        return replace(
            self,
            duration_s=60.0,
            mean_tokens=48.0,
            foreground_gap_s=1.2,
            lead_in_s=5.0,
            effort=self.effort.quick(),
        )

    @property
    def total_s(self) -> float:
        """About how long the run takes."""
        return CALIBRATE_S + self.repeat * self.duration_s * 1.1

    @property
    def lengths(self) -> Lengths:
        """Of the background's replies."""
        return Lengths.heavy(self.mean_tokens)


def config_of(
    settings: TruthSettings, backend: Mapping[str, Any], trace: Sequence[Arrival]
) -> dict[str, Any]:
    """The service's configuration for this engine and the trace's agents."""
    agents = {arrival.agent: arrival.priority_class for arrival in trace}
    return {
        "backends": [dict(backend)],
        "policy": {"preemption": settings.preemption, "turn_ttl_s": settings.duration_s + 2 * DRAIN_BOUND_S},
        "agents": {
            name: {"priority": of, "max_turn_tokens": settings.shape.slot_context}
            for name, of in sorted(agents.items())
        },
    }


# The trace ----------------------------------------------------------------------------------------


def make_trace(settings: TruthSettings, model: EngineModel) -> list[Arrival]:
    """Background turns that, with the foreground's, take the given part of what this engine can do."""
    per_s = background_per_s(settings, model)
    rng = random.Random(f"truth/{settings.seed}")
    lengths = settings.lengths

    def background(at_s: float) -> Arrival:
        prompt = rng.randint(*settings.prompt_tokens)
        return Arrival(round(at_s, 6), BACKGROUND, BACKGROUND, prompt, lengths.draw(rng))

    # As many as run on average are there at once, so that the first minute is not another load.
    first = round(settings.load * settings.shape.decode_slots)
    found = [background(0.05 * number) for number in range(first)]
    at_s = 0.0
    for gap_s in gaps(1 / per_s, settings.seed, "truth"):
        at_s += gap_s
        if at_s >= settings.duration_s:
            break
        found.append(background(at_s))
    at_s = settings.lead_in_s
    while True:
        at_s += settings.foreground_gap_s * rng.uniform(1 - _GAP_SPREAD, 1 + _GAP_SPREAD)
        if at_s >= settings.duration_s:
            break
        prompt = rng.randint(*settings.foreground_prompt_tokens)
        found.append(Arrival(round(at_s, 6), FOREGROUND, FOREGROUND, prompt, settings.foreground_tokens))
    return sorted(found, key=lambda arrival: (arrival.at_s, arrival.agent))


def background_per_s(settings: TruthSettings, model: EngineModel) -> float:
    """Background turns a second for the load. Raises BenchError when the foreground alone is more."""
    slots = settings.shape.decode_slots
    room = max(1, model.batch_tokens - slots + 1)

    def turn_s(prompt_tokens: float, output_tokens: float) -> float:
        step_s = model.step_s(slots, int(slots * (prompt_tokens + output_tokens / 2)), 0, 0)
        steps = output_tokens + math.ceil(prompt_tokens / room)
        # A prompt's tokens make the steps longer for all.
        return steps * step_s + slots * prompt_tokens * model.prefill_token_s

    foreground = turn_s(fmean(settings.foreground_prompt_tokens), settings.foreground_tokens)
    left = settings.load * slots - foreground / settings.foreground_gap_s
    if left <= 0:
        raise BenchError("the foreground alone is more than the load; let its turns come less often")
    return left / turn_s(fmean(settings.prompt_tokens), settings.mean_tokens)


def recorded(settings: TruthSettings, path: Path) -> list[Arrival]:
    """A trace from a file, checked against what the engine can hold. Raises BenchError, OSError."""
    try:
        trace = list(read_trace(path))
    except TraceError as error:
        raise BenchError(str(error)) from None
    longest = max(trace, key=lambda arrival: arrival.prompt_tokens + arrival.output_tokens)
    need = longest.prompt_tokens + longest.output_tokens
    if need > settings.shape.slot_context:
        raise BenchError(
            f"{path.name}: a turn of {need:,} tokens; a slot of the bench has {settings.shape.slot_context:,}"
        )
    if any(arrival.shared_tokens for arrival in trace):
        raise BenchError(f"{path.name}: turns with shared tokens cannot be replayed with random prompts")
    return trace
