"""A turn's log entries put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from orchestrator.broker import DELTA, END, ERROR, Entry, stop_sequence_of
from orchestrator.gateway.errors import from_entry

LOGPROBS = "_logprobs"


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
        self.finish_reason = ""
        self.stop_sequence: str | None = None
        self.usage: dict[str, Any] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Take the next entries. Raises ApiError when the turn failed."""
        for entry in entries:
            if entry[0] == DELTA:
                self._add_part(entry[1])
            elif entry[0] == END:
                self.finish_reason, self.usage = entry[1], entry[2]
                self.stop_sequence = stop_sequence_of(entry)
                self.over = True
            elif entry[0] == ERROR:
                self.over = True
                raise from_entry(entry[1], entry[2])

    def text(self, name: str) -> str:
        """What the deltas' texts of this name add up to."""
        return "".join(self._texts.get(name, []))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, in order, each whole."""
        return [self._whole_call(self._calls[index]) for index in sorted(self._calls)]

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """All tokens' logprobs; None when there are none."""
        return self._logprobs or None

    def message(self) -> dict[str, Any]:
        """The assistant's message as a ``chat.completion`` has it."""
        calls = self.calls
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", **self._other}
        message |= {name: "".join(pieces) for name, pieces in self._texts.items()}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        return message

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
