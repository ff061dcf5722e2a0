"""Turns on token ids: plain chat and completions, where a resume is exact.

The engine is given token ids and asked for those it makes, so the next segment's prompt is the very
sequence that is in the slot. Four gaps have to be closed:

- A token whose bytes leave a character incomplete is not sent; its id is missing before the next
  chunk, which `tokens_predicted` shows. That chunk's text is tokenised again when it is needed.
- A token whose text may be the start of a stop string comes with empty text. It is forwarded only
  once the text is; at a cut it is forgotten, and generated again.
- The text before a stop string comes with the string's tokens, and the word that it was the end comes with
  the next event. After a cut between the two the tokens tell: their text goes on with the stop string.
- A grammar starts at its root with each request, and `/completion` cannot be told how far the text is in
  it. So a completion with one is forwarded once it is whole, and a cut goes back to its beginning.
"""

from __future__ import annotations

from typing import Any

from backends.llamacpp import told
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.segment import LlamaGeneration, stop_strings
from backends.protocol import EngineRefused, Finished, ReplySoFar, Sink

_SERVICE_OWNED = frozenset(
    {
        "messages",
        "prompt",
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n_predict",
        "n",
        "id_slot",
        "cache_prompt",
        "return_tokens",
        "return_progress",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "logprobs",
        "top_logprobs",
    }
)
_FINAL_FIELDS = [
    *("content", "tokens", "stop", "stop_type", "stopping_word"),
    *("tokens_predicted", "tokens_cached", "timings"),
]


class TokenGeneration(LlamaGeneration):
    """A turn over `/completion` with token ids."""

    def __init__(
        self,
        backend: LlamaCppClient,
        api: str,
        body: dict[str, Any],
        max_tokens: int,
        so_far: ReplySoFar | None,
    ) -> None:
        super().__init__(backend, max_tokens)
        self._api = api
        self._body = body
        self._prompt: str | list[int] | None = None
        self._part = "content" if api == "chat" else "text"
        self._sent: list[int | str] = []
        self._held: list[int] = []
        self._held_from = 0
        self._held_text: list[str] = []
        self._hold_all = bool(body.get("grammar") or body.get("json_schema"))
        self._params = {key: value for key, value in body.items() if key not in _SERVICE_OWNED}
        self._stops = stop_strings(body)
        self._params.pop("stop", None)
        if self._stops:  # `/completion` takes a list only
            self._params["stop"] = self._stops
        self._said: list[str] = []
        if so_far is not None:
            self.n_done = so_far.n_tokens
            text = "".join(str(part.get(self._part, "")) for part in so_far.parts)
            self._sent = [text] if so_far.tokens is None else list(so_far.tokens)
            self._said = [text]

    async def _over(self) -> Finished | None:
        over = await super()._over()
        if over is not None or not self._stops or not self._sent or self._parked is not None:
            return over
        try:
            text = await self._backend.detokenize(await self._sent_ids())
        except EngineRefused:  # one that cannot tell
            return None
        said = "".join(self._said)
        rest = text[len(said) :] if text.startswith(said) else ""
        stop = next((stop for stop in self._stops if rest.startswith(stop)), None)
        return None if stop is None else Finished("stop", self.n_done, self.kv_tokens, stop)

    async def _request(self, slot: int) -> tuple[str, dict[str, Any]]:
        self._segment_start = self._held_from = self.n_done
        self._held, self._held_text = [], []
        return "/completion", {
            **self._params,
            "prompt": await self._whole_prompt(),
            "n_predict": self._max_tokens - self.n_done,
            "id_slot": slot,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            "response_fields": _FINAL_FIELDS,
        }

    async def _whole_prompt(self) -> str | list[int]:
        if self._prompt is None:
            self._prompt = await self._render()
        if not self._sent:
            return self._prompt
        return await self._prompt_ids() + await self._sent_ids()

    async def _render(self) -> str | list[int]:
        if self._api == "chat":
            return await self._backend.render(self._body)
        prompt = self._body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
        return prompt  # type: ignore[no-any-return]

    async def _prompt_ids(self) -> list[int]:
        if self._prompt is None:
            self._prompt = await self._render()
        if isinstance(self._prompt, str):
            self._prompt = await self._backend.tokenize(self._prompt)
        return self._prompt

    async def _sent_ids(self) -> list[int]:
        """Ids of what was forwarded; text whose ids were not told is tokenised once."""
        if any(isinstance(item, str) for item in self._sent):
            ids: list[int | str] = []
            for item in self._sent:
                ids += await self._backend.tokenize(item, special=False) if isinstance(item, str) else [item]
            self._sent = ids
        return [item for item in self._sent if isinstance(item, int)]

    async def _prompt_to_prefill(self, at_least: int) -> list[int]:
        if self._prompt is None:
            self._prompt = await self._render()
        if isinstance(self._prompt, str) and len(self._prompt.encode()) < at_least and not self._sent:
            return []  # a byte-level tokeniser makes at most one token a byte
        return await self._prompt_ids() + await self._sent_ids()

    def _read(self, event: dict[str, Any], sink: Sink) -> Finished | None:
        content = told.text(event.get("content"))
        predicted = self._counted(event.get("tokens_predicted", 0), self._held_from)
        if "prompt_progress" not in event:
            self._take(content, told.ids(event.get("tokens")), predicted, sink)
        if not event.get("stop"):
            return None
        if self._hold_all:
            self._hold_all = False
            self._take("".join(self._held_text), [], predicted, sink)
        reason = "length" if event.get("stop_type") == "limit" else "stop"
        self.n_done = predicted
        # The last token was sampled, and not evaluated.
        cached = event.get("tokens_cached")
        whole = max(0, self.prompt_tokens + predicted - 1)
        self.kv_tokens = whole if cached is None else told.count(cached)
        stop = told.one_of(event.get("stopping_word"), self._stops)
        return Finished(reason, predicted, self.kv_tokens, stop)

    def _take(self, content: str, tokens: list[int], predicted: int, sink: Sink) -> None:
        self._held += tokens
        self.kv_tokens = self.prompt_tokens + predicted
        if self._hold_all:
            self._held_text.append(content)
        if self._hold_all or not content:
            return
        count = predicted - self._held_from
        known = count == len(self._held)
        self._sent += self._held if known else [content]
        if self._stops:
            self._said.append(content)
        sink.delta({self._part: content}, count, self._held if known else [])
        self.n_done = self._held_from = predicted
        self._held = []

    def _roll_back(self) -> None:
        self._held, self._held_text = [], []
        self.kv_tokens = self.prompt_tokens + self.n_done if self.n_done else self.kv_tokens
