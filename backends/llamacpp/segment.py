"""One turn's segments on llama.cpp: open the stream, read it, stop it, go on later.

Two ways to preempt, behind one ``run``:

- *Closing*: the stream is closed; the server frees the slot at the next token boundary and leaves the
  KV there. `/slots` is asked until the slot is idle: its answer comes from the decode thread, so one
  round is usually enough. The next segment sends prompt and generated tokens again to the same slot,
  where all but the last are found.
- *Parking*, where the server can park a processing slot: task, sampler and stream stay alive, the
  stream carries ``: preempted``, and the next segment unparks the slot and reads on.

A subclass says what a request looks like and what its events mean.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson

from backends.llamacpp.wire import SseParser, error_of, unavailable
from backends.protocol import BackendError, Cut, EngineRefused, EngineUnavailable, Finished, Generation, Sink

if TYPE_CHECKING:
    from backends.llamacpp.adapter import LlamaCppBackend

STOP_BOUND_S = 30.0
PARKED = ": preempted"


class _Stream:
    """An open reply. Closing it is what preempts."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = response.aiter_raw()
        self._parser = SseParser()

    async def groups(self) -> AsyncIterator[list[dict[str, Any] | str]]:
        """Events in the groups in which they arrived."""
        async for chunk in self._chunks:
            yield list(self._parser.feed(chunk))

    async def flat(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON events, one by one. Raises EngineUnavailable when the connection breaks."""
        try:
            async for group in self.groups():
                for event in group:
                    if isinstance(event, dict):
                        yield event
        except (httpx.HTTPError, OSError) as error:
            raise unavailable(error) from None

    async def close(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await self._response.aclose()


class LlamaGeneration(Generation):
    """Segments of one turn; subclasses build requests and read events."""

    def __init__(self, backend: LlamaCppBackend) -> None:
        self._backend = backend
        self._scope: anyio.CancelScope | None = None
        self._cut = False
        self._preempted_at = 0.0
        self._asked: anyio.Event | None = None
        self._parked: _Stream | None = None
        self._started = False
        self._slot = self._kv_slot = -1
        self.prompt_tokens = 0
        self.n_done = 0
        self.kv_tokens = 0
        self._prefilled = 0

    # What subclasses provide -----------------------------------------------------------------------

    @abstractmethod
    async def _request(self, slot: int) -> tuple[str, dict[str, Any]] | Finished:
        """Path and body of the next segment's request, or the end if nothing is left to generate."""

    @abstractmethod
    def _read(self, event: dict[str, Any], sink: Sink) -> Finished | None:
        """Take one event; the end when it was the last."""

    @abstractmethod
    def _roll_back(self) -> None:
        """A cut: forget what arrived but was not forwarded."""

    @abstractmethod
    async def _prompt_to_prefill(self, at_least: int) -> list[int]:
        """The next segment's prompt as token ids; may be empty when it is shorter than `at_least`."""

    # Generation ------------------------------------------------------------------------------------

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        self._started = False
        self._sink = sink
        self._slot = slot
        if slot != self._kv_slot:
            self.kv_tokens = self._prefilled = 0
        result: Finished | None = None
        if not self._cut:
            self._kv_slot = slot
            with anyio.CancelScope() as self._scope:
                try:
                    result = await self._run_segment(slot)
                except anyio.get_cancelled_exc_class():
                    if not self._cut:  # from outside: the slot must not go on decoding for nobody
                        await self._backend.wait_idle(slot, STOP_BOUND_S)
                    raise
                finally:
                    self._scope = None
        self._cut, was_cut = False, self._cut
        if result is not None:
            return result
        assert was_cut
        return await self._stopped(slot)

    async def _run_segment(self, slot: int) -> Finished | None:
        """One segment to its end; None when the server parked the turn."""
        if self._parked is not None:
            stream, self._parked = self._parked, None
            await self._backend.unpark(slot)
            whole = self.prompt_tokens + self.n_done
            self._mark_started(whole, whole)
        else:
            if self._backend.piece_tokens:
                await self._prefill(slot, self._backend.piece_tokens)
            request = await self._request(slot)
            if isinstance(request, Finished):
                return request
            stream = _Stream(await self._backend.open_stream(*request))
        try:
            return await self._consume(stream)
        finally:
            if stream is not self._parked:
                await stream.close()

    def preempt(self) -> None:
        if self._cut:
            return
        self._cut = True
        self._preempted_at = time.monotonic()
        if self._asked is not None:
            self._asked.set()
        elif self._scope is not None:
            self._scope.cancel()

    async def discard(self) -> None:
        self._kv_slot = -1
        if self._parked is not None:
            stream, self._parked = self._parked, None
            await stream.close()
            self._roll_back()
            await self._backend.wait_idle(self._slot, STOP_BOUND_S)

    # Inside ----------------------------------------------------------------------------------------

    async def _stopped(self, slot: int) -> Cut:
        if self._parked is None:
            self._roll_back()
            if not await self._backend.wait_idle(slot, STOP_BOUND_S):
                raise EngineUnavailable(
                    f"slot {slot} still decodes {STOP_BOUND_S:.0f} s after it was stopped"
                )
        return Cut(
            self.kv_tokens, resident=self._kv_slot == slot, stop_s=time.monotonic() - self._preempted_at
        )

    async def _prefill(self, slot: int, size: int) -> None:
        """Bring the prompt in by pieces; between two of them the turn can be stopped.

        Each piece is a request that generates (almost) nothing and leaves its KV in the slot.
        """
        ids = await self._prompt_to_prefill(size)
        for end in range(size, len(ids), size):
            if end <= self._prefilled:
                continue
            body = {
                "prompt": ids[:end],
                "n_predict": 0,
                "id_slot": slot,
                "cache_prompt": True,
                "stream": True,
                "return_progress": True,
                "response_fields": ["stop"],
            }
            stream = _Stream(await self._backend.open_stream("/completion", body))
            try:
                async for event in stream.flat():
                    self._raise_on_error(event)
                    self._see_progress(event, len(ids))
            finally:
                await stream.close()

    async def _consume(self, stream: _Stream) -> Finished | None:
        """Read to the end, or to the point where the server has parked the turn (None)."""
        if not self._backend.native_park:
            return await self._read_all(stream)
        self._asked = anyio.Event()
        result: Finished | None = None
        failure: BackendError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._park_when_asked, self._asked)
            try:
                result = await self._read_all(stream)
                if result is None:
                    self._parked = stream
            except BackendError as error:
                failure = error
            finally:
                self._asked = None
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    async def _park_when_asked(self, asked: anyio.Event) -> None:
        await asked.wait()
        if not await self._backend.park(self._slot) and self._scope is not None:
            self._scope.cancel()

    async def _read_all(self, stream: _Stream) -> Finished | None:
        try:
            async for group in stream.groups():
                for event in group:
                    if isinstance(event, str):
                        if event == PARKED and self._cut:
                            return None
                        continue
                    self._raise_on_error(event)
                    self._see_progress(event)
                    result = self._read(event, self._sink)
                    if result is not None:
                        return result
        except (httpx.HTTPError, OSError) as error:
            raise unavailable(error) from None
        raise EngineUnavailable("the engine ended the stream before the reply was complete")

    def _see_progress(self, event: dict[str, Any], prompt_tokens: int | None = None) -> None:
        progress = event.get("prompt_progress")
        if progress:
            total, processed = int(progress["total"]), int(progress["processed"])
            # A cut takes effect after the batch under way: count it, so that it is never too little.
            self.kv_tokens = min(total, processed + self._backend.batch_tokens)
            self._prefilled = processed
            self._mark_started(prompt_tokens or total, int(progress["cache"]))

    def _mark_started(self, prompt_tokens: int, cached: int) -> None:
        if not self._started:
            self._started = True
            if not self.prompt_tokens:
                self.prompt_tokens = prompt_tokens - self.n_done
            self._sink.started(prompt_tokens, cached)

    @staticmethod
    def _raise_on_error(event: dict[str, Any]) -> None:
        if "error" in event:
            error = error_of(200, orjson.dumps(event))
            raise error if isinstance(error, EngineRefused) else EngineUnavailable(str(error))
