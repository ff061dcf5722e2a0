"""Bulk turns: embeddings and reranking, one batch of inputs after the other.

llama.cpp's server takes no `id_slot` for these. It gives each input the idle slot whose tokens begin most
like it (from a tenth of the input on), else the one that was idle longest, and overwrites what is there. It
evaluates none while any slot generates, and does not notice then that its client has left, so one that comes
at the wrong time blocks its slot for as long as others generate. It refuses an input that is longer than its
physical batch, unless the model pools by its last token. And inputs that it evaluates at the same time come
out wrong where each slot has its own KV: it cuts them into parts of one length (`split_equal` in its
`llama_kv_cache::init_batch`), and pools the last part only. So:

- Inputs go one by one over all bulk turns, whenever nothing is generated.
- From the first turn on that generates on the engine there is KV to lose. Each input to embed is then
  preceded by a request that evaluates its beginning in the turn's own slot, which so is the one that the
  input is given. Documents to rank cannot be led that way, as the server puts their text together itself; an
  engine for reranking serves nothing else.
- Until then, where the slots share their KV, a request holds a whole batch, and the engine spreads it over
  its slots.

A turn is stopped between two batches, at no loss.
"""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from backends.llamacpp import told
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.wire import error_of, read_json
from backends.protocol import (
    BULK_BATCH_BYTES,
    BackendError,
    Cut,
    EngineRefused,
    EngineSlot,
    EngineUnavailable,
    Finished,
    Generation,
    ReplySoFar,
    Sink,
    bulk_costs,
)

# How often the engine is asked whether it still generates.
QUIET_POLL_S = 0.1
# Whoever cancels a turn from outside may be in a hurry, such as a service that ends.
CANCEL_BOUND_S = 5.0
# The share of an input's tokens that leads it to its slot, well above the server's tenth.
_LEAD_PART = 4
_LEAD_TOKENS = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Call:
    """One bulk API of the engine: where it is, what is sent, and what its answer holds by what name."""

    path: str
    inputs: str
    constant: dict[str, Any]
    dropped: frozenset[str]
    items: str
    result: str
    part: str


_CALLS = {
    "embeddings": _Call(
        path="/v1/embeddings",
        inputs="input",
        # A third of the digits' length, in the log too.
        constant={"encoding_format": "base64"},
        dropped=frozenset({"model", "stream"}),
        items="data",
        result="embedding",
        part="embeddings",
    ),
    "rerank": _Call(
        path="/v1/rerank",
        inputs="documents",
        constant={},
        dropped=frozenset({"model", "stream", "top_n", "return_documents"}),
        items="results",
        result="relevance_score",
        part="scores",
    ),
}


