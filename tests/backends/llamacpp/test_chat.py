"""Turns over the chat endpoint: reasoning, and text that is handed back. Calls: `test_cut_calls.py`."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.llamacpp.chat import ChatGeneration
from backends.llamacpp.tokens import TokenGeneration
from backends.protocol import Cut, EngineRefused, EngineUnavailable, Finished, Generation, ReplySoFar
from backends.simulated import ScriptedReply, SimulatedConfig
from tests.backends.llamacpp.harness import (
    STEP,
    WAYS,
    Recorder,
    chat,
    cut_at_engine_tokens,
    finish,
    raw_server,
    rig,
)

ways = pytest.mark.parametrize("way", WAYS)
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


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
THINK = chat("Please think first", tools=TOOLS)


def config(way: str = "closing", **more: Any) -> SimulatedConfig:
    return SimulatedConfig(**{"profile": STEP, "scripts": (THOUGHT,), "n_ctx": 16_384, **WAYS[way], **more})


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
async def test_the_stop_string_is_told_wherever_the_cut_falls(way: str) -> None:
    body = chat("Some text [len=60]", tools=TOOLS)
    async with rig(config(way)) as r:
        _, told = await r.whole(body)
        stop = told.text[120:131]
        for stops in (stop, ["###", stop]):
            generation, sink = r.generation({**body, "stop": stops}, cut_at=list(range(1, 60, 7)))
            end, cuts = await finish(generation, sink)
            assert len(cuts) > 2
            assert sink.text == told.text[: told.text.index(stop)]
            assert (end.finish_reason, end.stop_sequence) == ("stop", stop)
        for others in (None, [], ["###"]):
            end, _ = await r.whole({**body, "stop": others})
            assert (end.finish_reason, end.stop_sequence) == ("stop", None)


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
        [message] = generation._continued("")["messages"]
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
        ({"json_schema": {"type": "object"}}, ChatGeneration),
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


def sse(*deltas: dict[str, Any], finish_reason: str = "stop", **choice: Any) -> bytes:
    """A reply of the chat endpoint that ends with the connection."""
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": delta, "finish_reason": None, **choice}], "timings": {"predicted_n": at + 1}}
        for at, delta in enumerate(deltas)
    ]
    events.append({"choices": [{"delta": {}, "finish_reason": finish_reason}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(deltas)}})
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events)


def resumed(backend: LlamaCppBackend, *parts: dict[str, Any]) -> tuple[Generation, Recorder]:
    generation = ChatGeneration(backend, THINK, 50, ReplySoFar(parts, None, len(parts)))
    return generation, Recorder(generation)


@pytest.mark.parametrize(
    "repeated",
    [
        ["So", ".", "abc def ghi"],
        ["So.", "abc", " def", " ghi"],
        ["So.", "a", "b", "c d", "ef ghi"],
        ["So.", "abc ", "def ghi"],
    ],
    ids=" ".join,
)
async def test_what_the_server_repeats_is_left_out_to_the_character(repeated: list[str]) -> None:
    """However its pieces fall, and although it leaves out a space at the end until more comes."""
    content = repeated.index("So.") if "So." in repeated else 1
    deltas = [{"reasoning_content" if at <= content else "content": text} for at, text in enumerate(repeated)]
    async with raw_server(lambda _: sse(*deltas)) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        generation, sink = resumed(backend, {"reasoning_content": "So."}, {"content": "abc "})
        end = await generation.run(0, sink)
        await backend.aclose()
    assert isinstance(end, Finished)
    assert (sink.joined("reasoning_content"), sink.joined("content")) == ("", "def ghi")


async def test_a_server_that_reads_the_reply_so_far_as_something_else_is_not_believed() -> None:
    async with raw_server(lambda _: sse({"content": "ab"}, {"content": "xyz"})) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        generation, sink = resumed(backend, {"content": "abcd"})
        with pytest.raises(EngineUnavailable, match="reads the reply so far as something else"):
            await generation.run(0, sink)
        await backend.aclose()
    assert sink.parts == []


@pytest.mark.parametrize(("asked", "told"), [(None, 0), (0, 0), (1, 1), (2, 2)])
async def test_as_many_alternatives_as_were_asked_for(asked: int | None, told: int) -> None:
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "a"}, {"token": "b"}]}
    seen: list[bytes] = []

    def answer(request: bytes) -> bytes:
        seen.append(request)
        return sse({"content": "a"}, logprobs={"content": [entry]})

    body = {**chat("hi"), "logprobs": True, **({} if asked is None else {"top_logprobs": asked})}
    async with raw_server(answer) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        generation = ChatGeneration(backend, body, 5, None)
        sink = Recorder(generation)
        await generation.run(0, sink)
        await backend.aclose()
    [part] = sink.parts
    assert [len(entry["top_logprobs"]) for entry in part["_logprobs"]["content"]] == [told]
    assert b'"top_logprobs":%d' % max(1, asked or 0) in seen[0], "the server tells none when asked for 0"


async def test_a_grammar_of_the_clients_own_is_not_gone_on_with() -> None:
    """It would start anew in the middle of the text, so the reply comes whole, whatever was cut."""
    body = chat("Some text [len=30]", grammar="root ::= x")
    async with rig(config()) as r:
        whole = await r.whole(body)
        generation, sink = r.generation(body)
        assert isinstance(await cut_at_engine_tokens(r, generation, sink, 12), Cut)
        assert sink.parts == []
        end, _ = await finish(generation, sink)
        assert len(sink.parts) == 1
        assert (sink.text, end.completion_tokens) == (whole[1].text, whole[0].completion_tokens)


def http_500(message: str, kind: bytes = b"application/json") -> bytes:
    body = orjson.dumps({"error": {"code": 500, "message": message, "type": "server_error"}})
    return b"HTTP/1.1 500 Oops\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        kind,
        len(body),
        body,
    )


async def test_what_the_template_does_not_take_is_the_requests_fault() -> None:
    """The server says 500 of an image that it cannot read, which would be tried again in vain."""
    async with raw_server(lambda _: http_500("image input is not supported")) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        for body in (THINK, chat("plain")):
            with pytest.raises(EngineRefused, match="image input is not supported") as raised:
                await backend.count_tokens("chat", body)
            assert raised.value.status == 400
        generation = ChatGeneration(backend, THINK, 5, None)
        with pytest.raises(EngineRefused, match="image input is not supported"):
            await generation.run(0, Recorder(generation))
        await backend.aclose()


async def test_a_500_that_the_template_does_not_repeat_is_the_engines_fault() -> None:
    prompt = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"prompt": "p"}'

    def answer(head: bytes) -> bytes:
        return prompt if b"/apply-template" in head else http_500("Context size has been exceeded.")

    async with raw_server(answer) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        generation = ChatGeneration(backend, THINK, 5, None)
        with pytest.raises(EngineUnavailable, match="Context size"):
            await generation.run(0, Recorder(generation))
        await backend.aclose()
    async with raw_server(lambda _: http_500("x", b"text/html")) as url:
        backend = LlamaCppBackend(url)
        with pytest.raises(EngineUnavailable):
            await backend.count_tokens("chat", THINK)
        await backend.aclose()
