"""Responses requests as the chats that the engine gets, and whatever else somebody may send."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.gateway.dialects import Head, Responses
from orchestrator.gateway.dialects.responses_request import chat_body, responses_ask
from orchestrator.gateway.errors import ApiError

HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path":"a"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "text of a"}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": {"type": "object"}}
READ_FUNCTION = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
MCP = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [READ, {"type": "custom", "name": "write"}],
}


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """The chat's messages for an input of these items."""
    return list(chat_body({"input": list(items), **fields})["messages"])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


def tool_call(arguments: str = '{"path":"a"}', name: str = "read", id_: str = "c1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, id_: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def test_a_request_becomes_a_chat() -> None:
    request = {
        "model": "small",
        "instructions": "Be short.",
        "input": "hello",
        "stream": True,
        "max_output_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {
            "format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
        },
        "tools": [READ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    accepted = {
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "safety_identifier": "s",
        "user": "u",
        "client_metadata": {"a": "b"},
        "metadata": {"a": "b"},
        "truncation": "auto",
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "something_new": [1],
    }
    ask = responses_ask(orjson.dumps({**request, **accepted}))
    assert ask.body == {
        "model": "small",
        "messages": [{"role": "system", "content": "Be short."}, HELLO],
        "stream": True,
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
        },
        "tools": [READ_FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    assert orjson.loads(ask.raw) == ask.body
    assert ask.request == {**request, **accepted}
    assert (ask.model, ask.max_tokens, ask.stream) == ("small", 50, True)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([HELLO], [user("hello")]),
        ([said("user", "a", "b")], [user("a\nb")]),
        ([said("user", "a"), HELLO], [user("a\nhello")]),
        (
            [said("developer", "rules"), said("system", "more"), HELLO],
            [{"role": "system", "content": "rules\n\nmore"}, user("hello")],
        ),
        (
            [HELLO, said("assistant", "hi"), said("developer", "be kind"), HELLO],
            [
                user("hello"),
                {"role": "assistant", "content": "hi"},
                user("<developer>\nbe kind\n</developer>\nhello"),
            ],
        ),
        ([said("developer", "only rules")], [user("only rules")]),
        (
            [HELLO, CALL, OUTPUT],
            [
                user("hello"),
                {"role": "assistant", "content": "", "tool_calls": [tool_call()]},
                result("text of a"),
            ],
        ),
        (
            [
                HELLO,
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "think"}]},
                said("assistant", "I read."),
                CALL,
                {**CALL, "call_id": "c2"},
                OUTPUT,
                {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
                said("assistant", "Done."),
                HELLO,
            ],
            [
                user("hello"),
                {
                    "role": "assistant",
                    "content": "I read.",
                    "reasoning_content": "think",
                    "tool_calls": [tool_call(), tool_call(id_="c2")],
                },
                result("text of a"),
                result("b", "c2"),
                {"role": "assistant", "content": "Done."},
                user("hello"),
            ],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}]}, HELLO],
            [{"role": "assistant", "content": "", "reasoning_content": "sum"}, user("hello")],
        ),
        (
            [
                said("assistant", "no"),
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "!"}]},
                HELLO,
            ],
            [{"role": "assistant", "content": "no!"}, user("hello")],
        ),
        (
            [
                {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "mcp__files",
                 "arguments": "{}"},
                OUTPUT,
            ],
            [
                {"role": "assistant", "content": "", "tool_calls": [tool_call("{}", "mcp__files__read")]},
                result("text of a"),
            ],
        ),
        (
            [
                {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '"x"\n'},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
            ],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [tool_call('{"input":"\\"x\\"\\n"}', "apply_patch")],
                },
                result("ok"),
            ],
        ),
        (
            [
                {"type": "local_shell_call", "id": "i", "call_id": "c1", "status": "completed",
                 "action": {"type": "exec", "command": ["ls"], "env": {}}},
                {"type": "local_shell_call_output", "id": "c1", "output": "{}"},
            ],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [tool_call('{"type":"exec","command":["ls"],"env":{}}', "local_shell")],
                },
                result("{}"),
            ],
        ),
        (
            [
                {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"q": "x"}},
                {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": []},
            ],
            [
                {"role": "assistant", "content": "", "tool_calls": [tool_call('{"q":"x"}', "tool_search")]},
                result('{"tools":[]}'),
            ],
        ),
        # Arguments that a model got wrong are JSON all the same: a template reads them.
        (
            [{**CALL, "arguments": '{"path": '}, OUTPUT],
            [
                {"role": "assistant", "content": "", "tool_calls": [tool_call('{"input":"{\\"path\\": "}')]},
                result("text of a"),
            ],
        ),
        # Nothing in them for a model.
        (
            [
                HELLO,
                {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}},
                {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
                {"type": "compaction", "encrypted_content": "gAAA"},
                {"type": "something_new", "text": "?"},
                said("assistant"),
            ],
            [user("hello")],
        ),
    ],
)  # fmt: skip
def test_items_become_messages(items: list[Any], expected: list[Any]) -> None:
    assert messages(*items) == expected


