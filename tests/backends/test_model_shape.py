"""Each family of models: its file by the official package, its KV by hand from the model's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from gguf import Keys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.gguf import read_model
from backends.kv_shape import KvShape
from backends.model_keys import Value, model_shape
from backends.model_shape import CACHE_BLOCKS, KvUnknown, LayerShape, ModelShape
from tests.backends.gguf_file import LLAMA_8B, Number, write_gguf


def name(key: str) -> str:
    """A key of the official package without its architecture."""
    return key.removeprefix("{arch}.")


LAYERS, WIDTH = name(Keys.LLM.BLOCK_COUNT), name(Keys.LLM.EMBEDDING_LENGTH)
HEADS, KV_HEADS = name(Keys.Attention.HEAD_COUNT), name(Keys.Attention.HEAD_COUNT_KV)
K, V = name(Keys.Attention.KEY_LENGTH), name(Keys.Attention.VALUE_LENGTH)
K_MLA, V_MLA = name(Keys.Attention.KEY_LENGTH_MLA), name(Keys.Attention.VALUE_LENGTH_MLA)
K_SWA, V_SWA = name(Keys.Attention.KEY_LENGTH_SWA), name(Keys.Attention.VALUE_LENGTH_SWA)
WINDOW, PATTERN = name(Keys.Attention.SLIDING_WINDOW), name(Keys.Attention.SLIDING_WINDOW_PATTERN)
SHARED = name(Keys.Attention.SHARED_KV_LAYERS)
CONV, INNER, STATE = name(Keys.SSM.CONV_KERNEL), name(Keys.SSM.INNER_SIZE), name(Keys.SSM.STATE_SIZE)
GROUPS, FF = name(Keys.SSM.GROUP_COUNT), name(Keys.LLM.FEED_FORWARD_LENGTH)
SHORT_CONV, WKV = name(Keys.ShortConv.L_CACHE), name(Keys.WKV.HEAD_SIZE)
SHIFTS, INTERVAL = name(Keys.LLM.TOKEN_SHIFT_COUNT), name(Keys.LLM.FULL_ATTENTION_INTERVAL)
NEXTN, KDA = name(Keys.LLM.NEXTN_PREDICT_LAYERS), name(Keys.KDA.HEAD_DIM)


def model(folder: Path, architecture: str, keys: Mapping[str, Number]) -> ModelShape:
    return read_model(write_gguf(folder / "model.gguf", architecture, keys))


def heads(kv: Number, size: int, *, layers: int, width: int = 4096, all_heads: int = 16) -> dict[str, Number]:
    return {LAYERS: layers, WIDTH: width, HEADS: all_heads, KV_HEADS: kv, K: size, V: size}


def every(period: int, there: int, layers: int) -> list[int]:
    """One value a layer: `there` in each `period`-th, else 0."""
    return [there if (index + 1) % period == 0 else 0 for index in range(layers)]


FAMILIES: dict[str, tuple[str, dict[str, Number], KvShape]] = {
    "plain: layers x KV heads x (K + V) x 2 bytes": (
        "llama",
        dict(LLAMA_8B),
        KvShape(32 * 8 * 256 * 2),
    ),
    "without KV heads, all heads have their own": (
        "phi2",
        {LAYERS: 32, WIDTH: 2560, HEADS: 32},
        KvShape(32 * 32 * 160 * 2),
    ),
    "K and V of different sizes": (
        "minicpm3",
        {LAYERS: 62, WIDTH: 2560, HEADS: 40, KV_HEADS: 40, K: 96, V: 64},
        KvShape(62 * 40 * 160 * 2),
    ),
    "a number of KV heads for each layer, some without attention": (
        "deci",
        heads([8, 0, 4, 0], 128, layers=4),
        KvShape(12 * 256 * 2),
    ),
    "prediction blocks do not count": (
        "glm4moe",
        heads(8, 128, layers=47) | {NEXTN: 1},
        KvShape(46 * 8 * 256 * 2),
    ),
    "phi3: its window is switched off": (
        "phi3",
        heads(32, 96, layers=32) | {WINDOW: 2047},
        KvShape(32 * 32 * 192 * 2),
    ),
    "gemma2: every second layer is dense, 4,096 by default": (
        "gemma2",
        heads(8, 256, layers=42),
        KvShape(21 * 8192, 21 * 8192, 4096),
    ),
    "gemma3: every sixth": (
        "gemma3",
        heads(4, 256, layers=34) | {WINDOW: 1024},
        KvShape(5 * 4096, 29 * 4096, 1024),
    ),
    "gemma3 without a window in the file": (
        "gemma3",
        heads(4, 256, layers=34),
        KvShape(34 * 4096),
    ),
    "gemma3n: every fifth of the first 20, the others use theirs": (
        "gemma3n",
        heads(2, 256, layers=35) | {WINDOW: 512},
        KvShape(4 * 2048, 16 * 2048, 512),
    ),
    "gemma4: a list, heads of two sizes, layers that share": (
        "gemma4",
        heads([2, 2, 1, 2, 2, 1], 512, layers=6)
        | {WINDOW: 512, PATTERN: [True, True, False, True, True, False], SHARED: 2, K_SWA: 256, V_SWA: 256},
        KvShape(1 * 1024 * 2, 3 * 2 * 512 * 2, 512),
    ),
    "cohere2: every fourth": (
        "cohere2",
        heads(8, 128, layers=32) | {WINDOW: 4096},
        KvShape(8 * 4096, 24 * 4096, 4096),
    ),
    "cohere2moe: every fourth from the first on": (
        "cohere2moe",
        heads(8, 128, layers=33) | {WINDOW: 4096},
        KvShape(9 * 4096, 24 * 4096, 4096),
    ),
    "gpt-oss: every second": (
        "gpt-oss",
        heads(8, 64, layers=24) | {WINDOW: 128},
        KvShape(12 * 2048, 12 * 2048, 128),
    ),
    "a period in the file": (
        "gpt-oss",
        heads(8, 64, layers=24) | {WINDOW: 128, PATTERN: 4},
        KvShape(6 * 2048, 18 * 2048, 128),
    ),
    "a list in the file, no in layers that it does not reach": (
        "gpt-oss",
        heads(8, 64, layers=4) | {WINDOW: 128, PATTERN: [True, False, True]},
        KvShape(2 * 2048, 2 * 2048, 128),
    ),
    "a period of 0: all of them": (
        "gpt-oss",
        heads(8, 64, layers=24) | {WINDOW: 128, PATTERN: 0},
        KvShape(0, 24 * 2048, 128),
    ),
    "llama4: chunks of 8,192, whatever the file says": (
        "llama4",
        heads(8, 128, layers=48) | {WINDOW: 1000},
        KvShape(12 * 4096, 36 * 4096, 8192),
    ),
    "llama4 without chunks": (
        "llama4",
        heads(8, 128, layers=48) | {WINDOW: 0},
        KvShape(48 * 4096),
    ),
    "smallthinker: 4,096, whatever the file says": (
        "smallthinker",
        heads(4, 128, layers=32) | {WINDOW: 1000},
        KvShape(8 * 2048, 24 * 2048, 4096),
    ),
    "exaone4 of 64 layers": (
        "exaone4",
        heads(8, 128, layers=64),
        KvShape(16 * 4096, 48 * 4096, 4096),
    ),
    "exaone4 of 30 layers": (
        "exaone4",
        heads(8, 64, layers=30) | {WINDOW: 4096},
        KvShape(30 * 2048),
    ),
    "deepseek2: one compressed K, no V": (
        "deepseek2",
        {LAYERS: 61, WIDTH: 7168, HEADS: 128, KV_HEADS: 1, K: 576, V: 512, K_MLA: 192, V_MLA: 128},
        KvShape(61 * 576 * 2),
    ),
    "deepseek2 from an old file: not compressed": (
        "deepseek2",
        {LAYERS: 27, WIDTH: 2048, HEADS: 16, KV_HEADS: 16, K: 192, V: 128},
        KvShape(27 * 16 * 320 * 2),
    ),
    "mamba": (
        "mamba",
        {LAYERS: 24, WIDTH: 768, HEADS: 0, CONV: 4, INNER: 1536, STATE: 16, GROUPS: 8},
        KvShape(0, fixed_bytes=24 * (3 * 1536 + 16 * 1536) * 4),
    ),
    "mamba2": (
        "mamba2",
        {LAYERS: 48, WIDTH: 2048, HEADS: 0, CONV: 4, INNER: 4096, STATE: 128, GROUPS: 2},
        KvShape(0, fixed_bytes=48 * (3 * (4096 + 2 * 2 * 128) + 128 * 4096) * 4),
    ),
    "rwkv7: two shifts by default": (
        "rwkv7",
        {LAYERS: 12, WIDTH: 768, WKV: 64},
        KvShape(0, fixed_bytes=12 * 768 * (2 + 64) * 4),
    ),
    "rwkv6qwen2: one shift": (
        "rwkv6qwen2",
        {LAYERS: 64, WIDTH: 5120, WKV: 128, SHIFTS: 1},
        KvShape(0, fixed_bytes=64 * 5120 * (1 + 128) * 4),
    ),
    "jamba: a layer without KV heads has a state": (
        "jamba",
        heads(every(8, 8, 32), 128, layers=32) | {CONV: 4, INNER: 8192, STATE: 16},
        KvShape(4 * 4096, fixed_bytes=28 * (3 * 8192 + 16 * 8192) * 4),
    ),
    "falcon-h1: both in every layer": (
        "falcon-h1",
        heads(2, 64, layers=36) | {CONV: 4, INNER: 1536, STATE: 128, GROUPS: 1},
        KvShape(36 * 512, fixed_bytes=36 * (3 * (1536 + 256) + 128 * 1536) * 4),
    ),
    "granitehybrid": (
        "granitehybrid",
        heads(every(10, 4, 40), 128, layers=40) | {CONV: 4, INNER: 3072, STATE: 128, GROUPS: 1},
        KvShape(4 * 2048, fixed_bytes=36 * (3 * (3072 + 256) + 128 * 3072) * 4),
    ),
    "nemotron_h: a layer without both is a feed-forward network": (
        "nemotron_h",
        heads([0, 0, 8, 0], 128, layers=4)
        | {FF: [0, 12_288, 0, 12_288], CONV: 4, INNER: 7168, STATE: 128, GROUPS: 8},
        KvShape(4096, fixed_bytes=(3 * (7168 + 2048) + 128 * 7168) * 4),
    ),
    "lfm2: a short convolution": (
        "lfm2",
        heads(every(2, 8, 16), 64, layers=16, width=1024) | {SHORT_CONV: 3},
        KvShape(8 * 2048, fixed_bytes=8 * 1024 * 2 * 4),
    ),
    "lfm2 with a window in all its attention": (
        "lfm2",
        heads(every(2, 8, 16), 64, layers=16, width=1024) | {SHORT_CONV: 3, WINDOW: 1000},
        KvShape(0, 8 * 2048, 1000, 8 * 1024 * 2 * 4),
    ),
    "qwen3next: attention in every fourth layer by default": (
        "qwen3next",
        heads(2, 256, layers=48) | {CONV: 4, INNER: 4096, STATE: 128, GROUPS: 16},
        KvShape(12 * 2048, fixed_bytes=36 * (3 * 8192 + 128 * 4096) * 4),
    ),
    "qwen35: an interval in the file": (
        "qwen35",
        heads(4, 256, layers=32) | {INTERVAL: 8, CONV: 4, INNER: 4096, STATE: 128, GROUPS: 16},
        KvShape(4 * 4096, fixed_bytes=28 * (3 * 8192 + 128 * 4096) * 4),
    ),
    "qwen35: a list in the file": (
        "qwen35",
        heads(4, 256, layers=3)
        | {"attention.recurrent_layers": [True, False, False]}
        | {CONV: 4, INNER: 4096, STATE: 128, GROUPS: 16},
        KvShape(2 * 4096, fixed_bytes=(3 * 8192 + 128 * 4096) * 4),
    ),
    "minimax-01: a square of the head size for each head": (
        "minimax-01",
        heads(8, 128, layers=80, all_heads=64),
        KvShape(10 * 4096, fixed_bytes=70 * 64 * 128 * 128 * 4),
    ),
    "kimi-linear: compressed K, and a state in the others": (
        "kimi-linear",
        heads([0, 0, 0, 1], 576, layers=4, all_heads=32) | {K_MLA: 192, V_MLA: 128, CONV: 4, KDA: 128},
        KvShape(576 * 2, fixed_bytes=3 * (3 * 3 * 4096 + 128 * 128 * 32) * 4),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_of(tmp_path: Path, family: str) -> None:
    architecture, keys, expected = FAMILIES[family]
    shape = model(tmp_path, architecture, keys)
    assert shape.kv() == expected
    assert shape.windowed == (expected.window_tokens > 0)
    assert shape.recurrent == (expected.fixed_bytes > 0)


def test_full_size_windows_keep_every_token(tmp_path: Path) -> None:
    shape = model(tmp_path, "gpt-oss", heads(8, 64, layers=24) | {WINDOW: 128})
    assert shape.kv(swa_full=True) == KvShape(24 * 2048)


#: Bytes of 32 elements.
PER_32 = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22} | {
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}


@pytest.mark.parametrize(("cache_type", "per_32"), PER_32.items())
def test_cache_types_have_the_overhead_of_their_blocks(cache_type: str, per_32: int) -> None:
    shape = ModelShape("llama", None, (LayerShape(64, 32, 64, 32),))
    assert shape.kv(cache_type, "f16") == KvShape(2 * per_32 + 64)
    assert shape.kv("f16", cache_type) == KvShape(128 + per_32)


def test_all_cache_types_of_the_engine_are_known() -> None:
    assert CACHE_BLOCKS.keys() == PER_32.keys()


UNKNOWN: dict[str, tuple[str, dict[str, Number], str]] = {
    "another architecture": ("nonesuch", dict(LLAMA_8B), "layers of architecture nonesuch are not known"),
    "a model without generation": ("bert", dict(LLAMA_8B), "layers of architecture bert are not known"),
    "no layers": ("llama", {HEADS: 8, WIDTH: 512}, "has no llama.block_count"),
    "too many layers": ("llama", dict(LLAMA_8B) | {LAYERS: 1 << 20}, "has 1048576 layers"),
    "no heads": ("llama", {LAYERS: 2, WIDTH: 512}, "has no llama.attention.head_count"),
    "no width": ("llama", {LAYERS: 2, HEADS: 8}, "has no llama.attention.key_length"),
    "a list of the wrong length": (
        "llama",
        heads([1, 2], 64, layers=3),
        "impossible llama.attention.head_count_kv",
    ),
    "no window": ("gpt-oss", heads(8, 64, layers=24), "has no gpt-oss.attention.sliding_window"),
    "no list of windows": (
        "gemma4",
        heads(8, 64, layers=2) | {WINDOW: 512},
        "no list gemma4.attention.sliding",
    ),
    "no state": ("mamba", {LAYERS: 24, WIDTH: 768}, "has no mamba.ssm.conv_kernel"),
    "an index beside the KV": (
        "deepseek2",
        dict(LLAMA_8B) | {"attention.indexer.key_length": 128},
        "an index beside its KV",
    ),
    "an interval of nothing": ("qwen35", heads(4, 64, layers=4) | {INTERVAL: 0}, "full_attention_interval"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_guessed(tmp_path: Path, case: str) -> None:
    architecture, keys, message = UNKNOWN[case]
    shape = model(tmp_path, architecture, keys)
    assert shape.architecture == architecture
    with pytest.raises(KvUnknown, match=message) as caught:
        shape.kv()
    assert "\n" not in str(caught.value)


def test_a_file_without_an_architecture() -> None:
    shape = model_shape({"llama.block_count": 2})
    assert shape.architecture is None
    with pytest.raises(KvUnknown, match=r"no general\.architecture"):
        shape.kv()


@pytest.mark.parametrize("context", [0, -1, True, "many", (8192,)])
def test_an_impossible_training_context_is_none(context: Value) -> None:
    pairs: dict[str, Value] = {"general.architecture": "llama", "llama.context_length": context}
    assert model_shape(pairs).training_context is None


def test_cache_types_that_the_engine_would_refuse() -> None:
    shape = ModelShape("phi2", None, (LayerShape(80, 80, 80, 80),))
    with pytest.raises(KvUnknown, match="q8_0 needs heads of a multiple of 32 elements, the model's have 80"):
        shape.kv("q8_0")
    with pytest.raises(KvUnknown, match="cache type q3_k is not among f32, f16"):
        shape.kv("f16", "q3_k")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 64),
    sizes=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    cache_type=st.sampled_from(sorted(CACHE_BLOCKS)),
)
def test_plain_models_are_a_product(
    tmp_path: Path, layers: int, kv_heads: int, sizes: tuple[int, int], cache_type: str
) -> None:
    k, v = (32 * size for size in sizes)
    shape = model(tmp_path, "qwen3", {LAYERS: layers, WIDTH: 1, HEADS: 64, KV_HEADS: kv_heads, K: k, V: v})
    _, block_bytes = CACHE_BLOCKS[cache_type]
    per_element = block_bytes / CACHE_BLOCKS[cache_type][0]
    assert shape.kv(cache_type, cache_type) == KvShape(int(layers * kv_heads * (k + v) * per_element))
