"""A swarm's configuration as a simulation: its backends, agents and policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.workload import Lengths
from agents.workload import Workload as AgentWorkload
from backends.gguf import NotGguf, read_model
from backends.kv_shape import KvShape
from backends.managed.settings import EngineSettingsError, model_path
from backends.model_shape import KvUnknown
from backends.protocol import EngineInfo, KvLayout
from orchestrator.config import Config
from orchestrator.config.checks import CACHE_TYPES
from orchestrator.config.schema import Agent, default_engine_slots
from orchestrator.config.schema import Backend as BackendConfig
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.sizing import SWAP_MOST_BYTES, make_policy, within_budget
from orchestrator.simulation import BackendSetup, Demo, EngineModel, Setup, Several, SimulationError, Workload
from orchestrator.simulation.sweep import Base, TimesTheClients

#: What a backend without a calibration is taken for: the bundled model on two CPU cores, where a step of
#: eight lanes takes about 25 ms.
DEFAULT_MODEL = EngineModel(
    base_step_s=9.4e-3,
    lane_s=1.6e-3,
    running_token_s=0.6e-6,
    prefill_token_s=2.1e-3,
    batch_tokens=64,
    save_token_s=9.5e-6,
    restore_token_s=4.5e-6,
    flush_s=1e-3,
    control_s=4e-3,
    call_s=1.5e-3,
)
#: What a chat template and the system message of the demo's turns take.
_TEMPLATE_TOKENS = 16
_BYTES_PER_TOKEN = 4
_UNKNOWN_CONTEXT = 1 << 30


@dataclass(frozen=True, slots=True)
class Swarm:
    """What of a configuration is simulated, without preemption and with it."""

    setup: Setup
    remarks: tuple[str, ...]

    def with_preemption(self, preemption: bool) -> Setup:
        """The same swarm with preemption on or off."""
        backends = tuple(
            replace(each, policy=replace(each.policy, preemption=preemption)) for each in self.setup.backends
        )
        return replace(self.setup, backends=backends)


def swarm_of(config: Config, model: EngineModel | None, pool: str | None, workload: Workload | None) -> Swarm:
    """One pool of a configuration. `workload` instead of its agents' own. Raises SimulationError."""
    pools = list(dict.fromkeys(backend.pool for backend in config.backends))
    if pool is None and len(pools) > 1:
        raise SimulationError(f"there are several pools; choose one with --pool: {', '.join(pools)}")
    chosen = [backend for backend in config.backends if pool is None or backend.pool == pool]
    if not chosen:
        raise SimulationError(f"--pool: {pool} is not among {', '.join(pools)}")
    remarks = []
    if model is None:
        remarks.append(
            "without --engine each backend is taken for the bundled model on two CPU cores; "
            "a calibration's file makes it yours"
        )
    backends = tuple(_backend(config, each, model or DEFAULT_MODEL) for each in chosen)
    return Swarm(
        Setup(
            backends,
            dict(config.priorities),
            workload or Several(_agents(config)),
            max_waiting=config.policy.max_waiting,
        ),
        tuple(remarks),
    )


def sweep_base(config: Config, model: EngineModel | None, pool: str | None) -> Base:
    """What a sweep of a configuration starts from: its only backend, and its agents as they are.

    Raises SimulationError.
    """
    swarm = swarm_of(config, model, pool, None)
    if len(swarm.setup.backends) > 1:
        raise SimulationError("--sweep varies one backend; this pool has several")
    backend = swarm.setup.backends[0]
    chosen = next(each for each in config.backends if each.name == backend.name)
    kv, token_bytes = _token_bytes(chosen)
    budget = backend.policy.kv_budget_tokens or _engine(chosen).kv_budget_tokens
    return Base(
        backend,
        swarm.setup.classes,
        TimesTheClients(_agents(config), swarm.setup.top_class),
        load=1.0,
        kv=kv,
        kv_bytes=budget * token_bytes[kv] if kv in token_bytes else None,
        token_bytes=token_bytes,
    )


