"""How true the simulator is: one trace on the real engine through the service, and in the simulator.

In one run, on one engine process:

1. The engine is measured directly, then through the service (`calibration.py`, `service_delay.py`). The
   simulator's engine model comes from that alone: nothing is fitted to the replay. As machines change their
   speed, a step is measured again after the replay, and the model's steps get the mean of before and after.
2. A trace is drawn: background turns at random times, with the lengths of the reference mixture scaled down,
   so many that all decode slots together are busy for the given part of the time; and foreground turns of one
   person. Or a recorded trace is taken.
3. The trace is replayed on the real engine through the real service: each turn is sent at its time, whatever
   became of the others, with a prompt and a reply of exactly as many tokens as the trace says. A turn's wait
   is measured as in `wait.py`. With `--repeat 2` that is done twice: so far apart are two real runs.
4. The same trace is simulated, with the scheduling parameters that the service has for this engine.

The two clocks begin at the trace's 0. All turns are waited for; tokens per second are counted while turns
arrive.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import anyio
import yaml
from rich.console import Console

from agents.client import TurnResult, stream_chat
from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import EngineInfo, KvLayout
from benchmarks.calibration import Engine, Words, measure_engine, measure_step
from benchmarks.harness import (
    BenchError,
    ask,
    empty_slots,
    json_client,
    real_engine,
    run_async,
    running_service,
)
from benchmarks.report import Advance, progress_bar, ratio
from benchmarks.service_delay import engine_wait, measure_service, served
from benchmarks.truth_report import Measured, Truth, drift, report
from benchmarks.truth_settings import (
    BACKGROUND,
    CALIBRATE_S,
    DRAIN_BOUND_S,
    FOREGROUND,
    TruthSettings,
    config_of,
    make_trace,
    recorded,
)
from orchestrator.config import Config, ConfigError, parse_config
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.sizing import make_policy, swap_budget, within_budget
from orchestrator.scheduler import Policy
from orchestrator.simulation.calibrate import Calibration, CalibrationError, fit
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.outcome import TurnRow
from orchestrator.simulation.setup import BackendSetup, Setup
from orchestrator.simulation.simulation import simulate
from orchestrator.simulation.workload import Arrival, Recorded

BACKEND = "bench"
_LEAD_S = 0.5
_TICK_S = 0.5
_STEP_GAPS = 1.8


def run(settings: TruthSettings, *, json_path: Path | None = None, console: Console | None = None) -> Truth:
    """Calibrate, replay, simulate, print the table, write the JSON.

    Raises BenchError, ManagedEngineError, OSError.
    """
    with progress_bar(settings.total_s, "starting") as advance:
        found = run_async(measure, settings, advance)
    report(settings, found).finish(console or Console(), json_path)
    return found


async def measure(settings: TruthSettings, advance: Advance) -> Truth:
    """All columns, on a real engine of the bench's own."""
    shape = settings.shape
    async with real_engine(shape) as engine:
        backend = shape.external(engine)
        return await measure_on(settings, engine.url, backend, advance)


async def measure_on(
    settings: TruthSettings, url: str, backend: Mapping[str, Any], advance: Advance
) -> Truth:
    """All columns, on the engine at this address; `backend` is the service's configuration of it."""
    trace = recorded(settings, settings.trace) if settings.trace is not None else None
    if trace is not None:
        settings = replace(settings, duration_s=trace[-1].at_s + 1)
    calibration = await calibrate(settings, url, backend, advance)
    if trace is None:
        trace = make_trace(settings, calibration.model)
    config = config_of(settings, backend, trace)
    try:
        parsed = parse_config(yaml.safe_dump(config), "truth")
    except ConfigError as error:
        raise BenchError(f"the trace's agents cannot be configured: {str(error).splitlines()[0]}") from None
    policy, info = await service_policy(url, parsed)
    real = []
    for number in range(settings.repeat):
        await _clean(url)
        done_s = CALIBRATE_S + number * settings.duration_s * 1.1
        label = f"real run {number + 1} of {settings.repeat}"
        async with json_client(url) as api:
            words = await Words.of(api, settings.seed)
        async with running_service(config) as service:
            base = service.base_url
            real.append(await replay(settings, base, words, trace, _part(advance, done_s, label)))
    await _clean(url)
    step_after = await measure_step(_engine(settings, url), settings.effort)
    change = drift(calibration, step_after)
    if not math.isnan(change):
        calibration = calibration.with_steps(1 + change / 2)
    advance(settings.total_s, "simulating")
    simulated = simulated_run(settings, trace, calibration.model, policy, info, parsed.priorities)
    return Truth(trace, calibration, real, simulated, step_after)