class BulkGeneration(Generation):
    """A turn over `/v1/embeddings` or `/v1/rerank`."""

    def __init__(
        self, backend: LlamaCppClient, api: str, body: dict[str, Any], so_far: ReplySoFar | None
    ) -> None:
        self._backend = backend
        self._call = call = _CALLS[api]
        self._inputs: list[Any] = body[call.inputs]
        self._costs = bulk_costs(api, body)
        left_out = {call.inputs, *call.dropped}
        self._constant = {key: value for key, value in body.items() if key not in left_out} | call.constant
        self._done = 0 if so_far is None else sum(len(part.get(call.part, ())) for part in so_far.parts)
        self._started = False
        self._cut = anyio.Event()
        self._cut_at = 0.0

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        try:
            if not self._cut.is_set():
                await self._run(slot, sink)
            if self._done >= len(self._inputs):
                return Finished("stop", 0, 0)
            return Cut(0, resident=False, stop_s=time.monotonic() - self._cut_at)
        finally:
            self._cut = anyio.Event()

    def preempt(self) -> None:
        if not self._cut.is_set():
            self._cut_at = time.monotonic()
            self._cut.set()

    def restored(self, slot: int, kv_tokens: int) -> None:
        """Of no use to a bulk turn."""

    async def discard(self) -> None:
        """There is nothing to let go of: a bulk turn leaves no KV, and no stream open."""

    async def _run(self, slot: int, sink: Sink) -> None:
        self._backend.pieces_in_slot.pop(slot, None)
        self._started = False
        if self._done >= len(self._inputs):  # only the word that it is was lost
            self._mark_started(1, sink)
        while self._done < len(self._inputs) and not self._cut.is_set():
            if self._backend.shared_kv and not self._backend.generates:
                async with self._backend.spread():
                    await self._evaluate(self._inputs[self._done : self._batch_end()], False, slot, sink)
                continue
            async with self._backend.one_input:
                if not any(other.processing for other in await self._backend.slots()):
                    lead = self._backend.generates and self._call.part == "embeddings"
                    await self._evaluate(self._inputs[self._done : self._done + 1], lead, slot, sink)
                    continue
            with anyio.move_on_after(QUIET_POLL_S):
                await self._cut.wait()

    def _batch_end(self) -> int:
        end = self._done + 1
        size = self._costs[self._done]
        while end < len(self._costs) and size + self._costs[end] <= BULK_BATCH_BYTES:
            size += self._costs[end]
            end += 1
        return end

    async def _evaluate(self, batch: Sequence[Any], lead: bool, slot: int, sink: Sink) -> None:
        """Have a batch evaluated, and its results told; `lead`: in this slot.

        Raises EngineRefused, EngineUnavailable.
        """
        part: dict[str, Any] = {}
        failure: BackendError | None = None
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal failure
                failure = await self._silence()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                if lead:
                    batch = [await self._led(text, slot) for text in batch]
                part = await self._ask(batch)
            except BackendError as error:
                failure = error
            except anyio.get_cancelled_exc_class():
                with suppress(BackendError):
                    await self._backend.wait_idle(slot, CANCEL_BOUND_S)
                raise
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        self._mark_started(part["prompt_tokens"], sink)
        sink.delta(part, 0, [])
        self._done += len(batch)

    def _mark_started(self, tokens: int, sink: Sink) -> None:
        """What the slot holds of it at a time, none of which counts as evaluated now.

        How long that took says little of a prompt's speed, as whoever generates goes first.
        """
        if not self._started:
            self._started = True
            sink.started(tokens, tokens)

    async def _silence(self) -> EngineUnavailable:
        """Return once the engine does nothing any more."""
        last: list[EngineSlot] = []
        while True:
            await anyio.sleep(self._backend.silence_s)
            try:
                slots = await self._backend.slots()
            except EngineUnavailable as error:
                return error
            if slots == last or not any(slot.processing for slot in slots):
                return EngineUnavailable("the engine fell silent in the middle of a turn")
            last = slots

    async def _led(self, text: str | list[int], slot: int) -> list[int]:
        """The input as token ids, which the engine gives that slot now."""
        ids = await self._backend.tokenize(text) if isinstance(text, str) else text
        lead = {
            "prompt": ids[: max(_LEAD_TOKENS, len(ids) // _LEAD_PART)],
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": True,
        }
        await self._post("/completion", lead)
        return ids

    async def _ask(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Have the engine evaluate one batch: the delta it makes."""
        call = self._call
        reply = await self._post(call.path, {**self._constant, call.inputs: batch})
        results: list[Any] = [None] * len(batch)
        reply = told.obj(reply)
        for item in told.objs(reply.get(call.items)):
            place, result = told.count(item.get("index"), len(batch) - 1), item.get(call.result)
            results[place] = _packed(result) if call.part == "embeddings" else told.number(result)
        tokens = told.count(told.obj(reply.get("usage")).get("prompt_tokens"))
        if any(result is None for result in results):
            raise EngineUnavailable("the engine's answer lacks some of the inputs")
        return {call.part: results, "prompt_tokens": tokens}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """One request and its answer, however long the engine lets it wait."""
        response = await self._backend.request("POST", path, body, timeout_s=None)
        if response.status_code == 200:
            return read_json(response.content)
        raise _failure(response.status_code, response.content)


async def longest_input(backend: LlamaCppClient, api: str, body: dict[str, Any]) -> int:
    """Tokens of the longest input. Only those are counted that may be it."""
    longest = 0
    inputs = body[_CALLS[api].inputs]
    costs = bulk_costs(api, body)
    for at in sorted(range(len(inputs)), key=lambda at: -costs[at]):
        if costs[at] <= longest:
            break
        text = inputs[at]
        if isinstance(text, str):
            tokens = len(await backend.tokenize(text))
            text_bytes = len(text.encode())
            longest = max(longest, costs[at] - text_bytes + tokens if api == "rerank" else tokens)
        else:
            longest = max(longest, len(text))
    return longest


def _packed(vector: Any) -> str:
    """A vector as base64 of little-endian floats, which is how it comes unless the engine knows numbers only.

    Raises EngineUnavailable when it is no vector of numbers.
    """
    try:
        if isinstance(vector, list):
            packed = struct.pack(f"<{len(vector)}f", *vector)
        else:
            packed = base64.b64decode(vector, validate=True)
        total = sum(struct.unpack(f"<{len(packed) // _FLOAT_BYTES}f", packed))
    except (TypeError, ValueError, OverflowError, struct.error):
        raise told.strange() from None
    if not packed or not math.isfinite(total):
        raise told.strange()
    return base64.b64encode(packed).decode()


def _failure(status: int, body: bytes) -> BackendError:
    """What an error reply means: that the engine does not do this at all is the request's fault."""
    error = error_of(status, body)
    if status in (404, 405, 501):
        return EngineRefused(501, f"this model's engine refuses: {error}", "not_supported_error")
    if status == 500 and "too large to process" in str(error):
        return EngineRefused(400, str(error), "exceed_context_size_error")
    return error