def test_images_are_shown_by_the_user_after_the_last_output() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert messages({"role": "user", "content": [{"type": "input_text", "text": "look"}, image]}) == [
        user([{"type": "text", "text": "look"}, shown])
    ]
    seen = messages(
        CALL,
        {**CALL, "call_id": "c2"},
        {**OUTPUT, "output": [{"type": "input_text", "text": "an image"}, image]},
        {**OUTPUT, "call_id": "c2"},
        HELLO,
    )
    assert seen[1:] == [
        result("an image"),
        result("text of a", "c2"),
        user([shown, {"type": "text", "text": "hello"}]),
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "[image file-1: it cannot be read here]"),
        (
            {"type": "input_file", "filename": "a.pdf", "file_data": "AA"},
            "[file a.pdf: it cannot be read here]",
        ),
        ({"type": "input_file", "file_url": "https://x"}, "[file: it cannot be read here]"),
        ({"type": "something_new", "n": 1}, '{"type":"something_new","n":1}'),
        ({"text": "of no type"}, "of no type"),
    ],
)
def test_what_cannot_be_read_is_named(part: Any, expected: str) -> None:
    assert messages({"role": "user", "content": [part]}) == [user(expected)]


def test_a_reply_that_the_input_begins_is_gone_on_with() -> None:
    begun = chat_body({"input": [HELLO, said("assistant", "Once")]})
    assert begun["continue_final_message"] == "content"
    assert begun["add_generation_prompt"] is False
    assert "continue_final_message" not in chat_body({"input": [HELLO, said("assistant")]})


def test_tools_become_functions() -> None:
    tools = [READ, PATCH, MCP, {"type": "web_search"}, {"type": "local_shell"}, {"type": "something_new"}]
    chat = chat_body({"input": "hello", "tools": tools})
    functions = {tool["function"]["name"]: tool["function"] for tool in chat["tools"]}
    assert list(functions) == ["read", "apply_patch", "mcp__files__read", "mcp__files__write"]
    assert functions["read"] == READ_FUNCTION["function"]
    assert functions["mcp__files__read"] == {**functions["read"], "name": "mcp__files__read"}
    patch = functions["apply_patch"]
    assert patch["parameters"]["required"] == ["input"]
    assert patch["description"].endswith('(lark):\nstart: "x"')
    assert "tool_choice" not in chat
    assert "tools" not in chat_body({"input": "hello", "tools": [{"type": "web_search"}]})


def test_tools_come_with_items_too_and_each_once() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [READ, PATCH]},
        HELLO,
        {"type": "tool_search_output", "call_id": "c1", "tools": [{**MCP, "name": "functions"}]},
    ]
    chat = chat_body({"input": items, "tools": [READ]})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["read", "apply_patch", "write"]


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        (None, ["read", "apply_patch", "mcp__files__read", "mcp__files__write"], None),
        ("none", ["read", "apply_patch", "mcp__files__read", "mcp__files__write"], "none"),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"], "required"),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, ["mcp__files__read"], "required"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "write"}]},
            ["mcp__files__write"],
            None,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]},
            ["read", "mcp__files__read"],
            "required",
        ),
    ],
)
def test_choices(choice: Any, names: list[str], mode: str | None) -> None:
    chat = chat_body({"input": "hello", "tools": [READ, PATCH, MCP], "tool_choice": choice})
    assert [tool["function"]["name"] for tool in chat["tools"]] == names
    assert chat.get("tool_choice") == mode


def test_logprobs_are_asked_for_in_either_way() -> None:
    included = chat_body({"input": "hello", "include": ["message.output_text.logprobs"]})
    assert (included["logprobs"], included["top_logprobs"]) == (True, 0)
    top = chat_body({"input": "hello", "top_logprobs": 3})
    assert (top["logprobs"], top["top_logprobs"]) == (True, 3)
    assert "logprobs" not in chat_body({"input": "hello", "top_logprobs": 0})


