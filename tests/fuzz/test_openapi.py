"""The document says what is there: every route, and no other; and it is one that tools can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import orjson
import pytest
import schemathesis
from redis.asyncio import Redis
from starlette.routing import Route

from orchestrator.broker import Broker, OutputReader
from orchestrator.gateway import create_app
from orchestrator.gateway.openapi import document
from tests.gateway.harness import GATEWAY, FakeEngines, application, make_config

METHODS = ("get", "post", "put", "patch", "delete")
BULK = ("embeddings", "rerank", "rerankByItsOtherName")


def routes() -> set[tuple[str, str]]:
    """Methods and paths of the application; HEAD comes with GET."""
    redis = Redis()
    broker = Broker(redis)
    app = create_app(make_config(), broker, OutputReader(broker, redis, GATEWAY), GATEWAY, FakeEngines())
    return {
        (method.lower(), route.path.replace("{id:path}", "{id}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Methods, paths and operations of the document."""
    for path, item in document()["paths"].items():
        for method in METHODS:
            if method in item:
                yield method, path, item[method]


def test_the_document_has_every_route_and_no_other() -> None:
    assert {(method, path) for method, path, _ in operations()} == routes()


def test_it_is_valid() -> None:
    schemathesis.openapi.from_dict(document()).validate()
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids)
    assert "x-shared" not in document()


def test_every_reference_leads_somewhere_and_nothing_is_described_for_nobody() -> None:
    found = document()
    meant = set(references(found))
    for reference in meant:
        at: Any = found
        for name in reference.removeprefix("#/").split("/"):
            at = at[name]
    defined = {
        f"#/components/{kind}/{name}"
        for kind, parts in found["components"].items()
        if kind != "securitySchemes"
        for name in parts
    }
    assert defined == meant


def test_every_turn_says_how_it_fails_and_names_itself() -> None:
    for _, path, operation in operations():
        if "requestBody" not in operation or operation["operationId"] in ("countTokens", "ollamaShow"):
            continue
        assert {"200", "400", "401", "404", "413", "429", "502", "503"} <= set(operation["responses"]), path
        reply = operation["responses"]["200"]
        assert "X-Swarm-Turn" in reply["headers"]
        assert len(reply["content"]) == (1 if operation["operationId"] in BULK else 2), path


@pytest.mark.parametrize("name", ["Chat", "Completion", "Messages", "Responses", "OllamaChat"])
def test_a_plain_request_is_a_valid_one(name: str) -> None:
    said = [{"role": "user", "content": "hello", "type": "message"}]
    body = {"model": "m", "messages": said, "prompt": "hello", "input": said, "max_tokens": 5, "stream": True}
    if name == "Responses":
        del body["prompt"]
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    assert jsonschema_rs.is_valid(schema, body)
    assert not jsonschema_rs.is_valid(schema, {**body, "stream": "yes"})


async def test_it_is_served(redis: Redis) -> None:
    async with application(redis) as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert orjson.loads(response.content) == document()


def references(value: Any) -> Iterator[str]:
    """All `$ref`s inside."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
