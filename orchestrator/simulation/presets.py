"""Whole machines with their users, whose published figures a simulation can be held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.scheduler import Policy
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.setup import BackendSetup, Setup
from orchestrator.simulation.sweep import Background, Base, PartOfCapacity
from orchestrator.simulation.workload import REFERENCE, Arrival, ClosedLoop, Fixed, Recorded, Several

QUANTILES = (0.5, 0.9, 0.99)
MEAN_TOKENS = 354.0
#: 40 layers, 8 KV heads of 128: 81,920 elements a token. 15.5 GiB less 5.2 of weights and 0.8 of buffers.
TOKEN_BYTES: Mapping[str, int] = MappingProxyType({"f16": 163_840, "q8_0": 87_040, "q4_0": 46_080})
KV_BYTES = int(9.5 * 2**30)


@dataclass(frozen=True, slots=True)
class Published:
    """Waits for a decode slot in seconds: p50, p90, p99, and the worst."""

    quantiles: tuple[float, float, float]
    worst: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A machine, its load, and how long it is simulated. `off`, `on`: without and with preemption."""

    title: str
    model: EngineModel
    off: Published
    on: Published
    hours: float = 10.0
    warmup_s: float = 600.0
    replications: int = 5

    def setup(self, *, preemption: bool) -> Setup:
        """Eight decode slots that are always full, and one person who asks now and then.

        Steps are all alike here and nothing depends on what the dispatcher reports, so it seldom does.
        """
        load = Several(
            (
                ClosedLoop("swarm", "background", clients=12, output=REFERENCE, prompt=Fixed(32)),
                ClosedLoop("person", "foreground", output=Fixed(39), prompt=Fixed(32), think_s=8.0),
            )
        )
        return Setup((self._backend(preemption, first_slots=2),), CLASSES, load, report_s=10.0)

    def example(self, *, preemption: bool) -> Setup:
        """The timeline: slot 3 holds a turn of 940 tokens, the others longer ones; somebody asks at 4 s."""
        outputs = [1500, 1420, 1340, 940, 1380, 1460, 1540, 1620]
        turns = [
            Arrival(0.0, f"agent {slot}", "background", 1 if slot == 3 else 2, tokens)
            for slot, tokens in enumerate(outputs)
        ]
        asks = Arrival(4.0, "person", "foreground", 1, 156)
        return Setup((self._backend(preemption, first_slots=0),), CLASSES, Recorded((*turns, asks)))

    def base(self) -> Base:
        """What a sweep starts from: the background's load is given, and the person the same at each."""
        return Base(
            backend=self._backend(True, first_slots=2),
            classes=CLASSES,
            workload=PartOfCapacity(
                ClosedLoop("person", "foreground", output=Fixed(39), prompt=Fixed(32), think_s=8.0),
                Background("swarm", "background", REFERENCE, MEAN_TOKENS, Fixed(32), 32.0),
            ),
            kv_bytes=KV_BYTES,
            token_bytes=TOKEN_BYTES,
        )

    def _backend(self, preemption: bool, first_slots: int) -> BackendSetup:
        policy = Policy(
            decode_slots=8,
            engine_slots=12,
            first_slots=first_slots,
            preemption=preemption,
            priorities=tuple(sorted(CLASSES.values())),
        )
        return BackendSetup("gpu", policy, self.model)


CLASSES: Mapping[str, int] = MappingProxyType({"background": 20, "foreground": 100})

#: 39 tokens a second in each slot; nothing else about a step is published, so nothing else is assumed.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "rx9070xt": Preset(
            title="Radeon RX 9070 XT, 16 GB: 8 decode slots of 39 tokens/s",
            model=EngineModel(base_step_s=1 / 39, flush_s=0.004),
            off=Published((0.76, 2.45, 6.17), 31.0),
            on=Published((0.017, 0.017, 0.029), 0.030),
        )
    }
)
