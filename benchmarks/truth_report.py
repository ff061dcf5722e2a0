"""What the truth bench found: its columns, how far they are apart, and its table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.report import Report, Summary, figure, milliseconds, ratio
from benchmarks.truth_settings import TruthSettings
from orchestrator.simulation.calibrate import Calibration, StepSample
from orchestrator.simulation.workload import Arrival

GOAL = 0.10
DRIFT = 0.05


@dataclass
class Measured:
    """One column: a real run or the simulated one. Seconds, tokens per second."""

    waits: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    background_whole: list[float] = field(default_factory=list)
    service_s: list[float] = field(default_factory=list)
    """Of a real run's foreground turns: the wait without what the engine took of it."""
    background_rate: float = math.nan
    preemptions: int = 0
    step_s: float = math.nan
    """The mean gap between two tokens of a background stream; of the simulation, lane seconds a token."""
    end_s: float = math.nan
    """When the last turn was over."""
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """What is compared, in the table's order."""
        waits, firsts = Summary.of(self.waits), Summary.of(self.first_tokens)
        return {
            **{f"wait {name}": getattr(waits, name) for name in ("p50", "p90", "p99")},
            **{f"first token {name}": getattr(firsts, name) for name in ("p50", "p90", "p99")},
            "background tokens/s": self.background_rate,
            "preemptions": float(self.preemptions),
        }

    def data(self) -> dict[str, Any]:
        """For the JSON, with all samples."""
        return {
            "figures": self.figures(),
            "wait_s": Summary.of(self.waits),
            "first_token_s": Summary.of(self.first_tokens),
            "background_whole_s": Summary.of(self.background_whole),
            "service_s": Summary.of(self.service_s),
            "step_s": self.step_s,
            "end_s": self.end_s,
            "errors": self.errors,
            "samples": {
                "wait_s": [round(wait, 5) for wait in self.waits],
                "first_token_s": [round(first, 5) for first in self.first_tokens],
                "background_whole_s": [round(whole, 4) for whole in self.background_whole],
                "service_s": [round(service, 5) for service in self.service_s],
            },
        }


@dataclass(frozen=True)
class Verdict:
    """One figure. `spread` is how far real runs differ, as a part of their mean; NaN for a single run."""

    name: str
    real: float
    simulated: float
    spread: float

    @property
    def difference(self) -> float:
        """The simulated figure's distance from the real runs' mean, as a part of that."""
        if self.real == self.simulated:
            return 0.0
        return ratio(self.simulated - self.real, self.real)

    @property
    def good(self) -> bool:
        """Within 10%, or within the spread of real runs where that is more."""
        most = GOAL if math.isnan(self.spread) else max(GOAL, self.spread)
        return abs(self.difference) <= most


def verdicts(real: Sequence[Measured], simulated: Measured) -> list[Verdict]:
    """Each figure's."""
    columns = [run.figures() for run in real]
    found = []
    for name, value in simulated.figures().items():
        values = [column[name] for column in columns]
        mean = fmean(values)
        spread = ratio(max(values) - min(values), mean) if len(values) > 1 else math.nan
        found.append(Verdict(name, mean, value, spread))
    return found


def drift(calibration: Calibration, after: StepSample) -> float:
    """How much longer a step takes than when it was calibrated, as a part: the machine was not quiet."""
    before = next((each for each in calibration.measured.steps if each.what == after.what), None)
    return math.nan if before is None else after.step_s / before.step_s - 1


@dataclass
class Truth:
    """The whole outcome."""

    trace: list[Arrival]
    calibration: Calibration
    """With steps of the mean of before and after the real runs."""
    real: list[Measured]
    simulated: Measured
    step_after: StepSample
    """A step of all lanes on the engine alone, after the real runs."""

    @property
    def drift(self) -> float:
        """See `drift`."""
        return drift(self.calibration, self.step_after)


