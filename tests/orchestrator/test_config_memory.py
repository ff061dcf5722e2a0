"""Memory in the configuration: sizes, the KV budget, the swap budget, and what KV is kept in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import Backend, ConfigError, Vram, parse_config
from orchestrator.config.checks import CACHE_TYPES, MAX_SIZE, parse_size

EXAMPLE = (Path(__file__).resolve().parents[2] / "config.yaml").read_text()

GIB = 1 << 30
SIZE_WORDS = "a size such as 9.5GiB, 512MiB, 1500MB or a whole number of bytes (at most 1024TiB)"


def backend(lines: str) -> Backend:
    """The only backend of a configuration; the first of its lines is on line 3."""
    indented = "\n".join(f"    {line}" for line in lines.splitlines())
    return parse_config(f"backends:\n  - name: b\n{indented}\nagents: {{a: {{}}}}\n", "c.yaml").backends[0]


@pytest.mark.parametrize(
    ("written", "n_bytes"),
    [
        ("9.5GiB", 9.5 * GIB),
        ("512MiB", 512 << 20),
        ("1500MB", 1_500_000_000),
        ("1.5 gb", 1_500_000_000),
        ("3KiB", 3072),
        ("3kb", 3000),
        ("2TiB", 2 << 40),
        ("2TB", 2 * 10**12),
        ("7B", 7),
        ("0.3KiB", 307),
        ("1048576", 1 << 20),
        ("1_000_000", 1_000_000),
        ("1024TiB", MAX_SIZE),
    ],
)
def test_sizes(written: str, n_bytes: int) -> None:
    assert backend(f"url: http://h\nkv_budget: {written}").kv_budget == n_bytes


@pytest.mark.parametrize(
    "written",
    [
        *(
            "9.5",
            "-1",
            "1.5e3MB",
            "-1GiB",
            "GiB",
            "1G",
            "1GiBs",
            "1  GiB",
            "1,5GiB",
            "1.GiB",
            ".5GiB",
            "'1024'",
        ),
        *("1025TiB", f"{MAX_SIZE + 1}", "9" * 17 + "B", "true", "[1]", "''", ".inf", "½GiB"),
    ],
)
def test_what_is_no_size(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        backend(f"url: http://h\nkv_budget: {written}")
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith("c.yaml:4: backends[0].kv_budget: ")
    assert problem.endswith(f" is not {SIZE_WORDS}")


@given(st.integers(0, 10**6), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_whole_numbers_of_a_unit_are_exact(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    expected = number * base ** " KMG".index(unit[0] if len(unit) > 1 else " ")
    assert parse_size(f"{number}{unit}") == parse_size(f"{number}.0{unit.lower()}") == expected


def test_nothing_said_means_everything_and_automatic() -> None:
    found = backend("url: http://h")
    assert (found.kv_budget, found.vram, found.kv_budget_bytes, found.swap_budget) == (None,) * 4
    managed = backend("managed: {}").managed
    assert managed is not None
    assert (managed.cache_type_k, managed.cache_type_v) == ("f16", "f16")


def test_vram_is_another_way_to_say_the_budget() -> None:
    found = backend("managed: {}\nvram: {usable: 15.5GiB, weights: 5GiB, buffers: 0.5GiB}")
    assert found.vram == Vram(usable=31 * GIB // 2, weights=5 * GIB, buffers=GIB // 2)
    assert (found.kv_budget, found.kv_budget_bytes) == (None, 10 * GIB)
    assert backend("managed: {}\nvram: {usable: 2, weights: 1}").kv_budget_bytes == 1
    assert backend("managed: {}\nkv_budget: 9GiB").kv_budget_bytes == 9 * GIB


@pytest.mark.parametrize(
    ("keys", "swap"),
    [
        ("url: http://h\nsave_path: /kv\nswap_budget: 2GiB", 2 * GIB),
        ("url: http://h\nswap_budget: 0", 0),
        ("url: http://h\nsave_path: /kv", None),
        ("managed: {}\nswap_budget: 2GiB", 2 * GIB),
    ],
)
def test_swap_budget(keys: str, swap: int | None) -> None:
    assert backend(keys).swap_budget == swap


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_cache_types(kind: str) -> None:
    managed = backend(f"managed: {{cache_type_k: {kind}, cache_type_v: {kind}}}").managed
    assert managed is not None
    assert (managed.cache_type_k, managed.cache_type_v) == (kind, kind)


REFUSED = {
    "url: http://h\nkv_budget: 0": "4: backends[0].kv_budget: 0 is not a size above zero",
    "url: http://h\nkv_budget: 0.5B": "4: backends[0].kv_budget: '0.5B' is not a size above zero",
    "url: http://h\nsave_path: /kv\nswap_budget: 8G": f"5: backends[0].swap_budget: '8G' is not {SIZE_WORDS}",
    "url: http://h\nsave_path: /kv\nswap_budget: off": (
        f"5: backends[0].swap_budget: 'off' is not {SIZE_WORDS}"
    ),
    "url: http://h\nvram: 9GiB": (
        "4: backends[0].vram: '9GiB' is not a mapping with keys of usable, weights, buffers"
    ),
    "url: http://h\nvram: {usable: 9GiB}": "4: backends[0].vram.weights: is missing, and has no default",
    "url: http://h\nvram:\n  usable: 9GiB\n  weights: 5Gb/s": (
        f"6: backends[0].vram.weights: '5Gb/s' is not {SIZE_WORDS}"
    ),
    "url: http://h\nvram: {usable: 9GiB, weights: 1GiB, buffer: 1GiB}": (
        "4: backends[0].vram.buffer: unknown key; did you mean buffers? "
        "Allowed here: usable, weights, buffers"
    ),
    "managed: {}\nkv_budget: 1GiB\nvram: {usable: 9GiB, weights: 5GiB}": (
        "5: backends[0].vram: says the same as kv_budget: keep one of them"
    ),
    "managed: {}\nvram: {usable: 3KiB, weights: 2KiB, buffers: 1KiB}": (
        "4: backends[0].vram: leaves nothing for KV: weights and buffers take 3,072 of 3,072 usable bytes"
    ),
    "managed: {}\nvram: {usable: 1KB, weights: 2KB}": (
        "4: backends[0].vram: leaves nothing for KV: weights and buffers take 2,000 of 1,000 usable bytes"
    ),
    "url: http://h\nswap_budget: 2GiB": (
        "4: backends[0].swap_budget: needs save_path: "
        "the folder that the engine was started with as --slot-save-path"
    ),
    "managed: {cache_type_k: q8}": (
        "3: backends[0].managed.cache_type_k: 'q8' is not one of "
        "f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1"
    ),
    "managed: {cache_type_v: 16}": (
        "3: backends[0].managed.cache_type_v: 16 is not one of "
        "f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1"
    ),
    "url: http://h\ncache_type_k: q8_0": (
        "4: backends[0].cache_type_k: unknown key; Allowed here: name, kind, pool, url, managed, model, "
        "aliases, decode_slots, kv_layout, batch_tokens, prefill_piece_tokens, kv_bytes_per_token, "
        "kv_budget, vram, save_path, swap_budget"
    ),
}


@pytest.mark.parametrize(("keys", "expected"), REFUSED.items())
def test_one_mistake_is_one_line(keys: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        backend(keys)
    assert str(caught.value) == f"c.yaml:{expected}"


def test_commented_memory_lines_of_the_example_are_valid() -> None:
    """Each on its own, as a reader would take one in."""
    lines = re.findall(
        r"^ +# ((?:cache_type_k|kv_budget|vram|swap_budget|save_path): .+)$", EXAMPLE, flags=re.MULTILINE
    )
    assert len(lines) == 5
    for line in lines:
        backend(
            f"managed: {{{line.split(' #')[0]}}}" if line.startswith("cache") else f"managed: {{}}\n{line}"
        )
