"""What keeps an OpenAI stream open, and that it leaves no mark in what clients put together of the stream."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from orchestrator.broker import Entry
from orchestrator.gateway.dialects import KEEP_ALIVE, ChatCompletions, Completions, Head
from tests.gateway.harness import data_of

CHAT, TEXT = ChatCompletions(), Completions()
ASK = CHAT.ask(
    b'{"messages":[{"role":"user","content":"hello"}],"stream":true,"stream_options":{"include_usage":true}}'
)
HEAD = Head("turn-77", "tiny", 1_790_000_000, ASK)
TEXT_HEAD = Head("turn-77", "tiny", 1_790_000_000, TEXT.ask(b'{"prompt":"p","stream":true}'))
USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 7,
    "total_tokens": 57,
    "prompt_tokens_details": {"cached_tokens": 40},
}
START = {"index": 0, "id": "c", "type": "function", "function": {"name": "read", "arguments": ""}}
LOG: list[Entry] = [
    ["s", "started", {"slot": 0}],
    ["d", {"reasoning_content": "So."}, 1, []],
    ["d", {"content": "I "}, 1, []],
    ["d", {"content": "read", "_logprobs": {"content": [1]}}, 1, []],
    ["d", {"tool_calls": [START]}, 1, []],
    ["d", {"tool_calls": [{"index": 0, "function": {"arguments": '{"path"'}}]}, 1, []],
    ["d", {"tool_calls": [{"index": 0, "function": {"arguments": ': "a"}'}}]}, 1, []],
    ["e", "tool_calls", USAGE],
]


def streamed(silences: list[int], log: list[Entry] = LOG) -> bytes:
    """The stream of a log, with so many silences before each of its entries."""
    chunks = CHAT.chunks(HEAD)
    pieces = [chunks.open()]
    for entry, count in zip(log, silences, strict=True):
        pieces += [*(chunks.keep_alive() for _ in range(count)), chunks.encode([entry])]
    return b"".join(pieces)


def chunk_of(silence: bytes) -> dict[str, Any]:
    """The one chunk of what keeps a stream open."""
    assert silence.startswith(KEEP_ALIVE)
    [event] = data_of(silence + b"data: [DONE]\n\n")
    assert isinstance(event, dict)
    return event


def accumulated(stream: bytes) -> Any:
    """What the `openai` package makes of it."""
    state: Any = ChatCompletionStreamState()
    for event in data_of(stream):
        state.handle_chunk(ChatCompletionChunk.construct(**event))
    return state.get_final_completion().to_dict()


def test_a_silent_chat_gets_its_role_and_then_chunks_that_add_nothing() -> None:
    chunks = CHAT.chunks(HEAD)
    first, *later = [chunk_of(chunks.keep_alive()) for _ in range(3)]
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    for one in later:
        assert one == {**first, "choices": [{"index": 0, "delta": {}, "finish_reason": None}]}
    [said] = data_of(chunks.encode([["d", {"content": "Hi"}, 1, []]]) + b"data: [DONE]\n\n")
    assert said["choices"][0]["delta"] == {"content": "Hi"}


def test_a_silent_completion_gets_empty_texts() -> None:
    chunks = TEXT.chunks(TEXT_HEAD)
    [said] = data_of(chunks.encode([["d", {"text": "Hi"}, 1, []]]) + b"data: [DONE]\n\n")
    assert said["choices"][0]["text"] == "Hi"
    said["choices"][0]["text"] = ""
    assert chunk_of(chunks.keep_alive()) == said


@given(silences=st.lists(st.integers(0, 2), min_size=len(LOG), max_size=len(LOG)))
def test_a_chat_is_the_same_wherever_it_was_silent(silences: list[int]) -> None:
    quiet, plain = data_of(streamed(silences)), data_of(streamed([0] * len(LOG)))
    parts = [event for event in quiet if not event["choices"] or event["choices"][0]["delta"] != {}]
    ends = [event for event in quiet if event["choices"] and event["choices"][0]["finish_reason"]]
    assert [*parts[:-1], *ends, parts[-1]] == plain
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("at", range(len(LOG)))
def test_the_openai_package_puts_the_same_reply_together(at: int) -> None:
    log = [entry for entry in LOG if "_logprobs" not in orjson.dumps(entry).decode()]
    silences = [3 if place == at else 0 for place in range(len(log))]
    assert accumulated(streamed(silences, log)) == accumulated(streamed([0] * len(log), log))
