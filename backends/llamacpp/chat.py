"""Turns over the server's chat endpoint: tools, JSON schema, reasoning, images.

Only the server's own chat parser reads such replies, so a segment is resumed by text: the same
messages and an assistant message with what was forwarded, to be continued. The prefix in the slot is
found as far as the text tokenises to the same ids; what was evaluated again is counted.

A tool call's text never reaches the deltas raw, so it cannot be handed back: from the first piece of a
call on, deltas are held until the reply is complete, and a cut goes back to the text before the call.
"""

from __future__ import annotations

from typing import Any

from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.segment import LlamaGeneration
from backends.protocol import Finished, ReplySoFar, Sink

_DROPPED = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict"}
)


class ChatGeneration(LlamaGeneration):
    """A turn over `/v1/chat/completions`."""

    def __init__(
        self, backend: LlamaCppClient, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None
    ) -> None:
        super().__init__(backend, max_tokens)
        self._body = {key: value for key, value in body.items() if key not in _DROPPED}
        self._called = False
        self._reasoning = ""
        self._content = ""
        self._held: list[dict[str, Any]] = []
        self._segment_start = 0
        self._predicted = 0
        self._finish: str | None = None
        if so_far is not None:
            self.n_done = so_far.n_tokens
            for part in so_far.parts:
                self._reasoning += part.get("reasoning_content") or ""
                self._content += part.get("content") or ""
                self._called = self._called or "tool_calls" in part

    def _messages_so_far(self) -> dict[str, Any]:
        """The request's messages with the reply so far, to be continued."""
        if not self._content and not self._reasoning:
            return self._body
        messages = self._body["messages"]
        said: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._reasoning:
            said["reasoning_content"] = self._reasoning
        if messages and messages[-1].get("role") == "assistant":
            # The client began the reply itself, and an engine takes one such message only.
            messages, said = messages[:-1], _joined(messages[-1], said)
        return {
            **self._body,
            "messages": [*messages, said],
            "continue_final_message": "content" if self._content else "reasoning_content",
            "add_generation_prompt": False,
        }

    def _over(self) -> Finished | None:
        # Calls are forwarded in one part, once the reply is complete: only its end was lost.
        if self._called and self.n_done < self._max_tokens:
            return Finished("tool_calls", self.n_done, self.kv_tokens)
        return super()._over()

    async def _request(self, slot: int) -> tuple[str, dict[str, Any]]:
        self._segment_start = self._predicted = self.n_done
        self._held = []
        self._finish = None
        return "/v1/chat/completions", {
            **self._messages_so_far(),
            "max_tokens": self._max_tokens - self.n_done,
            "id_slot": slot,
            "cache_prompt": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            "timings_per_token": True,
        }

    async def _prompt_to_prefill(self, at_least: int) -> list[int]:
        prompt = await self._backend.render(self._messages_so_far())
        return await self._backend.tokenize(prompt) if len(prompt.encode()) >= at_least else []

    def _read(self, event: dict[str, Any], sink: Sink) -> Finished | None:
        predicted = (event.get("timings") or {}).get("predicted_n")
        if predicted is not None:
            self._predicted = self._segment_start + int(predicted)
            self.kv_tokens = self.prompt_tokens + self._predicted
        for choice in event.get("choices") or []:
            part = {key: value for key, value in (choice.get("delta") or {}).items() if value}
            part.pop("role", None)
            if choice.get("logprobs"):
                part["_logprobs"] = choice["logprobs"]
            if part:
                self._take(part, sink)
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"]
        if self._finish is None or not event.get("usage"):
            return None
        generated = int(event["usage"].get("completion_tokens", 0))
        self._predicted = self._segment_start + generated
        self._forward_held(sink)
        self.n_done = self._predicted
        # This segment's own prompt: what was handed back as text may have become other tokens. The last
        # token was sampled, and not evaluated.
        prompt = event["usage"].get("prompt_tokens", self.prompt_tokens + self._segment_start)
        self.kv_tokens = max(0, int(prompt) + generated - 1)
        return Finished(self._finish, self._predicted, self.kv_tokens)

    def _take(self, part: dict[str, Any], sink: Sink) -> None:
        if self._held or "tool_calls" in part:
            self._held.append(part)
            return
        self._reasoning += part.get("reasoning_content") or ""
        self._content += part.get("content") or ""
        sink.delta(part, self._predicted - self.n_done, [])
        self.n_done = self._predicted

    def _forward_held(self, sink: Sink) -> None:
        if self._held:
            sink.delta(_merged(self._held), self._predicted - self.n_done, [])
            self.n_done = self._predicted
        self._held = []

    def _roll_back(self) -> None:
        self._held = []


def _joined(begun: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The client's own beginning of the reply, gone on with."""
    content = begun.get("content") or ""
    if isinstance(content, list):
        return {**begun, **said, "content": [*content, {"type": "text", "text": said["content"]}]}
    joined = {**begun, "content": content + said["content"]}
    reasoning = (begun.get("reasoning_content") or "") + said.get("reasoning_content", "")
    return {**joined, "reasoning_content": reasoning} if reasoning else joined


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several deltas as one, each call whole: whoever has some of a reply's calls has all of them."""
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        for name, value in part.items():
            if name == "tool_calls":
                for piece in value:
                    _add_piece(calls.setdefault(int(piece.get("index") or 0), {}), piece)
            elif name == "_logprobs":
                logprobs = whole.setdefault(name, {})
                for kind, entries in value.items():
                    logprobs[kind] = [*logprobs.get(kind, []), *(entries or [])]
            elif isinstance(value, str):
                whole[name] = whole.get(name, "") + value
            else:
                whole[name] = value
    if calls:
        whole["tool_calls"] = [calls[index] for index in sorted(calls)]
    return whole


def _add_piece(call: dict[str, Any], piece: dict[str, Any]) -> None:
    function = call.get("function", {})
    for name, value in (piece.get("function") or {}).items():
        if value:
            function[name] = function.get(name, "") + value if name == "arguments" else value
    call.update({name: value for name, value in piece.items() if value is not None and name != "function"})
    call["function"] = {"arguments": "", **function}
