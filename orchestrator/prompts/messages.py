"""Which of a chat's messages are instructions, and where their text is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

INSTRUCTION_ROLES = frozenset({"system", "developer"})

Message = Mapping[str, Any]


def is_instructions(message: Message) -> bool:
    """Whether the client's program wrote the message, not its user, a tool or the model."""
    role = message.get("role")
    return isinstance(role, str) and role in INSTRUCTION_ROLES


def texts(message: Message) -> Iterator[tuple[int | None, str]]:
    """The message's texts, each with the number of its part, None for a content that is one text."""
    content = message.get("content")
    if isinstance(content, str):
        yield None, content
    elif isinstance(content, list):
        for number, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield number, part["text"]
