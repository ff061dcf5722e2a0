"""Engines that break off, hang, lie or are not there: bounded, and always one of two errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import Cut, EngineRefused, EngineUnavailable, Finished
from backends.simulated import Fault, SimulatedConfig, TimingProfile
from backends.simulated.faults import FaultKind
from tests.backends.llamacpp.harness import KEEP_OPEN, STEP, WAYS, chat, finish, raw_server, rig

BODY = chat("Tell me more [len=40]")
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CHAT = {**BODY, "tools": TOOLS}
BREAKS: tuple[FaultKind, ...] = ("disconnect", "http_500", "truncated_sse", "html_error", "invalid_utf8")

ways = pytest.mark.parametrize("way", ["closing", "parking"])


def config(way: str = "closing", *faults: Fault, **more: Any) -> SimulatedConfig:
    return SimulatedConfig(**{"profile": STEP, "faults": faults, **WAYS[way], **more})


@ways
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("body", [BODY, CHAT], ids=["tokens", "chat"])
async def test_a_turn_goes_on_after_the_engine_broke_off(
    body: dict[str, Any], kind: FaultKind, after: int, way: str
) -> None:
    async with rig(config(way, Fault(kind, after_tokens=after, nth_request=2))) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable) as raised:
            await generation.run(0, sink)
        assert "127.0.0.1" not in str(raised.value)
        assert "\n" not in str(raised.value)
        assert whole[1].text.startswith(sink.text)
        end, _ = await finish(generation, sink)
        assert sink.text == whole[1].text
        assert end == Finished("stop", whole[0].completion_tokens, end.kv_tokens)
        await r.until_idle()


@ways
@pytest.mark.parametrize("after", [0, 5])
async def test_a_hanging_engine_is_found_out(way: str, after: int) -> None:
    """The slot is busy and says nothing: two looks at it that show no progress end the segment."""
    async with rig(config(way, Fault("hang", after_tokens=after)), silence_s=0.05) as r:
        generation, sink = r.generation(BODY)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable, match="fell silent"):
            await generation.run(0, sink)
        end, _ = await finish(generation, sink)
        assert end.completion_tokens == 41
        await r.until_idle()


async def test_a_hanging_turn_can_be_cut_and_cancelled() -> None:
    fault = Fault("hang", after_tokens=3)
    async with rig(config("closing", fault, multibyte_rate=0.0)) as r:
        generation, sink = r.generation(BODY, cut_at=[3])
        end, cuts = await finish(generation, sink)
        assert isinstance(cuts[0], Cut)
        assert end.completion_tokens == 41
        r.engine.faults.add([fault])
        generation, sink = r.generation(BODY)
        with anyio.fail_after(5), anyio.CancelScope() as scope:
            sink.on_started = scope.cancel
            await generation.run(0, sink)
        await r.until_idle()


async def test_a_slow_prefill_and_a_queue_are_no_hang() -> None:
    slow = TimingProfile(base_step_s=0.001, prefill_tokens_per_s=1000, n_batch=64)
    async with rig(config(profile=slow, n_ctx=16_384), silence_s=0.1) as r:
        other, others = r.generation(chat("word " * 150 + "[len=300]"))
        generation, sink = r.generation(BODY)
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            others.on_started = running.set
            tasks.start_soon(other.run, 0, others)
            await running.wait()
            end, _ = await finish(generation, sink)
        assert end.completion_tokens == 41


async def test_a_stream_that_the_engine_has_forgotten_is_found_out() -> None:
    async with (
        raw_server(forgetful) as url,
        backend_at(url, silence_s=0.05) as backend,
    ):
        generation = backend.generation("completion", {"prompt": [1, 2]}, 5)
        with anyio.fail_after(5), pytest.raises(EngineUnavailable, match="fell silent"):
            await generation.run(0, NoSink())


@ways
async def test_an_engine_that_ignores_a_closed_stream_is_bounded(way: str) -> None:
    """A natively parked turn does not depend on closing; a closed one is given up after the bound."""
    fault = Fault("ignore_disconnect", times=None)
    async with rig(config(way, fault), stop_bound_s=0.3) as r:
        generation, sink = r.generation(chat("Long [len=400]"), cut_at=[5])
        began = time.monotonic()
        if way == "parking":
            assert isinstance(await generation.run(0, sink), Cut)
            await generation.discard()
            return
        with pytest.raises(EngineUnavailable, match="slot 0 still decodes"):
            await generation.run(0, sink)
        assert 0.3 <= time.monotonic() - began < 3


async def test_a_park_that_is_refused_falls_back_to_closing() -> None:
    async with rig(config("parking", preempt_ram_bytes=1)) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=[5, 20])
        end, cuts = await finish(generation, sink)
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
        assert len(cuts) == 2
        assert r.engine.stats().parks == 0


async def test_a_parked_turn_that_the_engine_let_go_on_is_resumed_by_text() -> None:
    async with rig(config("parking")) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=[5])
        assert isinstance(await generation.run(0, sink), Cut)
        await r.backend.unpark(0)
        end, _ = await finish(generation, sink)
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)
        await r.until_idle()


async def test_a_turn_that_the_engine_parked_itself_can_still_be_preempted() -> None:
    async with rig(config("parking")) as r:
        body = chat("Long [len=300]")
        whole = await r.whole(body)
        generation, sink = r.generation(body)
        ends: list[Finished | Cut] = []
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            sink.on_delta = running.set

            async def run() -> None:
                ends.append(await generation.run(0, sink))

            tasks.start_soon(run)
            await running.wait()
            assert await r.backend.park(0)
            with anyio.fail_after(5):
                while not generation._parked_by_server:  # type: ignore[attr-defined] # noqa: ASYNC110
                    await anyio.sleep(0.001)
            generation.preempt()
        assert isinstance(ends[0], Cut)
        end, _ = await finish(generation, sink)
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)


async def test_a_parked_turns_engine_may_be_gone() -> None:
    async with rig(config("parking"), stop_bound_s=20) as r:
        generation, sink = r.generation(BODY, cut_at=[5])
        assert isinstance(await generation.run(0, sink), Cut)
        r.engine.faults.add([Fault("refuse", times=None)])
        with anyio.fail_after(5), pytest.raises(EngineUnavailable):
            await generation.run(0, sink)
        r.engine.faults.clear()
        end, _ = await finish(generation, sink)
        assert end.completion_tokens == 41
        await r.until_idle()


async def test_a_cut_of_an_engine_that_has_died_is_quick() -> None:
    async with backend_at("http://127.0.0.1:1") as backend:
        with anyio.fail_after(5), pytest.raises(EngineUnavailable, match="cannot be reached"):
            await backend.wait_idle(0, 60)


async def test_slow_health_is_not_dead() -> None:
    async with rig(config("closing", Fault("slow_health", delay_s=0.3))) as r:
        assert await r.backend.healthy()


# Not an engine at all --------------------------------------------------------------------------------


class NoSink:
    """A sink for turns that never come to anything."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        pass

    def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
        raise AssertionError("nothing was generated")


