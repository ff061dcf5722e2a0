"""``/swarm/turns``: looking at turns, and pausing, resuming and cancelling them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

import orjson
from starlette.types import Receive, Scope

from orchestrator.broker import TurnRecord
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import ApiError, bad_value, quoted
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply
from orchestrator.turns import FINAL_STATES, TurnState

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
# An id is part of a key's name: nothing else may reach the broker.
TURN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

ACTIONS = ("preempt", "resume", "cancel")

# Why an action has no effect on a turn in a state; where there is no reason, it has one.
REFUSALS: dict[str, dict[TurnState, str]] = {
    "preempt": {TurnState.QUEUED: "it is still waiting for its first slot"},
    "resume": {
        TurnState.QUEUED: "it is still waiting for its first slot",
        TurnState.CLAIMED: "it is about to start",
        TurnState.RUNNING: "it is running",
    },
    "cancel": {},
}


def turns(gateway: Gateway) -> Handler:
    """``GET /swarm/turns?limit=N``: owned turns, then waiting ones, then ended ones, N of each."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        limit = _limit(scope["query_string"])
        owned: list[TurnRecord] = []
        waiting: list[TurnRecord] = []
        ended: list[TurnRecord] = []
        for backend in gateway.config.backends:
            owned += await gateway.broker.owned(backend.pool, backend.name)
        for pool in gateway.models.pools:
            waiting += await gateway.broker.records(pool, await gateway.broker.waiting(pool, limit))
            ended += await gateway.broker.records(pool, await gateway.broker.recent(pool, limit))
        shown: dict[str, dict[str, Any]] = {}
        for record in (*owned[:limit], *waiting[:limit], *ended[:limit]):
            # A turn that moved on while this was read is shown where it was met first.
            shown.setdefault(record.request.id, summary(record))
        await reply.json(orjson.dumps({"turns": list(shown.values())}))

    return handle


def turn(gateway: Gateway) -> Handler:
    """``GET /swarm/turns/ID``: the turn's record, what its prompt has in common with others, its timeline."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        id_ = scope["path_params"]["id"]
        record = await find_turn(gateway, id_)
        reply.concerns(id_)
        pool = record.request.pool
        timeline = await gateway.broker.timeline(pool, id_)
        prompt = await gateway.prefixes.notes.of_turn(pool, id_)
        await reply.json(orjson.dumps({**summary(record), "prompt": prompt, "timeline": timeline}))

    return handle


def turn_action(gateway: Gateway, action: str) -> Handler:
    """``POST /swarm/turns/ID/preempt|resume|cancel``. The turn's owner acts on it a moment later."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        id_ = scope["path_params"]["id"]
        pool = (await find_turn(gateway, id_)).request.pool
        reply.concerns(id_)
        if action == "cancel":
            state = await gateway.broker.cancel(pool, id_)
        else:
            state = await gateway.broker.tell(pool, id_, "hold" if action == "preempt" else "release")
        if state is None:
            raise unknown_turn(id_)
        reason = f"it has ended ({state})" if state in FINAL_STATES else REFUSALS[action].get(state)
        if reason is not None:
            message = f"turn {id_} cannot be {_past(action)}: {reason}"
            raise ApiError(409, message, code="wrong_turn_state")
        await reply.json(orjson.dumps({"id": id_, "requested": action, "state": state}))

    return handle


def summary(record: TurnRecord) -> dict[str, Any]:
    """A turn as the admin API shows it. `state` and the counts are those of the record."""
    request = record.request
    return {
        "id": request.id,
        "pool": request.pool,
        "agent": request.agent,
        "priority": request.priority,
        "priority_class": request.priority_class,
        "state": record.state,
        "api": request.api,
        "model": request.model,
        "stream": request.stream,
        "kept": request.kept is not None,
        "created": request.created,
        "seq": record.seq,
        "backend": record.backend,
        "tier": record.tier,
        "preemptions": record.preemptions,
        "prompt_tokens": record.prompt_tokens,
        "tokens_generated": record.tokens_generated,
        "tokens_reevaluated": record.tokens_reevaluated,
        "max_tokens": request.size.max_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
    }


async def find_turn(gateway: Gateway, id_: str) -> TurnRecord:
    """The turn's record; an id does not tell its pool. Raises ApiError (404)."""
    if TURN_ID.fullmatch(id_):
        for pool in gateway.models.pools:
            record = await gateway.broker.record(pool, id_)
            if record is not None:
                return record
    raise unknown_turn(id_)


def unknown_turn(id_: str) -> ApiError:
    """The answer to an id that is nobody's (404)."""
    message = f"no turn {quoted(id_)}; ended turns are forgotten after a while"
    return ApiError(404, message, code="turn_not_found")


def _past(action: str) -> str:
    return {"preempt": "preempted", "resume": "resumed", "cancel": "cancelled"}[action]


def _limit(query: bytes) -> int:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True, max_num_fields=None).get("limit")
    if not values:
        return DEFAULT_LIMIT
    if re.fullmatch(r"[0-9]{1,6}", values[-1]) and 1 <= int(values[-1]) <= MAX_LIMIT:
        return int(values[-1])
    raise bad_value("limit", f"must be a whole number from 1 to {MAX_LIMIT}")
