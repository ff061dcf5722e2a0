"""One turn, from the request to its last byte, in whatever dialect it was asked for."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog
from redis.exceptions import RedisError
from starlette.types import Receive, Scope

from backends.protocol import BULK_APIS
from orchestrator.broker import Broker, DuplicateTurn, OutputReader, QueueFull
from orchestrator.config import Config
from orchestrator.gateway.answer import answer
from orchestrator.gateway.body import read_body
from orchestrator.gateway.detach import wants_detach
from orchestrator.gateway.dialects import Dialect, Head
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import ApiError, unavailable
from orchestrator.gateway.follow import Output
from orchestrator.gateway.identity import Caller, Identities
from orchestrator.gateway.models import Models
from orchestrator.gateway.prefixes import Prefixes
from orchestrator.gateway.reply import Reply
from orchestrator.gateway.sizer import size_turn
from orchestrator.gateway.validate import Ask
from orchestrator.gateway.watch import until_disconnect
from orchestrator.turns import Kept, TurnRequest

# How long a turn that nobody waits for any more is tried to be cancelled.
WITHDRAW_BOUND_S = 60.0
RETRY_S = 0.1
QUEUE_FULL_RETRY_AFTER_S = 5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the endpoints share. `dialects`: those that turns can be asked for in, by path."""

    config: Config
    broker: Broker
    reader: OutputReader
    id: str
    engines: Engines
    identities: Identities
    models: Models
    prefixes: Prefixes
    dialects: dict[str, Dialect] = field(default_factory=dict)


def generate(gateway: Gateway, dialect: Dialect) -> Handler:
    """The endpoint of one wire API."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        turn = f"turn-{secrets.token_hex(10)}"
        reply.concerns(turn)
        reply.errors = dialect.errors_of(turn)
        headers = dict(scope["headers"])
        caller = gateway.identities.identify(headers)
        if dialect.api in BULK_APIS:
            caller = gateway.identities.for_bulk(caller)
        raw = await read_body(headers, receive, gateway.config.server.max_body_bytes)
        kept = Kept(scope["path"], raw) if wants_detach(headers) else None
        ask = dialect.ask(raw)
        work = partial(_turn, gateway, turn, dialect, caller, ask, kept, reply)
        await until_disconnect(receive, work, reply, gateway.config.server.keepalive_s)

    return handle


async def _turn(
    gateway: Gateway,
    turn: str,
    dialect: Dialect,
    caller: Caller,
    ask: Ask,
    kept: Kept | None,
    reply: Reply,
) -> None:
    """Run one turn. Cancelled when the client is gone, and then so is the turn, unless it is to be kept."""
    pool, model = gateway.models.resolve(ask.model)
    steadied = await gateway.prefixes.steady(pool, caller.agent, dialect.api, ask)
    ask = steadied.ask
    size = await size_turn(gateway.engines, pool, dialect, ask, caller.max_turn_tokens)
    request = TurnRequest(
        id=turn,
        pool=pool,
        agent=caller.agent,
        priority=caller.priority,
        priority_class=caller.priority_class,
        api=dialect.api,
        model=model,
        body=ask.raw,
        stream=ask.stream,
        size=size,
        gateway=gateway.id,
        created=time.time(),
        kept=kept,
    )
    head = Head(turn, model, int(request.created), ask)
    async with gateway.reader.open(pool, turn) as stream:
        output = Output(gateway.broker, stream, pool)
        goes_on = False
        try:
            if await _submit(gateway, request):
                goes_on = kept is not None
                await gateway.prefixes.note(turn, steadied)
                await answer(gateway.config.server, output, dialect, head, reply, stream=ask.stream)
            else:
                # Answered before the finally below, which may take a while without a broker.
                await reply.fail(unavailable("the broker does not answer", "broker_unavailable"))
        except QueueFull as error:
            output.over = True
            retry = (b"retry-after", b"%d" % QUEUE_FULL_RETRY_AFTER_S)
            raise ApiError(
                429, f"too busy: {error}", "rate_limit_error", code="queue_full", headers=(retry,)
            ) from error
        finally:
            if not output.over and not goes_on:
                await _withdraw(gateway.broker, pool, turn)


async def _submit(gateway: Gateway, request: TurnRequest) -> bool:
    """Hand the turn over; False when nobody knows whether it arrived. Raises QueueFull.

    Not interrupted: a turn must not arrive after its own cancellation.
    """
    with anyio.CancelScope(shield=True):
        try:
            await gateway.broker.submit(request, max_waiting=gateway.config.policy.max_waiting)
        except DuplicateTurn:
            # The client of the broker lost the answer and asked again.
            _log.info("submitted twice", turn=request.id)
        except RedisError as error:
            _log.warning("turn not submitted", turn=request.id, error=str(error))
            return False
    return True


async def _withdraw(broker: Broker, pool: str, turn: str) -> None:
    """Cancel a turn that has no reader, whatever state it is in."""
    with anyio.move_on_after(WITHDRAW_BOUND_S, shield=True):
        while True:
            try:
                await broker.cancel(pool, turn)
                return
            except (RedisError, OSError):
                await anyio.sleep(RETRY_S)
    _log.warning("turn not cancelled: the broker does not answer", turn=turn)
