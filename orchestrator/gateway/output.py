"""An agent's own turns after their requests: their output, and their end.

``GET /v1/turns/ID/output`` is the reply to a turn that was asked to go on without its client. It is the reply
as the request would have had it, from its first byte: in the same API, as a stream if a stream was asked for,
and it waits for the end of a turn that has not ended. Reading it, and leaving, changes nothing, and it can be
done again and by several at once, for as long as the turn's record is there.

``DELETE /v1/turns/ID`` cancels a turn: the only way to end one whose client has left. It can be repeated, and
does nothing to a turn that has ended.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs

import orjson
from starlette.types import Receive, Scope

from orchestrator.broker import TurnRecord
from orchestrator.gateway.admin_turns import find_turn, unknown_turn
from orchestrator.gateway.answer import answer
from orchestrator.gateway.detach import HEADER
from orchestrator.gateway.dialects import Dialect, Head
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import ApiError, bad_value
from orchestrator.gateway.follow import Output
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply
from orchestrator.gateway.watch import until_disconnect

OWN_TURN_PATH = "/v1/turns/{id}"
OUTPUT_PATH = f"{OWN_TURN_PATH}/output"


def turn_output(gateway: Gateway) -> Handler:
    """Only the turn's own agent may read it. ``?stream=true`` or ``false`` asks for the other form."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        wanted = _wanted_form(scope["query_string"])
        record = await _own_turn(gateway, scope, reply)
        id_ = record.request.id
        kept = record.request.kept
        dialect = None if kept is None else gateway.dialects.get(kept.path)
        if kept is None or dialect is None:
            message = f"turn {id_} was not asked to be kept: its request had no {HEADER}: true"
            raise ApiError(409, message, code="turn_not_kept")
        reply.errors = dialect.errors_of(id_)
        ask = dialect.ask(kept.asked)
        head = Head(id_, record.request.model, int(record.request.created), ask)
        stream = ask.stream if wanted is None else wanted
        work = partial(_read, gateway, record, dialect, head, reply, stream)
        await until_disconnect(receive, work, reply, gateway.config.server.keepalive_s)

    return handle


def cancel_own_turn(gateway: Gateway) -> Handler:
    """Only the turn's own agent may. The dispatcher acts on it a moment later; `state` is the one before."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        request = (await _own_turn(gateway, scope, reply)).request
        state = await gateway.broker.cancel(request.pool, request.id)
        if state is None:
            raise unknown_turn(request.id)
        await reply.json(orjson.dumps({"id": request.id, "requested": "cancel", "state": state}))

    return handle


async def _own_turn(gateway: Gateway, scope: Scope, reply: Reply) -> TurnRecord:
    """The record of the turn in the path, which the reply then names.

    Raises ApiError: 401, or 404 for another agent's turn too, as nobody is to learn that there is one.
    """
    id_ = scope["path_params"]["id"]
    caller = gateway.identities.identify(dict(scope["headers"]))
    record = await find_turn(gateway, id_)
    if record.request.agent != caller.agent:
        raise unknown_turn(id_)
    reply.concerns(id_)
    return record


async def _read(
    gateway: Gateway, record: TurnRecord, dialect: Dialect, head: Head, reply: Reply, stream: bool
) -> None:
    request = record.request
    async with gateway.reader.open(request.pool, request.id) as entries:
        entries.suspect()  # what is in the log already is told to nobody
        output = Output(gateway.broker, entries, request.pool, heard=request.gateway == gateway.id)
        await answer(gateway.config.server, output, dialect, head, reply, stream=stream)


def _wanted_form(query: bytes) -> bool | None:
    """Whether a stream is asked for, None when the query does not say. Raises ApiError (400)."""
    words = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("stream")
    if words is None:
        return None
    if words[-1] not in ("true", "false"):
        raise bad_value("stream", "must be true or false")
    return words[-1] == "true"
