"""Anthropic's ``messages`` request as the chat request that the engine gets.

Source: the API's reference of ``POST /v1/messages``, and the request types of the ``anthropic`` package.
Fields that are not named here mean nothing to a local engine and are left out: ``metadata``,
``service_tier``, ``context_management``, ``container``, betas, and whatever comes next.

- ``thinking``: ``disabled`` turns it off, ``enabled`` limits it to its budget; ``adaptive``, or none at all,
  is what the model's template does by itself. ``output_config.effort`` goes to templates that know efforts.
- Tools without an ``input_schema`` are run by Anthropic or defined by a name that its models were trained
  on. No local model knows those, so they are not offered to it.
- A reply that the client began is gone on with.
"""

from __future__ import annotations

from orchestrator.gateway.dialects.anthropic_content import Json, chat_messages
from orchestrator.gateway.errors import bad_value, quoted
from orchestrator.gateway.validate import MAX_STOPS, Ask, make_ask, parse_body, write_body

CHOICES = {"any": "required", "none": "none"}
KINDS_OF_CHOICE = ("auto", "any", "tool", "none")


def messages_ask(raw: bytes) -> Ask:
    """Read, check and translate a request. Raises ApiError (400)."""
    body = parse_body(raw)
    if body.get("max_tokens") is None:
        raise bad_value("max_tokens", "is required")
    return _ask(chat_body(body))


def count_ask(raw: bytes) -> Ask:
    """The same for a request of ``count_tokens``, which limits nothing. Raises ApiError (400)."""
    return _ask(chat_body(parse_body(raw)))


def _ask(chat: Json) -> Ask:
    return make_ask(write_body(chat), chat)


def chat_body(body: Json) -> Json:
    """The chat request. Raises ApiError (400)."""
    messages = chat_messages(body.get("system"), body.get("messages"))
    chat: Json = {"messages": messages}
    chat |= {name: body[name] for name in ("model", "max_tokens", "stream") if body.get(name) is not None}
    for name in ("temperature", "top_p", "top_k"):
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise bad_value(name, "must be a number")
            chat[name] = value
    stop = body.get("stop_sequences")
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(word, str) for word in stop):
            raise bad_value("stop_sequences", "must be a list of strings")
        if len(stop) > MAX_STOPS:
            raise bad_value("stop_sequences", f"must have at most {MAX_STOPS} strings, not {len(stop)}")
        chat["stop"] = stop
    return chat | _tools(body) | _thinking(body) | _format(body) | _begun(messages)


def _begun(messages: list[Json]) -> Json:
    """How to go on with a reply that the client began. Takes an empty beginning out of the messages."""
    last = messages[-1] if messages else {"role": "system"}
    if last["role"] == "assistant" and set(last) == {"role", "content"} and not last["content"]:
        messages.pop()
        return _begun(messages)
    if last["role"] == "system":
        raise bad_value("messages", "must contain a user message")
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last:
        raise bad_value("messages", "must not end with tool_use blocks: their tool_result blocks are missing")
    begun = "content" if last["content"] else "reasoning_content"
    return {"continue_final_message": begun, "add_generation_prompt": False}


def _tools(body: Json) -> Json:
    tools, choice = body.get("tools"), _object(body, "tool_choice")
    if tools is None:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_value("tools", "must be a list of objects")
    functions = [
        _function(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if tool.get("input_schema") is not None
    ]
    kind = choice.get("type", "auto")
    if kind not in KINDS_OF_CHOICE:
        raise bad_value("tool_choice.type", f"must be one of {', '.join(KINDS_OF_CHOICE)}")
    wanted = choice.get("name") if kind == "tool" else None
    if kind == "tool" and not any(tool.get("name") == wanted for tool in tools):
        raise bad_value("tool_choice.name", f"is no tool of this request: {quoted(str(wanted))}")
    if not functions:
        return {}
    chat: Json = {"tools": functions}
    if kind in CHOICES:
        chat["tool_choice"] = CHOICES[kind]
    elif any(one["function"]["name"] == wanted for one in functions):
        chat["tool_choice"] = {"type": "function", "function": {"name": wanted}}
    if choice.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False
    return chat


def _function(tool: Json, where: str) -> Json:
    name, schema = tool.get("name"), tool["input_schema"]
    if not isinstance(name, str) or not name:
        raise bad_value(f"{where}.name", "must be a string")
    if not isinstance(schema, dict):
        raise bad_value(f"{where}.input_schema", "must be an object")
    function: Json = {"name": name, "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _thinking(body: Json) -> Json:
    thinking, effort = _object(body, "thinking"), _object(body, "output_config").get("effort")
    if thinking.get("type") == "disabled":
        return {"reasoning_effort": "none"}
    chat: Json = {}
    if effort is not None:
        if not isinstance(effort, str):
            raise bad_value("output_config.effort", "must be a string")
        chat["reasoning_effort"] = effort
    if thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        if type(budget) is not int or budget < 1:
            raise bad_value("thinking.budget_tokens", "must be a whole number of at least 1")
        chat["thinking_budget_tokens"] = budget
    return chat


def _format(body: Json) -> Json:
    wanted = _object(_object(body, "output_config"), "format", "output_config.format")
    if wanted.get("type") != "json_schema":
        return {}
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise bad_value("output_config.format.schema", "must be an object")
    named = {"name": "output", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _object(body: Json, name: str, where: str | None = None) -> Json:
    """A field that holds an object; empty when it is not there. Raises ApiError (400)."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_value(where or name, "must be an object")
    return value
