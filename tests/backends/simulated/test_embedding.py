"""Embeddings and reranking of the simulated engine."""

import base64
import struct

import anyio
import pytest

from backends.simulated import SimulatedConfig, TimingProfile
from backends.simulated.tokenizer import encode
from tests.backends.simulated.harness import connect

ENDLESS = {"ignore_eos": True, "n_predict": -1}


async def test_inputs_become_vectors_in_their_order() -> None:
    async with connect(SimulatedConfig(embeddings=True, kv_unified=True)) as client:
        texts = ["one", "two words", "one"]
        reply = await client.json("/v1/embeddings", {"input": texts})
        vectors = [item["embedding"] for item in reply["data"]]
        assert [item["index"] for item in reply["data"]] == [0, 1, 2]
        assert vectors[0] == vectors[2] != vectors[1]
        assert sum(value**2 for value in vectors[1]) == pytest.approx(1)
        assert reply["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in texts)

        by_ids = await client.json("/v1/embeddings", {"input": [encode(text) for text in texts]})
        assert by_ids["data"] == reply["data"]
        [single] = (await client.json("/v1/embeddings", {"input": "one"}))["data"]
        assert single["embedding"] == vectors[0]

        packed = await client.json("/v1/embeddings", {"input": "one", "encoding_format": "base64"})
        unpacked = struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))
        assert unpacked == pytest.approx(vectors[0])


async def test_inputs_that_are_evaluated_together_come_out_wrong_where_each_slot_has_its_own_kv() -> None:
    async with connect(SimulatedConfig(embeddings=True)) as client:
        [alone] = (await client.json("/v1/embeddings", {"input": "one input"}))["data"]
        first, _ = (await client.json("/v1/embeddings", {"input": ["one input", "another"]}))["data"]
        assert first["embedding"] != alone["embedding"]


async def test_documents_are_ranked() -> None:
    async with connect(SimulatedConfig(embeddings=True)) as client:
        body = {"query": "red fish", "documents": ["a blue fish", "nothing", "a red fish"]}
        reply = await client.json("/v1/rerank", body)
        assert [(item["index"], item["relevance_score"]) for item in reply["results"]] == [
            (2, 1.0),
            (0, 0.5),
            (1, 0.0),
        ]
        assert len((await client.json("/v1/rerank", {**body, "top_n": 1}))["results"]) == 1


async def test_what_is_refused() -> None:
    profile = TimingProfile(n_batch=8)
    async with connect(SimulatedConfig(embeddings=True, profile=profile)) as client:
        too_long = await client.post("/v1/embeddings", {"input": ["short", "word " * 10]})
        assert too_long.status_code == 500
        assert "is too large to process" in too_long.json()["error"]["message"]
        assert (await client.post("/v1/embeddings", {"input": ["short", ""]})).status_code == 400
        await client.until_idle()
    async with connect(SimulatedConfig()) as client:
        refused = await client.post("/v1/embeddings", {"input": "x"})
        assert refused.status_code == 501
        assert "--embeddings" in refused.json()["error"]["message"]
        assert (await client.post("/v1/rerank", {"query": "x", "documents": ["y"]})).status_code == 501


async def test_an_input_waits_while_anything_is_generated() -> None:
    config = SimulatedConfig(embeddings=True, profile=TimingProfile(base_step_s=0.001))
    async with connect(config) as client, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def generate() -> None:
            with scope:
                await client.stream({**ENDLESS, "prompt": "a"})

        tasks.start_soon(generate)
        await client.until(lambda stats: stats.tokens_generated > 0)
        answered = anyio.Event()

        async def embed() -> None:
            await client.json("/v1/embeddings", {"input": "b"})
            answered.set()

        tasks.start_soon(embed)
        await client.until(lambda stats: stats.running == 2)
        generated = client.stats.tokens_generated
        await client.until(lambda stats: stats.tokens_generated > generated + 20)
        assert not answered.is_set()
        scope.cancel()
        with anyio.fail_after(5):
            await answered.wait()


async def test_an_input_overwrites_the_slot_that_was_idle_longest() -> None:
    async with connect(SimulatedConfig(embeddings=True, n_slots=2)) as client:
        for slot in (0, 1):
            await client.json("/completion", {"prompt": "a long prompt", "n_predict": 1, "id_slot": slot})
        await client.json("/v1/embeddings", {"input": "other"})
        held = [slot["n_prompt_tokens"] for slot in (await client.http.get("/slots")).json()]
        assert held == [len(encode("other")), len(encode("a long prompt"))]


async def test_a_client_that_leaves_frees_the_slots() -> None:
    profile = TimingProfile(prefill_tokens_per_s=1000, n_batch=100)
    async with connect(SimulatedConfig(embeddings=True, profile=profile)) as client:
        with anyio.move_on_after(0.15):
            await client.json("/v1/embeddings", {"input": ["word " * 20] * 200})
        await client.until_idle()
        assert client.stats.disconnects == 1
        assert client.stats.tokens_prefilled < 100 * 100