def _engine(settings: TruthSettings, url: str) -> Engine:
    shape = settings.shape
    return Engine(url, shape.decode_slots, shape.engine_slots, shape.slot_context, shape.batch_tokens)


async def calibrate(
    settings: TruthSettings, url: str, backend: Mapping[str, Any], advance: Advance
) -> Calibration:
    """The engine alone, then behind the service. Raises BenchError."""
    shape, effort = settings.shape, settings.effort
    engine = _engine(settings, url)
    part_s = CALIBRATE_S * 0.6
    measured = await measure_engine(engine, effort, lambda done, label: advance(done * part_s, label))
    try:
        alone = fit(measured)
    except CalibrationError as error:
        raise BenchError(f"calibration: {error}") from None
    await _clean(url)
    advance(part_s, "behind the service")
    agents = [Arrival(0.0, name, name, 1, 1) for name in (FOREGROUND, BACKGROUND)]
    config = config_of(replace(settings, preemption=True), backend, agents)
    async with running_service(config) as service, json_client(url) as api:
        words = await Words.of(api, effort.seed + 1)
        figures = await measure_service(
            service.base_url,
            words,
            lanes=shape.decode_slots,
            slot_context=shape.slot_context,
            effort=effort,
            background={"X-Swarm-Agent": BACKGROUND},
            foreground={"X-Swarm-Agent": FOREGROUND},
        )
    return alone.behind_service(figures.controls_s, figures.calls_s, figures.step)


async def _clean(url: str) -> None:
    async with json_client(url) as api:
        try:
            await empty_slots(api)
        except BenchError:
            # An engine that does not erase: what is left in its slots shares nothing with the next prompts.
            return


async def service_policy(url: str, config: Config) -> tuple[Policy, EngineInfo]:
    """The scheduling parameters that the service gives this engine, by the service's own rules."""
    given, policy = config.backends[0], config.policy
    options = DispatcherOptions(
        pool=given.pool,
        name=given.name,
        kind=given.kind,
        decode_slots=given.decode_slots,
        preemption=policy.preemption,
        min_run_s=policy.min_run_s,
        max_preemptions=policy.max_preemptions,
        aging_s=policy.aging_s,
        priorities=tuple(sorted(config.priorities.values())),
        kv_budget_bytes=given.kv_budget_bytes,
        swap_budget=given.swap_budget,
    )
    adapter = LlamaCppBackend(
        url,
        LlamaCppOptions(
            kv_layout=KvLayout(given.kv_layout) if given.kv_layout else None,
            batch_tokens=given.batch_tokens,
            save_path=given.save_path,
            swap_tag="truth",
        ),
    )
    try:
        info = within_budget(await adapter.describe(), options)
        swap_bytes = swap_budget(options, info, adapter.swap_space())
        await adapter.clear_swap()
    finally:
        await adapter.aclose()
    return make_policy(options, info, swap_bytes, tag="truth"), info


# The real column ----------------------------------------------------------------------------------


async def replay(
    settings: TruthSettings,
    url: str,
    words: Words,
    trace: Sequence[Arrival],
    advance: Callable[[float], None],
) -> Measured:
    """Send each turn at its time, and wait for all. Raises BenchError when they do not end."""
    results = [TurnResult() for _ in trace]
    async with json_client(url) as admin:
        begin = anyio.current_time() + _LEAD_S
        with anyio.move_on_after(settings.duration_s + _LEAD_S + DRAIN_BOUND_S) as bound:
            async with anyio.create_task_group() as tasks, anyio.create_task_group() as turns:
                tasks.start_soon(_tick, begin, settings.duration_s, advance)
                for arrival, result in zip(trace, results, strict=True):
                    body = served(words.prompt(arrival.prompt_tokens), arrival.output_tokens)
                    await anyio.sleep_until(begin + arrival.at_s)
                    turns.start_soon(_send, url, body, arrival.agent, result)
        if bound.cancelled_caught:
            raise BenchError(f"turns did not end within {DRAIN_BOUND_S:g} s after the last one came")
        counters = (await ask(admin, "GET", "/swarm/state"))["counters"]
        found = measured(settings, trace, results, begin, int(counters.get("preemptions", 0)))
        for arrival, result in zip(trace, results, strict=True):
            if arrival.priority_class == FOREGROUND and result.wait_s is not None:
                found.service_s.append(result.wait_s - await engine_wait(admin, result))
    return found


