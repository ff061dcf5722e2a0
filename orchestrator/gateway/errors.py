"""Errors that end a request: what they say, and how OpenAI's clients expect them."""

from __future__ import annotations

from typing import Protocol

import orjson

QUOTED_CHARS = 80
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class ApiError(Exception):
    """The request ends with this status and error body. The message is one line, without internals."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers


class PromptTooLong(ApiError):
    """The prompt leaves no room for a reply. Some clients look for both numbers, in tokens."""

    def __init__(self, message: str, prompt_tokens: int, most_tokens: int, param: str) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.most_tokens = most_tokens


class ErrorShape(Protocol):
    """How one wire API writes an error."""

    def body(self, error: ApiError) -> bytes:
        """A reply's JSON body."""

    def event(self, error: ApiError) -> bytes:
        """The last bytes of a stream that had begun."""


class OpenAiErrors:
    """``{"error": {message, type, param, code}}``."""

    def body(self, error: ApiError) -> bytes:
        """The error as JSON."""
        detail = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        return orjson.dumps({"error": detail})

    def event(self, error: ApiError) -> bytes:
        """The same as an event, and the stream's end."""
        return b"data: %b\n\n%b" % (self.body(error), DONE)


OPENAI_ERRORS = OpenAiErrors()


def bad_value(param: str, message: str) -> ApiError:
    """A field of the body has a value that is not allowed."""
    return ApiError(400, f"{param} {message}", param=param, code="invalid_value")


def unavailable(message: str, code: str) -> ApiError:
    """The service cannot do it now; the same request may succeed soon."""
    return ApiError(503, message, "server_error", code=code, headers=((b"retry-after", b"1"),))


def internal() -> ApiError:
    """A bug. What happened is in the log only."""
    return ApiError(500, "internal error; the service's log has the details", "server_error", code="internal")


def from_entry(status: int, detail: dict[str, str | None]) -> ApiError:
    """The error that a turn's output log ends with."""
    return ApiError(
        status if 400 <= status <= 599 else 500,
        detail.get("message") or "the turn failed",
        detail.get("type") or "server_error",
        param=detail.get("param"),
        code=detail.get("code"),
    )


def quoted(text: str) -> str:
    """A client's text inside a message, shortened."""
    return repr(text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "...")
