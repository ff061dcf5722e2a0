"""`POST /completion` and the endpoints around it speak as the llama.cpp server does."""

from typing import Any

import pytest

from backends.simulated import PROFILES, SimulatedConfig
from backends.simulated.tokenizer import EOS, decode, encode
from tests.backends.simulated.harness import chat_prompt, connect

SMALL = SimulatedConfig(n_slots=2, n_ctx=1024)


async def test_state_endpoints() -> None:
    async with connect(SMALL) as client:
        assert (await client.http.get("/health")).json() == {"status": "ok"}
        props = (await client.http.get("/props")).json()
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["endpoint_slots"] is True
        model = (await client.http.get("/v1/models")).json()["data"][0]
        assert (model["id"], model["object"]) == ("simulated", "model")
        slots = (await client.http.get("/slots")).json()
        assert slots[1] == {"id": 1, "n_ctx": 512, "speculative": False, "is_processing": False}
        missing = await client.http.get("/nope")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_tokenize_and_detokenize() -> None:
    async with connect(SMALL) as client:
        tokens = (await client.json("/tokenize", {"content": "héllo <|im_end|>"}))["tokens"]
        assert (await client.json("/detokenize", {"tokens": tokens}))["content"] == "héllo <|im_end|>"
        assert (await client.post("/detokenize", {"tokens": [-1]})).status_code == 400


async def test_templates() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "We"}]
    async with connect(SMALL) as client:
        plain = await client.json("/apply-template", {"messages": messages[:1]})
        assert plain == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": False}
        closed = await client.json("/apply-template", body)
        assert closed["prompt"].endswith("<|im_start|>assistant\nWe<|im_end|>\n")
        opened = await client.json("/apply-template", body | {"continue_final_message": True})
        assert opened["prompt"].endswith("<|im_start|>assistant\nWe")
        thinking = [messages[0], {"role": "assistant", "reasoning_content": "Hm", "content": "We"}]
        body["messages"] = thinking
        inside = await client.json("/apply-template", body | {"continue_final_message": "reasoning_content"})
        assert inside["prompt"].endswith("<|im_start|>assistant\n<think>Hm")
        after = await client.json("/apply-template", body | {"continue_final_message": "content"})
        assert after["prompt"].endswith("<think>Hm</think>We")
        both = {"messages": messages, "continue_final_message": True}
        assert (await client.post("/apply-template", both)).status_code == 400


async def test_a_stream_has_progress_then_tokens_then_the_end() -> None:
    config = SimulatedConfig(n_slots=1, profile=PROFILES["fast"], multibyte_rate=0)
    prompt = "word " * 600 + "[len=3]"
    async with connect(config) as client:
        reply = await client.stream({"prompt": prompt, "return_progress": True, "n_predict": 50})
        n_prompt = len(encode(prompt))
        progress = [c["prompt_progress"] for c in reply.chunks if "prompt_progress" in c]
        assert [p["processed"] for p in progress] == [0, 512, 1024, n_prompt]
        assert {p["total"] for p in progress} == {n_prompt}
        assert [c["tokens_predicted"] for c in reply.chunks] == [0, 0, 0, 0, 1, 2, 3, 4, 4]
        assert reply.chunks[4].keys() == {
            "index",
            "content",
            "tokens",
            "stop",
            "id_slot",
            "tokens_predicted",
            "tokens_evaluated",
        }
        assert reply.chunks[4]["id_slot"] == -1
        assert reply.tokens[-1] == EOS
        assert reply.last["stop_type"] == "eos"
        assert reply.last["id_slot"] == 0
        timings = reply.last["timings"]
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, n_prompt, 4)
        assert timings["predicted_per_token_ms"] == pytest.approx(1.0)
        assert timings["prompt_ms"] == pytest.approx(n_prompt / 100)


async def test_a_reply_without_streaming_equals_the_stream() -> None:
    body = {"prompt": chat_prompt("[len=40]"), "return_tokens": True}
    async with connect(SimulatedConfig(multibyte_rate=0.3)) as client:
        whole = await client.json("/completion", body)
        reply = await client.stream(body)
        assert whole["content"] == reply.text == decode(whole["tokens"][:-1])
        assert (await client.json("/completion", body | {"return_tokens": False}))["tokens"] == []
        assert reply.last["timings"]["prompt_n"] == 1


