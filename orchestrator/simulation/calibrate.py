"""An engine model from what was measured of an engine. Pure: who measures is `benchmarks/calibration.py`.

A step's time is taken as linear in what is in the batch and in the KV (see `EngineModel.step_s`). The
coefficients are those with the least sum of squared *relative* errors among all that are not negative, so a
short step counts as much as a long one, and noise never makes an engine that gets faster with work. What a
sample cannot tell, such as parked KV where none was parked, has the coefficient 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import orjson

from orchestrator.simulation.engine_model import EngineModel

STEP_FIELDS = ("base_step_s", "lane_s", "running_token_s", "parked_token_s", "prefill_token_s", "group_s")
MAX_TOKENS = 1_000_000
MAX_SECONDS = 3600.0


class CalibrationError(Exception):
    """There is no engine model to be had from this; the message is one line."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step of one kind took, on average over `steps` of them.

    `lanes` decode; `running_tokens` is the KV of all turns in the batch and `parked_tokens` that of the
    others, halfway through the measurement; `prefill_tokens` of prompts are evaluated in each step. `groups`
    of adjacent slots are in the batch. `what` says it in words, `weight` how much it counts in the fit.
    """

    what: str
    step_s: float
    lanes: int
    running_tokens: float
    parked_tokens: float = 0.0
    prefill_tokens: float = 0.0
    steps: int = 1
    weight: float = 1.0
    groups: int = 1

    @property
    def amounts(self) -> tuple[float, ...]:
        """What each of `STEP_FIELDS` is multiplied by."""
        lanes, groups = float(self.lanes), float(self.groups - 1)
        return 1.0, lanes, self.running_tokens, self.parked_tokens, self.prefill_tokens, groups


@dataclass(frozen=True, slots=True)
class CopySample:
    """A save or restore of so many tokens stalled the engine for so long."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured of one engine. Empty where it cannot do that.

    `flushes_s`: from a boundary until a turn began that came while another was stopped. `calls_s`: from a
    request to the engine until the turn began, less what was left of the step under way. `controls_s`: the
    same from a turn's arrival at the service. Their means count, not the single ones: a request that just
    misses a boundary has a whole step too much, the others too little. Both still contain the flush.
    """

    batch_tokens: int
    steps: tuple[StepSample, ...]
    saves: tuple[CopySample, ...] = ()
    restores: tuple[CopySample, ...] = ()
    flushes_s: tuple[float, ...] = ()
    calls_s: tuple[float, ...] = ()
    controls_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted model with what it was fitted to."""

    model: EngineModel
    measured: Measurements
    how: dict[str, Any] = field(default_factory=dict)
    """Where and how it was measured, for the reader of the file."""
    step_factor: float = 1.0
    """What steps are multiplied by behind the service; in the model already, and not in the samples."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each step sample, the model's time over the measured one, less 1."""
        return tuple(
            _modelled(self.model, sample) / self.step_factor / sample.step_s - 1
            for sample in self.measured.steps
        )

    @property
    def worst_error(self) -> float:
        """The largest of them, without its sign, among the samples of full weight."""
        weights = [sample.weight for sample in self.measured.steps]
        full = [
            abs(error) for error, weight in zip(self.errors, weights, strict=True) if weight >= max(weights)
        ]
        return max(full, default=0.0)

    def behind_service(
        self, controls_s: Sequence[float], calls_s: Sequence[float], step: StepSample
    ) -> Calibration:
        """The same engine behind a service that was measured afterwards, on the same machine.

        `step` is one of all lanes meanwhile. All of a step's coefficients are multiplied by how far the fit
        is off there: where service and engine share cores, steps take longer than the engine's alone, and
        where steps are not quite linear, those of all lanes are the ones that count.
        """
        model = replace(self.model, **_delays(self.model.flush_s, calls_s, controls_s))
        measured = replace(self.measured, calls_s=tuple(calls_s), controls_s=tuple(controls_s))
        return replace(self, model=model, measured=measured).with_steps(
            step.step_s / _modelled(self.model, step)
        )

    def with_steps(self, factor: float) -> Calibration:
        """The same engine where steps take `factor` times as long, as on a machine that changed its speed."""
        changes: dict[str, Any] = {name: getattr(self.model, name) * factor for name in STEP_FIELDS}
        return replace(self, model=replace(self.model, **changes), step_factor=self.step_factor * factor)


