"""A chat's prompt as a row of pieces of which two prompts can be compared without their text.

A piece is a line of a system or developer message, any other message as a whole, or all tools. They stand in
the order in which most templates put them: instructions, tools, the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.prompts.messages import is_instructions, texts

#: Longer requests are not compared: splitting and hashing them would hold up every other turn's tokens.
MAX_BODY_BYTES = 1 << 20
#: What comes after so many pieces is not compared.
MAX_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes and bytes of a prompt's pieces; `lines` has a 1 where the piece is a line of instructions.

    The hashes are Python's own: they differ from process to process, and tell nothing of the text.
    """

    hashes: list[int]
    sizes: list[int]
    lines: bytes

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of instructions: its message's role, its number there (from 1), its bytes, the text itself."""

    role: str
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt while its turn is accepted: its fingerprint, and what its lines say."""

    fingerprint: Fingerprint
    tools: int | None
    _pieces: list[bytes]
    _starts: list[tuple[int, str]]

    def line(self, piece: int) -> Line:
        """A piece that is a line of instructions."""
        start, role = next(found for found in reversed(self._starts) if found[0] <= piece)
        return Line(role, piece - start + 1, self._pieces[piece].decode(errors="replace"))


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a chat body that has been checked, at most `MAX_PIECES` of it."""
    pieces: list[bytes] = []
    lines = bytearray()
    starts: list[tuple[int, str]] = []
    tools = body.get("tools") or body.get("functions")
    tools_piece = orjson.dumps(tools) if tools else None
    tools_hash = None
    for message in body["messages"]:
        if is_instructions(message):
            starts.append((len(pieces), message["role"]))
            for _, text in texts(message):
                pieces += text.encode(errors="replace").split(b"\n", MAX_PIECES)
            lines += b"\1" * (len(pieces) - len(lines))
        else:
            if tools_piece is not None:
                pieces.append(tools_piece)
                tools_hash, tools_piece = hash(tools_piece), None
            pieces.append(orjson.dumps(message))
            lines += b"\0" * (len(pieces) - len(lines))
        if len(pieces) >= MAX_PIECES:
            break
    pieces = pieces[:MAX_PIECES]
    fingerprint = Fingerprint(list(map(hash, pieces)), list(map(len, pieces)), bytes(lines[:MAX_PIECES]))
    return Prompt(fingerprint, tools_hash, pieces, starts)
