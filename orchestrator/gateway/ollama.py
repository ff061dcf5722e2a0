"""What Ollama's clients ask beside a chat: ``/api/tags``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.types import Receive, Scope

from orchestrator.gateway.body import read_body
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.errors import bad_value
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply
from orchestrator.gateway.validate import parse_body

#: The version whose `/api/chat` this is: clients refuse older ones than they know.
API_VERSION = "0.12.0"


def version(gateway: Gateway) -> Handler:
    """``GET /api/version``."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.json(orjson.dumps({"version": API_VERSION}))

    return handle


def tags(gateway: Gateway) -> Handler:
    """``GET /api/tags``: open to whoever sends no key, closed to a wrong one."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        gateway.identities.agent_of_key(dict(scope["headers"]))
        models = [_tag(model) for model in gateway.models.listing()["data"]]
        await reply.json(orjson.dumps({"models": models}))

    return handle


def show(gateway: Gateway) -> Handler:
    """``POST /api/show``: what of a model is known here."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        headers = dict(scope["headers"])
        gateway.identities.agent_of_key(headers)
        body = parse_body(await read_body(headers, receive, gateway.config.server.max_body_bytes))
        name = body.get("model") or body.get("name")
        if not isinstance(name, str):
            raise bad_value("model", "must be a string")
        await reply.json(orjson.dumps(_shown(gateway.models.entry(name))))

    return handle


def _tag(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": model["id"],
        "model": model["id"],
        "modified_at": _modified(model),
        "size": 0,
        "digest": "",
        "details": _DETAILS,
    }


def _shown(model: dict[str, Any]) -> dict[str, Any]:
    info = {"general.architecture": "swarm"}
    if model["context_length"] is not None:
        info["swarm.context_length"] = model["context_length"]
    return {
        "modified_at": _modified(model),
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools"],
    }


def _modified(model: dict[str, Any]) -> str:
    return datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")


_DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