def fit(measured: Measurements, how: dict[str, Any] | None = None) -> Calibration:
    """The model with the least error. Raises CalibrationError for too few samples or impossible ones."""
    samples = measured.steps
    if len(samples) < 2:
        raise CalibrationError(f"{len(samples)} kinds of steps were measured; at least 2 are needed")
    for sample in samples:
        if not 0 < sample.step_s < MAX_SECONDS or not all(
            0 <= amount <= MAX_TOKENS for amount in sample.amounts
        ):
            raise CalibrationError(f"{sample.what}: a step of {sample.step_s:g} s is no measurement")
    roots = [math.sqrt(sample.weight) for sample in samples]
    rows = [
        [root * amount / sample.step_s for amount in sample.amounts]
        for root, sample in zip(roots, samples, strict=True)
    ]
    coefficients = least_squares(rows, roots)
    figures = dict(zip(STEP_FIELDS, coefficients, strict=True))
    if not figures["base_step_s"] and not figures["lane_s"]:
        raise CalibrationError("the measured steps take no time but for their tokens; measure more of them")
    flush_s = max(0.0, median(measured.flushes_s)) if measured.flushes_s else 0.0
    model = EngineModel(
        **figures,
        batch_tokens=measured.batch_tokens,
        save_token_s=_per_token(measured.saves),
        restore_token_s=_per_token(measured.restores),
        flush_s=flush_s,
        **_delays(flush_s, measured.calls_s, measured.controls_s),
    )
    return Calibration(model, measured, how or {})


def _delays(flush_s: float, calls_s: Sequence[float], controls_s: Sequence[float]) -> dict[str, Any]:
    """`control_s` and `call_s`; without a service between, a call is all there is."""
    call_s = max(0.0, fmean(calls_s) - flush_s) if calls_s else 0.0
    control_s = max(0.0, fmean(controls_s) - flush_s) if controls_s else call_s
    return {"control_s": control_s, "call_s": min(call_s, control_s)}


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x, none negative, with the least |rows x - wanted|.

    Tries each set of columns that may be above 0: at most 2^columns small systems, so for a few columns only.
    A column that others already explain is left out. Among equally good ones, the fewest columns.
    """
    columns = len(rows[0])
    scales = [max((abs(row[at]) for row in rows), default=0.0) for at in range(columns)]
    usable = [at for at in range(columns) if scales[at] > 0]
    best, least = [0.0] * columns, math.fsum(value * value for value in wanted)
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            scaled = [[row[at] / scales[at] for at in chosen] for row in rows]
            found = _solve_normal(scaled, wanted)
            if found is None or min(found) < 0:
                continue
            error = math.fsum(
                (math.fsum(a * x for a, x in zip(row, found, strict=True)) - value) ** 2
                for row, value in zip(scaled, wanted, strict=True)
            )
            if error < least * (1 - 1e-9) - 1e-18:
                least = error
                best = [0.0] * columns
                for at, value in zip(chosen, found, strict=True):
                    best[at] = value / scales[at]
    return best


def _solve_normal(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Least squares without bounds, by the normal equations; None where they have no single solution."""
    size = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(size)]
        + [math.fsum(row[i] * value for row, value in zip(rows, wanted, strict=True))]
        for i in range(size)
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) < 1e-10:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for below in range(at + 1, size):
            factor = matrix[below][at] / matrix[at][at]
            matrix[below] = [a - factor * b for a, b in zip(matrix[below], matrix[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = math.fsum(matrix[at][j] * found[j] for j in range(at + 1, size))
        found[at] = (matrix[at][size] - known) / matrix[at][at]
    return found


def _per_token(copies: Sequence[CopySample]) -> float:
    """Seconds for each token, by the least relative error of a line through nothing."""
    ratios = [copy.tokens / copy.seconds for copy in copies if copy.tokens > 0 and copy.seconds > 0]
    return math.fsum(ratios) / math.fsum(ratio * ratio for ratio in ratios) if ratios else 0.0


def _modelled(model: EngineModel, sample: StepSample) -> float:
    return math.fsum(
        getattr(model, name) * amount for name, amount in zip(STEP_FIELDS, sample.amounts, strict=True)
    )


# Files --------------------------------------------------------------------------------------------


def to_json(calibration: Calibration) -> bytes:
    """The file of a calibration: the model first, then how it was measured, samples and errors."""
    document = {
        "model": calibration.model,
        "how": {**calibration.how, "step_factor": calibration.step_factor},
        "measured": calibration.measured,
        "errors": {
            sample.what: round(error, 6)
            for sample, error in zip(calibration.measured.steps, calibration.errors, strict=True)
        },
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def read_model(path: Path) -> EngineModel:
    """The engine model in a calibration's file. Raises CalibrationError, OSError."""
    raw = path.read_bytes()
    try:
        document = orjson.loads(raw)
        values = document["model"]
        known = {each.name for each in fields(EngineModel)}
        for key in values:
            if key not in known:
                raise CalibrationError(f"{path.name}: model.{key} is not a figure of an engine model")
            _check(path, key, values[key])
        return EngineModel(**values)
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path.name}: not JSON: {error.msg} (line {error.lineno})") from None
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CalibrationError(f"{path.name}: not the file of a calibration: {reason}") from None


def _check(path: Path, key: str, value: object) -> None:
    whole = key == "batch_tokens"
    good = type(value) is int if whole else type(value) in (int, float)
    if not good or not (1 if whole else 0) <= value <= (MAX_TOKENS if whole else MAX_SECONDS):  # type: ignore[operator]
        kind = f"a whole number from 1 to {MAX_TOKENS}" if whole else f"seconds from 0 to {MAX_SECONDS:g}"
        raise CalibrationError(f"{path.name}: model.{key} is {value!r}; it must be {kind}")
