"""What an engine's KV costs, measured by saving some: bytes a token."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio

from backends.llamacpp.client import LlamaCppClient
from backends.protocol import BackendError

SHORT, LONG = 8, 72


async def kv_bytes_per_token(backend: LlamaCppClient, folder: Path, slot: int) -> int | None:
    """Bytes of KV a token takes, None when the engine cannot save.

    Two prompts of different length are saved from idle slot `slot`; the difference of the files leaves
    out their fixed part. `folder` is where the engine writes, so that the files can be removed.
    """
    ids = await backend.tokenize("one two three four five six seven eight nine ten " * LONG)
    sizes = {}
    try:
        for count in (SHORT, LONG):
            sizes[count] = await _saved_bytes(backend, folder, slot, ids[:count])
        await backend.erase(slot)
    except (BackendError, KeyError, ValueError, OSError):
        return None
    per_token, rest = divmod(sizes[LONG] - sizes[SHORT], LONG - SHORT)
    # The file also holds each cell's position and sequence ids: a few bytes beside the tensors' thousands.
    return per_token if per_token > 0 and rest >= 0 else None


async def _saved_bytes(backend: LlamaCppClient, folder: Path, slot: int, ids: list[int]) -> int:
    body: dict[str, Any] = {"prompt": ids, "n_predict": 0, "id_slot": slot, "cache_prompt": True}
    await backend.ask("POST", "/completion", body)
    name = f"measure-{slot}-{len(ids)}.kv"
    try:
        saved = await backend.ask("POST", f"/slots/{slot}?action=save", {"filename": name})
    finally:
        with contextlib.suppress(OSError):
            await anyio.Path(folder / name).unlink()
    if int(saved["n_saved"]) != len(ids):
        raise ValueError(f"{saved['n_saved']} tokens saved instead of {len(ids)}")
    return int(saved["n_written"])
