"""What a dispatcher publishes of its backend, in the shape that `/swarm/state` shows."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from backends.protocol import EngineInfo
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.turn_run import TurnRun
from orchestrator.scheduler import CostView, SchedulerView, SwapView, TurnView


def backend_state(
    options: DispatcherOptions,
    info: EngineInfo | None,
    healthy: bool,
    view: SchedulerView,
    runs: dict[str, TurnRun],
    now: float,
) -> dict[str, Any]:
    """One backend's entry. Bytes are None where the engine's bytes per token are not known.

    `at`: when it was true, seconds since the epoch; `now` is the scheduler's clock.
    """
    shape = info.kv if info else None

    def kv_bytes(tokens: int) -> int | None:
        return shape.bytes(tokens) if shape is not None else None

    owned = {turn.id: turn for turn in view.owned}
    slots = []
    for slot in view.slots:
        turn = owned.get(slot.turn or "")
        slots.append(
            {
                "id": slot.id,
                "state": turn.phase if turn and slot.state == "busy" else slot.state.value,
                "turn": slot.turn,
                "agent": slot.agent,
                "priority": slot.priority if slot.agent else None,
                "kv_tokens": slot.kv_tokens,
                "kv_bytes": kv_bytes(slot.kv_tokens),
                "copy": slot.copy,
                **_progress(runs.get(slot.turn or "")),
                "predicted_resume_s": {tier.value: cost for tier, cost in turn.resume_s.items()}
                if turn
                else None,
            }
        )
    paused = [
        {
            "turn": turn.id,
            "agent": turn.agent,
            "tier": turn.tier.value,
            "priority": turn.priority,
            "kv_tokens": turn.kv_tokens,
            "kv_bytes": kv_bytes(turn.kv_tokens if turn.slot is not None else 0),
            "swap_bytes": turn.swap_bytes,
            "held": turn.phase == "held",
            **_progress(runs.get(turn.id)),
            "preemptions": turn.preemptions,
            "predicted_resume_s": _predicted(turn),
        }
        for turn in view.owned
        if turn.tier is not None
    ]
    budget = info.kv_budget_tokens if info else 0
    used = sum(slot.kv_tokens for slot in view.slots)
    return {
        "at": time.time(),
        "name": options.name,
        "kind": options.kind,
        "pool": options.pool,
        "healthy": healthy,
        "model": info.model if info else None,
        "decode_slots": options.decode_slots,
        "decoding": view.decoding,
        "engine_slots": info.engine_slots if info else 0,
        "slot_context": info.slot_context if info else 0,
        "kv": {
            "layout": info.kv_layout.value if info else None,
            "bytes_per_token": shape.token_bytes + shape.window_token_bytes if shape else None,
            "budget_tokens": budget,
            "budget_bytes": kv_bytes(budget),
            "used_tokens": used,
            "used_bytes": sum(kv_bytes(slot.kv_tokens) or 0 for slot in view.slots) if shape else None,
            "charged_tokens": view.kv_tokens_charged,
            "charged_bytes": kv_bytes(view.kv_tokens_charged),
            "owners": view.kv_owners,
        },
        "swap": _swap(view.swap, now),
        "costs": _costs(view.costs),
        "slots": slots,
        "step_s": view.costs.step_s,
        "paused": paused,
        "native_park": info.native_park if info else False,
        "engine": asdict(info) if info else None,
    }


_ENGINE = TypeAdapter(EngineInfo)


def published_engine(state: dict[str, Any]) -> EngineInfo | None:
    """The engine that a published state is of; None where its owner did not know it yet."""
    engine = state.get("engine")
    return _ENGINE.validate_python(engine) if engine else None


def _progress(run: TurnRun | None) -> dict[str, Any]:
    return {
        "tokens": run.n_tokens if run else None,
        "max_tokens": run.record.request.size.max_tokens if run else None,
        "preemptions": run.preemptions if run else None,
        "resume_cost_s": run.resume_cost_s if run else None,
        "tokens_reevaluated": run.reevaluated if run else None,
    }


def _predicted(turn: TurnView) -> float | None:
    return turn.resume_s[turn.tier] if turn.tier is not None else None


def _swap(swap: SwapView, now: float) -> dict[str, Any]:
    return {
        "enabled": swap.budget_bytes > 0,
        "budget_bytes": swap.budget_bytes,
        "used_bytes": swap.used_bytes,
        "files": swap.files,
        "turns": swap.turns,
        "saves": swap.saves,
        "restores": swap.restores,
        "failures": swap.failures,
        "stalls": swap.stalls,
        "paused_until_s": swap.paused_until - now if swap.paused_until is not None else None,
    }


def _costs(costs: CostView) -> dict[str, float | None]:
    def per_thousand(rate: float | None) -> float | None:
        return rate * 1000 if rate is not None else None

    return {
        "prefill_tokens_per_s": 1 / costs.prefill_s if costs.prefill_s else None,
        "save_s_per_1k_tokens": per_thousand(costs.save_s),
        "restore_s_per_1k_tokens": per_thousand(costs.restore_s),
        "resident_s_per_1k_tokens": per_thousand(costs.parked_step_s),
        "resident_reevaluated": costs.resident_reevaluated,
        "swapped_reevaluated": costs.swapped_reevaluated,
    }
