"""One turn, from the request to its last byte, in whatever dialect it was asked for."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from functools import partial

import anyio
import structlog
from redis.exceptions import RedisError
from starlette.types import Receive, Scope

from orchestrator.broker import DELTA, ERROR, Broker, DuplicateTurn, Entry, OutputReader, QueueFull
from orchestrator.config import Config
from orchestrator.gateway.body import read_body
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects import Chunks, Dialect, Head
from orchestrator.gateway.endpoint import Handler, until_disconnect
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import ApiError, from_entry, unavailable
from orchestrator.gateway.follow import Output
from orchestrator.gateway.identity import Caller, Identities
from orchestrator.gateway.models import Models
from orchestrator.gateway.reply import Reply
from orchestrator.gateway.sizer import size_turn
from orchestrator.gateway.validate import Ask
from orchestrator.turns import TurnRequest

# How long a turn that nobody waits for any more is tried to be cancelled.
WITHDRAW_BOUND_S = 5.0
RETRY_S = 0.1
QUEUE_FULL_RETRY_AFTER_S = 5
# A reply in one piece: how often its silent turn is looked after.
SILENCE_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the endpoints share."""

    config: Config
    broker: Broker
    reader: OutputReader
    id: str
    engines: Engines
    identities: Identities
    models: Models


def generate(gateway: Gateway, dialect: Dialect) -> Handler:
    """The endpoint of one wire API."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        turn = f"turn-{secrets.token_hex(10)}"
        reply.concerns(turn)
        headers = dict(scope["headers"])
        caller = gateway.identities.identify(headers)
        raw = await read_body(headers, receive, gateway.config.server.max_body_bytes)
        ask = dialect.ask(raw)
        await until_disconnect(receive, partial(_turn, gateway, turn, dialect, caller, ask, reply))

    return handle


async def _turn(
    gateway: Gateway, turn: str, dialect: Dialect, caller: Caller, ask: Ask, reply: Reply
) -> None:
    """Run one turn. Cancelled when the client is gone, and then so is the turn."""
    pool, model = gateway.models.resolve(ask.model)
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
    )
    head = Head(turn, model, int(request.created), ask)
    async with gateway.reader.open(pool, turn) as stream:
        output = Output(gateway.broker, stream, pool)
        try:
            if not await _submit(gateway, request):
                # Answered before the finally below, which may take a while without a broker.
                await reply.fail(unavailable("the broker does not answer", "broker_unavailable"))
            elif ask.stream:
                await _stream(gateway.config, output, dialect.chunks(head), reply)
            else:
                await reply.json(dialect.whole(head, await _collect(output)))
        except QueueFull as error:
            output.over = True
            retry = (b"retry-after", b"%d" % QUEUE_FULL_RETRY_AFTER_S)
            raise ApiError(
                429, f"too busy: {error}", "rate_limit_error", code="queue_full", headers=(retry,)
            ) from error
        finally:
            if not output.over:
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


async def _stream(config: Config, output: Output, chunks: Chunks, reply: Reply) -> None:
    """Send the turn's output as events, with a comment whenever it was silent for too long."""
    entries = await _first(output, config.server.header_wait_s)
    failed = _early_failure(entries)
    if failed is not None:
        raise failed
    await reply.start_stream()
    opening = chunks.open()
    if opening:
        await reply.write(opening)
    keepalive_s = config.server.keepalive_s
    sent_at = time.monotonic()
    while True:
        data = chunks.encode(entries)
        if chunks.over:
            await reply.end(data)
            return
        now = time.monotonic()
        if not data and now - sent_at >= keepalive_s:
            data = chunks.keep_alive()
        if data:
            await reply.write(data)
            sent_at = now
        entries = await output.next(max(0.0, sent_at + keepalive_s - now))


async def _first(output: Output, wait_s: float) -> list[Entry]:
    """The first entries, or none when the turn says nothing for a while."""
    until = time.monotonic() + wait_s
    while True:
        entries = await output.next(max(0.0, until - time.monotonic()))
        if entries or time.monotonic() >= until:
            return entries


def _early_failure(entries: list[Entry]) -> ApiError | None:
    """The error that the turn ended with before it put out anything."""
    for entry in entries:
        if entry[0] == DELTA:
            return None
        if entry[0] == ERROR:
            return from_entry(entry[1], entry[2])
    return None


async def _collect(output: Output) -> Collector:
    """The turn's whole output, however long it takes. Raises ApiError when the turn failed."""
    collector = Collector()
    while not collector.over:
        collector.add(await output.next(SILENCE_S))
    return collector
