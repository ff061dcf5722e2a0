"""A simulated engine: the llama.cpp server's HTTP interface with deterministic text, timing and faults.

For tests and benchmarks of scale, faults and determinism where a real engine would be too slow, too small or
too well-behaved.
"""

from backends.simulated.config import ScriptedReply, SimulatedConfig
from backends.simulated.engine import SimulatedEngine
from backends.simulated.faults import Fault, FaultBook
from backends.simulated.loop import EngineStats
from backends.simulated.profile import PROFILES, TimingProfile
from backends.simulated.server import serve_simulated, serve_simulated_in_thread

__all__ = [
    "PROFILES",
    "EngineStats",
    "Fault",
    "FaultBook",
    "ScriptedReply",
    "SimulatedConfig",
    "SimulatedEngine",
    "TimingProfile",
    "serve_simulated",
    "serve_simulated_in_thread",
]
