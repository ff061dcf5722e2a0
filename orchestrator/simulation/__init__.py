"""The service's scheduler under a virtual clock: a model engine, seeded users, and what comes of it."""

from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.outcome import BackendFigures, ClassFigures, Outcome, TurnRow
from orchestrator.simulation.setup import BackendSetup, Setup, SimulationError
from orchestrator.simulation.simulation import simulate
from orchestrator.simulation.sketch import Sketch
from orchestrator.simulation.workload import (
    REFERENCE,
    Arrival,
    Bursty,
    ClosedLoop,
    Demo,
    Fixed,
    Mixture,
    Poisson,
    Recorded,
    Sessions,
    Several,
    Sizes,
    Source,
    Workload,
)

__all__ = [
    "REFERENCE",
    "Arrival",
    "BackendFigures",
    "BackendSetup",
    "Bursty",
    "ClassFigures",
    "ClosedLoop",
    "Demo",
    "EngineModel",
    "Fixed",
    "Mixture",
    "Outcome",
    "Poisson",
    "Recorded",
    "Sessions",
    "Setup",
    "Several",
    "SimulationError",
    "Sizes",
    "Sketch",
    "Source",
    "TurnRow",
    "Workload",
    "simulate",
]
