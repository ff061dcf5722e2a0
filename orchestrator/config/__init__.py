"""`config.yaml` as typed, frozen settings.

Text goes through three steps, and the mistakes of all three are reported together, each with its line:

1. `document`: YAML to plain data that remembers the line of every key.
2. `schema`: each value against its type and range, through pydantic.
3. `rules`: what one value demands of another (a priority must exist, slots must suffice).

Bad input ends in `ConfigError` and in nothing else.
"""

from orchestrator.config.checks import BUNDLED_MODELS
from orchestrator.config.document import KeyPath, Problem
from orchestrator.config.exposure import exposure_problem, is_loopback
from orchestrator.config.load import ConfigError, load_config, parse_config, read_config
from orchestrator.config.schema import (
    DEFAULT_PRIORITIES,
    Agent,
    Backend,
    Config,
    ManagedEngine,
    Policy,
    Redis,
    Server,
    Vram,
    Workload,
)

__all__ = [
    "BUNDLED_MODELS",
    "DEFAULT_PRIORITIES",
    "Agent",
    "Backend",
    "Config",
    "ConfigError",
    "KeyPath",
    "ManagedEngine",
    "Policy",
    "Problem",
    "Redis",
    "Server",
    "Vram",
    "Workload",
    "exposure_problem",
    "is_loopback",
    "load_config",
    "parse_config",
    "read_config",
]
