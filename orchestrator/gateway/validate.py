"""What a generation request asks for. Only the fields that the service itself needs are checked.

Fields whose names start with ``swarm_`` are the service's own and are taken out. All others go to the
engine as they came: the stored body is the client's bytes unless something was taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.gateway.errors import ApiError, bad_value

PRIVATE_PREFIX = "swarm_"
# orjson reads deeper than it writes; a body nobody can write again is refused at the door.
WRITABLE_DEPTH = 254
TOKEN_ID_CEILING = 1 << 31
LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict")


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request. `max_tokens` is None when the client set no limit."""

    raw: bytes
    body: dict[str, Any]
    model: str | None
    max_tokens: int | None
    stream: bool
    include_usage: bool


def chat_ask(raw: bytes) -> Ask:
    """Read and check a chat's body. Raises ApiError (400)."""
    body, raw = _read(raw)
    check_messages(body.get("messages"))
    return make_ask(raw, body)


def completion_ask(raw: bytes) -> Ask:
    """Read and check a completion's body. Raises ApiError (400)."""
    body, raw = _read(raw)
    _check_prompt(body.get("prompt"))
    return make_ask(raw, body)


def make_ask(raw: bytes, body: dict[str, Any]) -> Ask:
    """What a body with a good prompt asks for. Raises ApiError (400)."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_value("model", "must be a string")
    n = body.get("n")
    if n is not None and (type(n) is not int or n != 1):
        raise bad_value("n", "must be 1: one choice a request")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_value("stream", "must be true or false")
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and options.get("include_usage") is True
    return Ask(raw, body, model, _limit(body), bool(stream), include_usage)


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
            orjson.dumps(body)
    except orjson.JSONDecodeError as error:
        # The decoder's message never quotes the body.
        place = f"line {error.lineno} column {error.colno}"
        raise ApiError(
            400, f"the body is not valid JSON: {error.msg} ({place})", code="invalid_json"
        ) from None
    except (orjson.JSONEncodeError, RecursionError):
        message = f"the body is nested deeper than {WRITABLE_DEPTH} levels"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


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


def _limit(body: dict[str, Any]) -> int | None:
    limits = []
    for field in LIMIT_FIELDS:
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise bad_value(field, "must be a whole number of at least 1")
        limits.append(value)
    return min(limits, default=None)
