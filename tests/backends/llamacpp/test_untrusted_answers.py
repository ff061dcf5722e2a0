"""What an engine that lies says of itself, its slots, texts and vectors: refused, or made something of."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import orjson
import pytest

from backends.llamacpp import LlamaCppBackend
from backends.llamacpp.wire import MAX_ANSWER_BYTES
from backends.protocol import BackendError, Cut, EngineUnavailable
from backends.simulated import SimulatedConfig
from tests.backends.llamacpp.harness import STEP, Recorder, chat
from tests.backends.llamacpp.liar import (
    CHUNKED,
    HTML,
    NUMBERS,
    ON_THE_WAY_BYTES,
    STRANGE,
    TEXT,
    TOOLS,
    Lie,
    answer,
    body_of,
    liar,
    lying_engine,
    place,
    run,
)

GETS = ["/props", "/slots", "/health"]
ANSWERS: dict[str, bytes] = {
    "text": answer(b"ok"),
    "half a JSON": answer(b'{"a": '),
    "HTML": answer(HTML),
    "HTML 404": answer(HTML, b"404 Not Found"),
    "HTML 502": answer(HTML, b"502 Bad Gateway"),
    "invalid UTF-8": answer(b'"\xff\xfe"'),
    "deep": answer(b"[" * 100_000),
    "packed": answer(gzip.compress(b"{}"), headers=b"content-encoding: gzip\r\n"),
    "said to be packed": answer(b"{}", headers=b"content-encoding: gzip, br, zstd\r\n"),
    "too short": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}a",
    "a reason that is no text": answer(b"{}", b"200 \xff\xfe"),
    "a header that is no text": answer(b"{}", headers=b"content-type: \xff\xfe\r\n"),
    **{f"{value!r}": answer(value) for value in STRANGE},
    "strange objects": answer([{"a": [1]}, 5]),
}
ASKED: dict[str, tuple[bytes, Callable[[LlamaCppBackend], Any]]] = {
    "props": (b"GET /props", lambda backend: backend.describe()),
    "slots, described": (b"GET /slots", lambda backend: backend.describe()),
    "slots": (b"GET /slots", lambda backend: backend.slots()),
    "report": (b"GET /slots", lambda backend: backend.slot_report(0)),
    "template": (b"POST /apply-template", lambda backend: backend.count_tokens("chat", chat(TEXT))),
    "tokens": (b"POST /tokenize", lambda backend: backend.count_tokens("completion", {"prompt": "a"})),
    "health": (b"GET /health", lambda backend: backend.healthy()),
    "erase": (b"POST /slots", lambda backend: backend.erase(0)),
    "park": (b"POST /slots", lambda backend: backend.park(0)),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_no_answer_is_believed(asked: str) -> None:
    about, ask = ASKED[asked]
    async with lying_engine() as (lying, backend):
        truth = await backend.describe()
        for name, said in ANSWERS.items():
            lying.lies = [Lie(about, said, times=None)]
            try:
                with anyio.fail_after(5):
                    await ask(backend)
            except BackendError as error:
                assert "\n" not in str(error), name
        lying.lies = []
        assert await backend.describe() == truth


def changed(body: Any, field: str, value: Any) -> bytes:
    """An answer in which one field has another value."""
    place(body, field, value)
    return answer(body)


@pytest.mark.parametrize("value", [*NUMBERS, *STRANGE, 0], ids=repr)
async def test_an_engine_is_what_it_can_be(value: Any) -> None:
    """No context, no slots, no names that are none; a slot is known by its place."""
    fields = {
        b"GET /props": ("model_alias", "model_path", "chat_template", "default_generation_settings"),
        b"GET /slots": ("0", "0.id", "1.id", "0.is_processing", "0.n_ctx", "0.n_prompt_tokens"),
    }
    async with lying_engine() as (lying, backend):
        for about, names in fields.items():
            for name in names:
                twist = partial(_twisted, name, value)
                lying.lies = [Lie(about, twist=twist, times=None)]
                try:
                    info = await backend.describe()
                    slots = await backend.slots()
                except EngineUnavailable:
                    continue
                assert 1 <= info.slot_context <= 100_000_000
                assert isinstance(info.model, str)
                assert [slot.id for slot in slots] == list(range(info.engine_slots))
                assert all((slot.kv_tokens or 0) >= 0 and slot.context >= 0 for slot in slots)


def _twisted(field: str, value: Any, reply: bytes) -> bytes:
    return changed(orjson.loads(body_of(reply)), field, value)


async def test_too_many_slots_are_none() -> None:
    slots = [{"id": place, "is_processing": False, "n_ctx": 100} for place in range(5000)]
    async with lying_engine() as (lying, backend):
        lying.lies = [Lie(b"GET /slots", answer(slots), times=None)]
        with pytest.raises(EngineUnavailable, match="more than 1,024 slots"):
            await backend.describe()


@pytest.mark.parametrize("ids", [["1"], [1.5], [-1], [None], [True], [[1]], 5, None, {"a": 1}], ids=repr)
async def test_no_token_id_is_believed(ids: Any) -> None:
    async with lying_engine() as (lying, backend):
        lying.lies = [Lie(b"POST /tokenize", answer({"tokens": ids}), times=None)]
        with pytest.raises(EngineUnavailable):
            await backend.tokenize("a")


async def test_an_answer_without_end_is_not_kept() -> None:
    async with lying_engine() as (lying, backend):
        for about, ask in (ASKED["props"], ASKED["tokens"]):
            sent = lying.sent
            lying.lies = [Lie(about, b"HTTP/1.1 200 OK\r\n\r\n[", repeated=b" " * (1 << 20), times=None)]
            with pytest.raises(EngineUnavailable, match="never ends"):
                await ask(backend)
            assert lying.sent - sent < MAX_ANSWER_BYTES + ON_THE_WAY_BYTES


async def test_an_answer_that_dribbles_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time; the whole is not."""
    monkeypatch.setattr("backends.llamacpp.client.HEALTH_S", 0.3)
    async with lying_engine() as (lying, backend):
        lying.lies = [Lie(b"GET /health", CHUNKED, repeated=b"1\r\n \r\n", times=None)]
        with anyio.fail_after(5):
            assert not await backend.healthy()