def report(settings: TruthSettings, found: Truth) -> Report:
    """The table: a row for each figure, the real runs, the simulation, and how far it is off."""
    real, simulated = found.real, found.simulated
    names = ["real engine"] if len(real) == 1 else [f"real {at + 1}" for at in range(len(real))]
    rows = []
    for verdict in verdicts(real, simulated):
        cells = [_cell(verdict.name, run.figures()[verdict.name]) for run in real]
        rows.append(
            [
                verdict.name,
                *cells,
                _cell(verdict.name, verdict.simulated),
                _signed(verdict.difference),
                *([_signed(verdict.spread)[1:]] if len(real) > 1 else []),
                "yes" if verdict.good else "no",
            ]
        )
    blanks = [""] * (3 if len(real) > 1 else 2)
    columns = [*real, simulated]
    rows += [
        ["foreground turns", *(str(len(column.waits)) for column in columns), *blanks],
        ["background turns", *(str(len(column.background_whole)) for column in columns), *blanks],
        [
            "background turn, mean",
            *(figure(Summary.of(column.background_whole).mean, 2) + " s" for column in columns),
            *blanks,
        ],
        *(
            [
                f"wait outside engine {name}",
                *(milliseconds(getattr(Summary.of(column.service_s), name)) for column in columns),
                *blanks,
            ]
            for name in ("p50", "p90", "p99")
        ),
        ["step, mean over tokens", *(milliseconds(column.step_s) for column in columns), *blanks],
        ["last turn over", *(figure(column.end_s) + " s" for column in columns), *blanks],
        ["errors", *(str(len(column.errors)) for column in columns), *blanks],
    ]
    spread = ["spread"] if len(real) > 1 else []
    return Report(
        bench="truth",
        title=f"The same {len(found.trace)} turns on the engine and in the simulator, "
        f"{settings.shape.decode_slots} decode slots",
        columns=["", *names, "simulator", "off by", *spread, "good"],
        rows=rows,
        notes=list(_notes(found)),
        parameters={"settings": settings},
        data={
            "real": [run.data() for run in real],
            "simulated": simulated.data(),
            "differences": {each.name: each.difference for each in verdicts(real, simulated)},
            "spreads": {each.name: each.spread for each in verdicts(real, simulated)},
            "model": found.calibration.model,
            "step_factor": found.calibration.step_factor,
            "drift": found.drift,
            "step_after": found.step_after,
            "measured": found.calibration.measured,
            "errors_of_the_fit": found.calibration.errors,
            "trace": found.trace,
        },
    )


def _notes(found: Truth) -> Iterator[str]:
    model, calibration = found.calibration.model, found.calibration
    yield "goal: each within 10%, or within the spread of two real runs (--repeat 2) where that is more"
    yield (
        f"engine model: a step of {model.base_step_s * 1e3:.1f} ms and {model.lane_s * 1e3:.2f} ms a lane, "
        f"{model.prefill_token_s * 1e3:.2f} ms a prompt token; worst error of the fit "
        f"{calibration.worst_error:.0%}; behind the service {calibration.step_factor:.3f} times that"
    )
    yield (
        f"the way to the engine: {model.control_s * 1e3:.1f} ms, {model.call_s * 1e3:.1f} ms of it the call; "
        f"flush {model.flush_s * 1e3:.1f} ms"
    )
    if abs(found.drift) > DRIFT:
        yield (
            f"the machine was not quiet: after the runs the engine's own step is {found.drift:+.0%} off "
            "what it was before; the model has the mean; run it again"
        )
    for name, column in (("real", found.real[0] if found.real else None), ("simulated", found.simulated)):
        if column is not None and column.errors:
            yield f"{name}: {len(column.errors)} errors, the first: {column.errors[0]}"


def _cell(name: str, value: float) -> str:
    if name == "preemptions":
        return figure(value, 0)
    return figure(value) if name.endswith("tokens/s") else milliseconds(value)


def _signed(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:+.1%}"
