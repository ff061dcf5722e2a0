"""Small swarms, at hand and at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from agents.workload import Lengths
from orchestrator.scheduler import Policy, SwapPolicy
from orchestrator.simulation import (
    Arrival,
    BackendSetup,
    Bursty,
    ClosedLoop,
    EngineModel,
    Fixed,
    Outcome,
    Poisson,
    Recorded,
    Sessions,
    Setup,
    Several,
    TurnRow,
    Workload,
    simulate,
)

CLASSES = {"batch": 0, "background": 20, "normal": 50, "foreground": 100}
#: Every part of a step costs something, none of it a round number.
MODEL = EngineModel(
    base_step_s=0.0113,
    lane_s=0.00171,
    running_token_s=1.3e-6,
    parked_token_s=0.7e-6,
    prefill_token_s=0.00023,
    batch_tokens=64,
    save_token_s=9.7e-6,
    restore_token_s=4.3e-6,
    flush_s=0.0041,
    control_s=0.0037,
    call_s=0.0013,
)
#: Nothing but a step of a quarter of a second: times that can be told by heart.
PLAIN = EngineModel(base_step_s=0.25)


def policy(decode: int = 2, spare: int = 2, **changes: Any) -> Policy:
    priorities = tuple(CLASSES.values())
    return Policy(decode, decode + spare, priorities=priorities, **changes)


def setup(*turns: Arrival, model: EngineModel = PLAIN, **changes: Any) -> Setup:
    """One backend and these arrivals."""
    backend = BackendSetup("one", changes.pop("policy", policy()), model)
    return Setup((backend,), CLASSES, Recorded(turns), **changes)


def turn(at_s: float, agent: str, tokens: int, prompt: int = 1, shared: int = 0) -> Arrival:
    """An arrival whose class is the first word of its agent's name."""
    return Arrival(at_s, agent, agent.partition("-")[0], prompt, tokens, shared)


def rows_of(what: Setup, **run: Any) -> tuple[list[TurnRow], Outcome]:
    """All rows in the order of the turns, and the outcome."""
    rows: list[TurnRow] = []
    run.setdefault("seed", 1)
    if "until_turns" not in run:
        run.setdefault("until_s", 1000.0)
    outcome = simulate(what, sink=rows.append, **run)
    return sorted(rows, key=lambda row: row.number), outcome


def one_step_at_a_time(what: Setup) -> Setup:
    return replace(what, stride=1)


SIZES = st.one_of(
    st.integers(1, 120).map(Fixed),
    st.floats(20, 200).map(lambda mean: Lengths(mean, 0.9, 1, 400)),
)


@st.composite
def workloads(draw: st.DrawFn, number: int = 0) -> Workload:
    """One agent's, or one group's; nothing that happens at the same moment as anything else."""
    priority_class = draw(st.sampled_from(sorted(CLASSES)))
    name = f"{priority_class}-{number}"
    sizes: dict[str, Any] = {"output": draw(SIZES), "prompt": draw(SIZES)}
    match draw(st.integers(0, 3)):
        case 0:
            clients, think_s = draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 1.0]))
            return ClosedLoop(name, priority_class, clients, **sizes, think_s=think_s, start_s=1.0)
        case 1:
            return Poisson(name, priority_class, draw(st.floats(0.2, 4.0)), **sizes)
        case 2:
            return Bursty(name, priority_class, draw(st.floats(1.0, 8.0)), 2.0, 4.0, **sizes)
    return Sessions(
        name,
        priority_class,
        agents=draw(st.integers(1, 3)),
        system_tokens=60,
        question=Fixed(40),
        result=Fixed(30),
        output=Fixed(25),
        tool_s=0.3,
        rest_s=1.0,
        context_tokens=500,
    )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    backends = []
    for number in range(draw(st.integers(1, 3))):
        decode, spare = draw(st.integers(1, 4)), draw(st.integers(0, 3))
        budget = draw(st.sampled_from([None, 900, 1400]))
        swap = SwapPolicy(draw(st.sampled_from([30_000, 400_000])), token_bytes=100, tag=f"b{number}")
        backends.append(
            BackendSetup(
                f"b{number}",
                policy(
                    decode,
                    spare,
                    first_slots=(spare + 1) // 2,
                    kv_budget_tokens=budget,
                    swap=draw(st.sampled_from([None, swap])),
                    preemption=draw(st.booleans()),
                    aging_s=2.0,
                ),
                replace(
                    MODEL,
                    base_step_s=MODEL.base_step_s + 1e-4 * number,
                    batch_tokens=draw(st.sampled_from([8, 64, 512])),
                    call_s=draw(st.sampled_from([0.0, 0.0013])),
                ),
                slot_tokens=draw(st.sampled_from([None, 700])),
            )
        )
    return Setup(
        tuple(backends),
        CLASSES,
        Several(tuple(draw(workloads(number)) for number in range(draw(st.integers(1, 3))))),
        limits=draw(st.sampled_from([None, {"background": 150}])),
    )
