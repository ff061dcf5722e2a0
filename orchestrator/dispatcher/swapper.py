"""Carries out what the scheduler decides about saved KV, and reports how it went.

A swap that fails costs a recompute and nothing else: it is a warning in the log and in the turn's
timeline, and the turn goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio.abc
import structlog

from backends.protocol import Backend, EngineUnavailable, SavedKv, SwapFailed
from orchestrator.broker import timeline_entry
from orchestrator.dispatcher.books import Books
from orchestrator.dispatcher.turn_run import TurnRun
from orchestrator.scheduler import Event, Restored, RestoreFailed, Saved, SaveFailed
from orchestrator.turns import Tier, TurnState

_log = structlog.get_logger(__name__)


class Swapper:
    """The swap folder of one backend, while one lease lasts."""

    def __init__(
        self,
        backend: Backend,
        books: Books,
        tasks: anyio.abc.TaskGroup,
        handle: Callable[[Event], None],
    ) -> None:
        self._backend = backend
        self._books = books
        self._tasks = tasks
        self._handle = handle
        self._saved: dict[str, SavedKv] = {}

    async def save(self, slot: int, key: str, run: TurnRun | None) -> None:
        """Copy a slot's KV to a file. `run`: the paused turn whose KV it is, if it is one's."""
        try:
            saved = await self._backend.save(slot, key)
        except (SwapFailed, EngineUnavailable) as error:
            _log.warning("KV was not saved", slot=slot, turn=run.id if run else None, error=str(error))
            self._handle(SaveFailed(slot, key))
            if run is not None:
                entry = timeline_entry("swap_failed", error=str(error))
                await self._books.note(run, TurnState.PAUSED, entry)
            return
        self._saved[key] = saved
        self._handle(Saved(slot, key, saved.kv_tokens, saved.file_bytes, saved.stall_s))

    async def restore(self, run: TurnRun, key: str, slot: int) -> None:
        """Bring saved KV in before the turn's segment; without it the segment evaluates its prompt.

        Raises EngineUnavailable.
        """
        first = run.tier is None
        try:
            restored = await self._backend.restore(key, slot)
        except SwapFailed as error:
            _log.warning("KV was not restored; it is evaluated again", turn=run.id, error=str(error))
            run.tier = None if first else Tier.DROPPED
            entry = timeline_entry("swap_failed", error=str(error))
            self._handle(RestoreFailed(run.id))
        else:
            if not first and run.generation is not None:
                run.generation.restored(slot, restored.kv_tokens)
            entry = timeline_entry(
                "restored", slot=slot, kv_tokens=restored.kv_tokens, stall_s=round(restored.stall_s, 6)
            )
            self._handle(Restored(run.id, restored.kv_tokens, restored.stall_s))
        run.asked_at = time.monotonic()
        state = TurnState.CLAIMED if first else TurnState.PAUSED
        self._tasks.start_soon(self._books.note, run, state, entry)

    async def swapped(self, run: TurnRun, key: str) -> None:
        """The paused turn's KV is in the file only."""
        saved = self._saved[key]
        if run.generation is not None:
            await run.generation.discard()
        entry = timeline_entry(
            "swapped",
            kv_tokens=saved.kv_tokens,
            file_bytes=saved.file_bytes,
            stall_s=round(saved.stall_s, 6),
        )
        await self._books.note(run, TurnState.PAUSED, entry, {"tier": Tier.SWAPPED.value})

    async def dropped(self, run: TurnRun) -> None:
        """The paused turn's KV was given up."""
        if run.generation is not None:
            await run.generation.discard()
        entry = timeline_entry("dropped")
        await self._books.note(run, TurnState.PAUSED, entry, {"tier": Tier.DROPPED.value})

    async def forget(self, key: str) -> None:
        """Remove a file."""
        self._saved.pop(key, None)
        await self._backend.forget(key)
