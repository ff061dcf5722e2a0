"""Bulk turns: batches, what a cut costs, and whose KV they leave alone."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import anyio
import orjson
import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import (
    BULK_BATCH_BYTES,
    BackendError,
    Cut,
    EngineRefused,
    EngineUnavailable,
    Finished,
    Generation,
    KvLayout,
    ReplySoFar,
    bulk_costs,
)
from backends.simulated import SimulatedConfig, TimingProfile
from backends.simulated.embedding import embedding, relevance
from backends.simulated.tokenizer import encode
from tests.backends.llamacpp.harness import KEEP_OPEN, Recorder, Rig, chat, finish, raw_server, rig

EMBEDS = SimulatedConfig(embeddings=True)
SHARED = SimulatedConfig(embeddings=True, kv_unified=True)
UNIFIED = {"kv_layout": KvLayout.UNIFIED}
TEXTS = [f"{number} {'word ' * (number * 7 % 90)}" for number in range(60)]


def embed(rig: Rig, inputs: list[Any], so_far: ReplySoFar | None = None) -> tuple[Generation, Recorder]:
    generation = rig.backend.generation("embeddings", {"input": inputs}, 0, so_far)
    return generation, Recorder(generation)


def packed(text: str) -> str:
    vector = embedding(encode(text))
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def vectors(sink: Recorder) -> list[str]:
    return [vector for part in sink.parts for vector in part["embeddings"]]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_inputs_are_embedded_in_bounded_batches() -> None:
    async with rig(SHARED, **UNIFIED) as r:
        generation, sink = embed(r, TEXTS)
        end, cuts = await finish(generation, sink)
        assert vectors(sink) == [packed(text) for text in TEXTS]
    assert (end, cuts) == (Finished("stop", 0, 0), [])
    costs = bulk_costs("embeddings", {"input": TEXTS})
    sizes = []
    for part in sink.parts:
        count = len(part["embeddings"])
        sizes.append(sum(costs[:count]))
        costs = costs[count:]
    assert max(sizes) <= BULK_BATCH_BYTES
    assert len(sizes) < len(TEXTS) / 3
    assert sum(part["prompt_tokens"] for part in sink.parts) == sum(len(encode(text)) for text in TEXTS)
    assert sink.n_tokens == 0
    first = sink.parts[0]["prompt_tokens"]
    assert sink.starts == [(first, first)], "what it holds at a time, none of it prefill"


async def test_an_input_larger_than_a_batch_goes_alone() -> None:
    config = replace(SHARED, profile=TimingProfile(n_batch=4096))
    async with rig(config, **UNIFIED) as r:
        inputs = ["a", "word " * 1000, "b", encode("c")]
        generation, sink = embed(r, inputs)
        await finish(generation, sink)
        assert [len(part["embeddings"]) for part in sink.parts] == [1, 1, 2]
        assert vectors(sink)[3] == packed("c")


async def test_inputs_are_never_evaluated_together_in_slots_with_kv_of_their_own() -> None:
    """The engine gets that wrong, and so does the simulated one."""
    async with rig(EMBEDS) as r:
        pairs = [embed(r, [f"{number} {text}" for text in TEXTS[:20]]) for number in range(3)]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for slot, (generation, sink) in enumerate(pairs):
                    tasks.start_soon(generation.run, slot, sink)
        for number, (_, sink) in enumerate(pairs):
            assert vectors(sink) == [packed(f"{number} {text}") for text in TEXTS[:20]]
        assert r.engine.stats().requests == 60, "no KV of others to lead them around"


@pytest.mark.parametrize(("config", "options"), [(EMBEDS, {}), (SHARED, UNIFIED)])
async def test_a_cut_takes_effect_between_batches_and_costs_nothing(
    config: SimulatedConfig, options: dict[str, Any]
) -> None:
    async with rig(config, **options) as r:
        generation, sink = embed(r, TEXTS)
        sink.on_delta = generation.preempt
        end, cuts = await finish(generation, sink, cycle(range(4)))
    assert end == Finished("stop", 0, 0)
    assert len(cuts) == len(sink.parts) - 1 > 3
    assert all(cut.kv_tokens == 0 and not cut.resident for cut in cuts)
    assert vectors(sink) == [packed(text) for text in TEXTS]


async def test_one_that_is_cut_before_it_ran_asks_for_nothing() -> None:
    async with rig(EMBEDS) as r:
        generation, sink = embed(r, ["a"])
        generation.preempt()
        assert isinstance(await generation.run(0, sink), Cut)
        assert r.engine.stats().requests == 0
        assert sink.starts == []
        assert isinstance(await generation.run(0, sink), Finished)


async def test_another_process_goes_on_from_the_log() -> None:
    async with rig(SHARED, **UNIFIED) as r:
        generation, sink = embed(r, TEXTS)
        await finish(generation, sink)
        log = ReplySoFar(sink.parts[:2], [], 0)
        again, rest = embed(r, TEXTS, log)
        await finish(again, rest)
        assert sink.parts[:2] + rest.parts == sink.parts
        over, nothing = embed(r, TEXTS, ReplySoFar(sink.parts, [], 0))
        assert await over.run(0, nothing) == Finished("stop", 0, 0)
        assert nothing.parts == []
        assert len(nothing.starts) == 1, "a turn has to have run to be done"


async def test_documents_are_ranked_in_their_order() -> None:
    documents = [f"fish {number} {'red ' * (number % 3)}{'word ' * 100}" for number in range(12)]
    async with rig(EMBEDS) as r:
        body = {"query": "red fish", "documents": documents, "top_n": 2, "return_documents": True}
        generation = r.backend.generation("rerank", body, 0)
        sink = Recorder(generation)
        await finish(generation, sink)
    assert len(sink.parts) == len(documents)
    scores = [score for part in sink.parts for score in part["scores"]]
    assert scores == [relevance("red fish", document) for document in documents]


async def test_paused_kv_survives_what_the_same_engine_embeds() -> None:
    """The engine would give an input the slot that was idle longest, which is the paused turn's."""
    async with rig(SimulatedConfig(embeddings=True, n_slots=2)) as r:
        turn, said = r.generation(chat("hello [len=200]"), cut_at=[20])
        cut = await turn.run(0, said)
        assert isinstance(cut, Cut)
        generation, sink = embed(r, [*TEXTS, encode("by ids"), "x"])
        end = await generation.run(1, sink)
        assert isinstance(end, Finished)
        assert vectors(sink) == [packed(text) for text in [*TEXTS, "by ids", "x"]]
        assert all(len(part["embeddings"]) == 1 for part in sink.parts)
        await turn.run(0, said)
    prompt_tokens, found = said.starts[1]
    assert prompt_tokens - found == 1, "all of it was found"