@asynccontextmanager
async def backend_at(url: str, **options: Any) -> AsyncIterator[LlamaCppBackend]:
    """An adapter of whatever is there."""
    backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0, **options))
    try:
        yield backend
    finally:
        await backend.aclose()


def forgetful(request: bytes) -> bytes:
    if request.startswith(b"GET /slots"):
        body = orjson.dumps([{"id": 0, "n_ctx": 100, "is_processing": False}])
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n: hm...\r\n" + KEEP_OPEN


STRANGE = {
    "closed at once": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9\r\n",
    "binary": bytes(range(256)),
    "cut in the head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "cut in the body": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: {",
    "bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "endless header": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    "html": b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 6\r\n\r\n<html>",
    "redirect": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    "not found": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "some JSON": b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"a": [1, 2]}',
}


@pytest.mark.parametrize("answer", STRANGE)
async def test_whatever_answers_there_is_an_engine_that_is_unavailable(answer: str) -> None:
    async with raw_server(lambda _: STRANGE[answer]) as url, backend_at(url) as backend:
        generation = backend.generation("completion", {"prompt": [1, 2]}, 5)
        errors = []
        with anyio.fail_after(10):
            for attempt in (
                backend.describe,
                backend.slots,
                lambda: backend.count_tokens("completion", {"prompt": "a"}),
                lambda: generation.run(0, NoSink()),
            ):
                with pytest.raises(EngineUnavailable) as raised:
                    await attempt()
                errors.append(str(raised.value))
            assert await backend.slot_report(0) is None
            assert not await backend.park(0)
            await backend.healthy()
        port = url.rpartition(":")[2]
        assert not [error for error in errors if "127.0.0.1" in error or port in error or "\n" in error]


async def test_nobody_there_is_an_engine_that_is_unavailable() -> None:
    async with backend_at("http://127.0.0.1:1") as backend:
        with pytest.raises(EngineUnavailable, match=r"^the engine cannot be reached$"):
            await backend.describe()
        assert not await backend.healthy()
        generation = backend.generation("completion", {"prompt": [1, 2]}, 5)
        with pytest.raises(EngineUnavailable, match=r"^the engine cannot be reached$"):
            await generation.run(0, NoSink())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, EngineRefused), (413, EngineRefused), (404, EngineUnavailable), (503, EngineUnavailable)],
)
async def test_a_refusal_is_told_from_an_outage(status: int, kind: type[Exception]) -> None:
    body = b'{"error": {"message": "no", "type": "t"}}'
    reply = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
    async with raw_server(lambda _: reply) as url, backend_at(url) as backend:
        generation = backend.generation("completion", {"prompt": [1, 2]}, 5)
        with pytest.raises(kind, match=r"^no$"):
            await generation.run(0, NoSink())
