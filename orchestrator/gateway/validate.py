"""What a generation request asks for. Only the fields that the service itself needs are checked.

Fields whose names start with ``swarm_`` are the service's own and are taken out. All others go to the
engine as they came: the stored body is the client's bytes unless something was taken out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from orchestrator.gateway.errors import ApiError, bad_value

PRIVATE_PREFIX = "swarm_"
# orjson reads deeper than it writes; a body nobody can write again is refused at the door.
WRITABLE_DEPTH = 254
TOKEN_ID_CEILING = 1 << 31
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")
# OpenAI allows 4; local clients that complete code send more. Each is looked for at every token.
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request. `max_tokens` is None when the client set no limit.

    `request`: the client's own request as parsed, for a dialect whose body is a translation of it.
    """

    raw: bytes
    body: dict[str, Any]
    model: str | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    request: dict[str, Any] = field(default_factory=dict)


def chat_ask(raw: bytes) -> Ask:
    """Read and check a chat's body. Raises ApiError (400)."""
    body, raw = _read(raw)
    check_messages(body.get("messages"))
    _check_format(body.get("response_format"))
    _check_tools(body)
    _check_logprobs(body)
    return make_ask(raw, body)


def completion_ask(raw: bytes) -> Ask:
    """Read and check a completion's body. Raises ApiError (400)."""
    body, raw = _read(raw)
    _check_prompt(body.get("prompt"))
    _check_unsupported(body)
    return make_ask(raw, body)


def make_ask(raw: bytes, body: dict[str, Any], request: dict[str, Any] | None = None) -> Ask:
    """What a body with a good prompt asks for; `request` is what it was translated from, if it was.

    Raises ApiError (400).
    """
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_value("model", "must be a string")
    for name in ("n", "n_cmpl"):  # the engine's own name for it
        n = body.get(name)
        if n is not None and (type(n) is not int or n != 1):
            raise bad_value(name, "must be 1: one choice a request")
    _check_stop(body.get("stop"))
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_value("stream", "must be true or false")
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    request = body if request is None else request
    return Ask(raw, body, model, _limit(body), bool(stream), include_usage, request)


def _read(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The body without the service's own fields, and its bytes."""
    body = parse_body(raw)
    private = [key for key in body if key.startswith(PRIVATE_PREFIX)]
    if not private:
        return body, raw
    for key in private:
        del body[key]
    return body, orjson.dumps(body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """A body as JSON. Raises ApiError (400)."""
    try:
        body = orjson.loads(raw)
        if raw.count(b"{") + raw.count(b"[") > WRITABLE_DEPTH:
            write_body(body)
    except orjson.JSONDecodeError as error:
        # The decoder's message never quotes the body.
        place = f"line {error.lineno} column {error.colno}"
        raise ApiError(
            400, f"the body is not valid JSON: {error.msg} ({place})", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def write_body(body: Any) -> bytes:
    """A body's JSON. Raises ApiError (400): a translation may be deeper than what it was made from."""
    try:
        return orjson.dumps(body)
    except (orjson.JSONEncodeError, RecursionError):
        message = f"the body is nested deeper than {WRITABLE_DEPTH} levels"
        raise ApiError(400, message, code="invalid_json") from None


def check_messages(messages: Any) -> None:
    """Raises ApiError (400) unless it is a list of messages."""
    if not isinstance(messages, list) or not messages:
        raise bad_value("messages", "must be a list with at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise bad_value("messages", "must contain objects only")


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        return
    if isinstance(prompt, list) and prompt:
        if len(prompt) == 1 and isinstance(prompt[0], str):
            return
        if all(type(token) is int and 0 <= token < TOKEN_ID_CEILING for token in prompt):
            return
    raise bad_value("prompt", "must be a string, a list with one string, or a list of token ids")


def _check_unsupported(body: dict[str, Any]) -> None:
    """What a completion may ask for elsewhere, and would be ignored here."""
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:  # 0 asks for those of the tokens themselves
        raise bad_value("logprobs", "is not supported here; ask for it on /v1/chat/completions")
    best_of = body.get("best_of")
    if best_of is not None and (type(best_of) is not int or best_of != 1):
        raise bad_value("best_of", "must be 1: one choice a request")
    if body.get("echo") not in (None, False):
        raise bad_value("echo", "is not supported: the reply never repeats the prompt")
    if body.get("suffix") not in (None, ""):
        raise bad_value("suffix", "is not supported: put what fills the middle into the prompt")


def _check_stop(stop: Any) -> None:
    if stop is None or isinstance(stop, str):
        return
    if not isinstance(stop, list) or not all(isinstance(word, str) for word in stop):
        raise bad_value("stop", "must be a string or a list of strings")
    if len(stop) > MAX_STOPS:
        raise bad_value("stop", f"must have at most {MAX_STOPS} strings, not {len(stop)}")


def _check_format(response_format: Any) -> None:
    if response_format is None:
        return
    if not isinstance(response_format, dict) or not isinstance(response_format.get("type"), str):
        raise bad_value("response_format", "must be an object with a type")
    if response_format["type"] == "json_schema":
        described = response_format.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema", {}), dict):
            raise bad_value("response_format", "of type json_schema needs json_schema with a schema")


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools is not None and (
        not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)
    ):
        raise bad_value("tools", "must be a list of objects")
    if not all(isinstance(tool.get("function") or {}, dict) for tool in tools or ()):
        raise bad_value("tools", "must have a function that is an object")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _function_name(choice)
        if not isinstance(name, str) or name not in map(_function_name, tools or []):
            raise bad_value("tool_choice", "names a function that is not among tools")
    elif choice is not None and choice not in ("none", "auto", "required"):
        raise bad_value("tool_choice", "must be none, auto, required, or name one function")
    elif choice == "required" and not tools:
        raise bad_value("tool_choice", "is required, but there are no tools")


def _function_name(tool: dict[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _check_logprobs(body: dict[str, Any]) -> None:
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise bad_value("logprobs", "must be true or false")
    if wanted and body.get("tools"):
        raise bad_value("logprobs", "cannot be combined with tools: the engine tells none for calls")
    if top is None:
        return
    if not wanted:
        raise bad_value("top_logprobs", "needs logprobs to be true")
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise bad_value("top_logprobs", f"must be a whole number from 0 to {MAX_TOP_LOGPROBS}")


def _limit(body: dict[str, Any]) -> int | None:
    limits = []
    for name in LIMIT_FIELDS:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise bad_value(name, "must be a whole number of at least 1")
        limits.append(value)
    return min(limits, default=None)
