"""Tool calls that are cut: whole, once, under one id, and gone on with where they broke off."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.llamacpp.chat import ChatGeneration, chat_body
from backends.llamacpp.client import LlamaCppClient
from backends.protocol import Cut, EngineRefused, EngineUnavailable, Finished
from backends.simulated import ScriptedReply, SimulatedConfig, TimingProfile
from tests.backends.llamacpp.harness import (
    STEP,
    WAYS,
    Recorder,
    Rig,
    calls_of,
    chat,
    cut_at_engine_tokens,
    finish,
    rig,
)

ways = pytest.mark.parametrize("way", WAYS)
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
ARGUMENTS = ('{"p": "a\\"é\\n\\u00fc🙂", "n": [1, "x"]}', '{"n": 12}', '{"p": "c"}')
LONG = orjson.dumps({"path": "a.py", "content": "a line of text; " * 25}).decode()


def pieces(index: int, arguments: str) -> list[dict[str, Any]]:
    """A call's deltas: its head, then a character each."""
    head = {"id": f"call_{index}", "type": "function", "function": {"name": "write", "arguments": ""}}
    return [
        {"tool_calls": [{"index": index, **head}]},
        *({"tool_calls": [{"index": index, "function": {"arguments": char}}]} for char in arguments),
    ]


def script(match: str, *arguments: str) -> ScriptedReply:
    text = ({"reasoning_content": "Two files."}, {"content": "Let me "}, {"content": "look. "})
    calls = [piece for index, one in enumerate(arguments) for piece in pieces(index, one)]
    return ScriptedReply(match, (*text, *calls), "tool_calls")


def config(way: str = "closing", **more: Any) -> SimulatedConfig:
    scripts = (script("some files", *ARGUMENTS), script("a long file", LONG))
    return SimulatedConfig(**{"profile": STEP, "scripts": scripts, "n_ctx": 16_384, **WAYS[way], **more})


ASK = chat("Write some files", tools=TOOLS)
ASK_LONG = chat("Write a long file", tools=TOOLS)


def check(sink: Recorder, *arguments: str) -> None:
    """All calls, whole, and all text once."""
    calls = calls_of(sink)
    assert [orjson.loads(call["arguments"]) for call in calls.values()] == list(map(orjson.loads, arguments))
    assert [len(call["ids"]) for call in calls.values()] == [1] * len(arguments)
    assert {call["name"] for call in calls.values()} == {"write"}
    assert sum("tool_calls" in part for part in sink.parts) == 1, "a log has all calls or none"
    assert (sink.joined("reasoning_content"), sink.joined("content")) == ("Two files.", "Let me look. ")


@ways
async def test_a_cut_at_every_token_of_calls_changes_nothing(way: str) -> None:
    """Every token is a byte or less of the arguments, so every byte of them is a place."""
    async with rig(config(way, profile=TimingProfile(base_step_s=0.0005))) as r:
        whole = await r.whole(ASK)
        check(whole[1], *ARGUMENTS)
        total = whole[0].completion_tokens
        for at in range(1, total):
            generation, sink = r.generation(ASK)
            end = await cut_at_engine_tokens(r, generation, sink, at)
            if isinstance(end, Cut):
                assert calls_of(sink) == {}, "no call before all are complete"
                end, _ = await finish(generation, sink)
            check(sink, *ARGUMENTS)
            assert end.finish_reason == "tool_calls"
            assert sink.n_tokens <= end.completion_tokens
        await r.until_idle()


async def cut_every(
    r: Rig, body: dict[str, Any], step: int, max_tokens: int = 500
) -> tuple[Finished, Recorder, int]:
    """Run a turn whose every segment is cut after so many tokens; how many cuts that took."""
    generation, sink = r.generation(body, max_tokens)
    for count in range(200):
        end = await cut_at_engine_tokens(r, generation, sink, step)
        if isinstance(end, Finished):
            return end, sink, count
    raise AssertionError("no progress")


async def test_a_call_longer_than_any_segment_is_written_all_the_same() -> None:
    async with rig(config()) as r:
        whole = await r.whole(ASK_LONG)
        before = r.engine.stats().tokens_generated
        end, sink, cuts = await cut_every(r, ASK_LONG, 25)
        check(sink, LONG)
        generated = r.engine.stats().tokens_generated - before
    assert end.finish_reason == "tool_calls"
    assert cuts >= 5
    assert generated < 2 * whole[0].completion_tokens, "hardly anything is written twice"


@pytest.mark.parametrize("limit", [40, 90, 150])
async def test_the_limit_counts_what_was_gone_on_with(limit: int) -> None:
    async with rig(config()) as r:
        end, sink, cuts = await cut_every(r, ASK_LONG, 20, limit)
    assert cuts >= 1
    assert (end.finish_reason, end.completion_tokens, sink.n_tokens) == ("length", limit, limit)
    [call] = calls_of(sink).values()
    assert LONG.startswith(call["arguments"])


class Recording(LlamaCppBackend):
    """Keeps the bodies of generation requests."""

    def __init__(self, url: str, options: LlamaCppOptions) -> None:
        super().__init__(url, options)
        self.bodies: list[dict[str, Any]] = []

    async def open_stream(self, path: str, body: dict[str, Any]) -> Any:
        self.bodies.append(body)
        return await super().open_stream(path, body)


