"""A request of Ollama's ``/api/chat`` as a chat completion's (docs.ollama.com/api/chat)."""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.gateway.errors import bad_value
from orchestrator.gateway.validate import check_messages

#: Options that mean the same to the engine, by the same name. The others are about loading the model.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
)
#: `num_predict` without end, and until the context is full.
NO_LIMIT = (-1, -2)


def chat_body(given: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat completion. Raises ApiError (400) for what cannot be translated."""
    messages: Any = given.get("messages")
    check_messages(messages)
    options = given.get("options") or {}
    if not isinstance(options, dict):
        raise bad_value("options", "must be an object")
    body = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    body |= {"messages": _messages(messages), "stream": given.get("stream", True)}
    body |= {name: given[name] for name in ("model", "tools") if given.get(name)}
    limit = options.get("num_predict")
    if limit is not None and limit not in NO_LIMIT:
        body["max_tokens"] = limit
    return body | _format(given.get("format")) | _think(given.get("think"))


def _format(wanted: Any) -> dict[str, Any]:
    if isinstance(wanted, dict):
        schema = {"name": "reply", "schema": wanted}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if wanted in (None, ""):
        return {}
    raise bad_value("format", 'must be "json" or a JSON schema')


def _think(wanted: Any) -> dict[str, Any]:
    if wanted is None:
        return {}
    if isinstance(wanted, bool):
        return {"chat_template_kwargs": {"enable_thinking": wanted}}
    if isinstance(wanted, str):
        return {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": wanted}}
    raise bad_value("think", "must be true, false or a level")


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With images as URLs, and with the calls' ids, which Ollama does without.

    There a result is of the call that it names, or of the first without one.
    """
    messages = []
    unanswered: list[dict[str, Any]] = []
    for number, said in enumerate(given):
        content = said.get("content") or ""
        if not isinstance(content, str):
            raise bad_value("messages", "must have texts as their content")
        message: dict[str, Any] = {"role": said.get("role"), "content": content}
        images = said.get("images")
        if images:
            if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
                raise bad_value("messages", "must have images in base64")
            message["content"] = [{"type": "text", "text": content}, *map(_image, images)]
        if said.get("thinking"):
            message["reasoning_content"] = said["thinking"]
        if said.get("tool_calls"):
            message["tool_calls"] = unanswered = _calls(said["tool_calls"], number)
        if said.get("role") == "tool":
            named = [call for call in unanswered if call["function"]["name"] == said.get("tool_name")]
            answered = next(iter(named or unanswered), None)
            message["tool_call_id"] = f"call_{number}" if answered is None else answered["id"]
            unanswered = [call for call in unanswered if call is not answered]
        messages.append(message)
    return messages


def _calls(given: Any, number: int) -> list[dict[str, Any]]:
    """The calls of message `number`, with ids."""
    calls = []
    for at, call in enumerate(given if isinstance(given, list) else [given]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value("messages", "must have tool_calls that name a function")
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        called = {"name": function["name"], "arguments": text}
        calls.append({"id": f"call_{number}_{at}", "type": "function", "function": called})
    return calls


def _image(data: str) -> dict[str, Any]:
    kind = "jpeg" if data.startswith("/9j/") else "png"  # how a JPEG's first bytes read in base64
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
