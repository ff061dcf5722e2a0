"""Replies of a service in the middle of its work."""

from __future__ import annotations

from typing import Any

CLASSES = {"foreground": 100, "normal": 50, "background": 20, "batch": 0}
KV_BYTES = 23_040
STEP_S = 0.0253
COSTS = {
    "prefill_tokens_per_s": 230.0,
    "save_s_per_1k_tokens": 0.0098,
    "restore_s_per_1k_tokens": 0.0041,
    "resident_s_per_1k_tokens": 0.0011,
    "resident_reevaluated": 0.0004,
    "swapped_reevaluated": 0.0006,
}
SWAP = {
    "enabled": True,
    "budget_bytes": 1 << 30,
    "used_bytes": (671 + 1364) * KV_BYTES + 32,
    "files": 2,
    "turns": 2,
    "saves": 7,
    "restores": 5,
    "failures": 0,
    "stalls": 1,
    "paused_until_s": None,
}


def turn_id(number: int) -> str:
    return f"turn-{number * 0x9E3779B97F4A7C15F39C % (1 << 80):020x}"


def slot(
    number: int,
    state: str,
    agent: str | None = None,
    priority: int | None = None,
    tokens: int | None = None,
    max_tokens: int | None = None,
    kv_tokens: int = 0,
    *,
    turn: str | None = None,
    preemptions: int | None = None,
    per_token: int | None = KV_BYTES,
    copy: bool = False,
    resume_cost_s: float = 0.0,
) -> dict[str, Any]:
    return {
        "id": number,
        "state": state,
        "turn": turn,
        "agent": agent,
        "priority": priority,
        "kv_tokens": kv_tokens,
        "kv_bytes": None if per_token is None else kv_tokens * per_token,
        "tokens": tokens,
        "max_tokens": max_tokens,
        "preemptions": preemptions,
        "copy": copy,
        "resume_cost_s": resume_cost_s,
        "tokens_reevaluated": 0,
        "predicted_resume_s": predicted(kv_tokens if turn else None),
    }


def predicted(kv_tokens: int | None) -> dict[str, float | None]:
    """What resumes would take on an engine with the figures of `COSTS`."""
    if kv_tokens is None:
        return {"resident": None, "swapped": None, "dropped": None}
    return {
        "resident": STEP_S,
        "swapped": STEP_S + kv_tokens * 4.1e-6,
        "dropped": STEP_S + kv_tokens / COSTS["prefill_tokens_per_s"],
    }


def paused_turn(
    number: int, agent: str, tier: str, tokens: int, *, per_token: int | None = KV_BYTES, **changes: Any
) -> dict[str, Any]:
    kv_tokens = 0 if tier == "dropped" else 60 + tokens
    resident = tier == "resident"
    return {
        "turn": turn_id(number),
        "agent": agent,
        "tier": tier,
        "kv_bytes": None if per_token is None else kv_tokens * per_token if resident else 0,
        "priority": 20,
        "kv_tokens": kv_tokens,
        "tokens": tokens,
        "max_tokens": 1500,
        "held": False,
        "preemptions": 1,
        "swap_bytes": 0 if tier != "swapped" else kv_tokens * (per_token or KV_BYTES) + 16,
        "resume_cost_s": 0.0,
        "tokens_reevaluated": 0,
        "predicted_resume_s": predicted(60 + tokens)[tier],
        **changes,
    }


def busy_state(*, per_token: int | None = KV_BYTES, layout: str = "unified") -> dict[str, Any]:
    """Twelve slots: a foreground turn and seven others decode, two are parked, one is cache, one empty.

    Four turns are paused: two resident, of which one has a copy in a file, one swapped and one dropped.
    """
    agents = ["editor", "reviewer", "reviewer", "tester", "tester", "refactorer", "refactorer", "indexer"]
    slots = []
    for number, agent in enumerate(agents):
        foreground = agent == "editor"
        limit = 512 if foreground else 1500
        tokens = 12 if foreground else 173 * number + 9
        slots.append(
            slot(
                number,
                "starting" if number == 7 else "running",
                agent,
                100 if foreground else 0 if agent == "indexer" else 20,
                tokens,
                limit,
                60 + tokens,
                turn=turn_id(number + 1),
                preemptions=number % 3,
                per_token=per_token,
                resume_cost_s=number % 3 * 0.0284,
            )
        )
    paused = [
        paused_turn(9, "reviewer", "resident", 611, per_token=per_token, swap_bytes=671 * KV_BYTES + 16),
        paused_turn(10, "indexer", "resident", 44, per_token=per_token, priority=0, held=True, preemptions=2),
        paused_turn(39, "refactorer", "swapped", 1304, per_token=per_token, resume_cost_s=0.0312),
        paused_turn(40, "tester", "dropped", 902, per_token=per_token, resume_cost_s=9.31, preemptions=12),
    ]
    for number, turn in enumerate(paused[:2], start=8):
        known = (turn[key] for key in ("agent", "priority", "tokens", "max_tokens", "kv_tokens"))
        copy = turn["swap_bytes"] > 0
        slots.append(slot(number, "paused", *known, turn=turn["turn"], per_token=per_token, copy=copy))
    slots.append(slot(10, "idle", "editor", 100, kv_tokens=96, per_token=per_token))
    slots.append(slot(11, "empty", per_token=per_token))
    used = sum(entry["kv_tokens"] for entry in slots)
    owners = {
        "running": sum(entry["kv_tokens"] for entry in slots[:8]),
        "paused": sum(entry["kv_tokens"] for entry in slots[8:10]),
        "idle": 96,
        "reserved": sum(entry["max_tokens"] - entry["tokens"] for entry in slots[:8]),
    }
    charged = sum(owners.values())
    return {
        "backends": [
            {
                "name": "local",
                "kind": "llama.cpp",
                "pool": "default",
                "healthy": True,
                "model": "smollm2-135m",
                "decode_slots": 8,
                "decoding": 8,
                "engine_slots": 12,
                "slot_context": 2048,
                "kv": {
                    "layout": layout,
                    "bytes_per_token": per_token,
                    "budget_tokens": 24_576,
                    "budget_bytes": None if per_token is None else 24_576 * per_token,
                    "used_tokens": used,
                    "used_bytes": None if per_token is None else used * per_token,
                    "charged_tokens": charged,
                    "charged_bytes": None if per_token is None else charged * per_token,
                    "owners": owners,
                },
                "swap": dict(SWAP),
                "costs": dict(COSTS),
                "slots": slots,
                "step_s": STEP_S,
                "native_park": False,
            }
        ],
        "queue": {"waiting": 3, "by_class": {"foreground": 0, "normal": 0, "background": 2, "batch": 1}},
        "paused": paused,
        "counters": {
            "preemptions": 17,
            "resumes": 14,
            "tokens_reevaluated": 14,
            "turns_done": 1203,
            "turns_failed": 0,
            "turns_cancelled": 2,
        },
    }