async def test_tokens_inside_a_character_are_missing_from_the_stream() -> None:
    async with connect(SimulatedConfig(multibyte_rate=0.5)) as client:
        body = {"prompt": chat_prompt("[len=60]"), "return_tokens": True}
        whole = await client.json("/completion", body)
        reply = await client.stream(body)
        numbers = [c["tokens_predicted"] for c in reply.chunks[:-1]]
        assert len(numbers) < 61
        assert numbers == sorted(set(numbers))
        assert [whole["tokens"][n - 1] for n in numbers] == reply.tokens
        assert "\ufffd" not in reply.text


async def test_stop_strings_and_limits() -> None:
    prompt = chat_prompt("[len=30]")
    async with connect(SimulatedConfig(multibyte_rate=0)) as client:
        text = (await client.json("/completion", {"prompt": prompt}))["content"]
        third = text.split(" ")[3]
        reply = await client.stream({"prompt": prompt, "stop": [f"{third}"]})
        assert reply.text == text[: text.index(third)]
        assert (reply.last["stop_type"], reply.last["stopping_word"]) == ("word", third)

        held = await client.stream({"prompt": prompt, "stop": [text[:4] + "ZZZ"], "n_predict": 1})
        assert [c["content"] for c in held.chunks] == ["", ""]
        assert held.last["stop_type"] == "limit"
        for limit, tokens in ((0, 1), (5, 5)):
            reply = await client.stream({"prompt": prompt, "n_predict": limit})
            assert reply.last["tokens_predicted"] == tokens
            assert reply.last["stop_type"] == "limit"
            assert reply.last["truncated"] is False
        unending = {"prompt": prompt, "ignore_eos": True, "max_tokens": 100}
        assert (await client.json("/completion", unending))["tokens_predicted"] == 100


async def test_a_full_context_truncates() -> None:
    async with connect(SimulatedConfig(n_slots=1, n_ctx=32)) as client:
        reply = await client.stream({"prompt": "hi", "ignore_eos": True})
        assert (reply.last["stop_type"], reply.last["truncated"]) == ("limit", True)
        assert reply.last["tokens_predicted"] + reply.last["tokens_evaluated"] == 32


async def test_a_cut_turn_resumes_exactly() -> None:
    prompt = encode(chat_prompt("tell me [len=50]"))
    async with connect(SimulatedConfig(multibyte_rate=0.2, profile=PROFILES["fast"])) as client:
        whole = await client.json("/completion", {"prompt": prompt, "return_tokens": True})
        cut = await client.stream({"prompt": prompt, "id_slot": 1}, until=20)
        await client.until_idle()
        received = cut.text
        resumed = await client.stream({"prompt": encode(decode(prompt) + received), "id_slot": 1})
        assert received + resumed.text == whole["content"]
        timings = resumed.last["timings"]
        assert timings["prompt_n"] == 1
        assert timings["cache_n"] == resumed.last["tokens_evaluated"] - 1


async def test_timings_come_with_every_token_if_asked_for() -> None:
    async with connect(SMALL) as client:
        reply = await client.stream({"prompt": "[len=3]", "timings_per_token": True})
        assert [chunk["timings"]["predicted_n"] for chunk in reply.chunks] == [1, 2, 3, 4, 4]


async def test_an_empty_prompt_ends_at_once() -> None:
    async with connect(SMALL) as client:
        reply = await client.json("/completion", {"prompt": ""})
        assert (reply["stop_type"], reply["tokens_predicted"]) == ("none", 0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -2]}, "tokens"),
        ({"prompt": [1, 1 << 40]}, "tokens"),
        ({"prompt": "hi", "n_predict": -2}, "n_predict"),
        ({"prompt": "hi", "n_predict": "many"}, "n_predict"),
        ({"prompt": "hi", "id_slot": 2}, "id_slot"),
        ({"prompt": "hi", "id_slot": -2}, "id_slot"),
        ({"prompt": "hi", "stop": 3}, "stop"),
        ([], "body"),
    ],
)
async def test_wrong_bodies_are_refused(body: Any, named: str) -> None:
    async with connect(SMALL) as client:
        response = await client.post("/completion", body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, 400)
        assert error["type"] == "invalid_request_error"
        assert named in error["message"]


async def test_broken_json_is_refused() -> None:
    async with connect(SMALL) as client:
        response = await client.http.post("/completion", content=b"{bad")
        assert response.status_code == 400
        assert "parse error" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_over_the_context_is_refused(stream: bool) -> None:
    async with connect(SMALL) as client:
        response = await client.post("/completion", {"prompt": "hi " * 600, "stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (len(encode("hi " * 600)), 512)
