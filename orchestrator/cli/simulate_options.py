"""What `swarm simulate` was asked: its options, understood or refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.cli.common import load
from orchestrator.cli.figures import plain
from orchestrator.cli.simulate_config import swarm_of
from orchestrator.simulation import EngineModel, Recorded, Setup, SimulationError
from orchestrator.simulation.calibrate import CalibrationError, read_model
from orchestrator.simulation.presets import PRESETS, Preset
from orchestrator.simulation.trace import TraceError, read_trace

OFF, ON = "off", "on"
LABELS: Mapping[str, str] = {OFF: "no preemption", ON: "preemption"}
_DEFAULT_HOURS, _DEFAULT_WARMUP_S = 1.0, 60.0
_DEFAULT_REPLICATIONS = 3
_SMALL_WARMUP = 0.1


@dataclass(frozen=True)
class Given:
    """The options as they were written; None is what was not."""

    preset: str | None = None
    config: Path | None = None
    engine: str | None = None
    pool: str | None = None
    trace: Path | None = None
    hours: float | None = None
    turns: int | None = None
    replications: int | None = None
    seed: int = 1
    off: bool = False
    on: bool = False


@dataclass(frozen=True)
class Study:
    """What is simulated: columns that differ by preemption only, each with the same seeds."""

    title: str
    columns: Mapping[str, Setup]
    until_s: float | None
    until_turns: int | None
    warmup_s: float
    replications: int
    seed: int
    preset: Preset | None = None
    remarks: tuple[str, ...] = ()

    @property
    def top_class(self) -> str:
        """The class whose waits this is about."""
        setup = next(iter(self.columns.values()))
        return setup.top_class

    @property
    def first(self) -> Setup:
        """Any of them."""
        return next(iter(self.columns.values()))


def understand(given: Given) -> Study:
    """The study. Raises SimulationError; a configuration's own mistakes end the program."""
    check_source(given)
    if given.hours is not None and given.turns is not None:
        raise SimulationError("--hours and --turns are two ways to say when it ends: give one")
    return _of_preset(given) if given.preset is not None else _of_config(given)


def check_source(given: Given) -> None:
    """Raises SimulationError unless there is a preset or a configuration."""
    if (given.preset is None) == (given.config is None):
        raise SimulationError(
            f"give --preset ({', '.join(PRESETS)}) or --config FILE, one of the two"
            + ("" if given.preset is None else ", not both")
        )


def preset_of(given: Given) -> Preset:
    """The preset that was named. Raises SimulationError."""
    preset = PRESETS.get(given.preset or "")
    if preset is None:
        raise SimulationError(f"--preset: {plain(given.preset)} is not among {', '.join(PRESETS)}")
    for option in ("engine", "pool", "trace"):
        if getattr(given, option) is not None:
            raise SimulationError(f"--{option} goes with --config; a preset has its own")
    return preset


def _of_preset(given: Given) -> Study:
    preset = preset_of(given)
    columns = {name: preset.setup(preemption=name == ON) for name in _columns(given)}
    replications = given.replications or preset.replications
    return _study(given, preset.title, columns, preset.hours, preset.warmup_s, replications, preset=preset)


def _of_config(given: Given) -> Study:
    assert given.config is not None
    config = load(given.config)
    workload = None
    if given.trace is not None:
        try:
            workload = Recorded(tuple(read_trace(given.trace)))
        except TraceError as error:
            raise SimulationError(f"--trace: {error}") from None
        except OSError as error:
            raise SimulationError(
                f"--trace: {plain(given.trace)} cannot be read: {error.strerror or error}"
            ) from None
    swarm = swarm_of(config, engine_model(given.engine), given.pool, workload)
    columns = {name: swarm.with_preemption(name == ON) for name in _columns(given)}
    replications = given.replications or (1 if workload is not None else _DEFAULT_REPLICATIONS)
    hours = _DEFAULT_HOURS
    if workload is not None and given.hours is None and workload.arrivals:
        hours = (max(each.at_s for each in workload.arrivals) + 1.0) / 3600
    warmup_s = 0.0 if workload is not None else _DEFAULT_WARMUP_S
    study = _study(given, plain(given.config), columns, hours, warmup_s, replications)
    return replace(study, remarks=swarm.remarks)


def engine_model(text: str | None) -> EngineModel | None:
    """A preset's engine or a calibration's; None: not given. Raises SimulationError."""
    if text is None:
        return None
    if text in PRESETS:
        return PRESETS[text].model
    path = Path(text)
    try:
        return read_model(path)
    except CalibrationError as error:
        raise SimulationError(f"--engine: {error}") from None
    except OSError as error:
        raise SimulationError(
            f"--engine: {plain(text)} is neither {' nor '.join(PRESETS)} nor a file: "
            f"{error.strerror or error}"
        ) from None


def _columns(given: Given) -> tuple[str, ...]:
    return (OFF, ON) if given.off == given.on else (OFF,) if given.off else (ON,)


def _study(
    given: Given,
    title: str,
    columns: Mapping[str, Setup],
    hours: float,
    warmup_s: float,
    replications: int,
    preset: Preset | None = None,
) -> Study:
    until_s = None if given.turns is not None else (given.hours or hours) * 3600
    if until_s is None:
        warmup_s = 0.0
    elif given.hours is not None:
        warmup_s = min(warmup_s, _SMALL_WARMUP * until_s)
    return Study(
        title=title,
        columns=columns,
        until_s=until_s,
        until_turns=given.turns,
        warmup_s=warmup_s,
        replications=replications,
        seed=given.seed,
        preset=preset,
    )
