"""Anthropic's messages and content blocks as chat messages.

What the chat API has no word for becomes text, so that a history that once held it can still be sent:
a document is its text, a block of an unknown kind is its JSON, a file that is not here is a note.

- Leading ``system`` and ``developer`` messages join the system prompt. Later ones become user messages,
  marked and in their place: many chat templates refuse a system message that is not the first, and moving
  it to the front would change the prompt's start, and with it everything that is in the KV cache.
- Messages of one role in a row are one turn, as in Anthropic's API: templates ask for alternating roles.
- A user message's tool results come first, as messages of their own, right after the calls.
- ``cache_control`` is ignored: prefixes are found without it.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from orchestrator.gateway.errors import bad_value, quoted
from orchestrator.gateway.validate import check_messages

Json = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")


def chat_messages(system: Any, messages: Any) -> list[Json]:
    """The chat's messages. Raises ApiError (400)."""
    check_messages(messages)
    prompt = [] if system is None else _parts(system, "system")
    chat: list[Json] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise bad_value(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        content, where = message.get("content"), f"{where}.content"
        if role == "user":
            _add_user(chat, content, where)
        elif role == "assistant":
            _add_assistant(chat, content, where)
        elif chat:
            _join_user(chat, [_text(f"<{role}>\n{_joined(_parts(content, where))}\n</{role}>")])
        else:
            prompt += _parts(content, where)
    for message in chat:
        if isinstance(message["content"], list):
            message["content"] = _collapsed(message["content"])
    system_prompt = _joined(prompt)
    return [{"role": "system", "content": system_prompt}, *chat] if system_prompt else chat


def _add_user(chat: list[Json], content: Any, where: str) -> None:
    results: list[Json] = []
    parts: list[Json] = []
    for place, block in _blocks(content, where):
        if block.get("type") == "tool_result":
            results.append(_result(block, place))
        else:
            parts += _part(block, place)
    chat += results
    if parts or not results:
        _join_user(chat, parts)


def _join_user(chat: list[Json], parts: list[Json]) -> None:
    if chat and chat[-1]["role"] == "user":
        chat[-1]["content"] += parts
    else:
        chat.append({"role": "user", "content": parts})


def _result(block: Json, where: str) -> Json:
    parts = [] if block.get("content") is None else _parts(block["content"], f"{where}.content")
    if block.get("is_error") is True:
        parts = [_text("Error:"), *parts]
    call = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call, "content": _collapsed(parts)}


def _add_assistant(chat: list[Json], content: Any, where: str) -> None:
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    said = chat[-1]
    for place, block in _blocks(content, where):
        kind = block.get("type")
        if kind == "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + _string(block, "thinking", place)
        elif kind == "tool_use":
            said.setdefault("tool_calls", []).append(_call(block, place))
        else:
            # One text that a reply was split at its thinking or calls: nothing goes between the pieces.
            said["content"] += "".join(part.get("text", "") for part in _part(block, place))


def _call(block: Json, where: str) -> Json:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise bad_value(f"{where}.input", "must be an object")
    # With the spaces that models write: where a template prints this text as it is, the KV still fits.
    function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _parts(content: Any, where: str) -> list[Json]:
    """A string or blocks as a chat's text and image parts."""
    return [part for place, block in _blocks(content, where) for part in _part(block, place)]


def _blocks(content: Any, where: str) -> list[tuple[str, Json]]:
    """The blocks and where each of them is."""
    if isinstance(content, str):
        return [(where, _text(content))]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_value(where, "must be a string or a list of content blocks")
    return [(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _part(block: Json, where: str) -> list[Json]:
    kind = _string(block, "type", where)
    if kind == "text":
        return [_text(_string(block, "text", where))]
    if kind == "image":
        return [_image(_source(block, where), f"{where}.source")]
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        return [_text(f"{block.get('title')} ({block.get('source')})"), *_parts(block.get("content"), where)]
    if kind == "redacted_thinking":
        return []
    return [_text(orjson.dumps({k: v for k, v in block.items() if k != "cache_control"}).decode())]


def _image(source: Json, where: str) -> Json:
    kind = source.get("type")
    if kind == "base64":
        url = f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"
    elif kind == "url":
        url = _string(source, "url", where)
    else:
        return _absent("image", source)
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, where: str) -> list[Json]:
    source = _source(block, where)
    kind, where = source.get("type"), f"{where}.source"
    if kind == "text":
        inside = [_text(_string(source, "data", where))]
    elif kind == "content":
        inside = _parts(source.get("content"), f"{where}.content")
    else:
        inside = [_absent("document", source)]
    about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return [*map(_text, about), *inside]


def _absent(what: str, source: Json) -> Json:
    """A note in the place of what cannot be read here: a PDF, or a file that was uploaded elsewhere."""
    kind = quoted(str(source.get("media_type") or source.get("type")))
    return _text(f"[{what} of type {kind}, which cannot be read here]")


def _source(block: Json, where: str) -> Json:
    source = block.get("source")
    if not isinstance(source, dict):
        raise bad_value(f"{where}.source", "must be an object")
    return source


def _string(block: Json, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{where}.{name}", "must be a string")
    return value


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _joined(parts: list[Json]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _collapsed(parts: list[Json]) -> str | list[Json]:
    """As one string where that says it all: every template takes that, and token ids stay exact."""
    return _joined(parts) if all(part["type"] == "text" for part in parts) else parts