async def test_inputs_wait_until_nothing_is_generated() -> None:
    """The engine would take them, let them wait in their slots, and not notice that they are given up."""
    config = SimulatedConfig(embeddings=True, profile=TimingProfile(base_step_s=0.001), eos_probability=0)
    async with rig(config) as r, anyio.create_task_group() as tasks:
        turn, said = r.generation(chat("hello"), 100_000)
        tasks.start_soon(turn.run, 0, said)
        generation, sink = embed(r, ["a", "b"])
        await until(lambda: said.n_tokens > 3)

        async def preempt_later() -> None:
            before = said.n_tokens
            await until(lambda: said.n_tokens > before + 50)
            generation.preempt()

        tasks.start_soon(preempt_later)
        with anyio.fail_after(10):
            end = await generation.run(1, sink)
        assert isinstance(end, Cut)
        assert sink.parts == []
        assert r.engine.stats().requests == 1, "nothing but the generation"
        turn.preempt()
        with anyio.fail_after(10):
            await r.until_idle()
            assert isinstance(await generation.run(1, sink), Finished)
        assert vectors(sink) == [packed("a"), packed("b")]


async def test_the_first_turn_that_generates_waits_for_the_batch_under_way() -> None:
    """It is spread over slots that the scheduler takes for free, and would wait there for that turn's end."""
    config = replace(SHARED, profile=TimingProfile(prefill_tokens_per_s=5000))
    async with rig(config, **UNIFIED) as r, anyio.create_task_group() as tasks:
        generation, sink = embed(r, ["word " * 60] * 40)
        tasks.start_soon(generation.run, 3, sink)
        await until(lambda: len(sink.parts) == 2 and r.engine.stats().running > 1)
        assert len(sink.parts[0]["embeddings"]) > 1
        ends: list[int] = []

        async def generate(slot: int) -> None:
            turn, said = r.generation(chat("hello [len=3]"), on_started=lambda: ends.append(len(sink.parts)))
            await turn.run(slot, said)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as turns:
                for slot in (0, 1):
                    turns.start_soon(generate, slot)
        assert ends == [3, 3], "the batch was over when they started"
        await until(lambda: len(sink.parts) > 3)
        assert len(sink.parts[3]["embeddings"]) == 1
        tasks.cancel_scope.cancel()


