"""What the user has to tell about a llama.cpp server, because it does not tell itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.kv_shape import KvShape
from backends.protocol import KvLayout

UNKNOWN_BATCH_PIECE = 512


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """What the engine does not tell about itself; None where the user does not know either.

    `kv_layout` None is taken as split, the server's default when the number of slots is given.
    `batch_tokens` is the server's ``-b``. `piece_tokens`: send prompts in pieces of that many tokens,
    0 never; None: in pieces of 512 unless `batch_tokens` is at most that. `kv`: what KV takes; None:
    measured where the engine can save. `save_path`: the folder that the engine saves slots to, when this
    process can reach it too. `swap_tag` tells this backend's files from those of others in that folder.

    `stop_bound_s`: how long a slot may take to go idle after its stream was closed. `silence_s`: how
    long an open stream may say nothing before the slot is looked at. A prefill of any length says
    something after every batch, so only a batch longer than this costs a look.
    """

    kv_layout: KvLayout | None = None
    batch_tokens: int | None = None
    piece_tokens: int | None = None
    kv: KvShape | None = None
    model: str | None = None
    save_path: Path | None = None
    swap_tag: str = "engine"
    stop_bound_s: float = 30.0
    silence_s: float = 120.0

    def pieces(self) -> int:
        """Tokens of a prompt's piece, 0: prompts go whole."""
        if self.piece_tokens is not None:
            return self.piece_tokens
        bounded = self.batch_tokens is not None and self.batch_tokens <= UNKNOWN_BATCH_PIECE
        return 0 if bounded else UNKNOWN_BATCH_PIECE
