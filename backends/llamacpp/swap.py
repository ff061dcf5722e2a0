"""Slots to files and back: llama.cpp's save and restore, with every answer checked.

A save of a full disk may look like any other save but for the file's size; a restore of a file from
another model may look like any other restore. So the sizes and counts in the answers are compared with
the file and with what was saved, and the engine is asked which model it runs before it gets a file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx

from backends.kv_shape import KvShape
from backends.llamacpp import told
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.swap_files import FileId, SwapFiles
from backends.llamacpp.wire import error_of, read_json
from backends.protocol import BackendError, EngineUnavailable, RestoredKv, SavedKv, SwapFailed

T = TypeVar("T")

# A save to a slow disk takes long, and breaking it off would leave its file to nobody.
SWAP_S = 120.0
# How long a cancelled caller waits for a save or a restore that the engine has begun.
CANCEL_BOUND_S = 5.0
# Beside the tensors a file has each cell's position, sequence and token, and a head.
_ROOM_BYTES, _ROOM_SHARE = 1 << 16, 64
_MOST_BYTES = 1 << 60
_PROBE_KEY = "probe"
_GATEWAY_STATUS = (502, 503, 504)
_IDENTITY = (
    "model_path",
    "model_alias",
    "model_ftype",
    "build_info",
    "bos_token",
    "eos_token",
    "chat_template",
)

Identity = tuple[str, ...]


def identity_of(props: dict[str, Any]) -> Identity:
    """What tells one model from another, in `/props`."""
    return tuple(str(props.get(name)) for name in _IDENTITY)


@dataclass(frozen=True, slots=True)
class _Saved:
    file: FileId
    kv_tokens: int
    model: Identity
    pieces: list[int] | None


class Swap:
    """The saved slots of one backend."""

    def __init__(self, client: LlamaCppClient, files: SwapFiles) -> None:
        self.files = files
        self.model: Identity = ()
        """The model that the engine ran when it was last asked."""
        self.kv: KvShape | None = None
        self._client = client
        self._saved: dict[str, _Saved] = {}

    async def works(self) -> bool:
        """Whether the engine saves where this process looks; tried out where an empty slot is idle.

        Raises EngineUnavailable.
        """
        if not await self.files.reachable():
            return False
        empty = next((s.id for s in await self._client.slots() if not s.processing and not s.kv_tokens), None)
        if empty is None:
            return True
        name = self.files.temporary_name(_PROBE_KEY)
        try:
            reply = await self._act(empty, "save", name)
            size = await self.files.size(_PROBE_KEY)
            return size is not None and isinstance(reply, dict) and reply.get("n_written") == size
        except SwapFailed:
            return False
        finally:
            with anyio.CancelScope(shield=True):
                await self.files.remove(_PROBE_KEY)

    async def save(self, slot: int, key: str) -> SavedKv:
        """See Backend.save."""
        name = self.files.temporary_name(key)
        if key in self._saved:
            raise ValueError(f"key {key!r} is in use")
        await self._check_slot(slot)
        pieces = self._client.pieces_in_slot.get(slot)
        try:
            reply = await _to_its_end(partial(self._act, slot, "save", name))
            tokens, size, stall_s = _figures(reply, "n_saved", "n_written", "save_ms")
            if not tokens:
                raise SwapFailed(f"slot {slot} holds nothing to save")
            file = await self.files.keep(key, size)
            self._saved[key] = _Saved(file, tokens, self.model, pieces)
        finally:
            if key not in self._saved:
                with anyio.CancelScope(shield=True):
                    await self.files.remove(key)
        return SavedKv(tokens, size, stall_s)

    async def restore(self, key: str, slot: int) -> RestoredKv:
        """See Backend.restore."""
        whole = False
        try:
            saved = await self._usable(key)
            reply = await _to_its_end(partial(self._act, slot, "restore", self.files.name(key)))
            tokens, _, stall_s = _figures(reply, "n_restored", "n_read", "restore_ms")
            if tokens != saved.kv_tokens:
                raise SwapFailed(f"the engine restored {tokens} tokens of {saved.kv_tokens}")
            whole = True
        finally:
            if not whole:
                await self._empty(slot)
        pieces = self._client.pieces_in_slot
        pieces.pop(slot, None)
        if saved.pieces is not None:
            pieces[slot] = saved.pieces
        return RestoredKv(tokens, stall_s)

    async def forget(self, key: str) -> None:
        """See Backend.forget."""
        self._saved.pop(key, None)
        with anyio.CancelScope(shield=True):
            await self.files.remove(key)

    async def clear(self) -> int:
        """See Backend.clear_swap."""
        self._saved.clear()
        return await self.files.clear()

    # Inside ----------------------------------------------------------------------------------------

    async def _usable(self, key: str) -> _Saved:
        """What is known of the key's file, if it may be given to the engine."""
        saved = self._saved.get(key)
        if saved is None:
            raise SwapFailed("nothing is saved under this key")
        if saved.model != self.model or saved.model != identity_of(await self._props()):
            raise SwapFailed("the engine runs another model than when the slot was saved")
        await self.files.check(key, saved.file)
        return saved

    async def _check_slot(self, slot: int) -> None:
        """That the slot is idle, else the save waits for its turn's end, and that its KV has room."""
        try:
            state = (await self._client.slots())[slot]
        except IndexError:
            raise SwapFailed(f"the engine has no slot {slot}") from None
        if state.processing:
            raise SwapFailed(f"slot {slot} is still decoding")
        if self.kv is None or state.kv_tokens is None:
            return
        need = self.kv.bytes(state.kv_tokens)
        need += need // _ROOM_SHARE + _ROOM_BYTES
        free = await anyio.to_thread.run_sync(self.files.space)
        if free < need:
            raise SwapFailed(f"the swap folder has {free} bytes free, and the slot needs {need}")

    async def _empty(self, slot: int) -> None:
        """Erase what a failed restore left, also while cancelled; an engine that is gone holds nothing."""
        shield = anyio.CancelScope(shield=True, deadline=anyio.current_time() + CANCEL_BOUND_S)
        with shield, contextlib.suppress(BackendError):
            await self._client.erase(slot)

    async def _props(self) -> dict[str, Any]:
        props = await self._client.ask("GET", "/props")
        return props if isinstance(props, dict) else {}

    async def _act(self, slot: int, action: str, name: str) -> Any:
        """A slot action on a file. Raises SwapFailed when the engine refuses, or fails at it."""
        path = f"/slots/{slot}?action={action}"
        began = time.monotonic()
        response = await self._client.request("POST", path, {"filename": name}, timeout_s=SWAP_S)
        if response.status_code in _GATEWAY_STATUS:
            raise EngineUnavailable(str(error_of(response.status_code, response.content)))
        if response.status_code != 200:
            raise SwapFailed(f"the engine could not {action} slot {slot}: {_said(response)}")
        reply = read_json(response.content)
        if isinstance(reply, dict):
            reply.setdefault("timings", {f"{action}_ms": (time.monotonic() - began) * 1000})
        return reply


