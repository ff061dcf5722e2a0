"""The application: its routes, and what they share."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.broker import Broker, OutputReader
from orchestrator.config import Config
from orchestrator.gateway.admin import healthz, models, not_found, swarm_state
from orchestrator.gateway.admin_turns import ACTIONS, turn, turn_action, turns
from orchestrator.gateway.dialects import ChatCompletions, Completions, Dialect
from orchestrator.gateway.endpoint import Endpoint, Handler
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError, internal
from orchestrator.gateway.generate import Gateway, generate
from orchestrator.gateway.identity import Identities
from orchestrator.gateway.models import Models


def create_app(
    config: Config, broker: Broker, reader: OutputReader, gateway_id: str, engines: Engines
) -> Starlette:
    """The HTTP side of the service.

    `reader` must listen on the channel of `gateway_id`, and run as long as the application serves.
    """
    gateway = Gateway(
        config, broker, reader, gateway_id, engines, Identities(config), Models(config, engines)
    )
    routes = [
        _turns("/v1/chat/completions", gateway, ChatCompletions()),
        _turns("/v1/completions", gateway, Completions()),
        _get("/v1/models", models(gateway)),
        _get("/healthz", healthz(gateway)),
        _get("/swarm/state", swarm_state(gateway)),
        _get("/swarm/turns", turns(gateway)),
        _get("/swarm/turns/{id}", turn(gateway)),
        *(_post(f"/swarm/turns/{{id}}/{action}", turn_action(gateway, action)) for action in ACTIONS),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _no_endpoint, Exception: _internal_error}
    )
    app.router.redirect_slashes = False
    return app


def _turns(path: str, gateway: Gateway, dialect: Dialect) -> Route:
    return Route(path, Endpoint(generate(gateway, dialect), dialect.errors), methods=["POST"])


def _get(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler), methods=["POST"])


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _response(not_found(request.url.path, request.method, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(internal())


def _response(error: ApiError) -> Response:
    return Response(OPENAI_ERRORS.body(error), error.status, media_type="application/json")