async def _send(url: str, body: Mapping[str, Any], agent: str, result: TurnResult) -> None:
    await stream_chat(url, body, {"X-Swarm-Agent": agent}, path="/v1/completions", into=result)


def measured(
    settings: TruthSettings,
    trace: Sequence[Arrival],
    results: Sequence[TurnResult],
    begin: float,
    preemptions: int,
) -> Measured:
    """A real run's figures from its turns; `begin` is the trace's 0."""
    found = Measured(preemptions=preemptions)
    end = begin + settings.duration_s
    tokens = 0.0
    step_gaps: list[float] = []
    for arrival, result in zip(trace, results, strict=True):
        if result.error is not None:
            found.errors.append(f"{arrival.agent}: {result.error}")
            continue
        if result.tokens != arrival.output_tokens or result.prompt_tokens != arrival.prompt_tokens:
            found.errors.append(
                f"{arrival.agent}: {result.prompt_tokens} + {result.tokens} tokens instead of "
                f"{arrival.prompt_tokens} + {arrival.output_tokens}"
            )
        if result.wait_s is None or result.ttft_s is None or result.total_s is None:
            found.errors.append(f"{arrival.agent}: the server did not tell when the turn started")
        elif arrival.priority_class == FOREGROUND:
            found.waits.append(result.wait_s)
            found.first_tokens.append(result.ttft_s)
        else:
            found.background_whole.append(result.total_s)
            within = sum(1 for moment in result.times if begin <= moment < end)
            # A piece of text is a token, but for those without text of their own.
            tokens += within * ratio(result.tokens, result.pieces)
            step_gaps += [after - before for before, after in pairwise(result.times)]
    found.background_rate = tokens / settings.duration_s
    if step_gaps:
        most = _STEP_GAPS * median(step_gaps)
        found.step_s = fmean(gap for gap in step_gaps if gap <= most)
    found.end_s = max((result.ended or begin for result in results), default=begin) - begin
    return found


# The simulated column -----------------------------------------------------------------------------


def simulated_run(
    settings: TruthSettings,
    trace: Sequence[Arrival],
    model: EngineModel,
    policy: Policy,
    info: EngineInfo,
    classes: Mapping[str, int],
) -> Measured:
    """The same trace in the simulator."""
    backend = BackendSetup(BACKEND, policy, model, slot_tokens=info.slot_context)
    setup = Setup((backend,), classes, Recorded(trace))
    rows: list[TurnRow] = []
    outcome = simulate(setup, until_s=settings.duration_s, seed=settings.seed, sink=rows.append)
    found = Measured()
    for row in sorted(rows, key=lambda row: row.number):
        if row.refused or row.wait_s is None or row.first_token_s is None:
            found.errors.append(f"{row.agent}: refused")
        elif row.priority_class == FOREGROUND:
            found.waits.append(row.wait_s)
            found.first_tokens.append(row.first_token_s)
        else:
            found.background_whole.append(row.end_s - row.arrival_s)
    others = [name for name in outcome.classes if name != FOREGROUND]
    found.background_rate = outcome.tokens_per_s(*others) if others else 0.0
    found.preemptions = sum(each.preemptions for each in outcome.classes.values())
    engine = outcome.backends[BACKEND]
    # For each token, as the gaps of real streams are.
    found.step_s = ratio(engine.lane_s, engine.generated)
    found.end_s = outcome.end_s
    return found


def _part(advance: Advance, done_s: float, label: str) -> Callable[[float], None]:
    return lambda passed_s: advance(done_s + passed_s, label)


async def _tick(begin: float, total_s: float, advance: Callable[[float], None]) -> None:
    while (passed_s := anyio.current_time() - begin) < total_s:
        advance(passed_s)
        await anyio.sleep(_TICK_S)
