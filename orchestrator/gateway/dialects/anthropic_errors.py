"""Anthropic's errors: ``{"type": "error", "error": {type, message}, "request_id"}``.

Source: https://docs.claude.com/en/api/errors. A client tells errors apart by status and type, so the
service's own kinds and codes are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from orchestrator.gateway.errors import ApiError, PromptTooLong

TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class AnthropicErrors:
    """Bodies of error replies, and the event that ends a stream. The request's id is its turn's."""

    request_id: str | None = None

    def body(self, error: ApiError) -> bytes:
        """The error as JSON."""
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        detail = {"type": kind, "message": _message(error)}
        return orjson.dumps({"type": "error", "error": detail, "request_id": self.request_id})

    def event(self, error: ApiError) -> bytes:
        """The same as an event; a stream ends with it."""
        return b"event: error\ndata: %b\n\n" % self.body(error)


def _message(error: ApiError) -> str:
    if isinstance(error, PromptTooLong):
        # Claude Code finds these words and both numbers, and then makes its conversation shorter.
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.most_tokens} maximum"
    return error.message


ANTHROPIC_ERRORS = AnthropicErrors()
