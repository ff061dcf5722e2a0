"""One turn's segments on llama.cpp: open the stream, read it, stop it, go on later.

Two ways to preempt, behind one ``run``:

- *Closing*: the stream is closed; the server frees the slot at the next token boundary and leaves the
  KV there. `/slots` is asked until the slot is idle: its answer comes from the decode thread, so one
  round is usually enough. The next segment sends prompt and generated tokens again to the same slot,
  where all but the last are found.
- *Parking*, where the server can park a processing slot: task, sampler and stream stay alive, the
  stream carries ``: preempted``, and the next segment unparks the slot and reads on.

A stream has no read timeout: a turn may wait for its slot, and a prefill may take minutes. What ends a
silent one is the engine's own account of the slot, asked for after `silence_s` without a sound: a slot
that is idle, that no longer answers, or that has not moved between two such looks.

A subclass says what a request looks like and what its events mean.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import orjson

from backends.llamacpp import told
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.stream import Stream
from backends.llamacpp.wire import TRANSPORT_ERRORS, error_of, unavailable
from backends.protocol import BackendError, Cut, EngineRefused, EngineUnavailable, Finished, Generation, Sink

PARKED = ": preempted"
RESUMED = ": resumed"

# A stream that was closed before the engine said anything was most likely still in its queue, behind
# somebody else's request in the slot: no reason to wait until that is done.
UNSTARTED_BOUND_S = 2.0
# Whoever cancels a segment from outside may be in a hurry, such as a service that ends.
CANCEL_BOUND_S = 5.0
# What an engine says of one token, with all that it counts and twenty others; and of a long prompt.
MOST_TOKEN_BYTES = 32 * 1024
MOST_PROMPT_BYTES = 16 * 1024 * 1024


class LlamaGeneration(Generation):
    """Segments of one turn; subclasses build requests and read events."""

    def __init__(self, backend: LlamaCppClient, max_tokens: int) -> None:
        self._backend = backend
        self._max_tokens = max_tokens
        self._tasks: anyio.abc.TaskGroup | None = None
        self._cut = False
        self._silent = False
        self._preempted_at = 0.0
        self._asked: anyio.Event | None = None
        self._parked: Stream | None = None
        self._parked_by_server = False
        self._requested = self._started = False
        self._slot = self._kv_slot = -1
        self.prompt_tokens = 0
        self.n_done = 0
        self.kv_tokens = 0
        self._prefilled = 0
        self._done_before = 0
        self._held_tokens = 0
        self._own = False
        self._segment_start = 0

    # What subclasses provide -----------------------------------------------------------------------

    @abstractmethod
    async def _request(self, slot: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the next segment's request."""

    @abstractmethod
    def _read(self, event: dict[str, Any], sink: Sink) -> Finished | None:
        """Take one event; the end when it was the last."""

    @abstractmethod
    def _roll_back(self) -> None:
        """A cut: forget what arrived but was not forwarded; `_held_tokens` is what that might cost."""

    @abstractmethod
    async def _prompt_to_prefill(self, at_least: int) -> list[int]:
        """The next segment's prompt as token ids; may be empty when it is shorter than `at_least`."""

    async def _over(self) -> Finished | None:
        """The end, when what was forwarded is the whole reply and only the word that it is was lost."""
        return Finished("length", self.n_done, self.kv_tokens) if self.n_done >= self._max_tokens else None

    # Generation ------------------------------------------------------------------------------------

    @property
    def evaluated_tokens(self) -> int:
        if self.n_done > self._done_before:
            return self.prompt_tokens + self.n_done
        return self._prefilled

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        if self._parked is not None and slot != self._kv_slot:
            await self.discard()
        self._requested = self._started = self._silent = False
        self._held_tokens = 0
        self._sink = sink
        self._slot = slot
        self._done_before = self.n_done
        self._own = slot == self._kv_slot
        if not self._own:
            self.kv_tokens = self._prefilled = 0
        was_asked = not self._cut
        result: Finished | None = None
        try:
            if was_asked:
                self._kv_slot = slot
                result = await self._watched_segment(slot)
        except BackendError:
            self._kv_slot = -1
            raise
        finally:
            self._cut = False
        end = await self._stopped(slot, was_asked) if result is None else result
        most = self._backend.slot_context
        return end if end.kv_tokens <= most else replace(end, kv_tokens=most)

    def preempt(self) -> None:
        if self._cut:
            return
        self._cut = True
        self._preempted_at = time.monotonic()
        if self._asked is not None and not self._parked_by_server:
            self._asked.set()
        elif self._tasks is not None and self._requested and not self._started:
            # The server begins a request that is on its way to it although nobody listens any more, and
            # notices that only after its first batch: who closed earlier would not know what is in the slot.
            self._tasks.start_soon(self._close_unstarted)
        elif self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def restored(self, slot: int, kv_tokens: int) -> None:
        self._kv_slot = slot
        self.kv_tokens = self._prefilled = kv_tokens

    async def discard(self) -> None:
        """Returns once the stream is closed; the server frees the slot at its next step."""
        self._kv_slot = -1
        if self._parked is not None:
            stream, self._parked = self._parked, None
            await stream.close()
            self._roll_back()

    # Inside ----------------------------------------------------------------------------------------

    async def _watched_segment(self, slot: int) -> Finished | None:
        """One segment to its end; None when it was preempted."""
        result: Finished | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._watch_silence, slot)
            try:
                result = await self._segment(slot)
            except anyio.get_cancelled_exc_class():
                if not self._cut and not self._silent:  # the slot must not go on decoding for nobody
                    with contextlib.suppress(BackendError):
                        idle = await self._backend.wait_idle(slot, CANCEL_BOUND_S)
                        if idle is not None and idle.kv_tokens is not None and self._started:
                            self._prefilled = idle.kv_tokens
                raise
            except Exception as error:
                failure = error
            finally:
                tasks, self._tasks = self._tasks, None
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if self._silent and result is None:
            raise EngineUnavailable("the engine fell silent in the middle of a turn")
        return result

    async def _segment(self, slot: int) -> Finished | None:
        over = await self._over()
        if over is not None:
            whole = self.prompt_tokens + self.n_done
            self._mark_started(whole, whole)
            return over
        stream = await self._unparked(slot)
        if stream is None:
            if self._backend.piece_tokens:
                await self._prefill(slot, self._backend.piece_tokens)
            stream = await self._open(slot)
        try:
            return await self._consume(stream)
        finally:
            if stream is not self._parked:
                await stream.close()

    async def _open(self, slot: int) -> Stream:
        path, body = await self._request(slot)
        self._requested = True
        most_bytes = MOST_PROMPT_BYTES + MOST_TOKEN_BYTES * self._max_tokens
        return Stream(await self._backend.open_stream(path, body), most_bytes)

    async def _close_unstarted(self) -> None:
        await anyio.sleep(UNSTARTED_BOUND_S)
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def _unparked(self, slot: int) -> Stream | None:
        """The stream of the parked turn, which goes on now; None when there is none (any more)."""
        stream, self._parked = self._parked, None
        if stream is None:
            return None
        goes_on = False
        try:
            await self._backend.unpark(slot)
            goes_on = True
        except EngineRefused:  # not parked any more: the engine was restarted, or let it go on by itself
            self._roll_back()
            return None
        finally:
            if not goes_on:
                await stream.close()
        whole = self._prefilled = self.prompt_tokens + self.n_done
        self._mark_started(whole, whole)
        return stream

    async def _stopped(self, slot: int, was_asked: bool) -> Cut:
        if self._parked is None and was_asked:
            self._roll_back()
            bound_s = self._backend.stop_bound_s if self._started else UNSTARTED_BOUND_S
            idle = await self._backend.wait_idle(slot, bound_s)
            if idle is None:
                self._kv_slot = -1
                if self._started:
                    raise EngineUnavailable(f"slot {slot} still decodes {bound_s:.0f} s after it was stopped")
            elif idle.kv_tokens is not None and (self._started or self._own):
                self.kv_tokens = self._prefilled = idle.kv_tokens
            elif self.n_done > self._done_before:
                self._prefilled = self.prompt_tokens + self.n_done
        return Cut(
            self.kv_tokens,
            resident=self._kv_slot == slot,
            stop_s=time.monotonic() - self._preempted_at,
            held_tokens=self._held_tokens,
        )

    async def _prefill(self, slot: int, size: int) -> None:
        """Bring the prompt in by pieces; between two of them the turn can be stopped.

        Each piece is a request that generates (almost) nothing and leaves its KV in the slot. A piece
        also cuts the slot's KV off at its own end, so none is sent for what the slot holds already.
        """
        ids = await self._prompt_to_prefill(size)
        held = self._backend.pieces_in_slot
        known = max(self._prefilled, _common_prefix(held.pop(slot, []), ids))
        for end in range(size, len(ids), size):
            if end <= known:
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
            self._requested = True
            stream = Stream(await self._backend.open_stream("/completion", body), MOST_PROMPT_BYTES)
            try:
                async for event in stream.flat():
                    self._raise_on_error(event)
                    self._see_progress(event, len(ids))
            finally:
                await stream.close()
        held[slot] = ids

    async def _consume(self, stream: Stream) -> Finished | None:
        """Read to the end, or to the point where the server has parked the turn (None)."""
        if not self._backend.native_park or self._tasks is None:
            return await self._read_all(stream)
        self._asked = anyio.Event()
        self._parked_by_server = False
        self._tasks.start_soon(self._park_when_asked, self._asked)
        try:
            result = await self._read_all(stream)
        finally:
            self._asked = None
        if result is None:
            self._parked = stream
        return result

    async def _park_when_asked(self, asked: anyio.Event) -> None:
        await asked.wait()
        if not await self._backend.park(self._slot) and self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def _read_all(self, stream: Stream) -> Finished | None:
        try:
            async for group in stream.groups():
                for event in group:
                    if isinstance(event, str):
                        if event == PARKED and self._cut:
                            return None
                        self._hear(event)
                        continue
                    self._raise_on_error(event)
                    self._see_progress(event)
                    result = self._read(event, self._sink)
                    if result is not None:
                        return result
        except TRANSPORT_ERRORS as error:
            raise unavailable(error) from None
        raise EngineUnavailable("the engine ended the stream before the reply was complete")

    def _hear(self, comment: str) -> None:
        """The server parks and resumes on its own account as well, when its memory runs short."""
        if comment == PARKED:
            self._parked_by_server = True
        elif comment == RESUMED:
            self._parked_by_server = False

    def _heard(self) -> tuple[bool, int, int, int]:
        """Changes with everything the engine tells of its progress."""
        return self._started, self.n_done, self.kv_tokens, self._prefilled

    async def _watch_silence(self, slot: int) -> None:
        """End the segment when the engine neither says nor does anything for it any more."""
        last: dict[str, Any] | None = None
        while True:
            heard = self._heard()
            await anyio.sleep(self._backend.silence_s)
            if self._heard() != heard:
                last = None
                continue
            report = await self._backend.slot_report(slot)
            if self._heard() != heard or (report is not None and report.get("is_preempted")):
                continue
            if report is None or not report.get("is_processing") or report == last:
                if self._tasks is not None and not self._cut:
                    self._silent = True
                    self._tasks.cancel_scope.cancel()
                return
            last = report

    def _see_progress(self, event: dict[str, Any], prompt_tokens: int | None = None) -> None:
        progress = event.get("prompt_progress")
        if progress:
            progress = told.obj(progress)
            total = told.count(progress.get("total"), self._backend.slot_context)
            processed, cached = (told.count(progress.get(name), total) for name in ("processed", "cache"))
            # A cut takes effect after the batch under way: count it, so that it is never too little.
            self.kv_tokens = min(total, processed + self._backend.batch_tokens)
            self._prefilled = processed
            self._mark_started(prompt_tokens or total, cached)

    def _counted(self, told_tokens: Any, at_least: int) -> int:
        """Tokens of the whole reply, from what the engine tells of this segment's.

        One that guesses ahead may tell a few more than it was asked for, and sends none of them.
        """
        predicted = min(self._max_tokens, self._segment_start + told.count(told_tokens))
        if predicted < at_least:
            raise told.strange()
        return predicted

    def _mark_started(self, prompt_tokens: int, cached: int) -> None:
        if not self._started:
            self._started = True
            if not self.prompt_tokens:
                self.prompt_tokens = max(0, prompt_tokens - self.n_done)
            self._sink.started(prompt_tokens, cached)
            if self._cut and self._asked is None and self._tasks is not None:
                self._tasks.cancel_scope.cancel()

    @staticmethod
    def _raise_on_error(event: dict[str, Any]) -> None:
        if "error" in event:
            error = error_of(200, orjson.dumps(event))
            raise error if isinstance(error, EngineRefused) else EngineUnavailable(str(error))


def stop_strings(body: Mapping[str, Any]) -> list[str]:
    """What ends a request's reply: `stop` as a list, without empty strings, which the server passes over."""
    stop = body.get("stop") or []
    return [word for word in ([stop] if isinstance(stop, str) else stop) if word]


def _common_prefix(left: list[int], right: list[int]) -> int:
    low, high = 0, min(len(left), len(right)) + 1
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
