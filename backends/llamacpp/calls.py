"""Tool calls in pieces: put together, and cut off where they can be gone on with. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

Call = dict[str, Any]

_ESCAPE_LENGTH = 2
_UNICODE_ESCAPE_LENGTH = 6


def merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several deltas as one, each call whole: whoever has some of a reply's calls has all of them."""
    whole: dict[str, Any] = {}
    calls: dict[int, Call] = {}
    for part in parts:
        for name, value in part.items():
            if name == "tool_calls":
                for piece in value:
                    _add_piece(calls.setdefault(int(piece.get("index") or 0), {}), piece)
            elif name == "_logprobs":
                logprobs = whole.setdefault(name, {})
                for kind, entries in value.items():
                    logprobs[kind] = [*logprobs.get(kind, []), *(entries or [])]
            elif isinstance(value, str):
                whole[name] = whole.get(name, "") + value
            else:
                whole[name] = value
    if calls:
        whole["tool_calls"] = [calls[index] for index in sorted(calls)]
    return whole


def _add_piece(call: Call, piece: dict[str, Any]) -> None:
    function = call.get("function", {})
    for name, value in (piece.get("function") or {}).items():
        if value:
            function[name] = function.get(name, "") + value if name == "arguments" else value
    call.update({name: value for name, value in piece.items() if value is not None and name != "function"})
    call["function"] = {"arguments": "", **function}


def broken_off(calls: Sequence[Call]) -> tuple[list[Call], str] | None:
    """The calls as far as they can be gone on with, and what closes the arguments of the last one.

    Those are whole but for the last, which ends at the last place inside a text among its arguments: there,
    whatever a chat template makes of arguments, what it writes up to this place is what the model would have
    written. A last call without such a place is left out. None when no call has one.
    """
    for count in range(len(calls), 0, -1):
        function = calls[count - 1]["function"]
        place = last_text_place(function["arguments"])
        if place is not None:
            at, closing = place
            last = {**calls[count - 1], "function": {**function, "arguments": function["arguments"][:at]}}
            return [*calls[: count - 1], last], closing
    return None


def tokens_until(held: Iterable[tuple[int, dict[str, Any]]], call: Call) -> int:
    """How many tokens had been generated when a call was as long as this; `held`: deltas with that count."""
    index, missing = int(call.get("index") or 0), len(call["function"]["arguments"])
    for tokens, part in held:
        for piece in part.get("tool_calls") or []:
            if int(piece.get("index") or 0) == index:
                missing -= len((piece.get("function") or {}).get("arguments") or "")
        if missing <= 0:
            return tokens
    raise ValueError("the call is longer than its deltas")


def goes_on(calls: Sequence[Call], begun: Sequence[Call], closing: str) -> bool:
    """Whether calls, of which the last may break off, are what `broken_off` found gone on with."""
    if len(calls) < len(begun):
        return False
    for call, old in zip(calls, begun, strict=False):
        new, known = call["function"], old["function"]
        told = _value(new["arguments"])
        if new.get("name") != known.get("name") or told is None:
            return False
        if old is begun[-1]:
            return _extends(told, orjson.loads(known["arguments"] + closing))
        if told != _value(known["arguments"]):
            return False
    return True


def _value(json: str) -> Any:
    """What JSON says that may break off, None when it is none."""
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(json)
    place = last_text_place(json)
    if place is None:
        return None
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(json[: place[0]] + place[1])
    return None


def _extends(new: Any, old: Any) -> bool:
    """Whether a value is another one whose last text has become longer, with more after it perhaps."""
    if isinstance(old, str):
        return isinstance(new, str) and new.startswith(old)
    if isinstance(old, dict) and isinstance(new, dict):
        new, old = list(new.items()), list(old.items())
    elif isinstance(old, tuple) and isinstance(new, tuple) and new[0] == old[0]:
        return _extends(new[1], old[1])
    if not isinstance(old, list) or not isinstance(new, list) or not old:
        return bool(new == old)
    return new[: len(old) - 1] == old[:-1] and len(new) >= len(old) and _extends(new[len(old) - 1], old[-1])


def last_text_place(json: str) -> tuple[int, str] | None:
    """The last index inside a string value of JSON that may break off anywhere, and what closes it there.

    ``json[:index] + closing`` is whole JSON. Keys are no values, and no escape is cut in two. None when no
    string value has begun.
    """
    found: tuple[int, str] | None = None
    closers: list[str] = []
    in_value = False  # what comes next in an object belongs to a value
    at = 0
    while at < len(json):
        char = json[at]
        at += 1
        if char in "{[":
            closers.append("}" if char == "{" else "]")
            in_value = char == "["
        elif char in "}]" and closers:
            closers.pop()
        elif char == ":":
            in_value = True
        elif char == ",":
            in_value = bool(closers) and closers[-1] == "]"
        elif char == '"':
            end, place = _text_end(json, at)
            if in_value:
                found = place, '"' + "".join(reversed(closers))
            if end is None:
                return found
            at = end
    return found


def _text_end(json: str, start: int) -> tuple[int | None, int]:
    """Where the string that begins at `start` is over, None when it breaks off, and its last place."""
    at = start
    while at < len(json):
        if json[at] == '"':
            return at + 1, at
        after = at + _unit_length(json, at)
        if after > len(json):
            return None, at
        at = after
    return None, at


def _unit_length(json: str, at: int) -> int:
    """Characters that must not be parted: an escape, or two that are one character."""
    if json[at] != "\\":
        return 1
    if json[at + 1 : at + 2] != "u":
        return _ESCAPE_LENGTH
    high = json[at + 2 : at + 4].lower() in ("d8", "d9", "da", "db")
    return _UNICODE_ESCAPE_LENGTH * (2 if high else 1)
