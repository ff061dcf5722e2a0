"""Replies of a service in the middle of its work."""

from __future__ import annotations

from typing import Any

CLASSES = {"foreground": 100, "normal": 50, "background": 20, "batch": 0}
KV_BYTES = 23_040


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
    }


def busy_state(*, per_token: int | None = KV_BYTES) -> dict[str, Any]:
    """Twelve slots: a foreground turn and seven others decode, two are parked, one is cache, one empty."""
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
            )
        )
    paused = []
    for number, (agent, tokens) in enumerate([("reviewer", 611), ("indexer", 44)], start=8):
        priority = 20 if agent == "reviewer" else 0
        turn = turn_id(number + 1)
        kv = 60 + tokens
        slots.append(
            slot(number, "paused", agent, priority, tokens, 1500, kv, turn=turn, per_token=per_token)
        )
        paused.append(
            {
                "turn": turn,
                "agent": agent,
                "tier": "resident",
                "kv_bytes": None if per_token is None else kv * per_token,
                "priority": priority,
                "kv_tokens": kv,
                "tokens": tokens,
                "max_tokens": 1500,
                "held": number == 9,
                "preemptions": number - 7,
            }
        )
    paused.append(
        {
            "turn": turn_id(40),
            "agent": "tester",
            "tier": "dropped",
            "kv_bytes": 0,
            "priority": 20,
            "kv_tokens": 0,
            "tokens": 902,
            "max_tokens": 1500,
            "held": False,
            "preemptions": 12,
        }
    )
    slots.append(slot(10, "idle", "editor", 100, kv_tokens=96, per_token=per_token))
    slots.append(slot(11, "empty", per_token=per_token))
    used = sum(entry["kv_tokens"] for entry in slots)
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
                    "budget_bytes": None if per_token is None else 24_576 * per_token,
                    "used_bytes": None if per_token is None else used * per_token,
                    "bytes_per_token": per_token,
                    "budget_tokens": 24_576,
                    "used_tokens": used,
                    "layout": "split",
                },
                "slots": slots,
                "step_s": 0.0253,
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
    """A turn that was preempted once and is done."""
    t = 1_800_000_000.0
    return summary(3, "done", finish_reason="stop") | {
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
            {
                "t": t + 9.75,
                "event": "resumed",
                "slot": 4,
                "cached_tokens": 230,
                "tokens_reevaluated": 1,
                "engine_wait_s": 0.0267,
            },
            {"t": t + 15.1, "event": "done", "finish_reason": "stop", "tokens": 354},
        ]
    }
