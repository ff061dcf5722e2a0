"""What a wire API is to the gateway: how its requests, replies, streams and errors read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from orchestrator.broker import DELTA, END, ERROR, STATUS, Entry, stop_sequence_of
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.errors import OPENAI_ERRORS, ErrorShape, from_entry
from orchestrator.gateway.validate import Ask

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every piece of one reply repeats: the turn, the model that was asked for, and when."""

    turn: str
    model: str
    created: int
    ask: Ask


class Chunks(ABC):
    """One turn's stream as bytes. Its ids are the same in every event of it.

    This runs once a token: what does not change over a stream is encoded once a turn, and entries that
    arrived together become one piece of bytes.
    """

    errors: ErrorShape = OPENAI_ERRORS
    content_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"

    def __init__(self) -> None:
        self.over = False
        self._stop_sequence: str | None = None

    def open(self) -> bytes:
        """What is sent with the headers, before the turn has said anything."""
        return b""

    def keep_alive(self) -> bytes:
        """What a silent stream is kept open with: an event, where clients do not count comments."""
        return KEEP_ALIVE

    def encode(self, entries: Iterable[Entry]) -> bytes:
        """The bytes to send for these entries. Nothing follows the end entry."""
        out: list[bytes] = []
        for entry in entries:
            kind = entry[0]
            if kind == DELTA:
                self._delta(out, entry[1])
            elif kind == STATUS:
                self._status(out, entry[1], entry[2])
            elif kind == END:
                self._stop_sequence = stop_sequence_of(entry)
                self._end(out, entry[1], entry[2])
                self.over = True
                break
            elif kind == ERROR:
                out.append(self.errors.event(from_entry(entry[1], entry[2])))
                self.over = True
                break
        return b"".join(out)

    @abstractmethod
    def _delta(self, out: list[bytes], part: dict[str, Any]) -> None:
        """Append the events of one delta."""

    def _status(self, out: list[bytes], status: str, details: dict[str, Any]) -> None:
        """Append what tells that the turn started, paused or resumed: a comment, unless overridden."""
        out.append(b": %b\n\n" % status.encode())

    @abstractmethod
    def _end(self, out: list[bytes], reason: str, usage: dict[str, Any]) -> None:
        """Append the events that end the reply; `_stop_sequence` is what ended it, if one did."""


class Dialect(ABC):
    """One wire API for turns. Stateless; one instance serves all requests."""

    #: What the turn runs as: ``chat``, ``completion``, or one of `backends.protocol.BULK_APIS`.
    api: ClassVar[str]
    #: The field of the request that holds the prompt.
    prompt_field: ClassVar[str]
    errors: ClassVar[ErrorShape] = OPENAI_ERRORS

    def errors_of(self, turn: str) -> ErrorShape:
        """How the errors of one turn read, where they name it."""
        return self.errors

    @abstractmethod
    def ask(self, raw: bytes) -> Ask:
        """Read and check a request. Raises ApiError (400)."""

    @abstractmethod
    def chunks(self, head: Head) -> Chunks:
        """The encoder of one streamed reply."""

    def collector(self, head: Head) -> Collector:
        """What puts a reply together for `whole`."""
        return Collector()

    @abstractmethod
    def whole(self, head: Head, reply: Collector) -> bytes:
        """The reply in one piece; `reply` is this dialect's collector."""
