"""JSON shapes of the OpenAI-compatible endpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from backends.simulated.events import Finished, Progress, TokenOut
from backends.simulated.template import message_text, read_calls
from backends.simulated.wire import progress_json, timings_json, token_timings_json

_FINGERPRINT = "b0-simulated"
CREATED = 1_790_000_000
"""All replies say the same time of creation: equal requests get equal bytes."""


class TextCompletionRenderer:
    """`POST /v1/completions`."""

    end = b"[DONE]"

    def __init__(self, model: str, reply_id: str) -> None:
        self._base = {
            "created": CREATED,
            "model": model,
            "system_fingerprint": _FINGERPRINT,
            "object": "text_completion",
            "id": reply_id,
        }

    def chunks(self, event: Progress | TokenOut | Finished) -> list[bytes]:
        if isinstance(event, TokenOut):
            return [orjson.dumps(self._choice(event.content, None) | token_timings_json(event))]
        if isinstance(event, Progress):
            return [orjson.dumps(self._choice("", None) | {"prompt_progress": progress_json(event)})]
        return [orjson.dumps(self._choice("", _text_reason(event)) | _accounts(event))]

    def whole(self, finished: Finished) -> bytes:
        return orjson.dumps(self._choice(finished.text, _text_reason(finished)) | _accounts(finished))

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}
        return {"choices": [choice], **self._base}


class ChatRenderer:
    """`POST /v1/chat/completions`."""

    end = b"[DONE]"

    def __init__(
        self,
        model: str,
        reply_id: str,
        *,
        include_usage: bool,
        continued: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """`continued`: the message to repeat before what is generated. `verbose`: tell the stop string."""
        self._base = {
            "created": CREATED,
            "id": reply_id,
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._include_usage = include_usage
        self._verbose = verbose
        self._echo = _repeated(continued, reply_id) if continued else []
        self._begun = False

    def chunks(self, event: Progress | TokenOut | Finished) -> list[bytes]:
        if isinstance(event, Progress):
            opening = self._chunk({"role": "assistant", "content": None})
            return [orjson.dumps(opening | {"prompt_progress": progress_json(event)})]
        chunks: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            chunks.append(self._chunk({"role": "assistant", "content": None}))
            chunks += [self._chunk(delta) for delta in self._echo]
        if isinstance(event, Finished):
            chunks += self._closing(event)
        elif event.delta is not None:
            chunks.append(self._chunk(event.delta) | token_timings_json(event))
        elif event.content:
            chunks.append(self._chunk({"content": event.content}) | token_timings_json(event))
        return [orjson.dumps(chunk) for chunk in chunks]

    def whole(self, finished: Finished) -> bytes:
        own = finished.deltas or ({"content": finished.text},)
        message = {"role": "assistant", "content": "", **merge_deltas([*self._echo, *own])}
        choice = {"finish_reason": finished.finish_reason, "index": 0, "message": message}
        return orjson.dumps(
            {"choices": [choice], **self._base, "object": "chat.completion"} | _accounts(finished)
        )

    def _closing(self, finished: Finished) -> list[dict[str, Any]]:
        last = self._chunk({}, finished.finish_reason)
        if self._verbose:
            last |= {"__verbose": {"stopping_word": finished.stopping_word}}
        timings = {"timings": timings_json(finished.timings)}
        if not self._include_usage:
            return [last | timings]
        return [last, {**self._chunk({}), "choices": [], **_accounts(finished)}]

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
        return {"choices": [choice], **self._base, "object": "chat.completion.chunk"}


def _repeated(message: Mapping[str, Any], reply_id: str) -> list[dict[str, Any]]:
    """The deltas of a message that is continued. Its calls get new ids, as in any reply."""
    text, calls = read_calls(message_text(message))
    texts = {"reasoning_content": message.get("reasoning_content"), "content": text}
    deltas: list[dict[str, Any]] = [{name: text} for name, text in texts.items() if text]
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        call = {"index": index, "id": f"{reply_id}-call-{index}", "type": "function", "function": function}
        deltas.append({"tool_calls": [call]})
    return deltas


def merge_deltas(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from scripted deltas, without its role."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(
                part.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}}
            )
            if part.get("id"):
                call["id"] = part["id"]
            for name in ("name", "arguments"):
                call["function"][name] += (part.get("function") or {}).get(name) or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message.setdefault("content", None)
    return message


def _text_reason(finished: Finished) -> str:
    return "length" if finished.stop_type == "limit" else "stop"


def _accounts(finished: Finished) -> dict[str, Any]:
    n_prompt, n_reply = finished.n_prompt, finished.timings.predicted_n
    return {
        "usage": {
            "completion_tokens": n_reply,
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt + n_reply,
            "prompt_tokens_details": {"cached_tokens": finished.timings.cache_n},
        },
        "timings": timings_json(finished.timings),
    }
