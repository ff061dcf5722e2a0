"""What the step loop tells a request's HTTP response, and the queue between the two."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anyio

StopType = Literal["none", "eos", "limit", "word"]


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the prefill: sent when a slot takes the request up, then after every batch."""

    total: int
    cached: int
    processed: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One chunk of the reply."""

    content: str
    token: int
    n_decoded: int
    delta: Mapping[str, Any] | None = None
    """Set for a scripted reply: the chat delta that is due with this token."""
    timings: "Timings | None" = None
    """Set if the request asked for timings with every token."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Modelled durations of a finished request, in seconds."""

    cache_n: int
    prompt_n: int
    prompt_s: float
    predicted_n: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete."""

    id_slot: int
    text: str
    tokens: tuple[int, ...]
    deltas: tuple[Mapping[str, Any], ...]
    stop_type: StopType
    stopping_word: str
    truncated: bool
    finish_reason: str
    """OpenAI's word for the stop type, or the script's own."""
    n_prompt: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends with an error."""

    status: int
    error_type: str
    message: str
    details: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """An SSE comment: `preempted` or `resumed`."""

    comment: Literal["preempted", "resumed"]


Event = Progress | TokenOut | Finished | Failed | Notice


class ApiError(Exception):
    """A request is refused; `failed` says with what status and message."""

    def __init__(self, status: int, message: str, error_type: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.failed = Failed(status, error_type, message)


class Outbox:
    """An unbounded queue with one reader, which takes everything that is there at once."""

    __slots__ = ("_events", "_filled")

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._filled = anyio.Event()

    def put(self, event: Event) -> None:
        """Never blocks: a slow reader does not hold up the step loop."""
        self._events.append(event)
        self._filled.set()

    async def take(self) -> list[Event]:
        """All events since the last call, at least one."""
        if not self._events:
            self._filled = anyio.Event()
            await self._filled.wait()
        taken = list(self._events)
        self._events.clear()
        return taken
