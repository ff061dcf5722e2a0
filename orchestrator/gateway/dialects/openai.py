"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``.

A silent stream gets a comment and, after it, a chunk that adds nothing: OpenAI's clients pass comments
over, so those that give a stream up for its silence (Qwen Code) count chunks. An empty text would not do in
a chat: to some it begins or ends a part of the reply, where an empty delta touches none.
"""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.gateway.collect import LOGPROBS, Collector
from orchestrator.gateway.dialects.base import KEEP_ALIVE, Chunks, Dialect, Head
from orchestrator.gateway.errors import DONE
from orchestrator.gateway.validate import Ask, chat_ask, completion_ask


class _OpenAiChunks(Chunks):
    def __init__(self, head: Head, prefix: str, kind: str) -> None:
        super().__init__()
        named = {
            "id": f"{prefix}-{head.turn}",
            "object": kind,
            "created": head.created,
            "model": head.model,
        }
        self._head = b"data: " + orjson.dumps(named)[:-1] + b',"choices":['
        self._include_usage = head.ask.include_usage

    def _end(self, out: list[bytes], reason: str, usage: dict[str, Any]) -> None:
        self._finish(out, orjson.dumps(reason))
        if self._include_usage:
            out += (self._head, b'],"usage":', orjson.dumps(usage), b"}\n\n")
        out.append(DONE)

    def _finish(self, out: list[bytes], reason: bytes) -> None:
        """Append the chunk that carries the finish reason, given as JSON."""
        raise NotImplementedError


class ChatChunks(_OpenAiChunks):
    """``chat.completion.chunk``: a role chunk before the first output, then deltas."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "chatcmpl", "chat.completion.chunk")
        self._prefix = self._head + b'{"index":0,"delta":'
        self._suffix = b',"finish_reason":null}]}\n\n'
        self._opened = False

    def keep_alive(self) -> bytes:
        out = [KEEP_ALIVE]
        if self._opened:
            out += (self._prefix, b"{}", self._suffix)
        else:
            self._open(out)
        return b"".join(out)

    def _open(self, out: list[bytes]) -> None:
        self._opened = True
        out += (self._prefix, b'{"role":"assistant","content":""}', self._suffix)

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        if not self._opened:
            self._open(out)
        if LOGPROBS not in part:
            if part:
                out += (self._prefix, orjson.dumps(part), self._suffix)
            return
        delta = {key: value for key, value in part.items() if key != LOGPROBS}
        logprobs = orjson.dumps(part[LOGPROBS])
        out += (self._prefix, orjson.dumps(delta), b',"logprobs":', logprobs, self._suffix)

    def _finish(self, out: list[bytes], reason: bytes) -> None:
        if not self._opened:
            self._open(out)
        out += (self._prefix, b'{},"finish_reason":', reason, b"}]}\n\n")


class CompletionChunks(_OpenAiChunks):
    """``text_completion``: pieces of text."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "cmpl", "text_completion")
        self._prefix = self._head + b'{"index":0,"text":'

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE + self._prefix + b'"","finish_reason":null,"logprobs":null}]}\n\n'

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        logprobs = part.get(LOGPROBS)
        text = part.get("text", "")
        if not text and logprobs is None:
            return
        out += (self._prefix, orjson.dumps(text), b',"finish_reason":null,"logprobs":')
        out += (b"null" if logprobs is None else orjson.dumps(logprobs), b"}]}\n\n")

    def _finish(self, out: list[bytes], reason: bytes) -> None:
        out += (self._prefix, b'"","finish_reason":', reason, b',"logprobs":null}]}\n\n')


class ChatCompletions(Dialect):
    """``/v1/chat/completions``."""

    api = "chat"
    prompt_field = "messages"

    def ask(self, raw: bytes) -> Ask:
        return chat_ask(raw)

    def chunks(self, head: Head) -> Chunks:
        return ChatChunks(head)

    def whole(self, head: Head, reply: Collector) -> bytes:
        choice = {"index": 0, "message": reply.message(), "logprobs": reply.logprobs}
        return _whole(head, "chatcmpl", "chat.completion", choice, reply)


class Completions(Dialect):
    """``/v1/completions``."""

    api = "completion"
    prompt_field = "prompt"

    def ask(self, raw: bytes) -> Ask:
        return completion_ask(raw)

    def chunks(self, head: Head) -> Chunks:
        return CompletionChunks(head)

    def whole(self, head: Head, reply: Collector) -> bytes:
        choice = {"index": 0, "text": reply.text("text"), "logprobs": reply.logprobs}
        return _whole(head, "cmpl", "text_completion", choice, reply)


def _whole(head: Head, prefix: str, kind: str, choice: dict[str, Any], reply: Collector) -> bytes:
    return orjson.dumps(
        {
            "id": f"{prefix}-{head.turn}",
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": [{**choice, "finish_reason": reply.finish_reason}],
            "usage": reply.usage,
        }
    )
