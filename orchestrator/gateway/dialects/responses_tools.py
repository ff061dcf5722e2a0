"""Tools as the Responses API has them, and as the functions that a chat offers.

- ``function``: the same, in the chat's form.
- ``custom``: a freeform tool, called with text. A chat's functions are called with JSON, so it becomes one
  whose only argument is that text. A grammar is described to the model, not enforced.
- ``namespace``: a group of functions and freeform tools; codex has its MCP servers' tools and its agents' in
  such. A member's name in the chat begins with its namespace's, and calls come back with both apart.
- All others are run by OpenAI (``web_search``, ``file_search``, ``mcp``, ...) or are known to its models only
  (``local_shell``, ``tool_search``, ...). No local model could use those, so they are not offered.
- ``defer_loading`` is ignored: there is no search for tools, all are there from the start. Tools that come
  with items of the input are offered as well.
- A ``tool_choice`` of one tool offers that tool only: llama.cpp takes a named choice for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.gateway.errors import bad_value, quoted

Json = dict[str, Any]

#: The argument of a function that stands for a freeform tool; the API calls it so as well.
INPUT = "input"
#: What codex calls the group of those that are in none.
NO_NAMESPACE = (None, "", "functions")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool by the name that the client has for it."""

    name: str
    namespace: str | None = None
    freeform: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions to offer, and what each of them is to the client, both by their names in the chat."""

    functions: dict[str, Json] = field(default_factory=dict)
    known: dict[str, Tool] = field(default_factory=dict)


def flat_name(name: str, namespace: Any) -> str:
    """A tool's name in the chat."""
    if not isinstance(namespace, str) or namespace in NO_NAMESPACE:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(request: Json) -> Tools:
    """The tools of a request. Raises ApiError (400)."""
    tools = Tools()
    for where, given in _lists(request):
        _add(tools, given, where, None)
    return tools


def choice_fields(request: Json, tools: Tools) -> Json:
    """The chat's ``tools`` and which of them may or must be called. Raises ApiError (400)."""
    names, mode = _choice(request.get("tool_choice"), tools)
    if mode == "required" and not names:
        raise bad_value("tool_choice", "requires a call, but there is no function or custom tool to call")
    if not names:
        return {}
    chat: Json = {"tools": [tools.functions[name] for name in names]}
    if mode != "auto":
        chat["tool_choice"] = mode
    parallel = request.get("parallel_tool_calls")
    if parallel is not None:
        if not isinstance(parallel, bool):
            raise bad_value("parallel_tool_calls", "must be true or false")
        chat["parallel_tool_calls"] = parallel
    return chat


def _lists(request: Json) -> Iterator[tuple[str, Any]]:
    """All lists of tools, and where they are."""
    if request.get("tools") is not None:
        yield "tools", request["tools"]
    items = request.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
            yield f"input[{index}].tools", item.get("tools")


def _add(tools: Tools, given: Any, where: str, namespace: str | None) -> None:
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise bad_value(where, "must be a list of objects")
    for index, tool in enumerate(given):
        place = f"{where}[{index}]"
        kind = tool.get("type")
        if kind not in ("function", "custom", "namespace"):
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise bad_value(f"{place}.name", "must be a string")
        if kind == "namespace":
            _add(tools, tool.get("tools"), f"{place}.tools", name)
            continue
        flat = flat_name(name, namespace)
        if flat not in tools.known:
            tools.functions[flat] = {"type": "function", "function": _function(flat, tool, place)}
            own = None if namespace in NO_NAMESPACE else namespace
            tools.known[flat] = Tool(name, own, freeform=kind == "custom")


def _function(flat: str, tool: Json, where: str) -> Json:
    description = tool.get("description")
    description = description if isinstance(description, str) else ""
    if tool["type"] == "custom":
        text = {"type": "string", "description": "The whole input, as plain text."}
        parameters: Any = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        return {"name": flat, "description": description + _grammar(tool), "parameters": parameters}
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise bad_value(f"{where}.parameters", "must be an object")
    strict = {"strict": tool["strict"]} if isinstance(tool.get("strict"), bool) else {}
    return {"name": flat, "description": description, "parameters": parameters, **strict}


def _grammar(tool: Json) -> str:
    """What a freeform tool's description has to add about its input."""
    wanted = tool.get("format")
    if not isinstance(wanted, dict) or not isinstance(wanted.get("definition"), str):
        return ""
    return f"\n\nThe input must match this grammar ({wanted.get('syntax')}):\n{wanted['definition']}"


def _choice(choice: Any, tools: Tools) -> tuple[list[str], str]:
    """The names in the chat of the tools to offer, and the chat's ``tool_choice``."""
    every = list(tools.functions)
    if choice is None:
        return every, "auto"
    if isinstance(choice, str) and choice in CHOICES:
        return every, choice
    if not isinstance(choice, dict):
        raise bad_value("tool_choice", "must be none, auto, required, or an object that names tools")
    if choice.get("type") == "allowed_tools":
        allowed, mode = choice.get("tools"), choice.get("mode", "auto")
        if not isinstance(allowed, list) or mode not in ("auto", "required"):
            raise bad_value("tool_choice", "of type allowed_tools needs tools, and a mode: auto or required")
        return [name for name in every if any(_names(one, tools.known[name]) for one in allowed)], mode
    named = [name for name in every if _names(choice, tools.known[name])]
    if not named:
        wanted = quoted(str(choice.get("name") or choice.get("type")))
        raise bad_value("tool_choice", f"names no function or custom tool of this request: {wanted}")
    return named, "required"


def _names(choice: Any, tool: Tool) -> bool:
    """Whether a choice means this tool."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return False
    is_freeform = choice["type"] == "custom"
    return (choice.get("name"), choice.get("namespace", tool.namespace), is_freeform) == (
        tool.name,
        tool.namespace,
        tool.freeform,
    )
