"""What an engine keeps of a sequence, layer by layer, and the bytes that follow from the cache types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from backends.kv_shape import KvShape

#: Of a cache type: elements in a block, and bytes of one (ggml's `block_*` structures).
CACHE_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "f32": (1, 4),
        "f16": (1, 2),
        "bf16": (1, 2),
        "q8_0": (32, 34),
        "q5_1": (32, 24),
        "q5_0": (32, 22),
        "q4_1": (32, 20),
        "q4_0": (32, 18),
        "iq4_nl": (32, 18),
    }
)
_STATE_BYTES = 4


class KvUnknown(Exception):
    """The bytes of KV cannot be told from the file; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps: elements per token of K and of V, and 32-bit values of state per sequence.

    `k_head` and `v_head` are the head sizes, which a quantised cache has to be able to divide.
    `windowed`: K and V of the last tokens only.
    """

    k: int = 0
    v: int = 0
    k_head: int = 0
    v_head: int = 0
    windowed: bool = False
    state: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps of a sequence. `unknown` says why `kv` cannot be told; `layers` is empty then."""

    architecture: str | None
    training_context: int | None
    layers: tuple[LayerShape, ...] = ()
    window_tokens: int = 0
    unknown: str | None = None

    @property
    def windowed(self) -> bool:
        """Some layers forget: a sequence cannot be rolled back beyond the window."""
        return any(layer.windowed for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """Some layers keep a state, which cannot be rolled back at all."""
        return any(layer.state for layer in self.layers)

    def kv(self, cache_type_k: str = "f16", cache_type_v: str = "f16", swa_full: bool = False) -> KvShape:
        """Bytes that a sequence fills in the engine. `swa_full`: windowed layers keep every token too.

        Files of saved slots (build 11549, Gemma 3) have as many, with two exceptions. Of windowed layers
        they have the window, also under `swa_full`. And beside the KV they have the slot's checkpoints
        (`--ctx-checkpoints`, without `swa_full`), each as large as the window's or the state's share.

        For a windowed layer the engine allocates a batch more than the window, rounded up to 256 tokens.
        Without flash attention it pads V where layers differ. Raises KvUnknown.
        """
        if self.unknown is not None:
            raise KvUnknown(self.unknown)
        full = windowed = state = 0
        for layer in self.layers:
            token_bytes = _row_bytes(layer.k, layer.k_head, cache_type_k)
            token_bytes += _row_bytes(layer.v, layer.v_head, cache_type_v)
            if layer.windowed and not swa_full:
                windowed += token_bytes
            else:
                full += token_bytes
            state += layer.state * _STATE_BYTES
        return KvShape(full, windowed, self.window_tokens if windowed else 0, state)


def _row_bytes(elements: int, head: int, cache_type: str) -> int:
    try:
        block, block_bytes = CACHE_BLOCKS[cache_type]
    except KeyError:
        raise KvUnknown(f"cache type {cache_type} is not among {', '.join(CACHE_BLOCKS)}") from None
    if elements and head % block:
        raise KvUnknown(
            f"cache type {cache_type} needs heads of a multiple of {block} elements, the model's have {head}"
        )
    return elements // block * block_bytes
