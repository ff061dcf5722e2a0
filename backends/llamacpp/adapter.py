"""llama.cpp's server as a :class:`~backends.protocol.Backend`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from backends.llamacpp import told
from backends.llamacpp.bulk import BulkGeneration, longest_input
from backends.llamacpp.chat import ChatGeneration
from backends.llamacpp.client import LlamaCppClient
from backends.llamacpp.measure import measured_kv
from backends.llamacpp.options import LlamaCppOptions
from backends.llamacpp.swap import Swap, identity_of
from backends.llamacpp.swap_files import SwapFiles
from backends.llamacpp.tokens import TokenGeneration
from backends.protocol import (
    BULK_APIS,
    Backend,
    EngineInfo,
    EngineUnavailable,
    Generation,
    KvLayout,
    ReplySoFar,
    RestoredKv,
    SavedKv,
    SwapFailed,
)

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


MOST_SLOTS = 1024
MOST_NAME_CHARS = 200


class LlamaCppBackend(LlamaCppClient, Backend):
    """One llama.cpp server."""

    def __init__(self, url: str, options: LlamaCppOptions | None = None) -> None:
        """`url` is the server's base address. Raises ValueError for an empty swap tag."""
        super().__init__(url, options)
        self._info: EngineInfo | None = None
        folder = self._options.save_path
        self._swap = None if folder is None else Swap(self, SwapFiles(folder, self._options.swap_tag))

    async def describe(self) -> EngineInfo:
        props = await self.ask("GET", "/props")
        slots = await self.ask("GET", "/slots")
        if not isinstance(props, dict) or not isinstance(slots, list) or not slots:
            raise EngineUnavailable("the engine lists no slots; start it with --slots")
        if len(told.objs(slots)) > MOST_SLOTS:
            raise EngineUnavailable(f"the engine lists more than {MOST_SLOTS:,} slots")
        self.slot_context = context = _context(props, slots)
        layout = self._options.kv_layout or KvLayout.SPLIT
        alias = told.text(props.get("model_alias")) or told.text(props.get("model_path")) or "model"
        template = told.text(props.get("chat_template"))
        self.native_park = "is_preempted" in slots[0]
        kv = self._options.kv
        swap = False
        if self._swap is not None:
            known, self._swap.model = self._swap.model, identity_of(props)
            saves = await self._swap.works()
            swap = saves and not self.native_park  # a parked slot counts as busy for ever
            if kv is None and self._info is not None and known == self._swap.model:
                kv = self._info.kv
            if kv is None and saves:
                kv = await measured_kv(self, self._swap.files)
            self._swap.kv = kv
        self._info = EngineInfo(
            model=self._options.model or PurePath(alias).stem[:MOST_NAME_CHARS],
            engine_slots=len(slots),
            slot_context=context,
            kv_layout=layout,
            kv_budget_tokens=context if layout is KvLayout.UNIFIED else context * len(slots),
            kv=kv,
            batch_tokens=self._options.batch_tokens,
            native_park=self.native_park,
            swap=swap,
            reasoning_template=any(mark in template for mark in _REASONING_MARKS),
        )
        return self._info

    async def save(self, slot: int, key: str) -> SavedKv:
        return await self._swapping().save(slot, key)

    async def restore(self, key: str, slot: int) -> RestoredKv:
        return await self._swapping().restore(key, slot)

    async def forget(self, key: str) -> None:
        if self._swap is not None:
            await self._swap.forget(key)

    async def clear_swap(self) -> int:
        return 0 if self._swap is None else await self._swap.clear()

    def swap_space(self) -> int:
        return 0 if self._swap is None else self._swap.files.space()

    def _swapping(self) -> Swap:
        if self._swap is None or self.native_park:
            raise SwapFailed("this engine's slots cannot be saved")
        return self._swap

    async def count_tokens(self, api: str, body: dict[str, Any]) -> int:
        if api in BULK_APIS:
            return await longest_input(self, api, body)
        if api == "chat":
            return len(await self.tokenize(await self.render(body)))
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
            return len(prompt)
        return len(await self.tokenize(prompt[0] if isinstance(prompt, list) else prompt))

    def generation(
        self, api: str, body: dict[str, Any], max_tokens: int, so_far: ReplySoFar | None = None
    ) -> Generation:
        if api in BULK_APIS:
            return BulkGeneration(self, api, body, so_far)
        self.generates = True
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
    settings = told.obj(props.get("default_generation_settings"))
    context = slots[0].get("n_ctx") or settings.get("n_ctx")
    if type(context) is not int or not 1 <= context <= told.MOST_TOKENS:
        raise EngineUnavailable("the engine does not tell its context size")
    return context
