"""What a dispatcher publishes of its backend, in the shape that `/swarm/state` shows."""

from __future__ import annotations

from typing import Any

from backends.protocol import EngineInfo
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.turn_run import TurnRun
from orchestrator.scheduler import SchedulerView


def backend_state(
    options: DispatcherOptions,
    info: EngineInfo | None,
    healthy: bool,
    view: SchedulerView,
    runs: dict[str, TurnRun],
    step_s: float | None,
) -> dict[str, Any]:
    """One backend's entry. Bytes are None where the engine's bytes per token are not known."""
    per_token = info.kv_bytes_per_token if info else None

    def kv_bytes(tokens: int) -> int | None:
        return tokens * per_token if per_token is not None else None

    used = sum(slot.kv_tokens for slot in view.slots)
    owned = {turn.id: turn for turn in view.owned}
    slots = []
    for slot in view.slots:
        turn = owned.get(slot.turn or "")
        run = runs.get(slot.turn or "")
        slots.append(
            {
                "id": slot.id,
                "state": turn.phase if turn and slot.state == "busy" else slot.state.value,
                "turn": slot.turn,
                "agent": slot.agent,
                "priority": slot.priority if slot.agent else None,
                "kv_tokens": slot.kv_tokens,
                "kv_bytes": kv_bytes(slot.kv_tokens),
                "tokens": run.n_tokens if run else None,
                "max_tokens": run.record.request.size.max_tokens if run else None,
                "preemptions": run.preemptions if run else None,
            }
        )
    paused = [
        {
            "turn": turn.id,
            "agent": turn.agent,
            "tier": turn.tier.value,
            "kv_bytes": kv_bytes(turn.kv_tokens if turn.slot is not None else 0),
            "priority": turn.priority,
            "kv_tokens": turn.kv_tokens,
            "tokens": runs[turn.id].n_tokens if turn.id in runs else None,
            "max_tokens": runs[turn.id].record.request.size.max_tokens if turn.id in runs else None,
            "held": turn.phase == "held",
            "preemptions": turn.preemptions,
        }
        for turn in view.owned
        if turn.tier is not None
    ]
    budget = info.kv_budget_tokens if info else 0
    return {
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
            "budget_bytes": kv_bytes(budget),
            "used_bytes": kv_bytes(used),
            "bytes_per_token": per_token,
            "budget_tokens": budget,
            "used_tokens": used,
            "layout": info.kv_layout.value if info else None,
        },
        "slots": slots,
        "step_s": step_s,
        "paused": paused,
        "native_park": info.native_park if info else False,
    }
