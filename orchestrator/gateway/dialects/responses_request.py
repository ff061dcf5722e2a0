"""OpenAI's ``responses`` request as the chat request that the engine gets.

Source: the API's reference of ``POST /v1/responses``, the request types of the ``openai`` package, and what
codex sends. Fields that are not named here mean nothing to a local engine and are left out: ``store``,
``include`` but for logprobs, ``metadata``, ``prompt_cache_key``, ``service_tier``, ``safety_identifier``,
``user``, ``truncation``, ``context_management``, and whatever comes next.

- What needs a past that nobody has stored is refused: ``previous_response_id``, ``conversation``, a
  ``prompt`` template, a ``background`` response.
- ``reasoning.effort`` goes to templates that know efforts; ``none`` turns thinking off.
- Sampling fields of the engine that the API does not have are passed on.
- A reply that the input begins with its last item is gone on with.
"""

from __future__ import annotations

from typing import Any

from orchestrator.gateway.dialects.responses_input import chat_messages
from orchestrator.gateway.dialects.responses_object import echoed
from orchestrator.gateway.dialects.responses_tools import Json, choice_fields, read_tools
from orchestrator.gateway.errors import ApiError, bad_value
from orchestrator.gateway.validate import MAX_TOP_LOGPROBS, Ask, make_ask, parse_body, write_body

STATELESS = "nothing is stored here: send the whole conversation as input"
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "prompt templates are stored elsewhere: send instructions and input",
    "background": "responses are not kept here: stream it, or wait for it",
}
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p")
ENGINE_FIELDS = ("seed", "stop", "chat_template_kwargs")
LOGPROBS_INCLUDED = "message.output_text.logprobs"


def responses_ask(raw: bytes) -> Ask:
    """Read, check and translate a request. Raises ApiError (400)."""
    request = parse_body(raw)
    chat = chat_body(request)
    write_body([[echoed(request)]])  # as deep as the events that will repeat it
    return make_ask(write_body(chat), chat, request)


def chat_body(request: Json) -> Json:
    """The chat request. Raises ApiError (400)."""
    for name, reason in REFUSED.items():
        if request.get(name):
            raise ApiError(
                400, f"{name} is not supported: {reason}", param=name, code="unsupported_parameter"
            )
    messages = chat_messages(request)
    chat: Json = {"messages": messages}
    chat |= {name: request[name] for name in ("model", "stream") if request.get(name) is not None}
    chat |= {name: request[name] for name in ENGINE_FIELDS if request.get(name) is not None}
    for name in NUMBERS:
        value = request.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise bad_value(name, "must be a number")
            chat[name] = value
    limit = request.get("max_output_tokens")
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise bad_value("max_output_tokens", "must be a whole number of at least 1")
        chat["max_tokens"] = limit
    chat |= choice_fields(request, read_tools(request))
    return chat | _format(request) | _effort(request) | _logprobs(request, chat) | _begun(messages)


def _format(request: Json) -> Json:
    wanted = _object(_object(request, "text"), "format", "text.format")
    kind = wanted.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        raise bad_value("text.format.type", "must be one of text, json_object, json_schema")
    if not isinstance(wanted.get("schema"), dict):
        raise bad_value("text.format.schema", "must be an object")
    described = {name: value for name, value in wanted.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _effort(request: Json) -> Json:
    effort = _object(request, "reasoning").get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise bad_value("reasoning.effort", "must be a string")
    return {"reasoning_effort": effort}


def _logprobs(request: Json, chat: Json) -> Json:
    included, top = request.get("include"), request.get("top_logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
        raise bad_value("top_logprobs", f"must be a whole number from 0 to {MAX_TOP_LOGPROBS}")
    if not top and not (isinstance(included, list) and LOGPROBS_INCLUDED in included):
        return {}
    if "tools" in chat:
        raise bad_value("top_logprobs" if top else "include", "has no logprobs together with tools")
    return {"logprobs": True, "top_logprobs": top or 0}


def _begun(messages: list[Json]) -> Json:
    """How to go on with a reply that the input begins."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    begun = "content" if last["content"] else "reasoning_content"
    return {"continue_final_message": begun, "add_generation_prompt": False}


def _object(of: Json, name: str, where: str | None = None) -> Json:
    """A field that holds an object; empty when it is not there. Raises ApiError (400)."""
    value: Any = of.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_value(where or name, "must be an object")
    return value
