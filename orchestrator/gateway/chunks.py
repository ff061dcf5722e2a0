"""Log entries as server-sent events, in the shapes of OpenAI's streams.

This runs once a token. What does not change over a stream is encoded once a turn, so a delta costs one
`orjson.dumps` of the delta itself; entries that arrived together become one piece of bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import orjson

from orchestrator.broker import DELTA, END, ERROR, STATUS, Entry

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
LOGPROBS = "_logprobs"


def error_event(error: bytes) -> bytes:
    """An error after the headers: its body as the stream's last event."""
    return b"data: %b\n\n%b" % (error, DONE)


class Chunks(ABC):
    """One turn's stream. `id` and `created` are the same in every chunk of it."""

    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._include_usage = include_usage
        self.over = False

    def encode(self, entries: Iterable[Entry]) -> bytes:
        """The bytes to send for these entries. Nothing follows the end entry."""
        out: list[bytes] = []
        for entry in entries:
            kind = entry[0]
            if kind == DELTA:
                self._delta(out, entry[1])
            elif kind == STATUS:
                out.append(b": %b\n\n" % entry[1].encode())
            elif kind == END:
                self._finish(out, orjson.dumps(entry[1]))
                if self._include_usage:
                    out += (self._head, b'],"usage":', orjson.dumps(entry[2]), b"}\n\n")
                out.append(DONE)
                self.over = True
                break
            elif kind == ERROR:
                out.append(error_event(orjson.dumps({"error": entry[2]})))
                self.over = True
                break
        return b"".join(out)

    @abstractmethod
    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        """Append the chunk of one delta."""

    @abstractmethod
    def _finish(self, out: list[bytes], reason: bytes) -> None:
        """Append the chunk that carries the finish reason, given as JSON."""


class ChatChunks(Chunks):
    """``chat.completion.chunk``: a role chunk before the first output, then deltas."""

    def __init__(self, turn: str, model: str, created: int, include_usage: bool) -> None:
        head = {
            "id": f"chatcmpl-{turn}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        super().__init__(head, include_usage)
        self._prefix = self._head + b'{"index":0,"delta":'
        self._suffix = b',"finish_reason":null}]}\n\n'
        self._opened = False

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


class CompletionChunks(Chunks):
    """``text_completion``: pieces of text."""

    def __init__(self, turn: str, model: str, created: int, include_usage: bool) -> None:
        head = {"id": f"cmpl-{turn}", "object": "text_completion", "created": created, "model": model}
        super().__init__(head, include_usage)
        self._prefix = self._head + b'{"index":0,"text":'

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        logprobs = part.get(LOGPROBS)
        text = part.get("text", "")
        if not text and logprobs is None:
            return
        out += (self._prefix, orjson.dumps(text), b',"finish_reason":null,"logprobs":')
        out += (b"null" if logprobs is None else orjson.dumps(logprobs), b"}]}\n\n")

    def _finish(self, out: list[bytes], reason: bytes) -> None:
        out += (self._prefix, b'"","finish_reason":', reason, b',"logprobs":null}]}\n\n')
