"""The frame around every endpoint: whatever happens inside, the client gets a reply in its API's shape."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import structlog
from redis.exceptions import RedisError
from starlette.types import Receive, Scope, Send

from orchestrator.gateway.connections import TRANSPORT
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError, ClientGone, ErrorShape, internal, unavailable
from orchestrator.gateway.reply import Reply

# A client that does not read must not hold up the service's end.
FAREWELL_BOUND_S = 0.5

Handler = Callable[[Scope, Receive, Reply], Awaitable[None]]

_log = structlog.get_logger(__name__)


class Endpoint:
    """An ASGI application that answers with a handler; a class, so that Starlette adds nothing to it."""

    def __init__(self, handler: Handler, errors: ErrorShape = OPENAI_ERRORS) -> None:
        self._handler = handler
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reply = Reply(send, self._errors, scope.get(TRANSPORT))
        try:
            try:
                await self._handler(scope, receive, reply)
            except ClientGone:
                raise
            except ApiError as error:
                await reply.fail(error)
            except RedisError as error:
                _log.warning("the broker failed", path=scope["path"], error=str(error))
                await reply.fail(unavailable("the broker does not answer", "broker_unavailable"))
            except Exception as error:
                # Neither its text nor its variables: they may hold a prompt.
                where = "".join(traceback.format_tb(error.__traceback__))
                _log.error("request failed", path=scope["path"], error=type(error).__name__, where=where)
                await reply.fail(internal())
        except ClientGone:
            return
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(FAREWELL_BOUND_S, shield=True), suppress(ClientGone):
                await reply.fail(unavailable("the service is stopping", "stopping"))
            raise
