"""What an engine tells, taken for what it has to be or refused: nothing that comes from there is trusted.

A number that is none, or that no engine can mean, would otherwise end up in the books, in the output log and
in other people's replies. All functions raise EngineUnavailable: another try may tell something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from backends.protocol import EngineUnavailable

#: More tokens than any context has, in slots, prompts and replies.
MOST_TOKENS = 100_000_000
#: An engine's word for a kind of error.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_DELTA_TEXTS = ("content", "reasoning_content")
_CALL_TEXTS = ("id", "type")
_FUNCTION_TEXTS = ("name", "arguments")


def strange() -> EngineUnavailable:
    """The error."""
    return EngineUnavailable("the engine's answer is in an unknown shape")


def count(value: Any, most: int = MOST_TOKENS) -> int:
    """A number from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise strange()
    return value


def text(value: Any) -> str:
    """A text, empty for none."""
    if type(value) is str:
        return value
    if value is not None:
        raise strange()
    return ""


def ids(value: Any) -> list[int]:
    """Token ids, none of them for none."""
    if value is None:
        return []
    if type(value) is not list:
        raise strange()
    for token in value:
        if type(token) is not int or token < 0:
            raise strange()
    return value


def obj(value: Any) -> dict[str, Any]:
    """An object, empty for none."""
    if type(value) is dict:
        return value
    if value is not None:
        raise strange()
    return {}


def objs(value: Any) -> list[dict[str, Any]]:
    """A list of objects, empty for none."""
    if value is None:
        return []
    if type(value) is not list or not all(type(one) is dict for one in value):
        raise strange()
    return value


def number(value: Any) -> float:
    """A number that is one."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise strange()
    return float(value)


def word(value: Any, otherwise: str) -> str:
    """A short word, or what is taken instead of anything else."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else otherwise


def one_of(value: Any, words: Sequence[str]) -> str | None:
    """The one of these words that is told, None for anything else."""
    return value if value in words else None


def delta(value: Any) -> dict[str, Any]:
    """A chat's delta without its role and what is empty: texts, by any name, and pieces of tool calls."""
    part: dict[str, Any] = {}
    for name, said in obj(value).items():
        if not said or name == "role":
            continue
        if name == "tool_calls":
            part[name] = [_call(piece) for piece in objs(said)]
        elif name in _DELTA_TEXTS or isinstance(said, str):
            part[name] = text(said)
    return part


def _call(piece: dict[str, Any]) -> dict[str, Any]:
    count(piece.get("index") or 0)
    function = obj(piece.get("function"))
    for name in _CALL_TEXTS:
        text(piece.get(name))
    for name in _FUNCTION_TEXTS:
        text(function.get(name))
    return piece
