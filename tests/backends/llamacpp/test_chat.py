"""Turns over the chat endpoint: tool calls that must stay whole, reasoning, and text that is handed back."""

from __future__ import annotations

from typing import Any

import anyio
import orjson
import pytest

from backends.llamacpp.chat import ChatGeneration
from backends.llamacpp.tokens import TokenGeneration
from backends.protocol import Cut, Finished, Generation, ReplySoFar
from backends.simulated import ScriptedReply, SimulatedConfig
from tests.backends.llamacpp.harness import STEP, WAYS, Recorder, Rig, chat, finish, rig

ways = pytest.mark.parametrize("way", WAYS)
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def call(index: int = 0, arguments: str = "", **head: Any) -> dict[str, Any]:
    name = {"name": head.pop("name")} if "name" in head else {}
    return {"tool_calls": [{"index": index, **head, "function": {**name, "arguments": arguments}}]}


CALLS = ScriptedReply(
    match="use the tools",
    deltas=(
        {"reasoning_content": "I should look at two files."},
        {"reasoning_content": " Both are short."},
        {"content": "Let me look. "},
        {"content": "One moment."},
        call(0, id="call_a", type="function", name="read"),
        call(0, '{"path":'),
        call(0, ' "a/b.py"}'),
        call(1, id="call_b", type="function", name="read"),
        call(1, '{"path": "c.py",'),
        call(1, ' "lines": [1, 2]}'),
    ),
    finish_reason="tool_calls",
)
THOUGHT = ScriptedReply(
    match="think first",
    deltas=(
        {"reasoning_content": "First this,"},
        {"reasoning_content": " then that,"},
        {"reasoning_content": " and so on."},
        {"content": "The answer"},
        {"content": " is forty-two."},
    ),
)
ASK = chat("Please use the tools", tools=TOOLS)
THINK = chat("Please think first", tools=TOOLS)


def config(way: str = "closing", **more: Any) -> SimulatedConfig:
    return SimulatedConfig(
        **{"profile": STEP, "scripts": (CALLS, THOUGHT), "n_ctx": 16_384, **WAYS[way], **more}
    )


def calls_of(sink: Recorder) -> list[Any]:
    """The calls as a client puts them together."""
    calls: dict[int, dict[str, Any]] = {}
    for part in sink.parts:
        for piece in part.get("tool_calls", []):
            known = calls.setdefault(piece["index"], {"ids": [], "name": "", "arguments": ""})
            known["ids"] += [piece["id"]] if piece.get("id") else []
            known["name"] += piece["function"].get("name") or ""
            known["arguments"] += piece["function"].get("arguments") or ""
    return [(c["ids"], c["name"], orjson.loads(c["arguments"])) for c in calls.values()]


WANTED_CALLS = [
    (["call_a"], "read", {"path": "a/b.py"}),
    (["call_b"], "read", {"path": "c.py", "lines": [1, 2]}),
]


async def cut_at_engine_tokens(r: Rig, generation: Generation, sink: Recorder, at: int) -> Finished | Cut:
    """Preempt once the engine has made `at` tokens of this segment, whether they were forwarded or not."""
    before = r.engine.stats().tokens_generated
    ends: list[Finished | Cut] = []

    async def watch() -> None:
        while r.engine.stats().tokens_generated - before < at:  # noqa: ASYNC110
            await anyio.sleep(0.0002)
        generation.preempt()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            ends.append(await generation.run(0, sink))
            tasks.cancel_scope.cancel()
    return ends[0]


