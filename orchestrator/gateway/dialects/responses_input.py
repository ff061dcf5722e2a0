"""The items of a response's input as chat messages.

What the chat API has no word for becomes text where it says something to a model, and is left out where it
does not, so that a session which once held it can go on.

- ``instructions`` and the ``system`` and ``developer`` messages at the beginning are the system prompt. Later
  ones become user messages, marked and in their place: many chat templates refuse a system message that is
  not the first, and moving it to the front would change the prompt's start, and with it all of the KV.
- What the model said in a row (reasoning, text, calls) is one assistant message, and what the user said in a
  row is one user message: templates ask for alternating roles.
- Calls of any kind (``function_call``, ``custom_tool_call``, ``local_shell_call``, ...) are tool calls, and
  their outputs are tool messages. Images in them are shown by the user, after the last output: few
  templates look for them in a tool message.
- Items without a word for a model are left out: calls of hosted tools, which have their outputs elsewhere
  (``web_search_call``, ...), encrypted reasoning and compactions, and any unknown type.
- An ``item_reference`` is refused: nothing is stored here that it could mean.
"""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.gateway.dialects.responses_tools import INPUT, Json, flat_name
from orchestrator.gateway.errors import ApiError, bad_value

ROLES = ("user", "assistant", "system", "developer")
#: Where the different kinds of calls have what they are called with.
CALL_FIELDS = ("arguments", "action", "operation")
NEED_CALL_ID = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
#: What an item has besides what it says.
LABELS = ("type", "id", "call_id", "status", "execution", "caller")


def chat_messages(request: Json) -> list[Json]:
    """The chat's messages. Raises ApiError (400)."""
    chat = _Chat()
    instructions, given = request.get("instructions"), request.get("input")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise bad_value("instructions", "must be a string")
        chat.system.append(instructions)
    if isinstance(given, str):
        chat.add_user([_text(given)])
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        for index, item in enumerate(given):
            chat.add(item, f"input[{index}]")
    else:
        raise bad_value("input", "must be a string or a list of items")
    return chat.whole()


class _Chat:
    """Messages as they are put together."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self._messages: list[Json] = []
        self._shown: list[Json] = []

    def add(self, item: Json, where: str) -> None:
        """Take the next item."""
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise bad_value(f"{where}.type", "must be a string")
        if kind == "item_reference":
            message = f"{where} refers to a stored item, and nothing is stored here: send the item itself"
            raise ApiError(400, message, param=where, code="unsupported_value")
        if kind in NEED_CALL_ID and not isinstance(item.get("call_id"), str):
            raise bad_value(f"{where}.call_id", "must be a string")
        if kind.endswith("_output") and isinstance(item.get("call_id") or item.get("id"), str):
            self._add_output(item, where)
            return
        self._show()
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind.endswith("_call") and isinstance(item.get("call_id"), str):
            self._add_call(kind, item, where)

    def add_user(self, parts: list[Json]) -> None:
        """What the user says; joins what was said just before."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages[-1]["content"] += parts
        else:
            self._messages.append({"role": "user", "content": parts})

    def whole(self) -> list[Json]:
        """The messages. Raises ApiError (400) when a model cannot go on from them."""
        self._show()
        messages = self._messages
        if messages and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()
        prompt = "\n\n".join(text for text in self.system if text)
        if not messages:
            if not prompt:
                raise bad_value("input", "has nothing in it for a model")
            # Templates want a user message.
            return [{"role": "user", "content": prompt}]
        if "tool_calls" in messages[-1]:
            raise bad_value("input", "must not end with a call: its output is missing")
        for message in messages:
            content = message["content"]
            if isinstance(content, list) and all(part["type"] == "text" for part in content):
                # Every template takes a string, and token ids stay exact.
                message["content"] = "\n".join(part["text"] for part in content)
        return [{"role": "system", "content": prompt}, *messages] if prompt else messages

    def _add_message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise bad_value(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        parts = _parts(item.get("content"), f"{where}.content")
        if role == "user":
            self.add_user(parts)
        elif role == "assistant":
            self._assistant()["content"] += _joined(parts, "")
        elif self._messages:
            self.add_user([_text(f"<{role}>\n{_joined(parts)}\n</{role}>")])
        else:
            self.system.append(_joined(parts))

    def _add_reasoning(self, item: Json) -> None:
        thought = _texts(item.get("content")) or _texts(item.get("summary"))
        if thought:
            said = self._assistant()
            said["reasoning_content"] = said.get("reasoning_content", "") + "\n".join(thought)

    def _add_call(self, kind: str, item: Json, where: str) -> None:
        name = kind.removesuffix("_call") if item.get("name") is None else _string(item, "name", where)
        given = next((item[one] for one in CALL_FIELDS if item.get(one) is not None), "{}")
        arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
        if kind == "custom_tool_call":
            arguments = orjson.dumps({INPUT: _string(item, INPUT, where)}).decode()
        elif not _is_object(arguments):
            # Templates read them; what a model once got wrong must not end the session.
            arguments = orjson.dumps({INPUT: arguments}).decode()
        function = {"name": flat_name(name, item.get("namespace")), "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Json, where: str) -> None:
        output = item.get("output")
        if output is None:
            output = orjson.dumps({name: item[name] for name in item if name not in LABELS}).decode()
        elif isinstance(output, dict):
            output = orjson.dumps(output).decode()
        parts = _parts(output, f"{where}.output")
        self._shown += [part for part in parts if part["type"] != "text"]
        call_id = item.get("call_id") or item["id"]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": _joined(parts)})

    def _show(self) -> None:
        """Let the user show what the outputs had besides text."""
        if self._shown:
            self.add_user(self._shown)
            self._shown = []

    def _assistant(self) -> Json:
        """The message of what the model says now."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def _parts(content: Any, where: str) -> list[Json]:
    """A string or a list of parts as a chat's parts."""
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_value(where, "must be a string or a list of parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Json, where: str) -> Json:
    kind = part.get("type")
    if isinstance(part.get("text"), str):
        return _text(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return _text(part["refusal"])
    if kind in ("input_image", "image_url", "computer_screenshot"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        return _absent("image", part) if not isinstance(url, str) else _image(url)
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    if kind == "input_file":
        return _absent("file", part)
    if not isinstance(kind, str):
        raise bad_value(f"{where}.type", "must be a string")
    return _text(orjson.dumps(part).decode())


def _string(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{where}.{name}", "must be a string")
    return value


def _absent(what: str, part: Json) -> Json:
    """A note in the place of what cannot be read here: a file, or what was uploaded elsewhere."""
    name = next((part[field] for field in ("filename", "file_id") if isinstance(part.get(field), str)), "")
    return _text(f"[{what} {name}: it cannot be read here]" if name else f"[{what}: it cannot be read here]")


def _image(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _joined(parts: list[Json], between: str = "\n") -> str:
    return between.join(part["text"] for part in parts if part["type"] == "text")


def _texts(parts: Any) -> list[str]:
    """The texts of a reasoning item's content or summary."""
    if not isinstance(parts, list):
        return []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False
