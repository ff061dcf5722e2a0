"""What every reply must be, whatever the request was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

JSON = "application/json"
SSE = "text/event-stream"
LINES = "application/x-ndjson"
#: What is no HTTP has no path and no method that could be trusted: it gets a body in OpenAI's shape.
NO_HTTP = (400, 408, 431)
OPENAI_NAMES = {"message", "type", "param", "code"}
#: Events, by their types, that may end a stream.
LAST_EVENTS = (
    *("message_stop", "error"),
    *("response.completed", "response.incomplete", "response.failed"),
)


def problem_of(path: str, status: int, headers: Mapping[str, str], body: bytes, method: str) -> str | None:
    """What is wrong with a whole reply; None when nothing is."""
    if status == 500:
        return "status 500"
    kind = headers.get("content-type", "").partition(";")[0]
    if method == "HEAD" and not (body and status in NO_HTTP):
        return "HEAD with a body" if body else None
    if kind == SSE:
        return _stream_problem(body) if status == 200 else "an error as a stream"
    if kind == LINES:
        return _lines_problem(body) if status == 200 else "an error as a stream"
    if kind != JSON:
        return f"content type {kind!r}"
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "a body that is not JSON"
    return None if status < 400 or path == "/healthz" else _error_problem(path, status, said)


def _error_problem(path: str, status: int, said: Any) -> str | None:
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str) or not message or "\n" in message:
        return f"an error {status} without a message on one line"
    names = set(error) if isinstance(error, dict) else set()
    if path.startswith("/v1/messages"):
        shape = said.get("type") == "error" and names == {"type", "message"}
    elif path.startswith("/api/"):
        shape = isinstance(error, str)
    else:
        shape = names == OPENAI_NAMES
    general = status in NO_HTTP and names == OPENAI_NAMES
    if not shape and not general:
        return f"an error {status} in another API's shape"
    if "127.0.0.1" in message or "Traceback" in message:
        return f"an error {status} with internals"
    return None


def _stream_problem(body: bytes) -> str | None:
    last: bytes | Any = b""
    for line in body.split(b"\n"):
        if not line or line.startswith((b":", b"event: ")):
            continue
        if not line.startswith(b"data: "):
            return "a line of a stream that is no event"
        last = line[6:]
        if last != b"[DONE]":
            try:
                last = orjson.loads(last)
            except orjson.JSONDecodeError:
                return "an event that is not JSON"
    if last == b"[DONE]" or (isinstance(last, dict) and last.get("type") in LAST_EVENTS):
        return None if body.endswith(b"\n\n") else "a stream that is cut off"
    return "a stream without an end"


def _lines_problem(body: bytes) -> str | None:
    try:
        lines = [orjson.loads(line) for line in body.split(b"\n") if line]
    except orjson.JSONDecodeError:
        return "a line that is not JSON"
    if not lines or not (lines[-1].get("done") is True or "error" in lines[-1]):
        return "a stream without an end"
    return None