@ways
async def test_tool_calls_come_whole_and_once_wherever_the_cut_falls(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(ASK)
        assert whole[0].finish_reason == "tool_calls"
        assert calls_of(whole[1]) == WANTED_CALLS
        total = whole[0].completion_tokens
        in_the_call = 0
        for at in range(1, total, 2):
            generation, sink = r.generation(ASK)
            assert isinstance(generation, ChatGeneration)
            first = await cut_at_engine_tokens(r, generation, sink, at)
            if isinstance(first, Cut):
                assert calls_of(sink) == [], "no call before it is complete"
                in_the_call += sink.joined("content") == "Let me look. One moment."
                end, _ = await finish(generation, sink)
            else:
                end = first
            assert calls_of(sink) == WANTED_CALLS
            assert sink.joined("content") == whole[1].joined("content")
            assert sink.joined("reasoning_content") == whole[1].joined("reasoning_content")
            assert (end.finish_reason, end.completion_tokens) == ("tool_calls", total)
            assert sink.n_tokens <= total
        assert in_the_call > 5
        await r.until_idle()


async def test_calls_are_one_delta_so_that_a_log_has_all_or_none() -> None:
    async with rig(config()) as r:
        _, sink = await r.whole(ASK)
    assert sum("tool_calls" in part for part in sink.parts) == 1


@pytest.mark.parametrize("way", ["closing", "parking"])
async def test_reasoning_and_content_are_continued_where_they_stopped(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(THINK)
        assert whole[1].joined("reasoning_content") == "First this, then that, and so on."
        for at in range(1, whole[0].completion_tokens):
            generation, sink = r.generation(THINK)
            first = await cut_at_engine_tokens(r, generation, sink, at)
            end = first if isinstance(first, Finished) else (await finish(generation, sink))[0]
            assert sink.joined("reasoning_content") == whole[1].joined("reasoning_content")
            assert sink.joined("content") == whole[1].joined("content")
            assert (end.finish_reason, end.completion_tokens) == ("stop", whole[0].completion_tokens)


@ways
async def test_plain_text_over_the_chat_endpoint_is_exact_here(way: str) -> None:
    """The simulated tokeniser turns its own text back into the same tokens; a real one may not."""
    body = chat("Some text [len=60]", tools=TOOLS)
    async with rig(config(way, multibyte_rate=0.3)) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body, cut_at=list(range(1, 60, 2)))
        end, cuts = await finish(generation, sink)
        assert len(cuts) > 5
        assert sink.text == whole[1].text
        assert end.completion_tokens == whole[0].completion_tokens
        assert sink.n_tokens <= whole[1].n_tokens + 1


@ways
@pytest.mark.parametrize("limit", [1, 7, 30])
async def test_the_limit_counts_over_all_segments(way: str, limit: int) -> None:
    body = chat("Some text [len=60]", tools=TOOLS)
    async with rig(config(way)) as r:
        whole = await r.whole(body, limit)
        generation, sink = r.generation(body, limit, cut_at=list(range(1, 60, 4)))
        end, _ = await finish(generation, sink)
        assert (end.finish_reason, end.completion_tokens) == ("length", limit)
        assert sink.text == whole[1].text


async def test_another_process_goes_on_from_text_and_reasoning() -> None:
    async with rig(config()) as r:
        whole = await r.whole(THINK)
        for count in range(len(whole[1].parts) + 1):
            so_far = whole[1].so_far(count, known=False)
            generation, sink = r.generation(THINK, so_far=so_far)
            end, _ = await finish(generation, sink)
            for name in ("reasoning_content", "content"):
                told = "".join(part.get(name, "") for part in so_far.parts)
                assert told + sink.joined(name) == whole[1].joined(name)
            assert end.completion_tokens == whole[0].completion_tokens


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


async def test_a_reply_that_the_client_began_is_continued_as_one_message() -> None:
    begun = {"role": "assistant", "content": "Well, as I was"}
    body = {
        **chat("Go on [len=60]", tools=TOOLS, continue_final_message="content", add_generation_prompt=False),
    }
    body["messages"] = [*body["messages"], begun]
    async with rig(config(multibyte_rate=0.3)) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body, cut_at=list(range(3, 50, 5)))
        end, cuts = await finish(generation, sink)
        assert len(cuts) > 3
        assert sink.text == whole[1].text
        assert end.completion_tokens == whole[0].completion_tokens
    assert begun["content"] == "Well, as I was"


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ("Well", "Well so"),
        (None, " so"),
        (
            [{"type": "text", "text": "Well"}],
            [{"type": "text", "text": "Well"}, {"type": "text", "text": " so"}],
        ),
    ],
)
async def test_what_the_client_began_may_have_any_shape(content: Any, joined: Any) -> None:
    body = {"messages": [{"role": "assistant", "content": content}], "tools": TOOLS}
    async with rig(config()) as r:
        so_far = ReplySoFar([{"content": " so"}], None, 1)
        generation = ChatGeneration(r.backend, body, 5, so_far)
        [message] = generation._messages_so_far()["messages"]
    assert message["content"] == joined


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, TokenGeneration),
        ({"response_format": {"type": "text"}, "tools": [], "logprobs": False}, TokenGeneration),
        ({"tools": TOOLS}, ChatGeneration),
        ({"response_format": {"type": "json_object"}}, ChatGeneration),
        ({"logprobs": True}, ChatGeneration),
        ({"grammar": "root ::= x"}, ChatGeneration),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, ChatGeneration),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, ChatGeneration),
    ],
)
async def test_only_what_needs_the_chat_parser_goes_there(
    more: dict[str, Any], kind: type[Generation]
) -> None:
    async with rig(config()) as r:
        assert type(r.backend.generation("chat", {**chat("hi"), **more}, 5)) is kind
        assert type(r.backend.generation("completion", {"prompt": "hi"}, 5)) is TokenGeneration
