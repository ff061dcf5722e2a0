"""``/healthz`` and ``/swarm/state``: what the dispatchers published, put together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import orjson
from redis.exceptions import RedisError
from starlette.types import Receive, Scope

from orchestrator.config import Backend
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply

HEALTH_BOUND_S = 2.0
COST_FIGURES = (
    *("prefill_tokens_per_s", "save_s_per_1k_tokens", "restore_s_per_1k_tokens"),
    *("resident_s_per_1k_tokens", "resident_reevaluated", "swapped_reevaluated"),
)
COUNTERS = (
    *("preemptions", "resumes", "tokens_reevaluated"),
    *("turns_done", "turns_failed", "turns_cancelled"),
)


def models(gateway: Gateway) -> Handler:
    """``GET /v1/models``: open to whoever sends no key, closed to a wrong one."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        gateway.identities.agent_of_key(dict(scope["headers"]))
        await reply.json(orjson.dumps(gateway.models.listing()))

    return handle


def model(gateway: Gateway) -> Handler:
    """``GET /v1/models/{id}``."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        gateway.identities.agent_of_key(dict(scope["headers"]))
        await reply.json(orjson.dumps(gateway.models.entry(scope["path_params"]["id"])))

    return handle


def healthz(gateway: Gateway) -> Handler:
    """``GET /healthz``: 200 when a turn would be served now."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        reason = "Redis does not answer"
        try:
            with anyio.fail_after(HEALTH_BOUND_S):
                if await _any_healthy(gateway):
                    await reply.json(b'{"status":"ok"}')
                    return
            reason = "no backend is healthy"
        except (RedisError, OSError, TimeoutError):
            pass
        await reply.json(orjson.dumps({"status": "unavailable", "reason": reason}), 503)

    return handle


async def _any_healthy(gateway: Gateway) -> bool:
    for backend in gateway.config.backends:
        state = await gateway.broker.backend_state(backend.pool, backend.name)
        if state is not None and state.get("healthy"):
            return True
    return False


def swarm_state(gateway: Gateway) -> Handler:
    """``GET /swarm/state``: backends and their slots, the queues, paused turns and counters."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.json(orjson.dumps(await assemble_state(gateway)))

    return handle


async def assemble_state(gateway: Gateway) -> dict[str, Any]:
    """The state as one document. Parts may be some milliseconds apart."""
    backends: list[dict[str, Any]] = []
    paused: list[dict[str, Any]] = []
    for backend in gateway.config.backends:
        state = await gateway.broker.backend_state(backend.pool, backend.name) or {}
        paused += state.pop("paused", [])
        state.pop("engine", None)
        backends.append({**_unknown(backend), **state, "pool": backend.pool})
    priorities = gateway.config.priorities
    by_class: Counter[str] = Counter(dict.fromkeys(priorities, 0))
    counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
    waiting = 0
    for pool in gateway.models.pools:
        depth = await gateway.broker.queue_depth(pool, priorities)
        # Two classes of the same priority share one stretch of the queue: count it once.
        waiting += sum({priorities[name]: count for name, count in depth.items()}.values())
        by_class.update(depth)
        counters.update(await gateway.broker.counters(pool))
    return {
        "backends": backends,
        "queue": {"waiting": waiting, "by_class": dict(by_class)},
        "paused": paused,
        "counters": dict(counters),
    }


def _unknown(backend: Backend) -> dict[str, Any]:
    """A backend of which nobody has published anything lately."""
    return {
        "name": backend.name,
        "kind": backend.kind,
        "healthy": False,
        "decode_slots": backend.decode_slots or 0,
        "engine_slots": backend.managed.engine_slots if backend.managed is not None else 0,
        "kv": _unknown_kv(backend),
        "swap": {
            "enabled": False,
            "budget_bytes": backend.swap_budget,
            "used_bytes": 0,
            **dict.fromkeys(("files", "turns", "saves", "restores", "failures", "stalls"), 0),
            "paused_until_s": None,
        },
        "costs": dict.fromkeys(COST_FIGURES),
        "slots": [],
        "step_s": None,
    }


def _unknown_kv(backend: Backend) -> dict[str, Any]:
    """An empty ledger. Its budget is as configured, None where only the engine can tell."""
    per_token, limit_bytes = backend.kv_bytes_per_token, backend.kv_budget_bytes
    tokens = backend.managed.context if backend.managed is not None else None
    if limit_bytes is not None:
        limit = limit_bytes // per_token if per_token else None
        tokens = min(limit, tokens) if limit is not None and tokens is not None else limit
    return {
        "layout": backend.kv_layout,
        "bytes_per_token": per_token,
        "budget_tokens": tokens,
        "budget_bytes": tokens * per_token if tokens is not None and per_token else limit_bytes,
        **dict.fromkeys(("used_tokens", "used_bytes", "charged_tokens", "charged_bytes"), 0),
        "owners": dict.fromkeys(("running", "paused", "idle", "reserved"), 0),
    }


def not_found(path: str, method: str, status: int) -> ApiError:
    """No such endpoint (404) or no such method of it (405)."""
    if status == 405:
        return ApiError(405, f"{method} is not allowed here", code="method_not_allowed")
    return ApiError(status, "there is no such endpoint", code="not_found")
