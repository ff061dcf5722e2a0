"""What llama.cpp keeps of a sequence, layer by layer, by the model's metadata.

Three sources of a layer's size. The keys in the file: KV heads, head sizes, window, state sizes. What
llama.cpp assumes where a key is missing. And what it knows of an architecture without any key: which layers
have a window or a state, and which have nothing at all. The last two are the tables below, taken from
`load_arch_hparams` of llama.cpp's `src/models/ARCHITECTURE.cpp`, `llama_model::load_hparams` and
`llama_model::create_memory` (`src/llama-model.cpp`) and `src/llama-hparams.cpp`, build 11434.

An architecture that is in no table is not guessed at: `ModelShape.unknown` says so, and the engine has to be
measured. The same holds for those with caches of another kind beside K and V, such as sparse attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from backends.model_shape import KvUnknown, LayerShape, ModelShape

Value: TypeAlias = "int | float | bool | str | tuple[int | float | bool, ...]"

_MAX_LAYERS = 512

# Tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Window:
    """Which layers have a window, where the file has no list of them: all but every `period`-th one.

    `tokens`: the window where the file gives none; no window at all when that is 0 too, unless `required`.
    `fixed`: the window whatever the file's figure is, unless that is 0. `only_layers`: no window in models
    with another number of layers. `period` None: the list has to be in the file.
    """

    period: int | None
    dense_first: bool = False
    tokens: int = 0
    required: bool = False
    fixed: int = 0
    only_layers: int | None = None


_WINDOWS: Mapping[str, _Window] = MappingProxyType(
    {
        "afmoe": _Window(4),
        "cohere2": _Window(4, required=True),
        "cohere2moe": _Window(4, dense_first=True, required=True),
        "exaone-moe": _Window(4, required=True),
        "exaone4": _Window(4, tokens=4096, only_layers=64),
        "gemma2": _Window(2, tokens=4096),
        "gemma3": _Window(6),
        "gemma3n": _Window(5, required=True),
        "gemma4": _Window(None, required=True),
        "gpt-oss": _Window(2, required=True),
        "granite_swa": _Window(None, required=True),
        "laguna": _Window(4, dense_first=True),
        # Chunks instead of a window: of 1 to 8,192 tokens, so the window is their upper bound.
        "llama4": _Window(4, tokens=8192, fixed=8192),
        "maple": _Window(None, required=True),
        "mellum": _Window(4),
        "mimo2": _Window(None, required=True),
        "muse-glimmer": _Window(4, required=True),
        "olmo2": _Window(4),
        "plamo3": _Window(8),
        "smallthinker": _Window(4, dense_first=True, fixed=4096),
        "spark2_5": _Window(None, required=True),
        "step35": _Window(None, required=True),
    }
)
#: The first so many layers have KV, the others use theirs.
_GEMMA3N_KV_LAYERS = 20

#: No attention anywhere.
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
#: Layers without KV heads have a state.
_HYBRID = frozenset(
    {"granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
    | {"plamo2"}
)
#: All layers but every n-th have a state; n where neither `recurrent_layers` nor the interval is in the file.
_INTERVALS: Mapping[str, int] = MappingProxyType(
    {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
)
#: Read a number of groups for the convolution; in the others it counts as none.
_SSM_GROUPS = frozenset(
    {"falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe", "plamo2"}
    | {"qwen3next", "qwen35", "qwen35moe"}
)
#: With `key_length_mla` in the file, the compressed K is cached and no V.
_MLA = frozenset({"deepseek2", "kimi-k3", "kimi-linear", "mistral4"})
#: K and V in every layer, for every token, whatever else is in the file.
_PLAIN_NAMES = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm
    command-r dbrx deci deepseek deepseek2 deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon gemma
    glm4 glm4moe gpt2 gptneox granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3
    internlm2 jais jais2 llama maincoder minicpm minicpm3 minimax-m2 mistral3 mistral4 mpt nemotron olmo
    olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plm qwen qwen2 qwen2moe qwen2vl
    qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 xverse
"""
_PLAIN = frozenset(_PLAIN_NAMES.split())


# From the keys to the layers ----------------------------------------------------------------------


