"""An agent's rules for lines that change from turn to turn: where they match, and the body after them.

Only whole lines of system and developer messages are looked at: what a user, a tool or the model said is
never touched. *Pin*: the line reads as it did when it was first seen. *Move*: the line goes to the end of the
last message of the user or a tool, so that only what the model says next comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.prompts.messages import Message, is_instructions, texts
from orchestrator.prompts.patterns import LinePattern

#: More matching lines than this are not lines that a program puts in front.
MAX_HITS = 64
ANSWERED_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class StableLines:
    """The patterns of one agent's `stable_prefix`. A line that both lists match is pinned."""

    pin: tuple[LinePattern, ...] = ()
    move: tuple[LinePattern, ...] = ()

    @classmethod
    def of(cls, pin: Iterable[str], move: Iterable[str]) -> StableLines:
        """From patterns as the configuration has them."""
        return cls(tuple(map(LinePattern, pin)), tuple(map(LinePattern, move)))

    def __bool__(self) -> bool:
        return bool(self.pin or self.move)


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that a rule matches. `pin` names it among the agent's pinned lines, None for one to move."""

    message: int
    part: int | None
    start: int
    end: int
    line: str
    pin: str | None


def find_lines(messages: Sequence[Message], rules: StableLines) -> list[Hit]:
    """The matching lines in the order of the prompt, at most `MAX_HITS`.

    The second line that a pattern matches is pinned apart from the first.
    """
    hits: list[Hit] = []
    seen: dict[str, int] = {}
    for number, message in enumerate(messages):
        if not is_instructions(message):
            continue
        for part, text in texts(message):
            # By its start, so that a line is one hit.
            found: dict[int, tuple[int, str | None]] = {}
            for patterns, pins in ((rules.pin, True), (rules.move, False)):
                for pattern in patterns:
                    for start, end in pattern.lines(text):
                        found.setdefault(start, (end, pattern.text if pins else None))
            for start, (end, pattern_text) in sorted(found.items()):
                pin = None
                if pattern_text is not None:
                    seen[pattern_text] = seen.get(pattern_text, 0) + 1
                    pin = f"{seen[pattern_text]} {pattern_text}"
                hits.append(Hit(number, part, start, end, text[start:end], pin))
                if len(hits) == MAX_HITS:
                    return hits
    return hits


def apply_rules(
    messages: Sequence[Message], hits: Sequence[Hit], pinned: Mapping[str, str]
) -> tuple[list[Message], int]:
    """The messages after the rules, and how many lines were pinned or moved.

    `pinned`: what each pinned line shall read; one that is not in it stays as it is. Without a message of the
    user or a tool there is no place to move to. The given messages are not changed.
    """
    target = _last_answered(messages)
    result = list(messages)
    moved: list[str] = []
    ruled = 0
    # From the end, so that places further ahead stay where they are.
    for hit in reversed(hits):
        if hit.pin is not None:
            line = pinned.get(hit.pin)
            if line is not None:
                ruled += 1
                if line != hit.line:
                    result[hit.message] = _edited(result[hit.message], hit, line)
        elif target is not None:
            result[hit.message] = _edited(result[hit.message], hit, None)
            moved.append(hit.line.strip())
            ruled += 1
    if target is not None and moved:
        result[target] = _ending_with(result[target], "\n".join(reversed(moved)))
    return result, ruled


def _last_answered(messages: Sequence[Message]) -> int | None:
    """The last message that the model answers, if a line can be written into it."""
    for number in range(len(messages) - 1, -1, -1):
        message = messages[number]
        if message.get("role") in ANSWERED_ROLES:
            return number if isinstance(message.get("content"), str | list) else None
    return None


def _edited(message: Message, hit: Hit, line: str | None) -> Message:
    """The message with another line at the hit's place, or without it."""
    content = message["content"]
    text: str = content if hit.part is None else content[hit.part]["text"]
    before, after = text[: hit.start], text[hit.end :]
    if line is None:
        # A line goes with its break: the one after it, or at the end the one before it.
        before, after = (before, after[1:]) if after else (before[:-1], "")
    new = before + (line or "") + after
    if hit.part is None:
        return {**message, "content": new}
    parts: list[Any] = list(content)
    parts[hit.part] = {**parts[hit.part], "text": new}
    if not new and len(parts) > 1:
        # Hits are worked off from the end: no other place is behind this part.
        del parts[hit.part]
    return {**message, "content": parts}


def _ending_with(message: Message, lines: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": lines}]}
    return {**message, "content": f"{content}\n\n{lines}" if content else lines}