def swap_trouble() -> dict[str, Any]:
    """As `busy_state`, after a folder has filled up."""
    state = busy_state()
    state["backends"][0]["swap"] |= {"failures": 3, "paused_until_s": 27.4}
    return state


def older_state() -> dict[str, Any]:
    """As `busy_state`, from a service that knows nothing of swap and costs."""
    state = busy_state(layout="split")
    (backend,) = state["backends"]
    del backend["swap"], backend["costs"]
    for key in ("charged_tokens", "charged_bytes", "owners"):
        del backend["kv"][key]
    state["paused"] = [turn for turn in state["paused"] if turn["tier"] != "swapped"]
    newer = ("copy", "resume_cost_s", "tokens_reevaluated", "predicted_resume_s", "swap_bytes")
    for entry in (*backend["slots"], *state["paused"]):
        for key in newer:
            entry.pop(key, None)
    return state


def down_state() -> dict[str, Any]:
    """A backend that nobody has heard of lately."""
    return {
        "backends": [
            {
                "name": "mine",
                "kind": "llama.cpp",
                "pool": "default",
                "healthy": False,
                "decode_slots": 0,
                "engine_slots": 0,
                "kv": {"budget_bytes": 0, "used_bytes": 0, "bytes_per_token": None},
                "slots": [],
                "step_s": None,
            }
        ],
        "queue": {"waiting": 0, "by_class": dict.fromkeys(CLASSES, 0)},
        "paused": [],
        "counters": dict.fromkeys(("preemptions", "resumes", "turns_done", "turns_failed"), 0),
    }


def summary(number: int, state: str, agent: str = "reviewer", **changes: Any) -> dict[str, Any]:
    return {
        "id": turn_id(number),
        "pool": "default",
        "agent": agent,
        "priority": 20,
        "priority_class": "background",
        "state": state,
        "api": "chat",
        "model": "smollm2-135m",
        "stream": True,
        "created": 1_800_000_000.0,
        "seq": number,
        "backend": "local",
        "tier": None,
        "preemptions": 1,
        "prompt_tokens": 60,
        "tokens_generated": 354,
        "tokens_reevaluated": 1,
        "max_tokens": 1500,
        "finish_reason": None,
        "error": None,
        **changes,
    }


def story() -> dict[str, Any]:
    """A turn that was preempted twice, whose KV was in a file once and once could not be saved."""
    t = 1_800_000_000.0
    return summary(3, "done", finish_reason="stop", preemptions=2, tokens_reevaluated=232) | {
        "timeline": [
            {"t": t, "event": "queued", "agent": "reviewer", "priority": "background"},
            {"t": t + 1.204, "event": "claimed", "backend": "local"},
            {
                "t": t + 1.251,
                "event": "started",
                "slot": 4,
                "prompt_tokens": 60,
                "cached_tokens": 12,
                "engine_wait_s": 0.0412,
            },
            {
                "t": t + 5.5,
                "event": "paused",
                "by": turn_id(9),
                "stop_s": 0.0183,
                "tokens": 171,
                "kv_tokens": 231,
            },
            {"t": t + 6.1, "event": "swapped", "kv_tokens": 231, "file_bytes": 5_322_256, "stall_s": 0.0023},
            {"t": t + 9.70, "event": "restored", "kv_tokens": 231, "stall_s": 0.0011},
            {
                "t": t + 9.75,
                "event": "resumed",
                "tier": "swapped",
                "slot": 4,
                "cached_tokens": 230,
                "tokens_reevaluated": 1,
                "engine_wait_s": 0.0267,
            },
            {
                "t": t + 9.81,
                "event": "paused",
                "by": turn_id(11),
                "stop_s": 0.0201,
                "tokens": 172,
                "kv_tokens": 232,
            },
            {"t": t + 9.9, "event": "swap_failed", "error": "the swap folder is full"},
            {"t": t + 10.2, "event": "dropped"},
            {
                "t": t + 11.3,
                "event": "resumed",
                "tier": "dropped",
                "slot": 7,
                "cached_tokens": 0,
                "tokens_reevaluated": 231,
                "engine_wait_s": 1.04,
            },
            {"t": t + 15.1, "event": "done", "finish_reason": "stop", "tokens": 354},
        ]
    }
