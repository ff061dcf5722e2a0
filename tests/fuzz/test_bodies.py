"""Any JSON in any field: a request is read or refused, and what was read breaks nothing further on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.llamacpp import LlamaCppBackend
from backends.protocol import BULK_APIS, EngineInfo, KvLayout, bulk_costs
from orchestrator.broker import Entry
from orchestrator.dispatcher.prefix import prompt_prefix
from orchestrator.gateway.dialects import (
    ChatCompletions,
    Completions,
    Dialect,
    Embeddings,
    Head,
    Messages,
    OllamaChat,
    Rerank,
    Responses,
)
from orchestrator.gateway.dialects.anthropic_request import count_ask
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.sizer import is_text, prompt_bound
from orchestrator.gateway.validate import WRITABLE_DEPTH
from orchestrator.prompts import StableLines, find_lines, read_prompt
from tests.fuzz.bodies import SAMPLES, mutated, nested

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
    "/v1/embeddings": Embeddings(),
    "/v1/rerank": Rerank(),
    "/api/chat": OllamaChat(),
}
PLAIN = EngineInfo(
    model="m",
    engine_slots=2,
    slot_context=512,
    kv_layout=KvLayout.SPLIT,
    kv_budget_tokens=1024,
    kv=None,
    batch_tokens=None,
    native_park=False,
    swap=False,
    reasoning_template=False,
)
# Never connected; to make one takes longer than all the rest.
adapter = cache(lambda: LlamaCppBackend("http://127.0.0.1:1"))
RULES = StableLines.of(("Current time:*",), ("Session*",))


def pass_on(dialect: Dialect, raw: bytes) -> None:
    """Read a request as the gateway does, and look at it as everybody behind it does."""
    try:
        ask = dialect.ask(raw)
    except ApiError as error:
        assert error.status == 400
        assert "\n" not in error.message
        assert len(error.message) < 500
        return
    body = orjson.loads(ask.raw)
    assert body == orjson.loads(orjson.dumps(ask.body))
    assert ask.max_tokens is None or ask.max_tokens >= 1
    prompt_prefix(dialect.api, body)
    if dialect.api in BULK_APIS:
        assert all(cost > 0 for cost in bulk_costs(dialect.api, body))
    else:
        assert prompt_bound(ask.body, len(ask.raw)) > 0
        dialect.chunks(Head("turn-1", "m", 1, ask)).open()
    if dialect.api == "chat":
        is_text(ask.body)
        find_lines(ask.body["messages"], RULES)
        read_prompt(ask.body)
    for info in (None, PLAIN):  # by the engine's own chat parser, and on token ids where that will do
        adapter()._info = info
        adapter().generation(dialect.api, body, 5)


@pytest.mark.parametrize("path", DIALECTS)
def test_the_samples_are_accepted(path: str) -> None:
    for sample in SAMPLES[path]:
        ask = DIALECTS[path].ask(orjson.dumps(sample))
        assert ask.model == sample.get("model")


@pytest.mark.parametrize("path", DIALECTS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_anything_anywhere_in_a_body(path: str, data: st.DataObject) -> None:
    # As json writes it: what is no JSON, such as NaN, too.
    raw = json.dumps(data.draw(mutated(path))).encode()
    pass_on(DIALECTS[path], raw)
    if path == "/v1/messages":
        try:
            orjson.loads(count_ask(raw).raw)
        except ApiError as error:
            assert error.status == 400


# Where a body is deeper once it is translated, and what is deep in it.
DEEPER: list[tuple[str, Callable[[Any], dict[str, Any]]]] = [
    ("/api/chat", lambda deep: {"format": {"a": deep}}),
    ("/api/chat", lambda deep: {"tools": [deep]}),
    (
        "/v1/messages",
        lambda deep: {"output_config": {"format": {"type": "json_schema", "schema": {"a": deep}}}},
    ),
    ("/v1/messages", lambda deep: {"tools": [{"name": "read", "input_schema": {"a": deep}}]}),
    ("/v1/responses", lambda deep: {"text": {"format": {"type": "json_schema", "schema": {"a": deep}}}}),
    (
        "/v1/responses",
        lambda deep: {"tools": [{"type": "function", "name": "read", "parameters": {"a": deep}}]},
    ),
    ("/v1/chat/completions", lambda deep: {"x": deep}),
]


@pytest.mark.parametrize(("path", "fields"), DEEPER)
def test_a_body_that_is_as_deep_as_can_be_read(path: str, fields: Callable[[Any], dict[str, Any]]) -> None:
    said = [{"role": "user", "content": "hello"}]
    for depth in range(244, WRITABLE_DEPTH + 2):
        raw = json.dumps({"messages": said, "input": said, "max_tokens": 1} | fields(nested(depth))).encode()
        pass_on(DIALECTS[path], raw)


@pytest.mark.parametrize("function", ["f", ["name"], 5, True], ids=repr)
def test_a_tool_whose_function_is_none(function: Any) -> None:
    read = {"type": "function", "function": {"name": "read"}}
    body = {"messages": [{"role": "user", "content": "hello"}], "tool_choice": read}
    raw = orjson.dumps({**body, "tools": [read, {"type": "function", "function": function}]})
    with pytest.raises(ApiError, match="tools must have a function that is an object"):
        ChatCompletions().ask(raw)
    pass_on(DIALECTS["/v1/chat/completions"], orjson.dumps({**body, "tools": [read, {"type": "x"}]}))


# What an adapter forwards: texts, whole and broken calls, log probabilities.
TEXT = st.text(max_size=5)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "index": st.integers(0, 3),
            "function": st.fixed_dictionaries({}, optional={"name": TEXT, "arguments": TEXT}),
        },
        optional={"id": TEXT, "type": st.just("function")},
    ),
    max_size=3,
)
LOGPROBS = st.fixed_dictionaries(
    {"content": st.lists(st.fixed_dictionaries({"token": TEXT, "logprob": st.floats(-99, 0)}), max_size=2)}
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "content": TEXT,
        "reasoning_content": TEXT,
        "text": TEXT,
        "tool_calls": CALLS,
        "_logprobs": LOGPROBS,
    },
)
USAGE = st.builds(
    lambda prompt, said, cached: {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    },
    *[st.integers(0, 1 << 40)] * 3,
)
ENDS = st.builds(lambda reason, usage: ["e", reason, usage], TEXT, USAGE) | st.builds(
    lambda status, message: ["x", status, {"message": message, "type": None, "param": None, "code": "c"}],
    st.integers(0, 999),
    TEXT,
)
LOGS = st.tuples(
    st.lists(
        st.builds(lambda part, n: ["d", part, n, []], PARTS, st.integers(0, 5))
        | st.builds(lambda word: ["s", word, {}], st.sampled_from(["started", "paused", "resumed"])),
        max_size=8,
    ),
    ENDS,
).map(lambda log: [*log[0], log[1]])


@pytest.mark.parametrize("path", [path for path in DIALECTS if DIALECTS[path].api not in BULK_APIS])
@settings(deadline=None)
@given(log=LOGS)
def test_whatever_is_in_a_log_can_be_told(path: str, log: list[Entry]) -> None:
    dialect = DIALECTS[path]
    for sample in SAMPLES[path]:
        head = Head("turn-1", "m", 1, dialect.ask(orjson.dumps(sample)))
        chunks = dialect.chunks(head)
        stream = chunks.open() + chunks.keep_alive() + chunks.encode(log)
        assert chunks.over
        stream.decode()
        check_events(stream, ndjson=path == "/api/chat")
        collector = dialect.collector(head)
        try:
            collector.add(log)
            whole: Any = orjson.loads(dialect.whole(head, collector))
        except ApiError as error:
            orjson.loads(dialect.errors.body(error))
            continue
        assert isinstance(whole, dict)


def check_events(stream: bytes, *, ndjson: bool) -> None:
    """Every payload is JSON on one line, and nothing else is in the stream but what SSE allows."""
    for line in stream.split(b"\n"):
        if ndjson:
            payload = line
        elif line.startswith((b":", b"event: ")):
            continue
        else:
            assert not line or line.startswith(b"data: ")
            payload = line.removeprefix(b"data: ")
        if payload not in (b"", b"[DONE]"):
            orjson.loads(payload)