class TakesNoHalfCalls(Recording):
    """An engine whose grammar does not accept a call that has begun."""

    async def open_stream(self, path: str, body: dict[str, Any]) -> Any:
        if "<tool_call>" in str(body["messages"][-1]["content"]):
            raise EngineRefused(400, "Failed to initialize samplers")
        return await super().open_stream(path, body)


class WritesNoCalls(Recording):
    """An engine whose template does not take calls."""

    async def render(self, body: dict[str, Any]) -> str:
        if any("tool_calls" in message for message in body["messages"]):
            raise EngineRefused(400, "no calls here")
        return await super().render(body)


class ReadsItOtherwise(Recording):
    """An engine whose template writes something else than its parser reads."""

    async def render(self, body: dict[str, Any]) -> str:
        return (await super().render(body)).replace('"path":"a.py"', '"path":"b.py"')


async def cut_in_the_call(r: Rig, backend: LlamaCppClient, **body: Any) -> tuple[Finished, Recorder]:
    generation = ChatGeneration(backend, {**ASK_LONG, **body}, 500, None)
    sink = Recorder(generation)
    assert isinstance(await cut_at_engine_tokens(r, generation, sink, 80), Cut)
    assert sink.joined("content") == "Let me look. "
    return (await finish(generation, sink))[0], sink


async def test_a_half_written_call_is_handed_back_as_the_template_writes_it() -> None:
    async with rig(config()) as r:
        backend = Recording(r.url, LlamaCppOptions(piece_tokens=0, batch_tokens=64))
        _, sink = await cut_in_the_call(r, backend)
        await backend.aclose()
        check(sink, LONG)
    first, second = backend.bodies
    assert "tool_choice" not in first
    assert second["tool_choice"] == "required", "the grammar has to hold from within the call"
    said = second["messages"][-1]
    assert said["content"].startswith(
        'Let me look. <tool_call>{"name": "write", "arguments": {"path":"a.py","'
    )
    assert LONG.startswith(said["content"].partition('"arguments": ')[2])
    assert (said["role"], said["reasoning_content"]) == ("assistant", "Two files.")
    assert second["max_tokens"] < 500 - 40


@pytest.mark.parametrize("kind", [TakesNoHalfCalls, WritesNoCalls])
async def test_where_it_cannot_be_handed_back_the_turn_goes_back_to_before_the_call(
    kind: type[Recording],
) -> None:
    async with rig(config()) as r:
        whole = await r.whole(ASK_LONG)
        backend = kind(r.url, LlamaCppOptions(piece_tokens=0, batch_tokens=64))
        end, sink = await cut_in_the_call(r, backend)
        await backend.aclose()
        check(sink, LONG)
    assert end.completion_tokens == whole[0].completion_tokens
    assert backend.bodies[-1]["messages"][-1]["content"] == "Let me look. "
    assert "tool_choice" not in backend.bodies[-1]


async def test_another_process_that_finds_the_calls_only_adds_the_end() -> None:
    async with rig(config()) as r:
        whole = await r.whole(ASK)
        before = r.engine.stats().requests
        generation, sink = r.generation(ASK, so_far=whole[1].so_far(len(whole[1].parts), known=False))
        end, _ = await finish(generation, sink)
        assert (end.finish_reason, sink.parts) == ("tool_calls", [])
        assert end.completion_tokens == whole[1].n_tokens
        assert len(sink.starts) == 1
        assert r.engine.stats().requests == before


def test_a_named_function_is_the_only_one_and_required() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    choice = {"type": "function", "function": {"name": "write"}}
    body = chat_body({"tools": tools, "tool_choice": choice})
    assert body == {"tools": tools[1:], "tool_choice": "required"}
    assert chat_body({"tools": tools, "tool_choice": "auto"}) == {"tools": tools, "tool_choice": "auto"}


async def test_a_cut_tells_what_was_held_back() -> None:
    async with rig(config()) as r:
        generation, sink = r.generation(ASK_LONG)
        in_content = await cut_at_engine_tokens(r, generation, sink, 5)
        in_the_call = await cut_at_engine_tokens(r, generation, sink, 60)
    assert isinstance(in_content, Cut)
    assert isinstance(in_the_call, Cut)
    assert in_content.held_tokens == 0
    assert 30 < in_the_call.held_tokens < 70


async def test_a_call_that_the_engine_reads_otherwise_is_not_forwarded() -> None:
    """Here the simulated engine starts its script anew, as what it is given is not that."""
    async with rig(config()) as r:
        backend = ReadsItOtherwise(r.url, LlamaCppOptions(piece_tokens=0, batch_tokens=64))
        generation = ChatGeneration(backend, ASK_LONG, 500, None)
        sink = Recorder(generation)
        assert isinstance(await cut_at_engine_tokens(r, generation, sink, 80), Cut)
        with pytest.raises(EngineUnavailable, match="reads the call so far as something else"):
            await generation.run(0, sink)
        assert calls_of(sink) == {}
        again = await cut_at_engine_tokens(r, generation, sink, 60)
        assert isinstance(again, Cut)
        await finish(generation, sink)
        await backend.aclose()
        check(sink, LONG)
    assert all(body.get("tool_choice") != "required" for body in backend.bodies[2:]), "not tried again"
