"""What is simulated: the backends, the classes, who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.scheduler import Policy
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.workload import Workload


class SimulationError(Exception):
    """What was asked for cannot be simulated; the message is one line."""


@dataclass(frozen=True, slots=True)
class BackendSetup:
    """One engine with its scheduler.

    `slot_tokens`: the most tokens one engine slot holds, None for any number; what needs more is refused,
    as is what exceeds the policy's KV budget. `name` is its name in rows and logs.
    """

    name: str
    policy: Policy
    model: EngineModel
    slot_tokens: int | None = None

    def fits(self, kv_tokens: int) -> bool:
        """Whether a turn of so many tokens may run here at all."""
        budget = self.policy.kv_budget_tokens
        return (self.slot_tokens is None or kv_tokens <= self.slot_tokens) and (
            budget is None or kv_tokens <= budget
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """A pool of backends that share one queue, and its users.

    `classes`: the priority of each class. `limits`: for agents whose requests ask for more than they get,
    the generation limit that is reserved for a turn; without one it is what the turn generates.
    `max_waiting`: more waiting turns than this are refused. `block_tokens`: how many tokens of a prompt one
    checksum of its prefix covers (the dispatcher's blocks have 256 bytes). `report_s`, `tick_s`: how often
    the dispatcher tells of progress and of time. `stride`: the most steps taken at once, None for as many as
    are alike.
    """

    backends: tuple[BackendSetup, ...]
    classes: Mapping[str, int]
    workload: Workload
    limits: Mapping[str, int] | None = None
    max_waiting: int = 10_000
    block_tokens: int = 64
    report_s: float = 0.25
    tick_s: float = 1.0
    stride: int | None = None

    def __post_init__(self) -> None:
        names = [backend.name for backend in self.backends]
        if not names or len(set(names)) < len(names):
            raise SimulationError("a simulation needs backends, each with a name of its own")
        if self.report_s <= 0 or self.tick_s <= 0 or self.block_tokens < 1:
            raise SimulationError("report_s, tick_s and block_tokens must be above 0")

    @property
    def top_class(self) -> str:
        """The class of the highest priority."""
        return max(self.classes, key=lambda name: (self.classes[name], name))
