"""``GET /v1/turns/ID/output``: the reply to a turn that was asked to go on without its client.

It is the reply as the request would have had it, from its first byte: in the same API, as a stream if a
stream was asked for, and it waits for the end of a turn that has not ended. Reading it, and leaving, changes
nothing, and it can be done again and by several at once, for as long as the turn's record is there.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs

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

OUTPUT_PATH = "/v1/turns/{id}/output"


def turn_output(gateway: Gateway) -> Handler:
    """Only the turn's own agent may read it. ``?stream=true`` or ``false`` asks for the other form."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        id_ = scope["path_params"]["id"]
        caller = gateway.identities.identify(dict(scope["headers"]))
        wanted = _wanted_form(scope["query_string"])
        record = await find_turn(gateway, id_)
        if record.request.agent != caller.agent:
            raise unknown_turn(id_)
        reply.concerns(id_)
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