async def test_cancelling_frees_the_engine() -> None:
    config = replace(SHARED, profile=TimingProfile(prefill_tokens_per_s=1000))
    async with rig(config, **UNIFIED) as r:
        generation, sink = embed(r, TEXTS)
        with anyio.move_on_after(0.1):
            await generation.run(0, sink)
        await r.until_idle()
        assert r.engine.stats().disconnects == 1


async def test_refusals_say_what_is_wrong() -> None:
    async with rig() as r:
        generation, sink = embed(r, ["a"])
        with pytest.raises(EngineRefused, match="Start it with `--embeddings`") as caught:
            await generation.run(0, sink)
        assert caught.value.status == 501
        ranking = r.backend.generation("rerank", {"query": "a", "documents": ["b"]}, 0)
        with pytest.raises(EngineRefused, match="--reranking"):
            await ranking.run(0, sink)
    async with rig(SimulatedConfig(embeddings=True, profile=TimingProfile(n_batch=16))) as r:
        generation, sink = embed(r, ["word " * 40])
        with pytest.raises(EngineRefused, match="increase the physical batch") as caught:
            await generation.run(0, sink)
        assert (caught.value.status, caught.value.kind) == (400, "exceed_context_size_error")


def answer(body: Any, status: str = "200 OK") -> bytes:
    raw = orjson.dumps(body)
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(raw), raw)


async def ask_raw(reply: bytes, inputs: int = 2, **options: Any) -> Recorder:
    """A turn on a server that answers so."""
    slots = answer([{"id": 0, "is_processing": False}])
    options = {**UNIFIED, **options}
    failure: BackendError | None = None
    async with raw_server(lambda head: slots if head.startswith(b"GET") else reply) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(**options))
        generation = backend.generation("embeddings", {"input": ["a"] * inputs}, 0)
        sink = Recorder(generation)
        with anyio.fail_after(10):
            try:
                await generation.run(0, sink)
            except BackendError as error:
                failure = error
        await backend.aclose()
    if failure is not None:
        raise failure
    return sink


def item(index: int, vector: Any) -> dict[str, Any]:
    return {"index": index, "embedding": vector}


USAGE = {"usage": {"prompt_tokens": 4}}


async def test_vectors_of_numbers_are_packed_and_put_in_order() -> None:
    reply = {"data": [item(1, [1, 0.5]), item(0, [0.25, -2])], **USAGE}
    sink = await ask_raw(answer(reply))
    assert [struct.unpack("<2f", base64.b64decode(vector)) for vector in vectors(sink)] == [
        (0.25, -2.0),
        (1.0, 0.5),
    ]


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {"data": None},
        {"data": [item(0, [1.0])], **USAGE},
        {"data": [item(0, [1.0]), item(0, [1.0])], **USAGE},
        {"data": [item(0, [1.0]), item(5, [1.0])], **USAGE},
        {"data": [item(0, [1.0]), item(1, ["x"])], **USAGE},
        {"data": [item(0, [1.0]), item(1, "no base64")], **USAGE},
        {"data": [item(0, [1.0]), item(1, "AAA=")], **USAGE},
        {"data": [item(0, [1.0]), item(1, [1e300])], **USAGE},
        {"data": [item(0, [1.0]), item(1, None)], **USAGE},
        {"data": [item(0, [1.0]), item(1, [1.0])]},
    ],
)
async def test_an_odd_answer_is_the_engines_fault(reply: Any) -> None:
    with pytest.raises(EngineUnavailable):
        await ask_raw(answer(reply))


async def test_an_engine_without_the_endpoint() -> None:
    with pytest.raises(EngineRefused) as caught:
        await ask_raw(answer({"error": {"message": "File Not Found"}}, "404 Not Found"))
    assert caught.value.status == 501


async def test_an_engine_that_fell_silent() -> None:
    with pytest.raises(EngineUnavailable, match="fell silent"):
        await ask_raw(KEEP_OPEN, silence_s=0.05)


async def test_the_longest_input_is_counted() -> None:
    async with rig(EMBEDS) as r:
        for inputs in (TEXTS, [encode(text) for text in TEXTS], ["é" * 9, "word " * 3]):
            lengths = [len(encode(one) if isinstance(one, str) else one) for one in inputs]
            assert await r.backend.count_tokens("embeddings", {"input": inputs}) == max(lengths)
        body = {"query": "a query", "documents": ["a document", "doc"]}
        bound = max(bulk_costs("rerank", body))
        assert len(encode("a query\na document")) <= await r.backend.count_tokens("rerank", body) <= bound
