"""``/v1/embeddings`` as OpenAI has it, and ``/v1/rerank`` as Jina has it.

Both are bulk turns: of the lowest priority class whoever asks, run in batches, and stopped between two of
them for anybody else. The reply is one piece, at the end. Its vectors are made into JSON as the batches
arrive: all at once would hold up everybody's streams.
"""

from __future__ import annotations

import base64
import struct
from abc import abstractmethod
from typing import Any

import orjson

from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.base import Chunks, Dialect, Head
from orchestrator.gateway.errors import ApiError, bad_value
from orchestrator.gateway.validate import PRIVATE_PREFIX, TOKEN_ID_CEILING, Ask, parse_body

#: What OpenAI takes in one request.
MAX_INPUTS = 2048
_FLOAT_BYTES = 4


class _BulkDialect(Dialect):
    def chunks(self, head: Head) -> Chunks:
        raise bad_value("stream", "must be false: the reply is one piece")


class Embeddings(_BulkDialect):
    """``/v1/embeddings``."""

    api = "embeddings"
    prompt_field = "input"

    def ask(self, raw: bytes) -> Ask:
        body = _read(raw)
        body["input"] = _inputs(body.get("input"))
        if body.setdefault("encoding_format", "float") not in ("float", "base64"):
            raise bad_value("encoding_format", "must be float or base64")
        dimensions = body.get("dimensions")
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise bad_value("dimensions", "must be a whole number of at least 1")
        return _ask(body)

    def collector(self, head: Head) -> Collector:
        body = head.ask.body
        return _Vectors(body["encoding_format"] == "base64", body.get("dimensions"))

    def whole(self, head: Head, reply: Collector) -> bytes:
        assert isinstance(reply, _Vectors)
        tail = {"model": head.model, "usage": reply.prompt_usage()}
        return b'{"object":"list","data":[%b],%b' % (b",".join(reply.items), orjson.dumps(tail)[1:])


class Rerank(_BulkDialect):
    """``/v1/rerank``."""

    api = "rerank"
    prompt_field = "documents"

    def ask(self, raw: bytes) -> Ask:
        body = _read(raw)
        query = body.get("query")
        if not isinstance(query, str) or not query:
            raise bad_value("query", "must be a text")
        body["documents"] = _documents(body.get("documents"))
        top_n = body.get("top_n")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise bad_value("top_n", "must be a whole number of at least 1")
        if not isinstance(body.setdefault("return_documents", False), bool):
            raise bad_value("return_documents", "must be true or false")
        return _ask(body)

    def collector(self, head: Head) -> Collector:
        return _Scores()

    def whole(self, head: Head, reply: Collector) -> bytes:
        assert isinstance(reply, _Scores)
        body, scores = head.ask.body, reply.scores
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]}
            for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.get("top_n")]
        ]
        if body["return_documents"]:
            for result in results:
                result["document"] = {"text": body["documents"][result["index"]]}
        usage = reply.prompt_usage()
        return orjson.dumps({"object": "list", "model": head.model, "results": results, "usage": usage})


class _Bulk(Collector):
    """The results of the batches, and the tokens that they took."""

    def __init__(self) -> None:
        super().__init__()
        self._prompt_tokens = 0

    def prompt_usage(self) -> dict[str, int]:
        """Tokens as counted by the engine."""
        return {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens}

    def _add_part(self, part: dict[str, Any]) -> None:
        self._prompt_tokens += part["prompt_tokens"]
        self._add_results(part)

    @abstractmethod
    def _add_results(self, part: dict[str, Any]) -> None:
        """Take one batch."""


class _Vectors(_Bulk):
    """Embeddings as the reply has them. Raises ApiError (400) at the first that has not the asked length."""

    def __init__(self, base64_wanted: bool, dimensions: int | None) -> None:
        super().__init__()
        self.items: list[bytes] = []
        self._base64_wanted = base64_wanted
        self._dimensions = dimensions

    def _add_results(self, part: dict[str, Any]) -> None:
        for text in part["embeddings"]:
            vector = text if self._base64_wanted and self._dimensions is None else self._unpacked(text)
            item = {"object": "embedding", "index": len(self.items), "embedding": vector}
            self.items.append(orjson.dumps(item))

    def _unpacked(self, text: str) -> str | tuple[float, ...]:
        packed = base64.b64decode(text)
        length = len(packed) // _FLOAT_BYTES
        if self._dimensions not in (None, length):
            message = f"must be {length}, the length of this model's vectors, or left out"
            raise bad_value("dimensions", message)
        return text if self._base64_wanted else struct.unpack(f"<{length}f", packed)


class _Scores(_Bulk):
    """Relevance scores in the order of the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float] = []

    def _add_results(self, part: dict[str, Any]) -> None:
        self.scores += part["scores"]


def _read(raw: bytes) -> dict[str, Any]:
    return {key: value for key, value in parse_body(raw).items() if not key.startswith(PRIVATE_PREFIX)}


def _ask(body: dict[str, Any]) -> Ask:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_value("model", "must be a string")
    return Ask(orjson.dumps(body), body, model, max_tokens=None, stream=False, include_usage=False)


def _inputs(given: Any) -> list[Any]:
    """The inputs, each a text or token ids. Raises ApiError (400)."""
    inputs = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(inputs, list) or not all(
        (isinstance(one, str) and one) or _is_tokens(one) for one in inputs
    ):
        raise bad_value("input", "must be a text, token ids, or a list of these, none of them empty")
    return _bounded("input", inputs)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < TOKEN_ID_CEILING for token in value)
    )


def _documents(given: Any) -> list[str]:
    if not isinstance(given, list):
        raise bad_value("documents", "must be a list")
    texts = [one.get("text") if isinstance(one, dict) else one for one in given]
    if not all(isinstance(text, str) and text for text in texts):
        raise bad_value("documents", 'must hold texts, or objects {"text": ...}, none of them empty')
    return _bounded("documents", texts)


def _bounded(name: str, items: list[Any]) -> list[Any]:
    if not 1 <= len(items) <= MAX_INPUTS:
        raise ApiError(400, f"{name} must have 1 to {MAX_INPUTS:,} items", param=name, code="invalid_value")
    return items
