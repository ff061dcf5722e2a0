"""Anthropic's ``/v1/messages/count_tokens``: the engine's own count of what it would get. Needs no slot."""

from __future__ import annotations

import anyio
import orjson
from starlette.types import Receive, Scope

from backends.protocol import EngineRefused, EngineUnavailable
from orchestrator.gateway.body import read_body
from orchestrator.gateway.dialects.anthropic_request import count_ask
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import ApiError, unavailable
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply
from orchestrator.gateway.sizer import COUNT_BOUND_S


def count_tokens(gateway: Gateway) -> Handler:
    """``POST /v1/messages/count_tokens``. Counts the prompt as the agent's rules for prefixes leave it."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        headers = dict(scope["headers"])
        caller = gateway.identities.identify(headers)
        ask = count_ask(await read_body(headers, receive, gateway.config.server.max_body_bytes))
        pool, _ = gateway.models.resolve(ask.model)
        ask = (await gateway.prefixes.steady(pool, caller.agent, "chat", ask)).ask
        try:
            with anyio.fail_after(COUNT_BOUND_S):
                count = await gateway.engines.count_tokens(pool, "chat", ask.body)
        except EngineRefused as error:
            raise ApiError(error.status if 400 <= error.status < 500 else 400, str(error)) from error
        except (EngineUnavailable, TimeoutError) as error:
            raise unavailable("no engine of this model answers", "engine_unavailable") from error
        await reply.json(orjson.dumps({"input_tokens": count}))

    return handle
