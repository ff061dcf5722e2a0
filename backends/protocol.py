"""What the service asks of an engine, whatever engine it is.

An adapter implements :class:`Backend` for its engine and :class:`Generation` for one turn on it. A
generation lives over any number of segments: ``run`` it in a slot, ``preempt`` it, ``run`` it again.
How an engine is preempted stays inside the adapter: by parking the slot where the engine offers that,
else by closing the stream and sending the text so far again. Either way ``run`` returns a
:class:`Cut` once the slot no longer decodes, and the next ``run`` goes on from the same token.

Errors at this boundary are three: :class:`EngineRefused` when the request itself is at fault,
:class:`EngineUnavailable` when the engine is, so that the turn may be tried again, and
:class:`SwapFailed` when a slot's KV could not be saved or brought back, which costs a recompute only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from backends.kv_shape import KvShape

BULK_APIS = frozenset({"embeddings", "rerank"})
"""Turns that generate nothing: a list of inputs, each of which the engine answers by itself."""

#: An engine gets a bulk turn in batches of so many bytes of text, about 500 tokens, or of one input.
BULK_BATCH_BYTES = 2048
#: What an engine adds to an input (the marks of its beginning and end), and to a pair to be ranked.
_MARKS_TOKENS = 8
_PAIR_TOKENS = 128
_BYTES_PER_TOKEN = 4


def bulk_costs(api: str, body: dict[str, Any]) -> list[int]:
    """The inputs of a bulk turn, each by its length in bytes, which is at least that in tokens.

    Tokens that are given by their ids count four bytes each.
    """
    if api == "rerank":
        query = _PAIR_TOKENS + len(body["query"].encode())
        return [query + len(document.encode()) for document in body["documents"]]
    return [
        _MARKS_TOKENS + (len(text.encode()) if isinstance(text, str) else _BYTES_PER_TOKEN * len(text))
        for text in body["input"]
    ]


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


class SwapFailed(BackendError):
    """A save or a restore did not work. No file is left, and a slot that was to be filled is empty.

    The engine goes on working; the turn goes on by recompute.
    """


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can do.

    `slot_context`: the most tokens one sequence may have. `kv_budget_tokens`: all slots' KV together.
    `kv`, the bytes that takes, and `batch_tokens` are None when nobody knows. `swap`: slots can be saved
    to files that this process sees, moves and removes. `reasoning_template`: the chat template separates
    reasoning from content, so only the engine's own chat parser reads its output.
    """

    model: str
    engine_slots: int
    slot_context: int
    kv_layout: KvLayout
    kv_budget_tokens: int
    kv: KvShape | None
    batch_tokens: int | None
    native_park: bool
    swap: bool
    reasoning_template: bool


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """A slot as the engine reports it.

    `kv_tokens`: the tokens whose KV is in it; None when the engine does not tell, such as llama.cpp of a
    slot that has run nothing since the engine started, even if it was restored.
    """

    id: int
    processing: bool
    parked: bool
    context: int
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SavedKv:
    """A slot's KV is in a file of `file_bytes`. `stall_s`: how long the engine decoded nothing for it."""

    kv_tokens: int
    file_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class RestoredKv:
    """A slot holds `kv_tokens` from a file. `stall_s`: how long the engine decoded nothing for it."""

    kv_tokens: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; `completion_tokens` counts all segments, `kv_tokens` is what the slot holds.

    `stop_sequence`: the one of the request's `stop` that ended it, and is not in it; None also where the
    engine does not tell.
    """

    finish_reason: str
    completion_tokens: int
    kv_tokens: int
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The turn was preempted. `resident`: its slot holds its KV. `stop_s`: how long stopping took.

    `kv_tokens` is the engine's own figure of what the slot holds where it tells one, else an upper bound.
    The first tokens of the KV are this turn's own; the last one or two may be generated again.
    `held_tokens` were generated and not forwarded, as their call was not complete; those that the next
    segment's prompt does not have are generated again.
    """

    kv_tokens: int
    resident: bool
    stop_s: float
    held_tokens: int = 0


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

    @property
    def evaluated_tokens(self) -> int:
        """Tokens of the prompt and reply so far whose KV the last segment is known to have made or found.

        Grows while a prompt is evaluated, where the engine tells; 0 where it does not.
        """
        return 0

    @abstractmethod
    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        """Run in engine slot `slot` until done or preempted.

        Cancelling it stops the turn on the engine as well. Raises EngineRefused, EngineUnavailable.
        """

    @abstractmethod
    def preempt(self) -> None:
        """Make `run` return a Cut at the next token boundary (or Finished, if that comes first)."""

    @abstractmethod
    def restored(self, slot: int, kv_tokens: int) -> None:
        """The slot now holds this turn's own first `kv_tokens` tokens (called before ``run(slot)``)."""

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
    async def save(self, slot: int, key: str) -> SavedKv:
        """Write an idle slot's KV to a file that `key` names from now on; the slot keeps its KV.

        A failed or cancelled save leaves no file. `key` must not be in use; it is made of ASCII letters,
        digits, ``-``, ``_`` and ``.`` (ValueError otherwise). Raises SwapFailed, EngineUnavailable.
        """

    @abstractmethod
    async def restore(self, key: str, slot: int) -> RestoredKv:
        """Fill an idle slot from the file of `key`, which stays until it is forgotten.

        Only a file that this object saved with the model that runs now, and that nobody has touched
        since, is given to the engine. After a failure the slot is empty. Raises SwapFailed,
        EngineUnavailable.
        """

    @abstractmethod
    async def forget(self, key: str) -> None:
        """Remove the file of `key`. Nothing happens when there is none."""

    @abstractmethod
    async def clear_swap(self) -> int:
        """Remove all saved files of this backend, those of an earlier owner too; how many there were."""

    @abstractmethod
    def swap_space(self) -> int:
        """Free bytes where saved files go; 0 when there is no such place."""

    @abstractmethod
    async def count_tokens(self, api: str, body: dict[str, Any]) -> int:
        """The prompt's exact length in tokens, template and tool schemas included.

        That of the longest input where there are many. Raises EngineRefused, EngineUnavailable.
        """

    @abstractmethod
    def generation(
        self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
    ) -> Generation:
        """A turn to run: `api` is ``chat``, ``completion`` or one of BULK_APIS, `body` the client's JSON.

        A bulk turn's body is whole: ``input`` a list, ``documents`` texts. Its deltas are the results of a
        batch (``embeddings``, each little-endian floats of 32 bits in base64, or ``scores``) with the
        ``prompt_tokens`` it took. It leaves no KV, and is cut between two batches.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""
