"""``/v1/embeddings`` and ``/v1/rerank``: formats, the priority of bulk turns, their size, bad requests."""

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import orjson
import pytest
from redis.asyncio import Redis

from backends.protocol import BULK_BATCH_BYTES, KvLayout
from orchestrator.broker import delta_entry
from orchestrator.gateway.dialects import Embeddings, Rerank
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.sizer import size_turn
from orchestrator.turns import TurnSize, TurnState
from tests.gateway.harness import (
    PERMANENT_KEYS,
    FakeEngines,
    Service,
    Taken,
    application,
    make_info,
    service,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

EMBED, RERANK = "/v1/embeddings", "/v1/rerank"
VECTORS = [(0.5, -1.0), (0.25, 2.0), (1.0, 0.0)]


def packed(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


PACKED = [packed(*vector) for vector in VECTORS]


async def answered(
    swarm: Service,
    path: str,
    body: dict[str, Any],
    dispatch: Callable[[Taken], Awaitable[None]],
    **headers: str,
) -> tuple[httpx.Response, Taken]:
    """Ask, and do what the dispatcher is told to."""
    taken: list[Taken] = []

    async def run() -> None:
        turn = await swarm.dispatcher.take()
        taken.append(turn)
        await turn.start()
        await dispatch(turn)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        response = await swarm.client.post(path, json=body, headers=headers)
    return response, taken[0]


async def embedded(turn: Taken) -> None:
    """Two batches, and a pause between them."""
    await turn.write(delta_entry({"embeddings": PACKED[:2], "prompt_tokens": 7}, 0, []))
    await turn.pause()
    await turn.resume()
    await turn.write(delta_entry({"embeddings": PACKED[2:], "prompt_tokens": 4}, 0, []))
    await turn.finish(tokens=0)


async def ranked(turn: Taken) -> None:
    await turn.write(delta_entry({"scores": [0.5, -3.0], "prompt_tokens": 20}, 0, []))
    await turn.write(delta_entry({"scores": [2.5, 0.5], "prompt_tokens": 15}, 0, []))
    await turn.finish(tokens=0)


@pytest.mark.parametrize(
    ("fields", "vectors"),
    [
        ({}, [list(vector) for vector in VECTORS]),
        ({"encoding_format": "float", "dimensions": 2}, [list(vector) for vector in VECTORS]),
        ({"encoding_format": "base64"}, PACKED),
        ({"encoding_format": "base64", "dimensions": 2}, PACKED),
    ],
)
async def test_vectors_of_all_batches_in_the_asked_format(
    redis: Redis, valkey_url: str, fields: dict[str, Any], vectors: list[Any]
) -> None:
    async with service(redis, valkey_url) as swarm:
        body = {"model": "tiny", "input": ["a", "b", "c"], "user": "me", "swarm_x": 1, **fields}
        response, turn = await answered(swarm, EMBED, body, embedded)
    assert response.status_code == 200
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }
    request = turn.record.request
    assert (request.api, request.stream) == ("embeddings", False)
    stored = orjson.loads(request.body)
    assert stored["input"] == ["a", "b", "c"]
    assert "swarm_x" not in stored


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [7]], ["a", [7]]),
    ],
)
async def test_inputs_of_every_kind(given: Any, stored: list[Any]) -> None:
    ask = Embeddings().ask(orjson.dumps({"input": given}))
    assert ask.body["input"] == orjson.loads(ask.raw)["input"] == stored


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
async def test_documents_come_best_first(redis: Redis, valkey_url: str, path: str) -> None:
    documents = ["a", {"text": "b", "title": "t"}, "c", "d"]
    async with service(redis, valkey_url) as swarm:
        body = {"query": "q", "documents": documents, "return_documents": True}
        response, turn = await answered(swarm, path, body, ranked)
        assert orjson.loads(turn.record.request.body)["documents"] == ["a", "b", "c", "d"]
        best, _ = await answered(swarm, path, {"query": "q", "documents": documents, "top_n": 2}, ranked)
    assert response.json() == {
        "object": "list",
        "model": "tiny",
        "results": [
            {"index": 2, "relevance_score": 2.5, "document": {"text": "c"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
            {"index": 3, "relevance_score": 0.5, "document": {"text": "d"}},
            {"index": 1, "relevance_score": -3.0, "document": {"text": "b"}},
        ],
        "usage": {"prompt_tokens": 35, "total_tokens": 35},
    }
    assert best.json()["results"] == [
        {"index": 2, "relevance_score": 2.5},
        {"index": 0, "relevance_score": 0.5},
    ]


@pytest.mark.parametrize("headers", [{}, {"X-Swarm-Priority": "foreground"}, {"X-Swarm-Agent": "indexer"}])
async def test_bulk_turns_are_of_the_lowest_class(
    redis: Redis, valkey_url: str, headers: dict[str, str]
) -> None:
    async with service(redis, valkey_url) as swarm:
        _, turn = await answered(swarm, EMBED, {"input": ["a", "b", "c"]}, embedded, **headers)
    request = turn.record.request
    assert (request.priority, request.priority_class) == (0, "batch")
    assert request.agent == headers.get("X-Swarm-Agent", "editor")


async def test_another_length_than_the_models_ends_the_turn_at_once(redis: Redis, valkey_url: str) -> None:
    async def first_batch(turn: Taken) -> None:
        await turn.write(delta_entry({"embeddings": PACKED[:1], "prompt_tokens": 1}, 0, []))

    async with service(redis, valkey_url) as swarm:
        response, turn = await answered(swarm, EMBED, {"input": ["a", "b"], "dimensions": 3}, first_batch)
        assert await swarm.dispatcher.event("cancel")
        await turn.become(TurnState.CANCELLED)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("dimensions", "invalid_value")
    assert "must be 2" in error["message"]


async def test_a_refusal_of_the_engine_comes_through(redis: Redis, valkey_url: str) -> None:
    async def refuse(turn: Taken) -> None:
        await turn.fail(501, "this model's engine refuses: Start it with `--embeddings`")

    async with service(redis, valkey_url) as swarm:
        response, _ = await answered(swarm, EMBED, {"input": "a"}, refuse)
    assert response.status_code == 501
    assert "--embeddings" in response.json()["error"]["message"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    (EMBED, {}, "input"),
    (EMBED, {"input": None}, "input"),
    (EMBED, {"input": ""}, "input"),
    (EMBED, {"input": []}, "input"),
    (EMBED, {"input": ["a", ""]}, "input"),
    (EMBED, {"input": ["a", None]}, "input"),
    (EMBED, {"input": ["a", []]}, "input"),
    (EMBED, {"input": [[1], [-1]]}, "input"),
    (EMBED, {"input": [1, True]}, "input"),
    (EMBED, {"input": [1, "a"]}, "input"),
    (EMBED, {"input": [1 << 31]}, "input"),
    (EMBED, {"input": {"text": "a"}}, "input"),
    (EMBED, {"input": ["a"] * 2049}, "input"),
    (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    (EMBED, {"input": "a", "encoding_format": None}, "encoding_format"),
    (EMBED, {"input": "a", "dimensions": 0}, "dimensions"),
    (EMBED, {"input": "a", "dimensions": True}, "dimensions"),
    (EMBED, {"input": "a", "model": 3}, "model"),
    (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": ["q"], "documents": ["a"]}, "query"),
    (RERANK, {"query": "q"}, "documents"),
    (RERANK, {"query": "q", "documents": []}, "documents"),
    (RERANK, {"query": "q", "documents": "a"}, "documents"),
    (RERANK, {"query": "q", "documents": ["a", 1]}, "documents"),
    (RERANK, {"query": "q", "documents": ["a", {"title": "t"}]}, "documents"),
    (RERANK, {"query": "q", "documents": ["a"] * 2049}, "documents"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": "3"}, "top_n"),
    (RERANK, {"query": "q", "documents": ["a"], "return_documents": 1}, "return_documents"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_requests(redis: Redis, path: str, body: dict[str, Any], param: str) -> None:
    async with application(redis) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_value",
        param,
    )
    assert "\n" not in error["message"]


async def size(engines: FakeEngines, *inputs: Any) -> TurnSize:
    ask = Embeddings().ask(orjson.dumps({"input": list(inputs)}))
    return await size_turn(engines, "default", Embeddings(), ask, 100)


async def test_a_turn_reserves_its_largest_batch() -> None:
    engines = FakeEngines()
    assert await size(engines, "x" * 50, "y" * 20) == TurnSize(50 + 20 + 2 * 8, 0, exact=False)
    assert await size(engines, *["x" * 1000] * 100) == TurnSize(BULK_BATCH_BYTES, 0, exact=False)
    assert await size(engines, [1] * 100) == TurnSize(408, 0, exact=False)
    assert engines.counted == []
    assert await size(FakeEngines(count=700), "x" * 3000) == TurnSize(2048, 0, exact=True)
    engines = FakeEngines({"default": make_info(4096)}, count=3000)
    assert await size(engines, "x" * 9000) == TurnSize(3000, 0, exact=True)
    assert engines.counted == [("default", "embeddings")]


async def test_an_input_that_does_not_fit_is_refused() -> None:
    engines = FakeEngines({"default": make_info(512, layout=KvLayout.UNIFIED)}, count=513)
    with pytest.raises(ApiError, match=r"input: the longest has 513 tokens.* takes 512") as caught:
        await size(engines, "x" * 3000)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    engines.count = 512
    assert (await size(engines, "x" * 3000)).kv_tokens == 512


async def test_documents_are_sized_with_their_query() -> None:
    ask = Rerank().ask(orjson.dumps({"query": "q" * 100, "documents": ["d" * 10, "e" * 20]}))
    turn_size = await size_turn(FakeEngines(), "default", Rerank(), ask, 100)
    assert turn_size == TurnSize(2 * (100 + 128) + 30, 0, exact=False)


async def test_a_kept_bulk_turn_has_no_stream(redis: Redis, valkey_url: str) -> None:
    async with service(redis, valkey_url) as swarm:
        headers = {"X-Swarm-Detach": "true"}
        response, turn = await answered(swarm, EMBED, {"input": ["a", "b", "c"]}, embedded, **headers)
        path = f"/v1/turns/{turn.id}/output"
        assert (await swarm.client.get(path)).json() == response.json()
        refused = await swarm.client.get(path, params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
