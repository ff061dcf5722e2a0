"""The ChatML template: chat messages to prompt text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from backends.simulated.events import ApiError

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What `GET /props` shows; `apply_template` also renders tools and tool calls."""


def apply_template(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool | Literal["content", "reasoning_content"] = False,
) -> str:
    """Renders a chat. With `continue_final_message` the last message, an assistant's, is left open so that
    the engine goes on inside it: inside its reasoning if it says so, else inside its content. The reasoning
    of other messages is left out. Raises ApiError 400 for messages it cannot render."""
    if not messages:
        raise ApiError(400, "'messages' must not be empty")
    if continue_final_message and add_generation_prompt:
        raise ApiError(400, "continue_final_message and add_generation_prompt exclude each other")
    if continue_final_message and messages[-1].get("role") != "assistant":
        raise ApiError(400, "continue_final_message needs an assistant message at the end")
    parts: list[str] = []
    if tools:
        listing = "\n".join(orjson.dumps(tool).decode() for tool in tools)
        parts.append(f"<|im_start|>system\n# Tools\n{listing}<|im_end|>\n")
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"messages[{index}] has no role")
        parts.append(f"<|im_start|>{role}\n")
        if continue_final_message and index == len(messages) - 1:
            if reasoning := message.get("reasoning_content"):
                parts.append(f"<think>{reasoning}")
                if continue_final_message == "reasoning_content":
                    continue
                parts.append("</think>")
            parts.append(message_text(message))
        else:
            parts.append(f"{message_text(message)}<|im_end|>\n")
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


_CALL_BEGIN, _CALL_END = "<tool_call>", "</tool_call>"
_CALL = re.compile(
    r'<tool_call>\{"name": "(?P<name>[^"]*)", "arguments": (?P<arguments>.*?)(?:\}</tool_call>|\Z)', re.S
)


def call_text(name: str, arguments: str) -> str:
    """A tool call as the model would write it."""
    return f'{_CALL_BEGIN}{{"name": "{name}", "arguments": {arguments}}}{_CALL_END}'


def read_calls(content: str) -> tuple[str, list[tuple[str, str]]]:
    """The text before any tool call, and the calls after it as (name, arguments); the last may break off."""
    calls = [(match["name"], match["arguments"]) for match in _CALL.finditer(content)]
    return content.partition(_CALL_BEGIN)[0], calls


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message: its content (a string or text parts), then its tool calls."""
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        text = "".join(str(part.get("text", "")) for part in content)
    else:
        raise ApiError(400, "message content must be a string, an array of text parts, or null")
    calls = message.get("tool_calls") or ()
    for function in (call.get("function") or {} for call in calls):
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments).decode()
        text += call_text(str(function.get("name", "")), arguments)
    return text


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text of the last user message, empty if there is none."""
    return next((message_text(m) for m in reversed(messages) if m.get("role") == "user"), "")
