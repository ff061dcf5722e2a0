"""Anthropic's ``/v1/messages``."""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.anthropic_errors import ANTHROPIC_ERRORS, AnthropicErrors
from orchestrator.gateway.dialects.anthropic_reply import (
    message,
    signature,
    stopped,
    tool_blocks,
    usage,
)
from orchestrator.gateway.dialects.anthropic_request import messages_ask
from orchestrator.gateway.dialects.anthropic_stream import MessageChunks
from orchestrator.gateway.dialects.base import Chunks, Dialect, Head
from orchestrator.gateway.validate import Ask


class Messages(Dialect):
    """``/v1/messages``."""

    api = "chat"
    prompt_field = "messages"
    errors = ANTHROPIC_ERRORS

    def errors_of(self, turn: str) -> AnthropicErrors:
        return AnthropicErrors(turn)

    def ask(self, raw: bytes) -> Ask:
        return messages_ask(raw)

    def chunks(self, head: Head) -> Chunks:
        return MessageChunks(head)

    def whole(self, head: Head, reply: Collector) -> bytes:
        content: list[dict[str, Any]] = []
        thought, text = reply.text("reasoning_content"), reply.text("content")
        if thought:
            content.append({"type": "thinking", "thinking": thought, "signature": signature(head)})
        if text:
            content.append({"type": "text", "text": text})
        calls = tool_blocks(head, reply, reply.finish_reason)
        ended = stopped(reply.finish_reason, bool(calls), reply.stop_sequence)
        said = {"content": [*content, *calls], **ended}
        return orjson.dumps(message(head, usage(reply.usage)) | said)
