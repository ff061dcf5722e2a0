"""What an engine's KV costs, measured by saving some: bytes a token, and bytes whatever the length."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from backends.kv_shape import KvShape
from backends.llamacpp import told
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.swap_files import SwapFiles
from backends.protocol import BackendError

# From 5 tokens on, a file of a model with windows or recurrent state may hold checkpoints of that as well.
SHORT, LONG = 1, 4
RESTORE_BOUND_S = 30.0


async def measured_kv(client: LlamaCppClient, files: SwapFiles) -> KvShape | None:
    """The line through the sizes of two saved prompts, None when the engine has no idle slot or cannot save.

    A sliding window is longer than these prompts, so its layers are taken for ones that keep every token:
    too much, never too little. The same goes for what a file has beside the tensors, some bytes a token.
    What an idle slot held is put back.
    """
    try:
        idle = [slot for slot in await client.slots() if not slot.processing]
        if not idle:
            return None
        # The one with the least to put back; of the empty ones the last, which is used last.
        slot = min(idle, key=lambda slot: (slot.kv_tokens or 0, -slot.id)).id
        ids = await client.tokenize("one two three four five six seven eight nine ten " * LONG)
        async with _borrowed(client, files, slot):
            short, long = [await _saved_bytes(client, files, slot, ids[:count]) for count in (SHORT, LONG)]
    except BackendError:
        return None
    per_token = (long - short) // (LONG - SHORT)
    return KvShape(per_token, fixed_bytes=max(0, short - SHORT * per_token)) if per_token > 0 else None


@asynccontextmanager
async def _borrowed(client: LlamaCppClient, files: SwapFiles, slot: int) -> AsyncIterator[None]:
    """The slot may be used for the block; then it holds what it held."""
    key = f"borrowed-{slot}"
    try:
        held = await _save(client, slot, files.temporary_name(key))
        client.pieces_in_slot.pop(slot, None)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(RESTORE_BOUND_S):
                if held.get("n_saved"):
                    body = {"filename": files.temporary_name(key)}
                    await client.ask("POST", f"/slots/{slot}?action=restore", body)
                else:
                    await client.erase(slot)
    finally:
        with anyio.CancelScope(shield=True):
            await files.remove(key)


async def _saved_bytes(client: LlamaCppClient, files: SwapFiles, slot: int, ids: list[int]) -> int:
    body: dict[str, Any] = {"prompt": ids, "n_predict": 0, "id_slot": slot, "cache_prompt": True}
    await client.ask("POST", "/completion", body)
    key = f"measure-{slot}-{len(ids)}"
    try:
        saved = await _save(client, slot, files.temporary_name(key))
        written = await files.size(key)
    finally:
        with anyio.CancelScope(shield=True):
            await files.remove(key)
    if saved.get("n_saved") != len(ids) or written is None or saved.get("n_written") != written:
        raise told.strange()
    return written


async def _save(client: LlamaCppClient, slot: int, name: str) -> dict[str, Any]:
    return told.obj(await client.ask("POST", f"/slots/{slot}?action=save", {"filename": name}))