async def test_a_packed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(b"[" + b" " * (64 << 20) + b"]", 1)
    assert len(bomb) < 1 << 20
    async with lying_engine() as (lying, backend):
        lying.lies = [Lie(b"GET", answer(bomb, headers=b"content-encoding: gzip\r\n"), times=None)]
        with pytest.raises(EngineUnavailable, match="not JSON"):
            await backend.describe()
        assert b"GET /props HTTP/1.1" in lying.asked


async def test_nobody_is_sent_elsewhere() -> None:
    """A redirect would take the prompt, and whatever key the address holds, to anybody."""
    async with lying_engine() as (lying, backend), liar(lying.url) as elsewhere:
        for status in (b"301 Moved", b"302 Found", b"307 Temporary", b"308 Permanent"):
            location = b"location: %b/v1/chat/completions\r\n" % elsewhere.url.encode()
            lying.lies = [Lie(b"", answer(b"", status, location), times=None)]
            for body in (chat(TEXT), chat(TEXT, tools=TOOLS)):
                _, end = await run(backend, body)
                assert isinstance(end, EngineUnavailable)
            with pytest.raises(EngineUnavailable):
                await backend.describe()
        assert elsewhere.asked == []


@pytest.mark.parametrize("held", [-5, 1 << 40, 1e300, "7", None], ids=repr)
async def test_what_a_cut_slot_holds_is_not_believed(held: Any) -> None:
    async with lying_engine(stop_bound_s=0.5) as (lying, backend):
        generation = backend.generation("chat", chat("Long [len=300]"), 300)
        sink = Recorder(generation, cut_at=[3])
        lying.lies = [
            Lie(b"GET /slots", twist=partial(_twisted, "0.n_prompt_tokens", held), times=None),
        ]
        with anyio.fail_after(10):
            try:
                end = await generation.run(0, sink)
            except EngineUnavailable:
                return
        assert isinstance(end, Cut)
        assert 0 <= end.kv_tokens <= backend.slot_context


BATCHES: list[Any] = [
    {"data": [{"index": -1, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": True, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 1 << 62, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 0, "embedding": []}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 0, "embedding": ""}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 0, "embedding": "AADAfw=="}], "usage": {"prompt_tokens": 3}},  # not a number
    {"data": [{"index": 0, "embedding": "AACAfw=="}], "usage": {"prompt_tokens": 3}},  # infinite
    {"data": [{"index": 0, "embedding": "AAA="}], "usage": {"prompt_tokens": 3}},  # half a number
    {"data": [{"index": 0, "embedding": [1e300]}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 0, "embedding": {"a": 1}}], "usage": {"prompt_tokens": 3}},
    {"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": -3}},
    {"data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 1 << 62}},
    {"data": [{"index": 0, "embedding": [0.5]}], "usage": 5},
    {"data": [{"index": 0, "embedding": [0.5]}]},
    {"data": {"index": 0}},
    {},
    [],
    None,
]


@pytest.mark.parametrize("said", BATCHES, ids=repr)
async def test_no_vector_is_believed(said: Any) -> None:
    config = SimulatedConfig(profile=STEP, embeddings=True)
    async with lying_engine(config) as (lying, backend):
        lying.lies = [Lie(b"POST /v1/embeddings", answer(said), times=None)]
        generation = backend.generation("embeddings", {"input": ["a"]}, 0)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable):
            await generation.run(0, Recorder(generation))


@pytest.mark.parametrize("score", [None, "0.5", True, [], 10**400], ids=lambda value: str(value)[:8])
async def test_no_score_is_believed(score: Any) -> None:
    said = {"results": [{"index": 0, "relevance_score": "S"}], "usage": {"prompt_tokens": 3}}
    raw = orjson.dumps(said).replace(b'"S"', str(score).encode() if isinstance(score, int) else b"null")
    config = SimulatedConfig(profile=STEP, embeddings=True)
    async with lying_engine(config) as (lying, backend):
        lying.lies = [Lie(b"POST /v1/rerank", answer(raw), times=None)]
        generation = backend.generation("rerank", {"query": "q", "documents": ["a"]}, 0)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable):
            await generation.run(0, Recorder(generation))
