"""Log entries as one JSON reply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from orchestrator.broker import DELTA, END, ERROR, Entry
from orchestrator.gateway.chunks import LOGPROBS
from orchestrator.gateway.errors import from_entry


class Collector:
    """Puts a turn's deltas together again.

    Texts are joined, tool calls by their index, logprobs by their lists; of anything else the last
    value counts.
    """

    def __init__(self) -> None:
        self.over = False
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._other: dict[str, Any] = {}
        self._logprobs: dict[str, Any] = {}
        self._finish_reason = ""
        self._usage: dict[str, Any] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Take the next entries. Raises ApiError when the turn failed."""
        for entry in entries:
            if entry[0] == DELTA:
                self._add_part(entry[1])
            elif entry[0] == END:
                self._finish_reason, self._usage = entry[1], entry[2]
                self.over = True
            elif entry[0] == ERROR:
                self.over = True
                raise from_entry(entry[1], entry[2])

    def chat(self, turn: str, model: str, created: int) -> bytes:
        """The ``chat.completion``."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", **self._other}
        message |= {name: "".join(pieces) for name, pieces in self._texts.items()}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._whole_call(call) for call in calls]
        choice = {"index": 0, "message": message, "logprobs": self._logprobs or None}
        return self._reply(f"chatcmpl-{turn}", "chat.completion", model, created, choice)

    def completion(self, turn: str, model: str, created: int) -> bytes:
        """The ``text_completion``."""
        text = "".join(self._texts.get("text", []))
        choice = {"index": 0, "text": text, "logprobs": self._logprobs or None}
        return self._reply(f"cmpl-{turn}", "text_completion", model, created, choice)

    def _reply(self, id_: str, kind: str, model: str, created: int, choice: dict[str, Any]) -> bytes:
        return orjson.dumps(
            {
                "id": id_,
                "object": kind,
                "created": created,
                "model": model,
                "choices": [{**choice, "finish_reason": self._finish_reason}],
                "usage": self._usage,
            }
        )

    def _add_part(self, part: dict[str, Any]) -> None:
        for name, value in part.items():
            if name == "tool_calls":
                for call in value:
                    self._add_call(call)
            elif name == LOGPROBS:
                self._add_logprobs(value)
            elif isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                self._other[name] = value

    def _add_call(self, delta: dict[str, Any]) -> None:
        call = self._calls.setdefault(delta.get("index", 0), {"function": {"arguments": []}})
        for name, value in delta.items():
            if name == "function":
                function = call["function"]
                for key, piece in value.items():
                    if key == "arguments":
                        function["arguments"].append(piece or "")
                    else:
                        function[key] = piece
            elif name != "index" and value is not None:
                call[name] = value

    @staticmethod
    def _whole_call(call: dict[str, Any]) -> dict[str, Any]:
        function = {**call["function"], "arguments": "".join(call["function"]["arguments"])}
        return {"type": "function", **call, "function": function}

    def _add_logprobs(self, logprobs: dict[str, Any] | None) -> None:
        for name, value in (logprobs or {}).items():
            if isinstance(value, list):
                self._logprobs.setdefault(name, []).extend(value)
            else:
                self._logprobs[name] = value
