"""The endpoints that generate nothing: `/v1/embeddings` and `/v1/rerank`.

Vectors and scores are made of the inputs alone. As in the llama.cpp server each input is a task of its own,
takes whatever slot it is given and overwrites what is there, must fit into one batch, and waits while any
slot generates (the step loop does these); the answer comes when all are done. And as there, those that are
evaluated together while each slot has KV of its own get the vectors of a part of them only.
"""

import base64
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import orjson
from starlette.types import Receive, Scope, Send

from backends.simulated.events import Failed, Finished
from backends.simulated.generation import Generation, GenerationParams
from backends.simulated.loop import StepLoop
from backends.simulated.sampler import TextSampler
from backends.simulated.tokenizer import decode
from backends.simulated.wire import error_json

N_DIMENSIONS = 8


def embedding(tokens: Sequence[int]) -> list[float]:
    """The vector of an input, of length 1."""
    digest = hashlib.sha256(decode(list(tokens)).encode()).digest()
    values = [byte - 127.5 for byte in digest[:N_DIMENSIONS]]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def relevance(query: str, document: str) -> float:
    """The share of the query's words that are in the document."""
    words = query.lower().split()
    return sum(word in document.lower().split() for word in words) / max(1, len(words))


def embeddings_json(
    model: str, prompts: Sequence[Sequence[int]], crowded: Sequence[bool], *, as_base64: bool
) -> bytes:
    """The answer to `POST /v1/embeddings`."""
    data: list[dict[str, Any]] = []
    for index, (tokens, is_crowded) in enumerate(zip(prompts, crowded, strict=True)):
        vector: Any = embedding(tokens[1:] if is_crowded else tokens)
        if as_base64:
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"embedding": vector, "index": index, "object": "embedding"})
    return orjson.dumps({"model": model, "object": "list", "usage": _usage(prompts), "data": data})


def rerank_json(
    model: str, prompts: Sequence[Sequence[int]], scores: Sequence[float], top_n: int | None
) -> bytes:
    """The answer to `POST /v1/rerank`, best first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results = [{"index": index, "relevance_score": scores[index]} for index in order]
    return orjson.dumps({"model": model, "object": "list", "usage": _usage(prompts), "results": results})


def _usage(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


class EvaluationResponse:
    """An ASGI application that has prompts evaluated, and answers with `render` once all are.

    `render` is told of each whether it was crowded; see `Generation`.
    """

    def __init__(
        self, loop: StepLoop, prompts: Sequence[Sequence[int]], render: Callable[[list[bool]], bytes]
    ) -> None:
        self._loop = loop
        self._tasks = [
            Generation(
                GenerationParams(tuple(prompt), cache_prompt=False, evaluate_only=True),
                TextSampler(list(prompt), eos_probability=0, multibyte_rate=0, ignore_eos=False, seed=None),
            )
            for prompt in prompts
        ]
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = 499, b""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
            status, body = await self._evaluate()
            tasks.cancel_scope.cancel()
        if status != 499:
            headers = [(b"content-type", b"application/json; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _evaluate(self) -> tuple[int, bytes]:
        for task in self._tasks:
            self._loop.submit(task)
        for task in self._tasks:
            for event in await task.outbox.take():
                if isinstance(event, Failed):
                    self._cancel()
                    return event.status, error_json(event)
                assert isinstance(event, Finished)
        return 200, self._render([task.crowded for task in self._tasks])

    async def _watch_client(self, receive: Receive, request: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._loop.abandon(self._tasks[0])
        self._cancel()
        request.cancel()

    def _cancel(self) -> None:
        for task in self._tasks:
            self._loop.cancel(task)
