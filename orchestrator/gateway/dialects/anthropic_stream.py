"""Anthropic's stream of events.

Source: https://docs.claude.com/en/docs/build-with-claude/streaming. ``message_start``; for each block a
start, deltas and a stop; ``message_delta`` with why the reply ended and what it took; ``message_stop``.

- ``message_start`` is sent with the headers, so that pings may follow while the turn waits. Nothing is
  counted by then: its usage says zero, and that of ``message_delta``, which is cumulative, says all. The
  ``anthropic`` package and Claude Code take each number of the latter over the former's.
- Tool calls are sent after the text, each input in one piece: the log has them whole, at the end.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from orchestrator.broker import DELTA
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.anthropic_errors import AnthropicErrors
from orchestrator.gateway.dialects.anthropic_reply import (
    message,
    signature,
    stopped,
    tool_blocks,
    usage,
)
from orchestrator.gateway.dialects.base import Chunks, Head
from orchestrator.gateway.errors import ApiError

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA_END = b"}}\n\n"

TextKind = Literal["text", "thinking"]


class MessageChunks(Chunks):
    """The events of one reply."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.errors = AnthropicErrors(head.turn)
        self._head = head
        self._index = 0
        self._open: TextKind | None = None
        self._delta_start = b""
        self._calls = Collector()

    def open(self) -> bytes:
        return _event("message_start", message=message(self._head, usage({})))

    def keep_alive(self) -> bytes:
        return PING

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        thought, text = part.get("reasoning_content"), part.get("content")
        if thought and isinstance(thought, str):
            self._say(out, "thinking", thought)
        if text and isinstance(text, str):
            self._say(out, "text", text)
        if "tool_calls" in part:
            self._calls.add([[DELTA, {"tool_calls": part["tool_calls"]}]])

    def _status(self, out: list[bytes], status: str, details: dict[str, Any]) -> None:
        """A ping for the client's clock, and the comment that all streams have."""
        out.append(b": %b\n%b" % (status.encode(), PING))

    def _end(self, out: list[bytes], reason: str, counts: dict[str, Any]) -> None:
        try:
            calls = tool_blocks(self._head, self._calls, reason)
        except ApiError as error:
            out.append(self.errors.event(error))
            return
        self._close(out)
        for call in calls:
            self._start(out, {**call, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": orjson.dumps(call["input"]).decode()}
            out.append(_event("content_block_delta", index=self._index, delta=delta))
            self._stop(out)
        ended = stopped(reason, bool(calls), self._stop_sequence)
        out += (_event("message_delta", delta=ended, usage=usage(counts)), STOP)

    def _say(self, out: list[bytes], kind: TextKind, text: str) -> None:
        """Append a piece of text or thinking, in a block of its own if another kind is open."""
        if self._open != kind:
            self._close(out)
            self._open = kind
            empty = {"signature": ""} if kind == "thinking" else {}
            self._start(out, {"type": kind, kind: "", **empty})
            # Once a block, not once a token.
            self._delta_start = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"%b_delta","%b":' % (self._index, kind.encode(), kind.encode())
            )
        out += (self._delta_start, orjson.dumps(text), DELTA_END)

    def _close(self, out: list[bytes]) -> None:
        """End the open block of text, if any."""
        if self._open == "thinking":
            # Claude Code shows thinking once it is signed.
            delta = {"type": "signature_delta", "signature": signature(self._head)}
            out.append(_event("content_block_delta", index=self._index, delta=delta))
        if self._open is not None:
            self._stop(out)
        self._open = None

    def _start(self, out: list[bytes], block: dict[str, Any]) -> None:
        out.append(_event("content_block_start", index=self._index, content_block=block))

    def _stop(self, out: list[bytes]) -> None:
        out.append(_event("content_block_stop", index=self._index))
        self._index += 1


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
