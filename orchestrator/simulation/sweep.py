"""A grid of simulations: what changes with slots, preemption, policy, KV precision and load.

Each point of the grid is simulated with the same seeds, so that points differ by what was changed and not by
who happened to ask when. One CSV row is one replication of one point; the same sweep gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orchestrator.scheduler import Policy
from orchestrator.simulation.engine_model import EngineModel
from orchestrator.simulation.outcome import Outcome
from orchestrator.simulation.setup import BackendSetup, Setup
from orchestrator.simulation.simulation import simulate
from orchestrator.simulation.sweep_grid import PARAMETERS, Point, Sweep, SweepError
from orchestrator.simulation.workload import Demo, Poisson, Several, Sizes, Workload


@dataclass(frozen=True, slots=True)
class Background:
    """The turns whose number the load sets: Poisson, of one agent. The means are those of the sizes."""

    agent: str
    priority_class: str
    output: Sizes
    mean_output: float
    prompt: Sizes
    mean_prompt: float

    def at(self, per_s: float) -> Workload:
        """So many turns a second."""
        return Poisson(self.agent, self.priority_class, per_s, self.output, self.prompt)


@dataclass(frozen=True, slots=True)
class PartOfCapacity:
    """`load` is the part of all that the decode slots can do that the background asks for.

    `foreground` is the same at every load.
    """

    foreground: Workload
    background: Background

    def __call__(self, load: float, backend: BackendSetup) -> Workload:
        """Who asks at this load."""
        return Several((self.foreground, self.background.at(load * self._turns_per_s(backend))))

    def _turns_per_s(self, backend: BackendSetup) -> float:
        """Background turns that all decode slots could end in a second, if they did nothing else.

        A turn takes a step for each token of its reply, and its prompt's tokens what they add to the steps of
        all; contexts are taken halfway through the reply.
        """
        lanes, model = backend.policy.decode_slots, backend.model
        each = self.background
        context = int(lanes * (each.mean_prompt + each.mean_output / 2))
        step_s = model.step_s(lanes, context, 0, 0)
        prompt_s = lanes * each.mean_prompt * model.prefill_token_s
        return lanes / (each.mean_output * step_s + prompt_s)


@dataclass(frozen=True, slots=True)
class TimesTheClients:
    """`load` multiplies the clients of every agent below the top class; half clients are rounded up."""

    agents: tuple[Demo, ...]
    top_class: str

    def __call__(self, load: float, backend: BackendSetup) -> Workload:
        """Who asks at this load."""
        return Several(
            tuple(
                agent
                if agent.priority_class == self.top_class
                else replace(agent, clients=max(1, math.floor(agent.clients * load + 0.5)))
                for agent in self.agents
            )
        )


@dataclass(frozen=True, slots=True)
class Base:
    """What a sweep changes, and what stays.

    `workload` says who asks at a load. `kv_bytes`: memory for KV, and `token_bytes` what a token takes of it
    by cache type; `kv` is the type that `backend` was made for and its model measured with. Without
    `kv_bytes` there is nothing that a cache type would change.
    """

    backend: BackendSetup
    classes: Mapping[str, int]
    workload: Callable[[float, BackendSetup], Workload]
    load: float = 0.9
    kv: str = "f16"
    kv_bytes: int | None = None
    token_bytes: Mapping[str, int] = field(default_factory=dict)

    def setup(self, point: Point) -> Setup:
        """One point's simulation. Raises SweepError for a cache type whose bytes are unknown."""
        model, policy = self._with_kv(point, self._policy(point))
        backend = replace(self.backend, policy=policy, model=model)
        load = point.load if point.load is not None else self.load
        return Setup((backend,), self.classes, self.workload(load, backend))

    def _policy(self, point: Point) -> Policy:
        policy = self.backend.policy
        slots = point.slots if point.slots is not None else policy.decode_slots
        spare = point.spare if point.spare is not None else policy.engine_slots - policy.decode_slots
        changes: dict[str, Any] = {
            name: value
            for name in ("preemption", "min_run_s", "max_preemptions", "aging_s")
            if (value := getattr(point, name)) is not None
        }
        # As the dispatcher does: half of the spare slots are for the highest class.
        return replace(
            policy,
            decode_slots=slots,
            engine_slots=slots + spare,
            first_slots=(spare + 1) // 2,
            **changes,
        )

    def _with_kv(self, point: Point, policy: Policy) -> tuple[EngineModel, Policy]:
        """A token of fewer bytes: more of them fit, and reading or copying one takes less."""
        model = self.backend.model
        if point.kv is None:
            return model, policy
        if self.kv_bytes is None or self.kv not in self.token_bytes:
            raise SweepError("sweep: kv has no effect here: the memory for KV is unknown")
        if point.kv not in self.token_bytes:
            known = ", ".join(self.token_bytes)
            raise SweepError(f"sweep: kv is {point.kv}; known are {known}")
        bytes_ = self.token_bytes[point.kv]
        part = bytes_ / self.token_bytes[self.kv]
        model = replace(
            model,
            running_token_s=model.running_token_s * part,
            parked_token_s=model.parked_token_s * part,
            save_token_s=model.save_token_s * part,
            restore_token_s=model.restore_token_s * part,
        )
        swap = policy.swap and replace(policy.swap, token_bytes=bytes_)
        return model, replace(policy, kv_budget_tokens=self.kv_bytes // bytes_, swap=swap)


# Running ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One replication of one point. `wait_*` and `first_token_*` are the highest class's, in seconds.

    `background_*` is of all classes below it.
    """

    slots: int
    spare: int
    preemption: bool
    load: float
    kv: str
    min_run_s: float
    max_preemptions: int
    aging_s: float
    kv_budget_tokens: int | None
    seed: int
    foreground_turns: int
    wait_p50_s: float
    wait_p90_s: float
    wait_p99_s: float
    wait_max_s: float
    first_token_p50_s: float
    first_token_p90_s: float
    first_token_p99_s: float
    background_turns: int
    background_tokens_per_s: float
    background_whole_mean_s: float
    preemptions: int
    resident_resumes: int
    swapped_resumes: int
    dropped_resumes: int
    evaluated_again: int
    refused: int
    busy: float


COLUMNS = tuple(each.name for each in fields(SweepRow))


def run_sweep(
    sweep: Sweep,
    base: Base,
    *,
    until_s: float,
    seed: int = 1,
    advance: Callable[[int, str], None] | None = None,
) -> Iterator[SweepRow]:
    """Simulate all points, `until_s` seconds each. `advance` is told how many runs are done, and of what.

    Raises SweepError, at the first row for what no point can be simulated with.
    """
    setups = [(point, base.setup(point)) for point in sweep.points()]
    done = 0
    for point, setup in setups:
        for number in range(sweep.replications):
            if advance is not None:
                advance(done, _label(point))
            yield _row(base, point, setup, simulate(setup, until_s=until_s, seed=seed + number))
            done += 1


def _label(point: Point) -> str:
    values = {name: getattr(point, name) for name in PARAMETERS}
    return " ".join(f"{name}={cell(value)}" for name, value in values.items() if value is not None)


def _row(base: Base, point: Point, setup: Setup, outcome: Outcome) -> SweepRow:
    policy = setup.backends[0].policy
    top, figures = outcome.classes[setup.top_class], list(outcome.classes.values())
    engine = outcome.backends[setup.backends[0].name]
    background = {name: each for name, each in outcome.classes.items() if name != setup.top_class}
    turns = sum(each.turns for each in background.values())
    whole_s = sum(each.turns * each.whole.mean for each in background.values() if each.turns)

    def resumes(tier: str) -> int:
        return sum(each.resumes[tier] for each in figures)

    return SweepRow(
        slots=policy.decode_slots,
        spare=policy.engine_slots - policy.decode_slots,
        preemption=policy.preemption,
        load=base.load if point.load is None else point.load,
        kv=base.kv if point.kv is None else point.kv,
        min_run_s=policy.min_run_s,
        max_preemptions=policy.max_preemptions,
        aging_s=policy.aging_s,
        kv_budget_tokens=policy.kv_budget_tokens,
        seed=outcome.seed,
        foreground_turns=top.turns,
        wait_p50_s=top.wait.quantile(0.5),
        wait_p90_s=top.wait.quantile(0.9),
        wait_p99_s=top.wait.quantile(0.99),
        wait_max_s=top.wait.quantile(1.0),
        first_token_p50_s=top.first_token.quantile(0.5),
        first_token_p90_s=top.first_token.quantile(0.9),
        first_token_p99_s=top.first_token.quantile(0.99),
        background_turns=turns,
        background_tokens_per_s=sum(outcome.tokens_per_s(name) for name in background),
        background_whole_mean_s=whole_s / turns if turns else math.nan,
        preemptions=sum(each.preemptions for each in figures),
        resident_resumes=resumes("resident"),
        swapped_resumes=resumes("swapped"),
        dropped_resumes=resumes("dropped"),
        evaluated_again=sum(each.evaluated_again for each in figures),
        refused=sum(each.refused for each in figures),
        busy=engine.busy_s / outcome.end_s if outcome.end_s > 0 else math.nan,
    )


def cell(value: Any) -> str:
    """A value as the CSV has it: six digits are more than any of them is exact to."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, ".6g")
    return "" if value is None else str(value)


def csv_text(rows: Iterable[SweepRow]) -> str:
    """The CSV, header first. Lines end in a newline on every platform."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([cell(getattr(row, name)) for name in COLUMNS] for row in rows)
    return text.getvalue()
