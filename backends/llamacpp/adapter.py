"""llama.cpp's server as a :class:`~backends.protocol.Backend`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from backends.llamacpp.chat import ChatGeneration
from backends.llamacpp.client import LlamaCppClient, LlamaCppOptions
from backends.llamacpp.measure import kv_bytes_per_token
from backends.llamacpp.tokens import TokenGeneration
from backends.protocol import Backend, EngineInfo, EngineUnavailable, Generation, KvLayout, ReplySoFar

_REASONING_MARKS = ("<think", "reasoning_content", "<|channel|>", "enable_thinking", "[THINK]")
_CHAT_PARSER_FIELDS = (
    "tools",
    "functions",
    "json_schema",
    "grammar",
    "logprobs",
    "top_logprobs",
    "reasoning_format",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
)


class LlamaCppBackend(LlamaCppClient, Backend):
    """One llama.cpp server."""

    def __init__(self, url: str, options: LlamaCppOptions | None = None) -> None:
        """`url` is the server's base address."""
        super().__init__(url, options)
        self._info: EngineInfo | None = None

    async def describe(self) -> EngineInfo:
        props = await self.ask("GET", "/props")
        slots = await self.ask("GET", "/slots")
        if not isinstance(props, dict) or not isinstance(slots, list) or not slots:
            raise EngineUnavailable("the engine lists no slots; start it with --slots")
        context = _context(props, slots)
        layout = self._options.kv_layout or KvLayout.SPLIT
        alias = str(props.get("model_alias") or props.get("model_path") or "model")
        template = str(props.get("chat_template") or "")
        self.native_park = "is_preempted" in slots[0]
        per_token = self._options.kv_bytes_per_token
        if per_token is None and self._info is not None:
            per_token = self._info.kv_bytes_per_token
        if per_token is None and self._options.save_path is not None:
            per_token = await kv_bytes_per_token(self, self._options.save_path, len(slots) - 1)
        self._info = EngineInfo(
            model=self._options.model or PurePath(alias).stem,
            engine_slots=len(slots),
            slot_context=context,
            kv_layout=layout,
            kv_budget_tokens=context if layout is KvLayout.UNIFIED else context * len(slots),
            kv_bytes_per_token=per_token,
            batch_tokens=self._options.batch_tokens,
            native_park=self.native_park,
            save_restore=self._options.save_path is not None,
            reasoning_template=any(mark in template for mark in _REASONING_MARKS),
        )
        return self._info

    async def count_tokens(self, api: str, body: dict[str, Any]) -> int:
        if api == "chat":
            return len(await self.tokenize(await self.render(body)))
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            return len(prompt)
        return len(await self.tokenize(prompt[0] if isinstance(prompt, list) else prompt))

    def generation(
        self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
    ) -> Generation:
        if api == "chat" and self._needs_chat_parser(body):
            return ChatGeneration(self, body, max_tokens, so_far)
        return TokenGeneration(self, api, body, max_tokens, so_far)

    def _needs_chat_parser(self, body: dict[str, Any]) -> bool:
        """Whether the reply must be read by the server's own chat parser.

        Else the turn runs on token ids, which makes a resume exact.
        """
        if self._info is None or self._info.reasoning_template:
            return True
        if any(body.get(field) not in (None, False, [], {}) for field in _CHAT_PARSER_FIELDS):
            return True
        kind = (body.get("response_format") or {"type": "text"}).get("type", "text")
        return kind != "text" or not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) and set(message) <= _PLAIN
            for message in body["messages"]
        )


_PLAIN = {"role", "content", "name"}


def _context(props: dict[str, Any], slots: list[Any]) -> int:
    try:
        return int(slots[0].get("n_ctx") or props["default_generation_settings"]["n_ctx"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EngineUnavailable("the engine does not tell its context size") from None
