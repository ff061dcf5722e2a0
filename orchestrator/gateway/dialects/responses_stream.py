"""The events of a streamed response.

Source: the API's reference of streaming events, and the parsers of its clients. ``response.created`` and
``response.in_progress``; for each item that it is added, its parts and their deltas, and that it is done;
``response.completed``, ``response.incomplete`` or ``response.failed``, and nothing after it: this API has no
``[DONE]``. Events are numbered from 0.

- Reasoning is told as it is, not as a summary: ``response.reasoning_text``.
- A silent stream gets the API's own ``keepalive`` event, which no reference has, but clients know: to codex a
  comment is silence, and after five minutes of that it asks again.
- An ``error`` event has the reference's fields, and ``error`` as the API sends it and its packages look for
  it. ``response.failed`` follows: codex looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from orchestrator.broker import Entry
from orchestrator.gateway.dialects.base import Chunks, Head
from orchestrator.gateway.dialects.responses_items import Item, Items
from orchestrator.gateway.dialects.responses_object import ended, failed, response, turn_part
from orchestrator.gateway.dialects.responses_tools import read_tools
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError

#: The events of each item's text: what they are called, and what the whole text is called in the last.
TEXT_EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


class ResponseChunks(Chunks):
    """One response's events. It writes its own errors: they are numbered, and end the response."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.errors = self
        self._response = response(head)
        self._items = Items(turn_part(head.turn), read_tools(head.ask.request), self)
        self._sequence = 0
        self._out: list[bytes] = []
        self._delta_starts: dict[int, bytes] = {}

    def open(self) -> bytes:
        self._out = []
        self._event("response.created", response=self._response)
        self._event("response.in_progress", response=self._response)
        return b"".join(self._out)

    def keep_alive(self) -> bytes:
        self._out = []
        self._event("keepalive")
        return b"".join(self._out)

    def encode(self, entries: Iterable[Entry]) -> bytes:
        entries = list(entries)
        self._items.count(entries)
        return super().encode(entries)

    # Errors --------------------------------------------------------------------------------------

    def body(self, error: ApiError) -> bytes:
        """An error before the stream."""
        return OPENAI_ERRORS.body(error)

    def event(self, error: ApiError) -> bytes:
        """The events that end a stream which fails."""
        self._out = []
        flat = {"code": error.code, "message": error.message, "param": error.param}
        self._event("error", **flat, error={"type": error.kind, **flat})
        self._event("response.failed", response=failed(self._response, self._items, error))
        return b"".join(self._out)

    # The log -------------------------------------------------------------------------------------

    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        self._out = out
        self._items.take(part)

    def _end(self, out: list[bytes], reason: str, usage: dict[str, Any]) -> None:
        self._out = out
        self._items.finish(reason)
        final = ended(self._response, self._items, reason, usage)
        self._event(f"response.{final['status']}", response=final)

    # The items' events ---------------------------------------------------------------------------

    def opened(self, item: Item) -> None:
        """The item, and the part that its text will be in."""
        self._event("response.output_item.added", output_index=item.index, item=item.json())
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.tool is None:
            place["content_index"] = 0
            self._event("response.content_part.added", **place, part=item.part())
        # Once an item, not once a token.
        kind = f"{TEXT_EVENTS[item.type][0]}.delta"
        start = {"type": kind, **place}
        opened = orjson.dumps(start)[:-1]
        self._delta_starts[item.index] = b'event: %b\ndata: %b,"delta":' % (kind.encode(), opened)

    def said(self, item: Item, text: str, logprobs: list[Any]) -> None:
        """A piece of the item's text."""
        self._out += (self._delta_starts[item.index], orjson.dumps(text))
        if item.type == "message":
            self._out += (b',"logprobs":', orjson.dumps(logprobs) if logprobs else b"[]")
        self._out.append(b',"sequence_number":%d}\n\n' % self._sequence)
        self._sequence += 1

    def closed(self, item: Item) -> None:
        """The item's whole text, part, and the item itself."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        kind, whole = TEXT_EVENTS[item.type]
        said: dict[str, Any] = {whole: item.text()}
        if item.tool is None:
            place["content_index"] = 0
            if item.type == "message":
                said["logprobs"] = item.logprobs
        else:
            said["name"] = item.tool.name
        self._event(f"{kind}.done", **place, **said)
        if item.tool is None:
            self._event("response.content_part.done", **place, part=item.part())
        self._event("response.output_item.done", output_index=item.index, item=item.json())

    def _event(self, kind: str, **fields: Any) -> None:
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._sequence += 1
