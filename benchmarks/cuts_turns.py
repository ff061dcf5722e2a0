"""The turns of the cut-anywhere bench, and what has to hold of their replies whatever happens to them.

Constrained replies have a long text that their schema prescribes to the letter (``const``), so one
character that is lost or repeated shows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

# A chat template in the manner of those that wrap calls in tags; the words are as few as can be.
_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nFunctions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and THINKS and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENING' }}{%- endif %}
"""


def chat_template(*, thinking: bool) -> str:
    """A template with tools; a thinking one begins each reply inside the model's thoughts."""
    opening = "<think>\\n" if thinking else ""
    return _TEMPLATE.replace("THINKS", str(thinking).lower()).replace("OPENING", opening)


LONG_TEXT = (
    'The ferry "Zoë" left at 6:30: “late again”, said the harbour master; 12 € for a café in 日本.\n'
    "Nobody\\noticed the small grey boat 🙂 that followed.\n"
)
MAX_TOKENS = 400
_THOUGHTS = 25

_FILE = {
    "type": "object",
    "properties": {"path": {"const": "notes/ferry.txt"}, "content": {"const": LONG_TEXT}},
    "required": ["path", "content"],
    "additionalProperties": False,
}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "story": {"const": LONG_TEXT},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "story", "tags"],
    "additionalProperties": False,
}


def _function(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": dict(parameters)}}


PATHS = ("a/long/way/to/the/first/file.py", "another/way/to/the/second/file.py")
WRITE = _function("write_file", _FILE)
READ = _function(
    "read_file",
    {
        "type": "object",
        "properties": {"path": {"enum": list(PATHS)}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WRITE, READ)}
JSON_REPLY = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}


@dataclass
class Reply:
    """A streamed reply as its client puts it together. `marks`: the comments in it."""

    turn: str = ""
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    roles: list[str] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    error: str | None = None
    done: bool = False
    thinks_late: bool = False
    """Whether it reasons after it has said something."""

    def take(self, line: str) -> None:
        """Read one line of the stream."""
        if line.startswith(": "):
            self.marks.append(line[2:])
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self._chunk(orjson.loads(line[6:]))

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"].get("message"))
            return
        self.heads.add(tuple(chunk[name] for name in ("id", "object", "created", "model")))
        if chunk.get("usage"):
            self.usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.roles += [delta["role"]] if "role" in delta else []
            thought = delta.get("reasoning_content") or ""
            self.thinks_late = self.thinks_late or bool(thought and (self.content or self.calls))
            self.reasoning += thought
            self.content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                call = self.calls.setdefault(piece["index"], {"ids": [], "name": "", "arguments": ""})
                call["ids"] += [piece["id"]] if piece.get("id") else []
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
            self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []

    @property
    def tokens(self) -> int:
        """Generated tokens by the reply's own account."""
        return int(self.usages[-1]["completion_tokens"]) if self.usages else 0

    def said(self) -> tuple[Any, ...]:
        """All that a user would see of it."""
        calls = [(call["name"], call["arguments"]) for _, call in sorted(self.calls.items())]
        return self.reasoning, self.content, calls, self.finish_reasons


@dataclass(frozen=True)
class Kind:
    """A kind of turn. `exact`: a cut changes nothing, as it runs on token ids.

    `body` makes the request of a number, `check` says what is wrong with a reply beside what `violations`
    finds in any. `thinking`: which template its engine has. `stop`: it is to end at a stop string from the
    middle of its text. `fresh`: its prompt is evaluated again when it is cut, so that cuts fall into that.
    """

    name: str
    body: Callable[[int], dict[str, Any]]
    check: Callable[[Reply], list[str]]
    exact: bool = False
    thinking: bool = False
    stop: bool = False
    fresh: bool = False


def _ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS, **fields}


def _plain(number: int) -> dict[str, Any]:
    return _ask(
        f"Tell story {number} about a fox, with an emoji in each line.", max_tokens=120, ignore_eos=True
    )


