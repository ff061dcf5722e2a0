"""The output items of a response, put together from a chat's deltas. Pure.

- Reasoning, text and each call are items of their own, in the order in which they begin. A text is over when
  anything else begins; calls are open until the reply's end, as their pieces may come in turns.
- A call is opened once its name is known: the name decides what kind of item it is.
- Arguments of a freeform tool are a JSON object around its input, which is told once it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from orchestrator.broker import DELTA, Entry
from orchestrator.gateway.collect import LOGPROBS
from orchestrator.gateway.dialects.responses_tools import INPUT, Json, Tool, Tools

Status = Literal["in_progress", "completed", "incomplete"]
ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


@dataclass(slots=True)
class Item:
    """One item of the output: a text, or a call of `tool`. `pieces` add up to what it says.

    `type` is the API's own name. `status` says "in_progress" as long as there may be more.
    """

    type: str
    id: str
    index: int
    tool: Tool | None = None
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    status: Status = "in_progress"

    def text(self) -> str:
        """All that it says so far."""
        return "".join(self.pieces)

    def part(self) -> Json:
        """The content of a text item as its only part."""
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": self.text()}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs, "text": self.text()}

    def json(self) -> Json:
        """The item as the API has it. A text that has just begun has no content."""
        head: Json = {"id": self.id, "type": self.type, "status": self.status}
        if self.tool is not None:
            said = {"name": self.tool.name, "call_id": self.call_id}
            if self.tool.namespace is not None:
                said["namespace"] = self.tool.namespace
            return {**head, **said, INPUT if self.tool.freeform else "arguments": self.text()}
        content = [self.part()] if self.pieces else []
        if self.type == "reasoning":
            return {**head, "summary": [], "content": content, "encrypted_content": None}
        return {**head, "role": "assistant", "content": content}


class Events(Protocol):
    """Who is told how the items grow."""

    def opened(self, item: Item) -> None:
        """An item begins; it says nothing yet."""

    def said(self, item: Item, text: str, logprobs: list[Any]) -> None:
        """An open item has said more."""

    def closed(self, item: Item) -> None:
        """An item is over."""


class NoEvents:
    """For a reply in one piece."""

    def opened(self, item: Item) -> None:
        """Nobody listens."""

    def said(self, item: Item, text: str, logprobs: list[Any]) -> None:
        """Nobody listens."""

    def closed(self, item: Item) -> None:
        """Nobody listens."""


class _Call:
    """A call whose pieces are coming in. `item` is there once its name is."""

    def __init__(self) -> None:
        self.name = ""
        self.id = ""
        self.arguments: list[str] = []
        self.item: Item | None = None


class Items:
    """The items of one reply. `turn` makes their ids its own."""

    def __init__(self, turn: str, tools: Tools, events: Events) -> None:
        self._turn = turn
        self._tools = tools
        self._events = events
        self._items: list[Item] = []
        self._open_text: Item | None = None
        self._calls: dict[int, _Call] = {}
        self._last: Item | None = None
        self.reasoning_tokens = 0

    def count(self, entries: Iterable[Entry]) -> None:
        """Count the tokens of the reasoning that is in these entries."""
        for entry in entries:
            if entry[0] == DELTA and entry[1].get("reasoning_content"):
                self.reasoning_tokens += entry[2]

    def take(self, part: dict[str, Any]) -> None:
        """Take one delta."""
        thought = part.get("reasoning_content")
        if thought and isinstance(thought, str):
            self._say("reasoning", thought, [])
        text = part.get("content")
        if text and isinstance(text, str):
            self._say("message", text, _logprobs(part) if LOGPROBS in part else [])
        elif LOGPROBS in part and self._open_text is not None and self._open_text.type == "message":
            # A token that left a character incomplete.
            self._say("message", "", _logprobs(part))
        if "tool_calls" in part:
            pieces = part["tool_calls"]
            for piece in pieces if isinstance(pieces, list) else ():
                if isinstance(piece, dict):
                    self._take_call(piece)

    def finish(self, reason: str) -> None:
        """Close what is open. After a reply that was cut off, what it ended in is incomplete."""
        cut_off = reason == "length"
        for number in sorted(self._calls):
            call = self._calls[number]
            if call.item is None:
                self._begin_call(call)
        calls = {call.item.index: call for call in self._calls.values() if call.item is not None}
        for item in self._items:
            if item.status != "in_progress":
                continue
            is_cut = cut_off and item is self._last
            if item.index in calls:
                self._complete_call(item, calls[item.index], is_cut=is_cut)
            self._close(item, "incomplete" if is_cut else "completed")

    def break_off(self) -> None:
        """The reply failed: what is open stays as it is, and nobody is told."""
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"

    def output(self) -> list[Json]:
        """All items as they are."""
        return [item.json() for item in self._items]

    def _say(self, kind: str, text: str, logprobs: list[Any]) -> None:
        item = self._open_text
        if item is None or item.type != kind:
            item = self._open(kind)
            self._open_text = item
        item.pieces.append(text)
        if logprobs:
            item.logprobs += logprobs
        self._last = item
        self._events.said(item, text, logprobs)

    def _open(self, kind: str, tool: Tool | None = None, call_id: str = "") -> Item:
        if self._open_text is not None:
            self._close(self._open_text, "completed")
            self._open_text = None
        index = len(self._items)
        item = Item(kind, f"{ID_PREFIXES[kind]}_{self._turn}_{index}", index, tool, call_id)
        self._items.append(item)
        self._events.opened(item)
        return item

    def _close(self, item: Item, status: Status) -> None:
        item.status = status
        self._events.closed(item)

    def _take_call(self, piece: dict[str, Any]) -> None:
        number = piece.get("index")
        call = self._calls.setdefault(number if isinstance(number, int) else 0, _Call())
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        call.id = call.id or _string(piece.get("id"))
        call.name = call.name or _string(function.get("name"))
        arguments = _string(function.get("arguments"))
        call.arguments.append(arguments)
        if call.item is None:
            if not call.name:
                return
            arguments = "".join(call.arguments)
            self._begin_call(call)
        item = call.item
        assert item is not None
        self._last = item
        if arguments and item.type == "function_call":
            self._more(item, arguments)

    def _begin_call(self, call: _Call) -> None:
        tool = self._tools.known.get(call.name) or Tool(call.name)
        kind = "custom_tool_call" if tool.freeform else "function_call"
        call_id = call.id or f"call_{self._turn}_{len(self._items)}"
        call.item = self._open(kind, tool, call_id)

    def _complete_call(self, item: Item, call: _Call, *, is_cut: bool) -> None:
        """Tell what is left of a call."""
        arguments = "".join(call.arguments)
        if item.type == "custom_tool_call":
            self._more(item, _freeform_input(arguments, is_cut=is_cut))
        elif not item.pieces:
            # Nothing at all is not JSON, and clients read JSON.
            self._more(item, arguments or ("" if is_cut else "{}"))

    def _more(self, item: Item, text: str) -> None:
        if text:
            item.pieces.append(text)
            self._events.said(item, text, [])


def _freeform_input(arguments: str, *, is_cut: bool) -> str:
    """What a freeform tool is called with; nothing of a call that was cut off, which must not be run."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "" if is_cut else arguments
    if isinstance(given, dict) and isinstance(given.get(INPUT), str):
        return str(given[INPUT])
    return arguments


def _logprobs(part: dict[str, Any]) -> list[Any]:
    """The tokens of a chat delta's logprobs."""
    logprobs = part[LOGPROBS]
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return content if isinstance(content, list) else []


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
