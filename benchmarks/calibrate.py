"""`swarm simulate --calibrate`: an engine model of a backend, by measuring it for about a minute.

A managed engine is started for it; one that is reached by its address has to be idle, and loses what its
slots hold. What a service would add to a wait is not in the model: `swarm bench truth` measures that, too.
"""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.managed import ManagedEngine
from backends.managed.settings import EngineSettingsError
from backends.protocol import BackendError, EngineInfo, KvLayout
from benchmarks.calibration import Advance, Effort, Engine, measure_engine
from benchmarks.harness import BenchError, run_async
from benchmarks.report import machine, progress_bar
from orchestrator.config import Config
from orchestrator.config.schema import Backend as BackendConfig
from orchestrator.service import engine_settings
from orchestrator.simulation.calibrate import Calibration, CalibrationError, fit, to_json

#: llama-server's own -b, which it does not tell.
DEFAULT_BATCH_TOKENS = 2048
LABEL = "measuring the engine"


def run_calibration(
    target: Config | str,
    *,
    backend: str | None = None,
    path: Path | None = None,
    effort: Effort | None = None,
    shown: bool = True,
) -> Calibration:
    """Measure a configured backend, or the llama.cpp server at an address, and write the file if asked to.

    `backend`: which one of the configuration; without it, the only one. Raises BenchError,
    ManagedEngineError, OSError.
    """
    chosen = BackendConfig(name="engine", url=target) if isinstance(target, str) else choose(target, backend)
    with progress_bar(1.0, LABEL, shown=shown) as advance:
        found = run_async(_measure, chosen, effort or Effort(), advance)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json(found))
    return found


def choose(config: Config, name: str | None) -> BackendConfig:
    """The backend of that name, or the only one. Raises BenchError."""
    names = [backend.name for backend in config.backends]
    if name is None and len(names) > 1:
        raise BenchError(f"which backend? --backend with one of {', '.join(names)}")
    for backend in config.backends:
        if name in (None, backend.name):
            return backend
    raise BenchError(f"there is no backend {name!r}; the configuration has {', '.join(names)}")


async def _measure(config: BackendConfig, effort: Effort, advance: Advance) -> Calibration:
    async with _engine(config) as url:
        info = await _describe(url, config)
        engine = engine_of(url, info, config)
        measured = await measure_engine(engine, effort, advance)
    how: dict[str, Any] = {
        "model": info.model,
        "managed": config.managed is not None,
        "decode_slots": engine.lanes,
        "engine_slots": engine.slots,
        "slot_context": engine.slot_context,
        "kv_layout": info.kv_layout.value,
        "batch_tokens_assumed": info.batch_tokens is None,
        "machine": machine(),
        "effort": effort,
    }
    try:
        return fit(measured, how)
    except CalibrationError as error:
        raise BenchError(f"calibration: {error}") from None


@asynccontextmanager
async def _engine(config: BackendConfig) -> AsyncIterator[str]:
    if config.url is not None:
        yield config.url
        return
    with tempfile.TemporaryDirectory(prefix="swarm-calibrate-") as folder:
        try:
            # Where it saves is its own folder: a service's is left alone.
            settings = replace(engine_settings(config), save_path=None)
        except (ValueError, EngineSettingsError) as error:
            raise BenchError(str(error)) from None
        async with ManagedEngine(settings, Path(folder), name=config.name) as engine:
            yield engine.url


async def _describe(url: str, config: BackendConfig) -> EngineInfo:
    layout = KvLayout(config.kv_layout) if config.kv_layout else None
    adapter = LlamaCppBackend(url, LlamaCppOptions(kv_layout=layout, batch_tokens=config.batch_tokens))
    try:
        return await adapter.describe()
    except BackendError as error:
        raise BenchError(f"the engine at {url} does not answer: {error}") from None
    finally:
        await adapter.aclose()


def engine_of(url: str, info: EngineInfo, config: BackendConfig) -> Engine:
    """What is measured: as many lanes as the service would let decode."""
    lanes = min(config.decode_slots or max(1, info.engine_slots - 1), info.engine_slots)
    context = info.slot_context
    if info.kv_layout is KvLayout.UNIFIED:
        # All lanes at once have to fit into what all slots share.
        context = min(context, info.kv_budget_tokens // (lanes + 1))
    return Engine(url, lanes, info.engine_slots, context, info.batch_tokens or DEFAULT_BATCH_TOKENS)
