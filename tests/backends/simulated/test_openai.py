"""The OpenAI-compatible endpoints."""

from typing import Any

import orjson

from backends.simulated import PROFILES, ScriptedReply, SimulatedConfig
from backends.simulated.openai import merge_deltas
from tests.backends.simulated.harness import Reply, connect

CALL = ScriptedReply(
    "read the file",
    (
        {"reasoning_content": "A file."},
        {"content": "I read it now. "},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "read"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"a.py"}'}}]},
    ),
    "tool_calls",
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def deltas(reply: Reply) -> list[dict[str, Any]]:
    return [c["choices"][0]["delta"] for c in reply.chunks if c["choices"]]


def content(reply: Reply) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(reply))


async def test_a_chat_stream_has_role_text_reason_usage_and_done() -> None:
    async with connect(SimulatedConfig()) as client:
        body = {"messages": user("[len=5]"), "stream_options": {"include_usage": True}}
        reply = await client.stream(body, path="/v1/chat/completions")
        assert deltas(reply)[0] == {"role": "assistant", "content": None}
        assert all(delta.keys() == {"content"} for delta in deltas(reply)[1:-1])
        assert reply.chunks[-2]["choices"][0] == {"finish_reason": "stop", "index": 0, "delta": {}}
        assert reply.last["choices"] == []
        assert reply.last["usage"]["completion_tokens"] == 6
        assert reply.last["timings"]["predicted_n"] == 6
        assert {chunk["object"] for chunk in reply.chunks} == {"chat.completion.chunk"}
        assert reply.done

        whole = await client.json("/v1/chat/completions", body)
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": content(reply)}
        assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 6
        assert whole["object"] == "chat.completion"


async def test_a_chat_continues_its_final_message() -> None:
    async with connect(SimulatedConfig(multibyte_rate=0.2)) as client:
        body: dict[str, Any] = {"messages": user("[len=40]"), "id_slot": 0}
        whole = (await client.json("/v1/chat/completions", body))["choices"][0]["message"]["content"]
        for cut in (whole.index(" ", 5), whole.index(" ", len(whole) // 2), len(whole)):
            partial = {"role": "assistant", "content": whole[:cut]}
            continued = body | {
                "messages": [*body["messages"], partial],
                "continue_final_message": "content",
                "add_generation_prompt": False,
            }
            reply = await client.stream(continued, path="/v1/chat/completions")
            assert whole[:cut] + content(reply) == whole
            echoed = await client.stream(continued | {"echo": True}, path="/v1/chat/completions")
            assert content(echoed) == whole


async def test_a_limit_is_reported_as_length() -> None:
    async with connect(SimulatedConfig()) as client:
        body = {"messages": user("[len=40]"), "max_completion_tokens": 3}
        reply = await client.stream(body, path="/v1/chat/completions")
        assert reply.last["choices"][0]["finish_reason"] == "length"
        assert "usage" not in reply.last
        assert (await client.post("/v1/chat/completions", {"max_tokens": 3})).status_code == 400
        assert (await client.post("/v1/chat/completions", {"messages": []})).status_code == 400


async def test_a_script_with_a_tool_call_is_played() -> None:
    async with connect(SimulatedConfig(scripts=(CALL,))) as client:
        body = {"messages": user("please read the file"), "tools": [{"type": "function"}]}
        reply = await client.stream(body, path="/v1/chat/completions")
        assert deltas(reply) == [{"role": "assistant", "content": None}, *CALL.deltas, {}]
        assert reply.last["choices"][0]["finish_reason"] == "tool_calls"

        whole = (await client.json("/v1/chat/completions", body))["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] == "I read it now. "
        assert whole["message"]["reasoning_content"] == "A file."
        function = whole["message"]["tool_calls"][0]["function"]
        assert orjson.loads(function["arguments"]) == {"path": "a.py"}

        other = await client.stream({"messages": user("[len=2]")}, path="/v1/chat/completions")
        assert other.last["choices"][0]["finish_reason"] == "stop"


async def test_a_cut_script_goes_on_after_the_text_that_was_sent() -> None:
    async with connect(SimulatedConfig(scripts=(CALL,), profile=PROFILES["fast"])) as client:
        messages = [*user("read the file"), {"role": "assistant", "content": "I read it now. "}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        reply = await client.stream(body, path="/v1/chat/completions")
        assert deltas(reply)[1:-1] == list(CALL.deltas[2:])


async def test_chat_progress_comes_before_the_role() -> None:
    async with connect(SimulatedConfig()) as client:
        body = {"messages": user("[len=1]"), "return_progress": True}
        reply = await client.stream(body, path="/v1/chat/completions")
        assert [("prompt_progress" in chunk) for chunk in reply.chunks[:3]] == [True, True, False]


async def test_text_completions() -> None:
    async with connect(SimulatedConfig()) as client:
        body = {"prompt": "go [len=4]", "return_progress": True}
        reply = await client.stream(body, path="/v1/completions")
        text = "".join(chunk["choices"][0]["text"] for chunk in reply.chunks)
        assert reply.last["choices"][0]["finish_reason"] == "stop"
        assert reply.last["usage"]["completion_tokens"] == 5
        assert reply.done
        whole = await client.json("/v1/completions", body | {"max_tokens": 2})
        assert text.startswith(whole["choices"][0]["text"])
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["object"] == "text_completion"


def test_merged_deltas_of_a_call_without_text() -> None:
    assert merge_deltas(CALL.deltas[2:])["content"] is None


async def test_a_half_written_call_is_repeated_and_gone_on_with() -> None:
    async with connect(SimulatedConfig(scripts=(CALL,))) as client:
        said = 'I read it now. <tool_call>{"name": "read", "arguments": {"path": "a'
        partial = {"role": "assistant", "reasoning_content": "A file.", "content": said}
        body = {
            "messages": [*user("read the file"), partial],
            "continue_final_message": "content",
            "add_generation_prompt": False,
        }
        rest = await client.stream(body, path="/v1/chat/completions")
        assert merge_deltas(deltas(rest))["tool_calls"][0]["function"]["arguments"] == '.py"}'
        whole = merge_deltas(deltas(await client.stream({**body, "echo": True}, path="/v1/chat/completions")))
    [call] = whole.pop("tool_calls")
    assert whole == {"reasoning_content": "A file.", "content": "I read it now. "}
    assert call["function"] == {"name": "read", "arguments": '{"path": "a.py"}'}
    assert call["id"] != "c1", "as any reply's, new"


async def test_the_template_writes_calls_as_the_model_would() -> None:
    async with connect(SimulatedConfig()) as client:
        function = {"name": "read", "arguments": '{"path": "a.py"}'}
        answer = {"role": "assistant", "content": "So: ", "tool_calls": [{"function": function}]}
        prompt = (await client.json("/apply-template", {"messages": [*user("hi"), answer]}))["prompt"]
    assert 'So: <tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call><|im_end|>' in prompt
