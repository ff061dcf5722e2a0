"""Ollama's ``/api/chat`` (docs.ollama.com/api/chat): a chat as JSON lines, with options of its own names.

A client that reads JSON lines has no comments to skip, so a silent stream is kept open with an empty message.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import orjson

from orchestrator.broker import DELTA
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.base import Chunks, Dialect, Head
from orchestrator.gateway.dialects.ollama_request import chat_body
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.validate import Ask, chat_ask, parse_body, write_body


class OllamaErrors:
    """``{"error": message}``, also as a stream's last line."""

    def body(self, error: ApiError) -> bytes:
        """The error as JSON."""
        return orjson.dumps({"error": error.message})

    def event(self, error: ApiError) -> bytes:
        """The same as a line."""
        return self.body(error) + b"\n"


OLLAMA_ERRORS = OllamaErrors()


class OllamaChat(Dialect):
    """``/api/chat``."""

    api = "chat"
    prompt_field = "messages"
    errors = OLLAMA_ERRORS

    def ask(self, raw: bytes) -> Ask:
        return chat_ask(write_body(chat_body(parse_body(raw))))

    def chunks(self, head: Head) -> Chunks:
        return OllamaChunks(head)

    def collector(self, head: Head) -> Collector:
        return _Timed()

    def whole(self, head: Head, reply: Collector) -> bytes:
        assert isinstance(reply, _Timed)
        said = {name: reply.text(part) for name, part in _TEXTS.items() if reply.text(part)}
        message: dict[str, Any] = {"role": "assistant", "content": "", **said}
        calls = _calls(reply)
        if calls:
            message["tool_calls"] = calls
        ending = _ending(reply.finish_reason, reply.usage, reply.clock)
        return orjson.dumps({**_head(head), "message": message, **ending})


class OllamaChunks(Chunks):
    """Lines with pieces of the message, then one with ``done`` and the figures."""

    errors = OLLAMA_ERRORS
    content_type = b"application/x-ndjson"

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._head = orjson.dumps(_head(head))[:-1]
        self._prefix = self._head + b',"message":{"role":"assistant","content":'
        self._empty = self._prefix + b'""},"done":false}\n'
        self._clock = _Clock()
        self._collected = Collector()

    def keep_alive(self) -> bytes:
        return self._empty

    def _status(self, out: list[bytes], status: str, details: dict[str, Any]) -> None:
        """Nothing: there are no comments."""

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        self._clock.tick()
        content, thinking = part.get("content") or "", part.get("reasoning_content")
        if content or thinking:
            out += (self._prefix, orjson.dumps(content))
            if thinking:
                out += (b',"thinking":', orjson.dumps(thinking))
            out.append(b'},"done":false}\n')
        if "tool_calls" in part:
            # Calls are lines of whole ones, and their arguments are objects: told at the end.
            self._collected.add([[DELTA, {"tool_calls": part["tool_calls"]}]])

    def _end(self, out: list[bytes], reason: str, usage: dict[str, Any]) -> None:
        calls = _calls(self._collected)
        if calls:
            out += (self._prefix, b'"","tool_calls":', orjson.dumps(calls), b'},"done":false}\n')
        ending = orjson.dumps(_ending(reason, usage, self._clock))
        out += (self._prefix, b'""},', ending[1:], b"\n")


class _Clock:
    """When a reply was begun, and when its first output came."""

    def __init__(self) -> None:
        self._begun = time.monotonic_ns()
        self._first: int | None = None

    def tick(self) -> None:
        """There is output."""
        if self._first is None:
            self._first = time.monotonic_ns()

    def durations(self) -> dict[str, int]:
        """In nanoseconds, up to now. Waiting for a slot counts as evaluating the prompt."""
        now = time.monotonic_ns()
        first = now if self._first is None else self._first
        return {
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_duration": first - self._begun,
            "eval_duration": now - first,
        }


class _Timed(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.clock = _Clock()

    def _add_part(self, part: dict[str, Any]) -> None:
        self.clock.tick()
        super()._add_part(part)


_TEXTS = {"content": "content", "thinking": "reasoning_content"}


def _head(head: Head) -> dict[str, Any]:
    created = datetime.fromtimestamp(head.created, UTC).isoformat().replace("+00:00", "Z")
    return {"model": head.model, "created_at": created}


def _ending(reason: str, usage: dict[str, Any], clock: _Clock) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "prompt_eval_count": usage["prompt_tokens"],
        "eval_count": usage["completion_tokens"],
        **clock.durations(),
    }


def _calls(reply: Collector) -> list[dict[str, Any]]:
    """The tool calls that are whole; one that the token limit cut off is none."""
    calls = []
    for call in reply.calls:
        try:
            arguments = orjson.loads(call["function"]["arguments"] or "{}")
        except orjson.JSONDecodeError:
            continue
        calls.append({"function": {"name": call["function"].get("name", ""), "arguments": arguments}})
    return calls
