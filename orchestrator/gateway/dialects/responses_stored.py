"""What clients may ask about a stored response: there is none."""

from __future__ import annotations

from starlette.types import Receive, Scope

from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply


def stored_response(gateway: Gateway) -> Handler:
    """To read, delete or cancel a response, or to list its input: a refusal (404) that says why."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        gateway.identities.identify(dict(scope["headers"]))
        message = "responses are not stored here: their output is in the reply to their request only"
        raise ApiError(404, message, code="response_not_found")

    return handle
