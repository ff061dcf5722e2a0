"""OpenAI's ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from orchestrator.broker import DELTA, Entry
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.base import Chunks, Dialect, Head
from orchestrator.gateway.dialects.responses_items import Items, NoEvents
from orchestrator.gateway.dialects.responses_object import ended, response, turn_part
from orchestrator.gateway.dialects.responses_request import responses_ask
from orchestrator.gateway.dialects.responses_stream import ResponseChunks
from orchestrator.gateway.dialects.responses_tools import read_tools
from orchestrator.gateway.validate import Ask


class Responses(Dialect):
    """``/v1/responses``. Nothing is stored: every request brings its whole input."""

    api = "chat"
    prompt_field = "input"

    def ask(self, raw: bytes) -> Ask:
        return responses_ask(raw)

    def chunks(self, head: Head) -> Chunks:
        return ResponseChunks(head)

    def collector(self, head: Head) -> Collector:
        return _Reply(head)

    def whole(self, head: Head, reply: Collector) -> bytes:
        assert isinstance(reply, _Reply)
        items = reply.items
        items.finish(reply.finish_reason)
        return orjson.dumps(ended(response(head), items, reply.finish_reason, reply.usage))


class _Reply(Collector):
    """A reply in one piece is made of the same items as a stream."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.items = Items(turn_part(head.turn), read_tools(head.ask.request), NoEvents())

    def add(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        self.items.count(entries)
        for entry in entries:
            if entry[0] == DELTA:
                self.items.take(entry[1])
            else:
                super().add([entry])
