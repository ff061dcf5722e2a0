"""What the service asks of an engine, whatever engine it is.

An adapter implements :class:`Backend` for its engine and :class:`Generation` for one turn on it. A
generation lives over any number of segments: ``run`` it in a slot, ``preempt`` it, ``run`` it again.
How an engine is preempted stays inside the adapter: by parking the slot where the engine offers that,
else by closing the stream and sending the text so far again. Either way ``run`` returns a
:class:`Cut` once the slot no longer decodes, and the next ``run`` goes on from the same token.

Errors at this boundary are two: :class:`EngineRefused` when the request itself is at fault, and
:class:`EngineUnavailable` when the engine is, so that the turn may be tried again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class KvLayout(StrEnum):
    """SPLIT: each slot has its own share of the context. UNIFIED: all slots draw on one pool."""

    SPLIT = "split"
    UNIFIED = "unified"


class BackendError(Exception):
    """An engine call failed. The message is one line and names no host or path."""


class EngineRefused(BackendError):
    """The engine will never accept this request."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class EngineUnavailable(BackendError):
    """The engine did not answer, or broke off; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can do.

    `slot_context`: the most tokens one sequence may have. `kv_budget_tokens`: all slots' KV together.
    `kv_bytes_per_token` and `batch_tokens` are None when nobody knows. `reasoning_template`: the chat
    template separates reasoning from content, so only the engine's own chat parser reads its output.
    """

    model: str
    engine_slots: int
    slot_context: int
    kv_layout: KvLayout
    kv_budget_tokens: int
    kv_bytes_per_token: int | None
    batch_tokens: int | None
    native_park: bool
    save_restore: bool
    reasoning_template: bool


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """A slot as the engine reports it."""

    id: int
    processing: bool
    parked: bool
    context: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; `completion_tokens` counts all segments."""

    finish_reason: str
    completion_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The turn was preempted. `resident`: its slot holds its KV. `stop_s`: how long stopping took."""

    kv_tokens: int
    resident: bool
    stop_s: float


@dataclass(frozen=True, slots=True)
class ReplySoFar:
    """What a turn that another process began has sent: enough to go on from there.

    `tokens` are the ids of the generated tokens where known for all of them, else None.
    `parts` are the pieces of the reply in order.
    """

    parts: Sequence[dict[str, Any]]
    tokens: Sequence[int] | None
    n_tokens: int


class Sink(Protocol):
    """Where a running segment puts what it learns; called from the event loop, must not block."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine picked the turn up: its prompt's length and how much of it was in the slot."""

    def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
        """A piece of the reply, the tokens it took, and their ids where the engine tells them."""


class Generation(ABC):
    """One turn on one engine."""

    @abstractmethod
    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        """Run in engine slot `slot` until done or preempted.

        Cancelling it stops the turn on the engine as well. Raises EngineRefused, EngineUnavailable.
        """

    @abstractmethod
    def preempt(self) -> None:
        """Make `run` return a Cut at the next token boundary (or Finished, if that comes first)."""

    @abstractmethod
    async def discard(self) -> None:
        """Let go of whatever the engine holds for a turn that will not run again."""


class Backend(ABC):
    """One engine."""

    @abstractmethod
    async def describe(self) -> EngineInfo:
        """Ask the engine what it is. Raises EngineUnavailable."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Whether the engine answers at all. Slow is not dead: the bound is generous."""

    @abstractmethod
    async def slots(self) -> list[EngineSlot]:
        """All slots as the engine reports them. Raises EngineUnavailable."""

    @abstractmethod
    async def erase(self, slot: int) -> None:
        """Free an idle slot's KV. Raises EngineUnavailable."""

    @abstractmethod
    async def count_tokens(self, api: str, body: dict[str, Any]) -> int:
        """The prompt's exact length in tokens, template and tool schemas included.

        Raises EngineRefused, EngineUnavailable.
        """

    @abstractmethod
    def generation(
        self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
    ) -> Generation:
        """A turn to run: `api` is ``chat`` or ``completion``, `body` the client's JSON."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""