def _long_prompt(number: int) -> dict[str, Any]:
    words = " ".join(f"word{number}{word}" for word in range(250))
    return _ask(f"{words} Tell a story.", max_tokens=40, ignore_eos=True)


def _prose_beside_tools(number: int) -> dict[str, Any]:
    return _ask(f"Tell story {number} about a fox.", max_tokens=120, tools=[WRITE, READ], tool_choice="auto")


def _schema(number: int) -> dict[str, Any]:
    return _ask(f"Describe person {number}.", response_format=JSON_REPLY)


def _practised(text: str, *answers: Sequence[tuple[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request after turns in which calls were made: alone, the small model would answer in prose."""
    messages: list[dict[str, Any]] = []
    for at, calls in enumerate(answers):
        made = [
            {
                "id": f"call{at}{number}",
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps(arguments).decode()},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": "", "reasoning_content": "A call does that."}
        messages += [
            {"role": "user", "content": "Do it."},
            {**answer, "tool_calls": made},
            *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in made),
            {"role": "assistant", "content": "Done."},
        ]
    messages.append({"role": "user", "content": text})
    return {"messages": messages, "max_tokens": MAX_TOKENS, **fields}


_A_READ = ("read_file", {"path": PATHS[0]})
_A_WRITE = ("write_file", {"path": "notes/ferry.txt", "content": LONG_TEXT})
_BOTH_READ = [("read_file", {"path": path}) for path in PATHS]


def _auto_call(number: int) -> dict[str, Any]:
    return _practised(f"Do it, {number}.", [_A_READ], [_A_WRITE], tools=[READ, WRITE])


def _call(number: int) -> dict[str, Any]:
    return _practised(f"Do it, {number}.", [_A_READ], [_A_WRITE], tools=[WRITE], tool_choice="required")


def _short_call(number: int) -> dict[str, Any]:
    return {**_call(number), "max_tokens": 40}


def _named_call(number: int) -> dict[str, Any]:
    choice = {"type": "function", "function": {"name": "write_file"}}
    return _practised(f"Do it, {number}.", [_A_READ], [_A_WRITE], tools=[READ, WRITE], tool_choice=choice)


def _parallel_calls(number: int) -> dict[str, Any]:
    choice = {"tool_choice": "required", "parallel_tool_calls": True}
    return _practised(f"Do it, {number}.", _BOTH_READ, _BOTH_READ, tools=[READ], **choice)


def _thoughtful(body: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """With an end to the thoughts, which the small model would not find."""
    return lambda number: {**body(number), "reasoning_budget_tokens": _THOUGHTS + number % 7}


def _nothing_else(_: Reply) -> list[str]:
    return []


def _breaks_off(reply: Reply) -> list[str]:
    return [] if reply.finish_reasons == ["length"] else ["no end at the limit"]


def _has_reasoning(reply: Reply) -> list[str]:
    return [] if reply.reasoning else ["no reasoning"]


def _fits_schema(reply: Reply) -> list[str]:
    return misfit(reply.content, _PERSON) if "length" not in reply.finish_reasons else []


def _has_a_call(reply: Reply) -> list[str]:
    return [] if reply.calls or reply.finish_reasons == ["length"] else ["no call"]


KINDS = (
    Kind("plain", _plain, _nothing_else, exact=True),
    Kind("plain with a stop string", _plain, _nothing_else, exact=True, stop=True),
    Kind("long prompt", _long_prompt, _nothing_else, fresh=True),
    Kind("prose beside tools", _prose_beside_tools, _nothing_else),
    Kind("prose with a stop string", _prose_beside_tools, _nothing_else, stop=True),
    Kind("JSON schema", _schema, _fits_schema),
    Kind("tool call", _auto_call, _has_a_call),
    Kind("required tool call", _call, _has_a_call),
    Kind("named tool call", _named_call, _has_a_call),
    Kind("parallel tool calls", _parallel_calls, _has_a_call),
    Kind("tool call over its limit", _short_call, _breaks_off),
    Kind("reasoning then prose", _thoughtful(_plain), _has_reasoning, thinking=True),
    Kind("reasoning then JSON", _thoughtful(_schema), _fits_schema, thinking=True),
    Kind("reasoning then a call", _thoughtful(_call), _has_a_call, thinking=True),
)


def violations(kind: Kind, reply: Reply, whole: Reply, body: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reply to `body` that was cut, in words; `whole` is the same turn uninterrupted.

    Where text was tokenised again its continuation may be another one, which need not come to the stop string
    that was chosen from the uninterrupted one. It must not have it, however.
    """
    if reply.error is not None:
        return [f"error: {reply.error}"]
    wrong: list[str] = []

    def hold(condition: object, what: str) -> None:
        if not condition:
            wrong.append(what)

    hold(reply.done, "no end")
    hold(len(reply.heads) == 1, f"ids, created or model change: {reply.heads}")
    hold(reply.roles == ["assistant"], f"roles {reply.roles}")
    hold(len(reply.finish_reasons) == 1, f"finish reasons {reply.finish_reasons}")
    hold(len(reply.usages) == 1, f"{len(reply.usages)} usages")
    hold(not reply.thinks_late, "reasoning after content")
    wrong += _usage(reply, whole, body["max_tokens"])
    wrong += _tool_calls(reply)
    hold(not any(stop in reply.content for stop in body.get("stop", ())), "a stop string in the text")
    # Further on the small model may have written such words itself.
    hold(not reply.content.lstrip().startswith(("<think>", "</think>", "<tool_call>")), "markup")
    if kind.exact:
        hold(reply.said() == whole.said(), "another text than uninterrupted")
        hold(reply.tokens == whole.tokens, f"{reply.tokens} tokens, {whole.tokens} uninterrupted")
    return wrong + kind.check(reply)


def _usage(reply: Reply, whole: Reply, max_tokens: int) -> list[str]:
    if not reply.usages:
        return []
    usage = reply.usages[0]
    tokens = usage["completion_tokens"]
    wrong = []
    if whole.usages and usage["prompt_tokens"] != whole.usages[0]["prompt_tokens"]:
        wrong.append(f"{usage['prompt_tokens']} prompt tokens")
    if usage["total_tokens"] != usage["prompt_tokens"] + tokens:
        wrong.append("usage does not add up")
    if tokens > max_tokens or ("length" in reply.finish_reasons) != (tokens == max_tokens):
        wrong.append(f"{tokens} of {max_tokens} tokens, finish reason {reply.finish_reasons}")
    return wrong


def _tool_calls(reply: Reply) -> list[str]:
    wrong = []
    if reply.calls and reply.finish_reasons == ["stop"]:
        wrong.append("stop after a call")
    if not reply.calls and reply.finish_reasons == ["tool_calls"]:
        wrong.append("no call")
    for call in reply.calls.values():
        if len(call["ids"]) != 1:
            wrong.append(f"a call with the ids {call['ids']}")
        if reply.finish_reasons != ["length"]:
            wrong += misfit(call["arguments"], SCHEMAS.get(call["name"], {"const": "no such function"}))
    return wrong


def misfit(text: str, schema: Mapping[str, Any]) -> list[str]:
    """Why a text is not JSON of a schema, in one sentence; empty when it is."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return [f"not JSON: {text[:60]!r}..."]
    return [] if satisfies(value, schema) else [f"not of its schema: {text[:200]!r}"]


_TYPES: dict[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "integer": int}


def satisfies(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of a schema, as far as the schemas here go."""
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or isinstance(value, bool)):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return set(schema.get("required", ())) <= set(value) <= set(properties) and all(
            satisfies(value[name], properties[name]) for name in value
        )
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(satisfies(item, schema.get("items", {})) for item in value)
    if isinstance(value, str):
        return bool(len(value) <= schema.get("maxLength", len(value)))
    if isinstance(value, int):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True