def _token_bytes(backend: BackendConfig) -> tuple[str, dict[str, int]]:
    """The cache type that is configured, and what a token takes by cache type, where the model tells."""
    managed = backend.managed
    if managed is None or managed.cache_type_k != managed.cache_type_v:
        return "as configured", {}
    found = {}
    for name in CACHE_TYPES:
        kv = _kv_of(backend, name)
        if kv is not None:
            found[name] = kv.token_bytes + kv.window_token_bytes
    return managed.cache_type_k, found


def _agents(config: Config) -> tuple[Demo, ...]:
    found = tuple(_demo(name, agent) for name, agent in config.agents.items() if agent.workload is not None)
    if not found:
        raise SimulationError("no agent has a workload: add one to an agent, or give --trace")
    return found


def _demo(name: str, agent: Agent) -> Demo:
    workload = agent.workload
    assert workload is not None
    mean = workload.mean_tokens
    lengths = Lengths.heavy(mean) if workload.tail == "heavy" else Lengths.fixed(mean)
    return Demo(
        agent=name,
        priority_class=agent.priority,
        clients=workload.clients,
        turns=AgentWorkload(lengths, workload.think_s, workload.prompt),
        prompt_tokens=_TEMPLATE_TOKENS + -(-len(workload.prompt.encode()) // _BYTES_PER_TOKEN),
        most_tokens=agent.max_turn_tokens,
    )


def _backend(config: Config, backend: BackendConfig, model: EngineModel) -> BackendSetup:
    """By the same rules as the service, of what the configuration says the engine is."""
    options = DispatcherOptions(
        pool=backend.pool,
        name=backend.name,
        kind=backend.kind,
        decode_slots=backend.decode_slots,
        preemption=config.policy.preemption,
        min_run_s=config.policy.min_run_s,
        max_preemptions=config.policy.max_preemptions,
        aging_s=config.policy.aging_s,
        priorities=tuple(sorted(config.priorities.values())),
        kv_budget_bytes=backend.kv_budget_bytes,
        swap_budget=backend.swap_budget,
    )
    info = within_budget(_engine(backend), options)
    swap_bytes = 0
    if info.swap and info.kv is not None:
        swap_bytes = SWAP_MOST_BYTES if backend.swap_budget is None else backend.swap_budget
    policy = make_policy(options, info, swap_bytes, tag=backend.name)
    batch = max(backend.batch_tokens or model.batch_tokens, policy.decode_slots)
    known = info.slot_context < _UNKNOWN_CONTEXT
    return BackendSetup(
        backend.name,
        policy,
        replace(model, batch_tokens=batch),
        slot_tokens=info.slot_context if known else None,
    )


def _engine(backend: BackendConfig) -> EngineInfo:
    managed = backend.managed
    layout = KvLayout(backend.kv_layout or "split")
    if managed is not None:
        slots, context = managed.engine_slots, managed.context
        slot_context = context // slots if layout is KvLayout.SPLIT else context
        kv = _kv_of(backend)
    else:
        if backend.decode_slots is None:
            raise SimulationError(
                f"backend {backend.name}: set decode_slots; without the engine nobody knows how many it has"
            )
        slots = default_engine_slots(backend.decode_slots)
        slot_context = _UNKNOWN_CONTEXT
        context = slots * slot_context
        kv = None
        if backend.kv_bytes_per_token is not None:
            kv = KvShape(backend.kv_bytes_per_token)
    return EngineInfo(
        model=backend.model or backend.name,
        engine_slots=slots,
        slot_context=slot_context,
        kv_layout=layout,
        kv_budget_tokens=context,
        kv=kv,
        batch_tokens=backend.batch_tokens,
        native_park=False,
        swap=managed is not None or backend.save_path is not None,
        reasoning_template=False,
    )


def _kv_of(backend: BackendConfig, cache_type: str | None = None) -> KvShape | None:
    """KV as configured, or with another cache type."""
    managed = backend.managed
    assert managed is not None
    if backend.kv_bytes_per_token is not None and cache_type is None:
        return KvShape(backend.kv_bytes_per_token)
    types = (cache_type or managed.cache_type_k, cache_type or managed.cache_type_v)
    try:
        return read_model(model_path(managed.model)).kv(*types)
    except (EngineSettingsError, NotGguf, KvUnknown, OSError):
        return None
