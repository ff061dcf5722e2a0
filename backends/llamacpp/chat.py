"""Turns over the server's chat endpoint: tools, reasoning, images, log probabilities.

Only the server's own chat parser reads such replies, so a segment is resumed by text: the same
messages and an assistant message with what was forwarded, to be continued. The prefix in the slot is
found as far as the text tokenises to the same ids; what was evaluated again is counted. The server is
asked to repeat that text (`echo`), so what it reads in it is compared with what the client has, character
by character, before anything new is forwarded.

A tool call's text never reaches the deltas raw. From the first piece of a call on, deltas are held until
the reply is complete, so the client has all of a reply's calls or none. A cut inside a call goes on within
it all the same: the server's own template writes the half-written call, up to the last place inside one of
its texts, and that is handed back after the content. From there the grammar has to hold from the start,
which llama.cpp does for `tool_choice: required` only; the call that has begun is one anyway. Where a
template or a call does not lend itself to that, the cut goes back to the text before the call.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from backends.llamacpp import told
from backends.llamacpp.calls import Call, broken_off, goes_on, merged, tokens_until
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.repeated import CONTENT, REASONING, RepeatedText
from backends.llamacpp.segment import LlamaGeneration, stop_strings
from backends.llamacpp.stream import Stream
from backends.protocol import (
    BackendError,
    Cut,
    EngineRefused,
    EngineUnavailable,
    Finished,
    ReplySoFar,
    Sink,
)

_DROPPED = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n_predict"}
    | {"n", "n_cmpl", "echo"}
)
# The only way to be told by this endpoint which stop string ended a reply: with its last chunk. A server that
# does not know it from a request leaves it out.
_TELL_STOP = {"verbose": True, "response_fields": ["stopping_word"]}


@dataclass(frozen=True, slots=True)
class _BrokenOff:
    """The calls of a reply that was cut inside one; see `broken_off`. `tokens`: what they took."""

    calls: list[Call]
    closing: str
    tokens: int


class ChatGeneration(LlamaGeneration):
    """A turn over `/v1/chat/completions`."""

    def __init__(
        self, backend: LlamaCppClient, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None
    ) -> None:
        super().__init__(backend, max_tokens)
        self._body = chat_body({key: value for key, value in body.items() if key not in _DROPPED})
        self._top_logprobs = body.get("top_logprobs") or 0
        self._called = False
        self._stops = stop_strings(body)
        self._stop_sequence: str | None = None
        last = self._body["messages"][-1] if self._body["messages"] else {}
        self._begun = last if last.get("role") == "assistant" else None
        self._said = {REASONING: "", CONTENT: ""}
        self._repeated: RepeatedText | None = None
        # A grammar of the client's own starts anew with each request, so such a reply comes whole.
        self._hold_all = bool(self._body.get("grammar"))
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._broken_off: _BrokenOff | None = None
        # The client began the reply itself: the server takes one such message only, and repeats all of it.
        self._hands_back = self._begun is None
        self._next: tuple[dict[str, Any], int] | None = None
        self._predicted = 0
        self._finish: str | None = None
        if so_far is not None:
            self.n_done = so_far.n_tokens
            for part in so_far.parts:
                for name in self._said:
                    self._said[name] += part.get(name) or ""
                self._called = self._called or "tool_calls" in part

    async def run(self, slot: int, sink: Sink) -> Finished | Cut:
        try:
            return await super().run(slot, sink)
        except BackendError:
            self._forget_calls()
            raise

    async def _over(self) -> Finished | None:
        # Calls are forwarded in one part, once the reply is complete: only its end was lost.
        if self._called and self.n_done < self._max_tokens:
            return Finished("tool_calls", self.n_done, self.kv_tokens)
        return await super()._over()

    # Requests --------------------------------------------------------------------------------------

    async def _open(self, slot: int) -> Stream:
        """Open the next segment. A server that takes no half-written call goes back to before it."""
        try:
            return await super()._open(slot)
        except EngineRefused:
            if self._broken_off is None:
                raise
        except EngineUnavailable:
            await self._backend.render(self._body)  # which knows a request that will never be taken
            raise
        self._hands_back = False
        self._forget_calls()
        return await super()._open(slot)

    async def _request(self, slot: int) -> tuple[str, dict[str, Any]]:
        body, kept = await self._to_continue()
        self._segment_start = self._predicted = self.n_done + kept
        self._held = []
        self._finish = self._stop_sequence = None
        self._repeated = None
        if "echo" in body:
            in_content = body["continue_final_message"] == CONTENT
            self._repeated = RepeatedText(self._said[REASONING], self._said[CONTENT], in_content=in_content)
        return "/v1/chat/completions", {
            **body,
            **(_TELL_STOP if self._stops else {}),
            "max_tokens": self._max_tokens - self._segment_start,
            "id_slot": slot,
            "cache_prompt": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            "timings_per_token": True,
        }

    async def _prompt_to_prefill(self, at_least: int) -> list[int]:
        body, _ = await self._to_continue()
        prompt = await self._backend.render(body)
        return await self._backend.tokenize(prompt) if len(prompt.encode()) >= at_least else []

    async def _to_continue(self) -> tuple[dict[str, Any], int]:
        """The body of the next request without what is the segment's own, and how many generated tokens
        of a call that was not forwarded are in it."""
        if self._next is None:
            calls = await self._written(self._broken_off) if self._broken_off is not None else ""
            if not calls:
                self._broken_off = None
            self._next = self._continued(calls), self._broken_off.tokens if self._broken_off else 0
        return self._next

    def _continued(self, calls: str) -> dict[str, Any]:
        """The request with the reply so far, and then `calls` as the template writes them."""
        content, reasoning = self._said[CONTENT] + calls, self._said[REASONING]
        if not content and not reasoning:
            return self._body
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            said["reasoning_content"] = reasoning
        body = {
            **self._body,
            "continue_final_message": CONTENT if content else REASONING,
            "add_generation_prompt": False,
        }
        messages = self._body["messages"]
        if self._begun is not None:
            return {**body, "messages": [*messages[:-1], _joined(self._begun, said)]}
        body |= {"messages": [*messages, said], "echo": True}
        return {**body, "tool_choice": "required"} if calls else body

    async def _written(self, broken: _BrokenOff) -> str:
        """What the template writes for calls that break off, up to where they do.

        Empty when the template does not write what it is given in this place.
        """
        begin, end = (f"@{secrets.token_hex(8)}@" for _ in range(2))
        *whole, last = broken.calls
        function = last["function"]
        last = {**last, "function": {**function, "arguments": function["arguments"] + end + broken.closing}}
        asked = {"role": "assistant", "content": begin, "tool_calls": [*whole, last]}
        # Answered, as a server takes a last message of the assistant's for one to be continued.
        answers = [{"role": "tool", "tool_call_id": call.get("id"), "content": ""} for call in broken.calls]
        messages = [*self._body["messages"], asked, *answers]
        try:
            text = await self._backend.render({**self._body, "messages": messages})
        except EngineRefused:
            return ""
        _, found, written = text.rpartition(begin)
        written, complete, _ = written.partition(end)
        # All text before a call is content, spaces too, and has been forwarded.
        return written.lstrip() if found and complete else ""

    # Replies ---------------------------------------------------------------------------------------

    def _read(self, event: dict[str, Any], sink: Sink) -> Finished | None:
        predicted = told.obj(event.get("timings")).get("predicted_n")
        if predicted is not None:
            self._predicted = self._counted(predicted, self.n_done)
            self.kv_tokens = self.prompt_tokens + self._predicted
        for choice in told.objs(event.get("choices")):
            part = told.delta(choice.get("delta"))
            if choice.get("logprobs"):
                part["_logprobs"] = self._openai_logprobs(told.obj(choice["logprobs"]))
            if part:
                self._take(part, sink)
            self._finish = told.text(choice.get("finish_reason")) or self._finish
        if self._stops and "__verbose" in event:
            self._stop_sequence = told.one_of(told.obj(event["__verbose"]).get("stopping_word"), self._stops)
        usage = told.obj(event.get("usage"))
        if self._finish is None or not usage:
            return None
        generated = told.count(usage.get("completion_tokens", 0))
        self._predicted = self._counted(generated, self.n_done)
        self._forward_held(sink)
        self.n_done = self._predicted
        # This segment's own prompt: what was handed back as text may have become other tokens. The last
        # token was sampled, and not evaluated.
        prompt = usage.get("prompt_tokens", self.prompt_tokens + self._segment_start)
        self.kv_tokens = max(0, told.count(prompt) + generated - 1)
        return Finished(self._finish, self._predicted, self.kv_tokens, self._stop_sequence)

    def _take(self, part: dict[str, Any], sink: Sink) -> None:
        if self._repeated is not None:
            try:
                part = self._repeated.left_out(part)
            except ValueError:
                raise EngineUnavailable("the engine reads the reply so far as something else") from None
            if self._repeated.over:
                self._repeated = None
            if not part:
                return
        if self._held or self._hold_all or "tool_calls" in part:
            self._held.append((self._predicted, part))
            return
        for name in self._said:
            if name in part:
                self._said[name] += part[name]
        sink.delta(part, self._predicted - self.n_done, [])
        self.n_done = self._predicted

    def _openai_logprobs(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """The server's, with as many alternatives as were asked for: it always tells at least one."""
        entries = [
            {**entry, "top_logprobs": told.objs(entry.get("top_logprobs"))[: self._top_logprobs]}
            for entry in told.objs(logprobs.get("content"))
        ]
        return {"content": entries}

    def _forward_held(self, sink: Sink) -> None:
        if not self._held:
            return
        part, begun = self._merged(), self._broken_off
        if begun is not None and not goes_on(part.get("tool_calls", []), begun.calls, begun.closing):
            self._hands_back = False
            raise EngineUnavailable("the engine reads the call so far as something else")
        sink.delta(part, self._predicted - self.n_done, [])
        self.n_done = self._predicted
        self._held = []

    def _roll_back(self) -> None:
        if self._held:
            self._held_tokens = self._predicted - self.n_done
            self._broken_off = None
            found = broken_off(self._merged().get("tool_calls", [])) if self._hands_back else None
            if found is not None:
                calls, closing = found
                tokens = tokens_until(self._held, calls[-1]) - self.n_done
                self._broken_off = _BrokenOff(calls, closing, tokens)
        self._held = []
        self._next = None

    def _merged(self) -> dict[str, Any]:
        return merged(part for _, part in self._held)

    def _forget_calls(self) -> None:
        self._broken_off = None
        self._next = None


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """A chat request as llama.cpp understands it.

    It takes a function named in `tool_choice` for `auto`, and tells no log probabilities at all when no
    alternatives are asked for.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        tools = [tool for tool in body["tools"] if (tool.get("function") or {}).get("name") == name]
        body = {**body, "tools": tools, "tool_choice": "required"}
    if body.get("logprobs"):
        body = {**body, "top_logprobs": max(1, body.get("top_logprobs") or 0)}
    return body


def _joined(begun: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The client's own beginning of the reply, gone on with."""
    content = begun.get("content") or ""
    if isinstance(content, list):
        return {**begun, **said, "content": [*content, {"type": "text", "text": said["content"]}]}
    joined = {**begun, "content": content + said["content"]}
    reasoning = (begun.get("reasoning_content") or "") + said.get("reasoning_content", "")
    return {**joined, "reasoning_content": reasoning} if reasoning else joined
