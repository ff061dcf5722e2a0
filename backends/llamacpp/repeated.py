"""What a server repeats of a reply that it continues, left out of its deltas. Pure."""

from __future__ import annotations

from typing import Any

REASONING, CONTENT = "reasoning_content", "content"


class RepeatedText:
    """Takes the deltas of a reply that was asked for with `echo`, and lets through what is new in them.

    Its pieces may fall anywhere. Chat parsers trim spaces around tags, and templates put line breaks next to
    them: text may begin with other spaces than it did, and reasoning that content follows may end with
    others. None of that is new.
    """

    def __init__(self, reasoning: str, content: str, *, in_content: bool) -> None:
        """`in_content`: the reply goes on in its content, or in calls after that; else in its reasoning."""
        self._in_content = in_content
        text = content if in_content else reasoning
        self._rest = text.lstrip()
        self._spaces = text[: len(text) - len(self._rest)]
        self._begun = False
        self.over = False

    def left_out(self, part: dict[str, Any]) -> dict[str, Any]:
        """What of a delta is new. Raises ValueError when the server repeats another text."""
        if self.over:
            return part
        kept = {name: value for name, value in part.items() if name not in (REASONING, CONTENT)}
        if "tool_calls" in part:
            self.over = True
        if self._in_content:
            new = self._after(part.get(CONTENT) or "")
            return {**kept, CONTENT: new} if new else kept
        new = self._after(part.get(REASONING) or "")
        if new:
            kept[REASONING] = new
        if part.get(CONTENT):
            self.over = True
            kept[CONTENT] = part[CONTENT]
        return kept

    def _after(self, text: str) -> str:
        """The rest of a text behind what is repeated."""
        if not self._begun:
            text = self._without_spaces(text)
            self._begun = bool(text)
        if not text:
            return ""
        if not text.startswith(self._rest[: len(text)]):
            raise ValueError("another text than the one that was handed back")
        new, self._rest = text[len(self._rest) :], self._rest[len(text) :]
        self.over = self.over or not self._rest
        return new

    def _without_spaces(self, text: str) -> str:
        """A first piece without the spaces that the text began with, or with others in their place."""
        if self._spaces.startswith(text):
            self._spaces = self._spaces[len(text) :]
            return ""
        text = text.removeprefix(self._spaces)
        return text.lstrip() if self._rest else text
