"""``GET /openapi.json``: the endpoints as an OpenAPI document (spec.openapis.org/oas/v3.1.0).

The document is written by hand, in ``openapi.yaml`` beside this module: the endpoints parse their bodies by
themselves, so there is nothing that it could be made from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import orjson
import yaml
from starlette.types import Receive, Scope

from orchestrator import __version__
from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.identity import Identities
from orchestrator.gateway.reply import Reply

OPENAPI_PATH = "/openapi.json"
#: Where the document keeps what its parts have in common.
_SHARED = "x-shared"

_FILE = Path(__file__).with_suffix(".yaml")


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    # In C where there is one: this is done before the service answers.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(_FILE.read_bytes(), loader)
    del found[_SHARED]
    found["info"]["version"] = __version__
    return found


def openapi(identities: Identities) -> Handler:
    """``GET /openapi.json``: open to whoever sends no key, closed to a wrong one."""
    body = orjson.dumps(document())

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        identities.agent_of_key(dict(scope["headers"]))
        await reply.json(body)

    return handle