class _Keys:
    """The keys of one architecture. Its methods raise KvUnknown where a key is missing or of no use."""

    def __init__(self, architecture: str, pairs: Mapping[str, Value]) -> None:
        self._architecture = architecture
        self._pairs = pairs

    def __contains__(self, name: str) -> bool:
        return f"{self._architecture}.{name}" in self._pairs

    def number(self, name: str, default: int | None = None) -> int:
        value = self._pairs.get(f"{self._architecture}.{name}", default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31:
            return value
        what = "has no" if value is None else "has an impossible"
        raise KvUnknown(f"the model file {what} {self._architecture}.{name}")

    def each(self, name: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """The number of each layer: the same in all of them, or a list."""
        value = self._pairs.get(f"{self._architecture}.{name}")
        if not isinstance(value, tuple):
            return (self.number(name, default),) * layers
        if len(value) != layers or not all(isinstance(item, int) and 0 <= item < 1 << 31 for item in value):
            raise KvUnknown(f"the model file has an impossible {self._architecture}.{name}")
        return tuple(int(item) for item in value)

    def flags(self, name: str, layers: int) -> tuple[bool, ...] | None:
        """A list of yes and no, no where it is too short; None where the key is no list."""
        value = self._pairs.get(f"{self._architecture}.{name}")
        if not isinstance(value, tuple):
            return None
        return tuple(bool(item) for item in value[:layers]) + (False,) * (layers - len(value))


def model_shape(pairs: Mapping[str, Value]) -> ModelShape:
    """The shape behind a GGUF file's key-value pairs; `unknown` where they do not say enough."""
    architecture = pairs.get("general.architecture")
    if not isinstance(architecture, str):
        return ModelShape(None, None, unknown="the model file has no general.architecture")
    context = pairs.get(f"{architecture}.context_length")
    training_context = context if type(context) is int and context > 0 else None
    try:
        layers, window = _layers(architecture, _Keys(architecture, pairs))
    except KvUnknown as unknown:
        return ModelShape(architecture, training_context, unknown=str(unknown))
    return ModelShape(architecture, training_context, layers, window)


def _layers(architecture: str, keys: _Keys) -> tuple[tuple[LayerShape, ...], int]:
    known = _PLAIN | _WINDOWS.keys() | _RECURRENT | _HYBRID | _INTERVALS.keys() | {"falcon-h1"}
    if architecture not in known:
        raise KvUnknown(f"the layers of architecture {_shown(architecture)} are not known here")
    if "attention.indexer.key_length" in keys:
        raise KvUnknown("the model has an index beside its KV, which is not known here")
    every = keys.number("block_count")
    # Blocks that only predict further tokens have a cache of their own, and only when they are used.
    count = every - keys.number("nextn_predict_layers", 0)
    if not 0 < count <= _MAX_LAYERS:
        raise KvUnknown(f"the model file has {count} layers")
    if architecture in _RECURRENT:
        return (LayerShape(state=_state(architecture, keys, 0)),) * count, 0

    heads = keys.each("attention.head_count", every)
    kv_heads = keys.each("attention.head_count_kv", every, heads[0])
    if "attention.head_count_kv" not in keys:
        kv_heads = heads
    recurrent = _recurrent(architecture, keys, kv_heads, count)
    windowed, window = _window(architecture, keys, count)
    if architecture.startswith("lfm2") and window:
        windowed = tuple(not state for state in recurrent)
    with_kv = _kv_layers(architecture, keys, every)
    state = _state(architecture, keys, heads[0]) if any(recurrent) else 0
    head_sizes = {False: _head_sizes(architecture, keys, heads[0], "")}
    head_sizes[True] = head_sizes[False]
    if any(windowed):
        head_sizes[True] = _head_sizes(architecture, keys, heads[0], "_swa")

    layers = []
    for index in range(count):
        k_head, v_head = head_sizes[windowed[index]]
        attends = index < with_kv and (architecture == "falcon-h1" or not recurrent[index])
        kv = kv_heads[index] if attends else 0
        layers.append(
            LayerShape(
                k=kv * k_head,
                v=kv * v_head,
                k_head=k_head,
                v_head=v_head,
                windowed=windowed[index] and kv > 0,
                state=state if recurrent[index] else 0,
            )
        )
    return tuple(layers), window if any(layer.windowed for layer in layers) else 0


def _shown(architecture: str) -> str:
    return architecture[:40] if architecture.isprintable() else "?"


def _kv_layers(architecture: str, keys: _Keys, every: int) -> int:
    """How many layers from the first have KV of their own."""
    if architecture == "gemma3n":
        return _GEMMA3N_KV_LAYERS
    if architecture == "gemma4":
        return every - keys.number("attention.shared_kv_layers", 0)
    return every


def _head_sizes(architecture: str, keys: _Keys, heads: int, suffix: str) -> tuple[int, int]:
    """Elements of K and of V in one head, of the layers without (`""`) or with (`"_swa"`) a window."""
    default = None
    if heads and "embedding_length" in keys:
        default = keys.number("embedding_length") // heads
    k, v = (keys.number(f"attention.{name}_length", default) for name in ("key", "value"))
    if suffix:
        k, v = keys.number("attention.key_length_swa", k), keys.number("attention.value_length_swa", v)
    if architecture in _MLA and "attention.key_length_mla" in keys:
        return k, 0
    return k, v


def _window(architecture: str, keys: _Keys, layers: int) -> tuple[tuple[bool, ...], int]:
    """Which layers have a window, and of how many tokens."""
    none = (False,) * layers
    if architecture.startswith("lfm2"):
        # All its attention layers; lfm2moe never reads the key.
        return none, keys.number("attention.sliding_window", 0) if architecture == "lfm2" else 0
    rule = _WINDOWS.get(architecture)
    if rule is None or rule.only_layers not in (None, layers):
        return none, 0
    tokens = keys.number("attention.sliding_window", None if rule.required else rule.tokens)
    if not tokens:
        return none, 0
    tokens = rule.fixed or tokens
    pattern = "attention.sliding_window_pattern"
    if (listed := keys.flags(pattern, layers)) is not None:
        return listed, tokens
    if rule.period is None:
        raise KvUnknown(f"the model file has no list {architecture}.{pattern}")
    period = keys.number(pattern, rule.period)
    if period == 0:
        return (True,) * layers, tokens
    dense = 0 if rule.dense_first else period - 1
    return tuple(index % period != dense for index in range(layers)), tokens


def _recurrent(architecture: str, keys: _Keys, kv_heads: tuple[int, ...], layers: int) -> tuple[bool, ...]:
    """Which layers have a state."""
    if architecture == "falcon-h1":
        return (True,) * layers
    if architecture in _INTERVALS:
        if (listed := keys.flags("attention.recurrent_layers", layers)) is not None:
            return listed
        interval = keys.number("full_attention_interval", _INTERVALS[architecture])
        if not interval:
            raise KvUnknown(f"the model file has an impossible {architecture}.full_attention_interval")
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if architecture not in _HYBRID:
        return (False,) * layers
    without = tuple(not heads for heads in kv_heads[:layers])
    if not architecture.startswith("nemotron_h"):
        return without
    # A layer without attention is either a state or a feed-forward network.
    width = keys.each("feed_forward_length", len(kv_heads), 0)
    return tuple(empty and not width[index] for index, empty in enumerate(without))


def _state(architecture: str, keys: _Keys, heads: int) -> int:
    """32-bit values of one recurrent layer: `n_embd_r` + `n_embd_s` of `llama-hparams.cpp`."""
    if architecture.startswith(("rwkv", "arwkv")):
        width = keys.number("embedding_length")
        return width * (keys.number("token_shift_count", 2) + keys.number("wkv.head_size"))
    if architecture.startswith("lfm2"):
        return keys.number("embedding_length") * (keys.number("shortconv.l_cache") - 1)
    if architecture.startswith("kimi"):
        size, kernel = keys.number("kda.head_dim"), keys.number("ssm.conv_kernel")
        return heads * size * (3 * (kernel - 1 if kernel else 3) + size)
    if architecture == "minimax-01":
        size = keys.number(
            "attention.key_length", keys.number("embedding_length") // heads if heads else None
        )
        return size * size * heads
    kernel, inner, size = (keys.number(f"ssm.{name}") for name in ("conv_kernel", "inner_size", "state_size"))
    groups = keys.number("ssm.group_count") if architecture in _SSM_GROUPS else 0
    return max(0, kernel - 1) * (inner + 2 * groups * size) + size * inner
