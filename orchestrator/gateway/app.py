"""The application: its routes, and what they share."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.broker import Broker, OutputReader
from orchestrator.broker.prompts import PromptNotes
from orchestrator.config import Config
from orchestrator.gateway import ollama
from orchestrator.gateway.admin import healthz, model, models, not_found, swarm_state
from orchestrator.gateway.admin_prefixes import prefixes
from orchestrator.gateway.admin_turns import ACTIONS, turn, turn_action, turns
from orchestrator.gateway.dialects import (
    ChatCompletions,
    Completions,
    Dialect,
    Embeddings,
    Messages,
    OllamaChat,
    Rerank,
    Responses,
)
from orchestrator.gateway.dialects.anthropic_count import count_tokens
from orchestrator.gateway.dialects.anthropic_errors import ANTHROPIC_ERRORS
from orchestrator.gateway.dialects.ollama import OLLAMA_ERRORS
from orchestrator.gateway.dialects.responses_stored import stored_response
from orchestrator.gateway.endpoint import Endpoint, Handler
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError, ErrorShape, internal
from orchestrator.gateway.generate import Gateway, generate
from orchestrator.gateway.guard import Guard
from orchestrator.gateway.identity import Identities
from orchestrator.gateway.models import Models
from orchestrator.gateway.openapi import OPENAPI_PATH, openapi
from orchestrator.gateway.output import OUTPUT_PATH, OWN_TURN_PATH, cancel_own_turn, turn_output
from orchestrator.gateway.prefixes import Prefixes

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"


def create_app(
    config: Config, broker: Broker, reader: OutputReader, gateway_id: str, engines: Engines
) -> Starlette:
    """The HTTP side of the service.

    `reader` must listen on the channel of `gateway_id`, and run as long as the application serves.
    """
    gateway = Gateway(
        config,
        broker,
        reader,
        gateway_id,
        engines,
        Identities(config),
        Models(config, engines),
        Prefixes(config, PromptNotes(broker.redis)),
    )
    routes = [
        _turns("/v1/chat/completions", gateway, ChatCompletions()),
        _turns("/v1/completions", gateway, Completions()),
        _turns(MESSAGES_PATH, gateway, Messages()),
        _post(f"{MESSAGES_PATH}/count_tokens", count_tokens(gateway), ANTHROPIC_ERRORS),
        _turns(RESPONSES_PATH, gateway, Responses()),
        *_stored(RESPONSES_PATH, gateway),
        _turns("/v1/embeddings", gateway, Embeddings()),
        _turns("/v1/rerank", gateway, Rerank()),
        _turns("/rerank", gateway, Rerank()),
        _turns("/api/chat", gateway, OllamaChat()),
        _get("/api/tags", ollama.tags(gateway), OLLAMA_ERRORS),
        _post("/api/show", ollama.show(gateway), OLLAMA_ERRORS),
        _get("/api/version", ollama.version(gateway), OLLAMA_ERRORS),
        _get("/v1/models", models(gateway)),
        _get("/v1/models/{id:path}", model(gateway)),
        Route(OWN_TURN_PATH, Endpoint(cancel_own_turn(gateway)), methods=["DELETE"]),
        _get(OUTPUT_PATH, turn_output(gateway)),
        _get("/healthz", healthz(gateway)),
        _get(OPENAPI_PATH, openapi(gateway.identities)),
        _get("/swarm/state", swarm_state(gateway)),
        _get("/swarm/prefixes", prefixes(gateway)),
        _get("/swarm/turns", turns(gateway)),
        _get("/swarm/turns/{id}", turn(gateway)),
        *(_post(f"/swarm/turns/{{id}}/{action}", turn_action(gateway, action)) for action in ACTIONS),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, config, gateway.identities, _errors_at)],
        exception_handlers={HTTPException: _no_endpoint, Exception: _internal_error},
    )
    app.router.redirect_slashes = False
    return app


def _turns(path: str, gateway: Gateway, dialect: Dialect) -> Route:
    gateway.dialects[path] = dialect
    return Route(path, Endpoint(generate(gateway, dialect), dialect.errors), methods=["POST"])


def _stored(path: str, gateway: Gateway) -> list[Route]:
    """What there would be of a response that was stored."""
    endpoint = Endpoint(stored_response(gateway))
    methods = {"/{id}": ["GET", "DELETE"], "/{id}/input_items": ["GET"], "/{id}/cancel": ["POST"]}
    return [Route(path + part, endpoint, methods=allowed) for part, allowed in methods.items()]


def _get(path: str, handler: Handler, errors: ErrorShape = OPENAI_ERRORS) -> Route:
    return Route(path, Endpoint(handler, errors), methods=["GET"])


def _post(path: str, handler: Handler, errors: ErrorShape = OPENAI_ERRORS) -> Route:
    return Route(path, Endpoint(handler, errors), methods=["POST"])


async def _no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    response = _response(not_found(path, request.method, error.status_code), _errors_at(path))
    response.headers.update(error.headers or {})
    return response


def _errors_at(path: str) -> ErrorShape:
    """How the API at a path writes an error, whether or not there is such an endpoint."""
    if path.startswith(MESSAGES_PATH):
        return ANTHROPIC_ERRORS
    return OLLAMA_ERRORS if path.startswith("/api/") else OPENAI_ERRORS


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(internal())


def _response(error: ApiError, errors: ErrorShape = OPENAI_ERRORS) -> Response:
    return Response(errors.body(error), error.status, media_type="application/json")