def _said(response: httpx.Response) -> str:
    """The engine's reason, unless it may name a path."""
    said = str(error_of(response.status_code, response.content))
    return f"HTTP {response.status_code}" if "/" in said or "\\" in said else said


def _figures(reply: Any, tokens: str, size: str, time_ms: str) -> tuple[int, int, float]:
    try:
        reply = told.obj(reply)
        stall_s = max(0.0, told.number(told.obj(reply.get("timings")).get(time_ms))) / 1000
        return told.count(reply.get(tokens)), told.count(reply.get(size), _MOST_BYTES), stall_s
    except EngineUnavailable:
        raise SwapFailed("the engine answered a slot action in an unknown shape") from None


async def _to_its_end(call: Callable[[], Awaitable[T]]) -> T:
    """Await a call that goes on for a bounded time after its caller was cancelled.

    The engine does what it has begun whether anyone listens or not; only its answer tells when the file
    can be removed, or the slot be erased, for good.
    """
    results: list[T] = []
    failures: list[Exception] = []
    over = anyio.Event()
    shield = anyio.CancelScope(shield=True)

    async def run() -> None:
        try:
            with shield:
                results.append(await call())
        except Exception as error:
            failures.append(error)
        finally:
            over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            await over.wait()
        except anyio.get_cancelled_exc_class():
            shield.deadline = anyio.current_time() + CANCEL_BOUND_S
            raise
    if failures:
        raise failures[0]
    return results[0]
