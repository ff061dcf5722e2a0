"""Anthropic's requests as the chats that the engine gets, and whatever else somebody may send."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.gateway.dialects.anthropic_content import ROLES
from orchestrator.gateway.dialects.anthropic_request import chat_body, count_ask, messages_ask
from orchestrator.gateway.errors import ApiError

HELLO = {"role": "user", "content": "hello"}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}
READ_FUNCTION = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {}},
        "description": "Reads.",
    },
}
CALL = {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "é.py", "lines": [1, 2]}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "read", "arguments": '{"path": "é.py", "lines": [1, 2]}'},
        }
    ],
}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
LINKED = {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}
LINKED_PART = {"type": "image_url", "image_url": {"url": "https://host/a.png"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"type": "tool_result", "tool_use_id": "c1", **given, **more}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def translated(*messages: Any, **fields: Any) -> dict[str, Any]:
    return chat_body({"messages": list(messages), **fields})


MESSAGES: dict[str, tuple[list[Any], list[Any]]] = {
    "a text": ([HELLO], [HELLO]),
    "blocks of text": ([user(text("a"), text("b"))], [{"role": "user", "content": "a\nb"}]),
    "cache control": (
        [user(text("a", cache_control={"type": "ephemeral", "ttl": "1h"}))],
        [{"role": "user", "content": "a"}],
    ),
    "images": (
        [user(text("see"), PNG, LINKED)],
        [{"role": "user", "content": [text("see"), PNG_PART, LINKED_PART]}],
    ),
    "an uploaded image": (
        [user({"type": "image", "source": {"type": "file", "file_id": "f"}})],
        [{"role": "user", "content": "[image of type 'file', which cannot be read here]"}],
    ),
    "a document": (
        [user({"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}})],
        [{"role": "user", "content": "T\nC\nD"}],
    ),
    "a document of blocks": (
        [user({"type": "document", "source": {"type": "content", "content": [text("a"), PNG]}})],
        [{"role": "user", "content": [text("a"), PNG_PART]}],
    ),
    "a PDF": (
        [
            user(
                {
                    "type": "document",
                    "title": "T",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": "x"},
                }
            )
        ],
        [{"role": "user", "content": "T\n[document of type 'application/pdf', which cannot be read here]"}],
    ),
    "a search result": (
        [user({"type": "search_result", "title": "T", "source": "S", "content": [text("a"), text("b")]})],
        [{"role": "user", "content": "T (S)\na\nb"}],
    ),
    "a kind that is not known": (
        [user({"type": "tool_reference", "tool_name": "x", "cache_control": None})],
        [{"role": "user", "content": '{"type":"tool_reference","tool_name":"x"}'}],
    ),
    "a call and its result": (
        [HELLO, said(CALL), user(result("42"))],
        [HELLO, CALLED, tool("42")],
    ),
    "text and thinking around a call": (
        [
            HELLO,
            said(
                {"type": "thinking", "thinking": "I ", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                text("Look"),
                {"type": "thinking", "thinking": "see", "signature": "s"},
                text("ing."),
                CALL,
            ),
            user(result([text("a"), text("b")]), text("go on")),
        ],
        [
            HELLO,
            {**CALLED, "content": "Looking.", "reasoning_content": "I see"},
            tool("a\nb"),
            {"role": "user", "content": "go on"},
        ],
    ),
    "results come before what is said with them": (
        [HELLO, said(CALL), user(text("here"), result("42"))],
        [HELLO, CALLED, tool("42"), {"role": "user", "content": "here"}],
    ),
    "a result with an image": (
        [HELLO, said(CALL), user(result([text("a"), PNG]))],
        [HELLO, CALLED, tool([text("a"), PNG_PART])],
    ),
    "a failed call": (
        [HELLO, said(CALL), user(result("no such file", is_error=True))],
        [HELLO, CALLED, tool("Error:\nno such file")],
    ),
    "an empty result": ([HELLO, said(CALL), user(result())], [HELLO, CALLED, tool("")]),
    "one role in a row": (
        [HELLO, user(text("you")), {"role": "assistant", "content": "a"}, said(text("b")), HELLO],
        [{"role": "user", "content": "hello\nyou"}, {"role": "assistant", "content": "ab"}, HELLO],
    ),
    "a system message first": (
        [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": [text("Now.")]}, HELLO],
        [{"role": "system", "content": "Be brief.\nNow."}, HELLO],
    ),
    "a system message later": (
        [HELLO, {"role": "system", "content": "Agents: none."}, said(text("Hi.")), HELLO],
        [
            {"role": "user", "content": "hello\n<system>\nAgents: none.\n</system>"},
            {"role": "assistant", "content": "Hi."},
            HELLO,
        ],
    ),
    "an empty beginning": ([HELLO, said()], [HELLO]),
    "no words": ([user()], [{"role": "user", "content": ""}]),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    given, wanted = MESSAGES[name]
    assert translated(*given) == {"messages": wanted}


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ("Be brief.", [{"role": "system", "content": "Be brief."}]),
        ([text("a", cache_control={}), text("b")], [{"role": "system", "content": "a\nb"}]),
        ("", []),
        ([], []),
        (None, []),
    ],
)
def test_the_system_prompt(system: Any, wanted: list[Any]) -> None:
    assert translated(HELLO, system=system)["messages"] == [*wanted, HELLO]


def test_a_history_only_grows() -> None:
    """Else the KV of the turns before would be of no use."""
    history = [
        HELLO,
        {"role": "system", "content": "Agents: none."},
        said({"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("Hi."), CALL),
        user(result("42")),
        said(text("It is 42.")),
        HELLO,
        {"role": "system", "content": "Agents: one."},
    ]
    whole = translated(*history, system="Be brief.")["messages"]
    for length in (2, 4):
        so_far = translated(*history[:length], system="Be brief.")["messages"]
        assert whole[: len(so_far)] == so_far


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "what is passed on": (
        {"model": "m", "max_tokens": 5, "stream": True, "temperature": 0, "top_p": 0.9, "top_k": 40},
        {"model": "m", "max_tokens": 5, "stream": True, "temperature": 0, "top_p": 0.9, "top_k": 40},
    ),
    "null is nothing": (
        dict.fromkeys(
            ("model", "stream", "temperature", "stop_sequences", "tools", "tool_choice", "thinking")
        ),
        {},
    ),
    "what a local engine does not need": (
        {
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "container": "c",
            "mcp_servers": [],
            "cache_control": {"type": "ephemeral"},
            "swarm_x": 1,
            "n": 7,
            "from_next_year": [1],
        },
        {},
    ),
    "stop": ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    "tools": ({"tools": [READ]}, {"tools": [READ_FUNCTION]}),
    "a tool with a type": ({"tools": [{**READ, "type": "custom"}]}, {"tools": [READ_FUNCTION]}),
    "a tool of Anthropic's": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, READ]},
        {"tools": [READ_FUNCTION]},
    ),
    "tools of Anthropic's only": (
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        {},
    ),
    "no tools": ({"tools": [], "tool_choice": {"type": "any"}}, {}),
    "auto": ({"tools": [READ], "tool_choice": {"type": "auto"}}, {"tools": [READ_FUNCTION]}),
    "any": (
        {"tools": [READ], "tool_choice": {"type": "any"}},
        {"tools": [READ_FUNCTION], "tool_choice": "required"},
    ),
    "none": (
        {"tools": [READ], "tool_choice": {"type": "none"}},
        {"tools": [READ_FUNCTION], "tool_choice": "none"},
    ),
    "one tool": (
        {"tools": [READ], "tool_choice": {"type": "tool", "name": "read"}},
        {
            "tools": [READ_FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "read"}},
        },
    ),
    "one tool that is not offered": (
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}, READ],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        {"tools": [READ_FUNCTION]},
    ),
    "one call at a time": (
        {"tools": [READ], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [READ_FUNCTION], "parallel_tool_calls": False},
    ),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking_budget_tokens": 1024},
    ),
    "no thinking": (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
        {"reasoning_effort": "none"},
    ),
    "thinking as the model likes": ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
    "effort": ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    "a schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
            }
        },
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    given, wanted = FIELDS[name]
    assert translated(HELLO, **given) == {"messages": [HELLO], **wanted}


def test_a_begun_reply_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    chat = translated(HELLO, begun)
    assert chat["messages"] == [HELLO, begun]
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == ("content", False)
    thought = translated(HELLO, said({"type": "thinking", "thinking": "Hm", "signature": ""}))
    assert thought["continue_final_message"] == "reasoning_content"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ({"messages": [said()]}, "messages"),
    ({"messages": [HELLO, said(CALL)]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [HELLO, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"messages": [user({"text": "x"})]}, "messages[0].content[0].type"),
    ({"messages": [user(text("x"), {"type": "text"})]}, "messages[0].content[1].text"),
    ({"messages": [user({"type": "image"})]}, "messages[0].content[0].source"),
    (
        {"messages": [user({"type": "image", "source": {"type": "url"}})]},
        "messages[0].content[0].source.url",
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "content", "content": 1}})]},
        "messages[0].content[0].source.content",
    ),
    ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user(result(7))]}, "messages[0].content[0].content"),
    ({"messages": [said({**CALL, "id": None})]}, "messages[0].content[0].id"),
    ({"messages": [said({**CALL, "input": "x"})]}, "messages[0].content[0].input"),
    ({"messages": [said({"type": "thinking"})]}, "messages[0].content[0].thinking"),
    ({"messages": [HELLO], "system": 5}, "system"),
    ({"messages": [HELLO], "system": [{}]}, "system[0].type"),
    ({"messages": [HELLO], "max_tokens": 0}, "max_tokens"),
    ({"messages": [HELLO], "max_tokens": None}, "max_tokens"),
    ({"messages": [HELLO], "max_tokens": "5"}, "max_tokens"),
    ({"messages": [HELLO], "model": 5}, "model"),
    ({"messages": [HELLO], "stream": 1}, "stream"),
    ({"messages": [HELLO], "temperature": True}, "temperature"),
    ({"messages": [HELLO], "top_k": "x"}, "top_k"),
    ({"messages": [HELLO], "stop_sequences": "x"}, "stop_sequences"),
    ({"messages": [HELLO], "stop_sequences": [1]}, "stop_sequences"),
    ({"messages": [HELLO], "stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"messages": [HELLO], "tools": {}}, "tools"),
    ({"messages": [HELLO], "tools": ["read"]}, "tools"),
    ({"messages": [HELLO], "tools": [READ, {"input_schema": {}}]}, "tools[1].name"),
    ({"messages": [HELLO], "tools": [{"name": "read", "input_schema": 1}]}, "tools[0].input_schema"),
    ({"messages": [HELLO], "tools": [READ], "tool_choice": "auto"}, "tool_choice"),
    ({"messages": [HELLO], "tools": [READ], "tool_choice": {"type": []}}, "tool_choice.type"),
    ({"messages": [HELLO], "tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"messages": [HELLO], "thinking": "on"}, "thinking"),
    ({"messages": [HELLO], "thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"messages": [HELLO], "output_config": {"effort": 5}}, "output_config.effort"),
    ({"messages": [HELLO], "output_config": {"format": 5}}, "output_config.format"),
    (
        {"messages": [HELLO], "output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_requests(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        messages_ask(orjson.dumps({"max_tokens": 5, **body}))
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, "invalid_value")
    assert raised.value.message.startswith(param + " ")
    assert len(raised.value.message) < 300


def test_counting_needs_no_limit() -> None:
    body = orjson.dumps({"messages": [HELLO]})
    assert count_ask(body).max_tokens is None
    with pytest.raises(ApiError, match="max_tokens is required"):
        messages_ask(body)


def nested(depth: int) -> dict[str, Any]:
    return {} if depth == 0 else {"a": nested(depth - 1)}


def test_a_schema_that_can_be_read_but_not_written_again() -> None:
    # Four levels down in the request, five in the chat.
    for depth, good in ((248, True), (250, False)):
        tools = [{"name": "read", "input_schema": nested(depth)}]
        raw = json.dumps({"messages": [HELLO], "max_tokens": 5, "tools": tools}).encode()
        if good:
            assert messages_ask(raw).body["tools"]
        else:
            with pytest.raises(ApiError, match="nested deeper than 254 levels"):
                messages_ask(raw)


def test_blocks_in_blocks_to_any_depth() -> None:
    block: dict[str, Any] = text("x")
    for _ in range(80):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    raw = json.dumps({"messages": [user(block)], "max_tokens": 5}).encode()
    assert messages_ask(raw).body["messages"] == [{"role": "user", "content": "x"}]


NAMES = [
    *("type", "text", "content", "source", "data", "thinking", "input", "id", "name", "tool_use_id"),
    *("media_type", "url", "title", "is_error", "cache_control", "budget_tokens", "effort", "format"),
    *("schema", "input_schema", "description", "disable_parallel_tool_use", "role"),
]
TYPES = [
    *(
        "text",
        "image",
        "document",
        "search_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
    ),
    *("base64", "url", "file", "content", "enabled", "disabled", "adaptive", "auto", "any", "tool", "none"),
    *("custom", "json_schema", "user", "assistant", "system", "developer", "server_tool_use"),
]
FIELD_NAMES = [
    *("messages", "system", "model", "max_tokens", "stream", "temperature", "top_p", "top_k"),
    *("stop_sequences", "tools", "tool_choice", "thinking", "output_config", "metadata", "n"),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(TYPES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=8,
)
BLOCKS = st.lists(
    st.builds(
        lambda kind, words, odd: {
            **dict.fromkeys(("text", "thinking", "id", "name", "tool_use_id"), words),
            "source": {"type": "text", "data": words},
            "type": kind,
            **odd,
        },
        st.sampled_from(TYPES),
        st.text(max_size=4),
        st.dictionaries(st.sampled_from(NAMES), JSON, max_size=1),
    ),
    max_size=3,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(ROLES),
        "content": BLOCKS | st.text() | JSON,
    }
)
TOOL = st.fixed_dictionaries({"name": st.text(max_size=4), "input_schema": JSON})
BODIES = st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(max_size=3), JSON, max_size=6) | st.builds(
    lambda messages, tools, more: {"max_tokens": 5, "tools": tools, **more, "messages": messages},
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.lists(TOOL, max_size=2),
    st.dictionaries(st.sampled_from(FIELD_NAMES), JSON, max_size=3),
)


@settings(deadline=None, max_examples=200)
@given(BODIES)
def test_any_json_is_a_chat_or_a_bad_request(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    for read in (messages_ask, count_ask):
        try:
            ask = read(raw)
        except ApiError as error:
            assert error.status == 400
            assert "\n" not in error.message
            continue
        assert orjson.loads(ask.raw) == ask.body
        roles = [message["role"] for message in ask.body["messages"]]
        assert "system" not in roles[1:]
        assert all(left != right or left == "tool" for left, right in pairwise(roles))
        assert all(isinstance(message["content"], str | list) for message in ask.body["messages"])
