"""The engine that the service owns: started, watched, restarted and stopped by it."""

from backends.managed.engine import ManagedEngine, ManagedEngineError
from backends.managed.settings import CacheType, EngineSettings, KvLayout

__all__ = ["CacheType", "EngineSettings", "KvLayout", "ManagedEngine", "ManagedEngineError"]