STORED = "nothing is stored here: send the whole conversation as input"
BAD: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({}, "invalid_value", "input", "must be a string or a list"),
    ({"input": None}, "invalid_value", "input", "must be a string or a list"),
    ({"input": []}, "invalid_value", "input", "nothing in it"),
    ({"input": ["hello"]}, "invalid_value", "input", "must be a string or a list"),
    ({"input": [{"type": "compaction"}]}, "invalid_value", "input", "nothing in it"),
    ({"input": [{"type": 5}]}, "invalid_value", "input[0].type", "must be a string"),
    ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role", "must be one of"),
    ({"input": [{"role": "user"}]}, "invalid_value", "input[0].content", "must be a string or a list"),
    ({"input": [{"role": "user", "content": [{}]}]}, "invalid_value", "input[0].content[0].type", "string"),
    ({"input": [{"id": "msg_1"}]}, "unsupported_value", "input[0]", "send the item itself"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_value", "input[0]", "send the item"),
    ({"input": [HELLO, CALL]}, "invalid_value", "input", "must not end with a call"),
    ({"input": [{**CALL, "call_id": None}]}, "invalid_value", "input[0].call_id", "must be a string"),
    ({"input": [{**CALL, "name": 5}]}, "invalid_value", "input[0].name", "must be a string"),
    ({"input": [{**OUTPUT, "output": 5}]}, "invalid_value", "input[0].output", "must be a string or a list"),
    ({"instructions": 5}, "invalid_value", "instructions", "must be a string"),
    ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id", STORED),
    ({"conversation": {"id": "c"}}, "unsupported_parameter", "conversation", STORED),
    ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt", "send instructions and input"),
    ({"background": True}, "unsupported_parameter", "background", "stream it"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens", "at least 1"),
    ({"max_output_tokens": True}, "invalid_value", "max_output_tokens", "at least 1"),
    ({"temperature": "hot"}, "invalid_value", "temperature", "must be a number"),
    ({"stream": 1}, "invalid_value", "stream", "must be true or false"),
    ({"model": 1}, "invalid_value", "model", "must be a string"),
    ({"stop": 5}, "invalid_value", "stop", "must be a string"),
    ({"tools": {}}, "invalid_value", "tools", "must be a list"),
    ({"tools": ["x"]}, "invalid_value", "tools", "must be a list"),
    ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].name", "must be a string"),
    ({"tools": [{**READ, "parameters": 5}]}, "invalid_value", "tools[0].parameters", "must be an object"),
    ({"tools": [{**MCP, "tools": 5}]}, "invalid_value", "tools[0].tools", "must be a list"),
    ({"tool_choice": "any"}, "invalid_value", "tool_choice", "must be none, auto, required"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice", "there is no function"),
    (
        {"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]},
        "invalid_value",
        "tool_choice",
        "names no function or custom tool of this request: 'web_search'",
    ),
    ({"tool_choice": {"type": "allowed_tools"}}, "invalid_value", "tool_choice", "needs tools"),
    ({"tools": [READ], "parallel_tool_calls": 1}, "invalid_value", "parallel_tool_calls", "true or false"),
    ({"text": "json"}, "invalid_value", "text", "must be an object"),
    ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type", "must be one of"),
    ({"text": {"format": {"type": "json_schema"}}}, "invalid_value", "text.format.schema", "an object"),
    ({"reasoning": {"effort": 5}}, "invalid_value", "reasoning.effort", "must be a string"),
    ({"top_logprobs": 21}, "invalid_value", "top_logprobs", "from 0 to 20"),
    ({"top_logprobs": 1, "tools": [READ]}, "invalid_value", "top_logprobs", "together with tools"),
]


@pytest.mark.parametrize(("fields", "code", "param", "message"), BAD)
def test_a_bad_request_is_refused(fields: dict[str, Any], code: str, param: str, message: str) -> None:
    body = fields if "input" in fields or not fields else {"input": "hello", **fields}
    with pytest.raises(ApiError) as raised:
        responses_ask(orjson.dumps(body))
    error = raised.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert message in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("depth", [120, 245, 250, 251, 252, 253])
@pytest.mark.parametrize(
    "field", [b'"tools":[{"type":"function","name":"f","parameters":%b}]', b'"metadata":%b']
)
def test_what_is_too_deep_to_be_repeated_is_refused(depth: int, field: bytes) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    raw = b'{"input":"hello",%b}' % (field % deep)
    dialect = Responses()
    try:
        ask = dialect.ask(raw)
    except ApiError as error:
        assert depth > 120
        assert (error.status, error.code) == (400, "invalid_json")
        return
    assert dialect.chunks(Head("turn-1", "m", 1, ask)).open()


KEYS = st.sampled_from(
    (
        *(
            "type",
            "role",
            "content",
            "text",
            "input",
            "output",
            "tools",
            "name",
            "call_id",
            "arguments",
            "id",
        ),
        *("namespace", "tool_choice", "parameters", "format", "schema", "reasoning", "summary", "action"),
        *("instructions", "model", "stream", "max_output_tokens", "temperature", "top_logprobs", "include"),
        *("image_url", "input_image", "mode", "status", "stop", "parallel_tool_calls", "definition"),
    )
)
WORDS = st.sampled_from(
    (
        *("message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "refusal"),
        *("user", "assistant", "developer", "system", "input_text", "input_image", "input_file", "auto"),
        *("function", "custom", "namespace", "allowed_tools", "required", "json_schema", "additional_tools"),
        *("local_shell_call", "web_search_call", "tool_search_output", "item_reference", "{}", "", "x"),
    )
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), WORDS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, st.text(max_size=3)), inner, max_size=5)
    ),
    max_leaves=25,
)


BODIES = st.builds(
    lambda body, given: {"input": given, **body}, st.dictionaries(KEYS, JSON, max_size=8), JSON
)


@settings(max_examples=500, deadline=None)
@given(st.one_of(JSON, BODIES))
def test_any_json_is_a_chat_or_a_400(body: Any) -> None:
    try:
        ask = Responses().ask(orjson.dumps(body))
    except ApiError as error:
        assert error.status == 400
        assert error.message
        return
    assert ask.body["messages"]
    for message in ask.body["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str | list)
    assert all(one["role"] != "system" for one in ask.body["messages"][1:])
