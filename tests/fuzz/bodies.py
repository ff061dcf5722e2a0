"""Requests of every API as its clients make them, and the same with anything anywhere in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

#: By path, bodies that together have every field that the service looks at.
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": "sim",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hello"}, IMAGE], "name": "n"},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "x"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "read"}},
            "parallel_tool_calls": True,
            "max_completion_tokens": 4,
            "n": 1,
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "messages": [{"role": "user", "content": "hello"}],
            "stop": ["a", "b"],
            "temperature": 0.5,
            "top_p": 0.9,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 3,
            "n_predict": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
            "chat_template_kwargs": {"enable_thinking": False},
            "swarm_note": 1,
        },
        {"messages": [{"role": "user", "content": "hello"}], "functions": [], "grammar": 'root ::= "a"'},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "stop": "c"},
    ],
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 3, "stop": "x", "stream": True, "echo": False, "suffix": None},
        {"prompt": [1, 2, 3], "n": 1, "best_of": 1, "logprobs": None, "json_schema": {}, "grammar": None},
        {"prompt": ["hello"], "model": "sim", "seed": 1, "n_predict": 2, "temperature": 0},
    ],
    "/v1/messages": [
        {
            "model": "sim",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "I read"},
                        {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": True},
                        {"type": "image", "source": {"type": "url", "url": "http://e/x.png"}},
                        {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
                        {"type": "search_result", "title": "t", "source": "s", "content": []},
                    ],
                },
            ],
            "tools": [{"name": "read", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "stop_sequences": ["a"],
            "temperature": 1,
            "top_k": 3,
            "top_p": 0.5,
            "stream": True,
            "metadata": {"user_id": "u"},
        }
    ],
    "/v1/responses": [
        {
            "model": "sim",
            "instructions": "be brief",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
                {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "x"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_image", "image_url": "data:image/png;base64,a"}],
                },
                {"role": "developer", "content": "go on"},
            ],
            "tools": [
                {"type": "function", "name": "read", "parameters": {"type": "object"}},
                {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "read"}]},
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
            "parallel_tool_calls": True,
            "max_output_tokens": 4,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
            "metadata": {},
            "stream": True,
            "store": False,
        },
        {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 1, "truncation": "a"},
    ],
    "/v1/embeddings": [
        {"input": ["hello", [1, 2]], "model": "vectors", "encoding_format": "base64", "dimensions": None},
        {"input": [1, 2, 3], "user": "u"},
    ],
    "/v1/rerank": [
        {
            "query": "q",
            "documents": ["a", {"text": "b"}],
            "model": "vectors",
            "top_n": 1,
            "return_documents": True,
        }
    ],
    "/api/chat": [
        {
            "model": "sim:latest",
            "messages": [
                {"role": "user", "content": "hello", "images": ["/9j/"]},
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "hm",
                    "tool_calls": [{"function": {"name": "read", "arguments": {"path": "a"}}}],
                },
                {"role": "tool", "tool_name": "read", "content": "x"},
            ],
            "tools": [TOOL],
            "format": {"type": "object"},
            "think": "low",
            "options": {"num_predict": 3, "temperature": 0, "stop": ["a"], "seed": 1, "top_k": 2},
            "stream": False,
            "keep_alive": "5m",
        }
    ],
}


def nested(depth: int) -> list[Any]:
    """A list in a list, and so on: so many levels."""
    inner: list[Any] = []
    for _ in range(depth - 1):
        inner = [inner]
    return inner


NUMBERS = st.integers(-(2**64), 2**64) | st.floats() | st.sampled_from([0, -1, 2**31, 2**53 + 1, 1e308])
TEXTS = st.text(max_size=12) | st.sampled_from(["", "\0", "\N{REPLACEMENT CHARACTER}", "text", "x" * 500])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
) | st.integers(200, 256).map(nested)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside, but for the value itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*here, key)
        yield from places(inner, (*here, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """What is at a place."""
    for key in place:
        value = value[key]
    return value


@st.composite
def mutated(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A sample in which up to three values are others, are missing, or are where others were."""
    body: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(SAMPLES[path])))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(body))
        if not found:
            break
        place = draw(st.sampled_from(found))
        holder, key = at(body, place[:-1]), place[-1]
        match draw(st.sampled_from(["any", "any", "missing", "moved", "added"])):
            case "any":
                holder[key] = draw(JSON)
            case "missing":
                del holder[key]
            case "moved":
                holder[key] = copy.deepcopy(at(body, draw(st.sampled_from(found))))
            case "added" if isinstance(holder, list):
                holder.insert(key, draw(JSON))
            case _:
                holder[draw(st.text(max_size=4))] = draw(JSON)
    return body
