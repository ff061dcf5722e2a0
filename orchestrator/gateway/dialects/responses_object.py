"""The response object: what it repeats of the request, and how it ends.

Source: the API's reference of ``POST /v1/responses``, and the types of the ``openai`` package.
"""

from __future__ import annotations

import time
from typing import Any

from orchestrator.gateway.dialects.base import Head
from orchestrator.gateway.dialects.responses_items import Items
from orchestrator.gateway.dialects.responses_tools import Json
from orchestrator.gateway.errors import ApiError

#: What a response repeats of its request, and what it says where the request says nothing.
ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
#: Codes of a failed response that clients know; by all others they cannot tell whether to try again.
CONTEXT_CODE = "context_length_exceeded"


def turn_part(turn: str) -> str:
    """What the ids of a turn's response and items have in common."""
    return turn.removeprefix("turn-")


def echoed(request: Json) -> Json:
    """What a response repeats of its request."""
    return {name: default if request.get(name) is None else request[name] for name, default in ECHOED.items()}


def response(head: Head) -> Json:
    """The response before it has any output. It is never stored, whatever the request says."""
    return {
        "id": f"resp_{turn_part(head.turn)}",
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": [],
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "usage": None,
        **echoed(head.ask.request),
    }


def ended(begun: Json, items: Items, reason: str, counts: dict[str, Any]) -> Json:
    """The response at the end of its output; `reason` is the chat's finish reason."""
    end: Json = {"status": "completed", "completed_at": int(time.time())}
    if reason == "length":
        end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {**begun, **end, "output": items.output(), "usage": _usage(counts, items.reasoning_tokens)}


def failed(begun: Json, items: Items, error: ApiError) -> Json:
    """The response of a turn that failed, with the output that it had."""
    items.break_off()
    detail = {"code": _code(error), "message": error.message}
    return {**begun, "status": "failed", "error": detail, "output": items.output()}


def _code(error: ApiError) -> str:
    """Codex asks again unless the code says that the same request would fail again."""
    if error.code == CONTEXT_CODE:
        return CONTEXT_CODE
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def _usage(counts: dict[str, Any], reasoning_tokens: int) -> Json:
    prompt = int(counts.get("prompt_tokens") or 0)
    completion = int(counts.get("completion_tokens") or 0)
    cached = int((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, completion)},
        "total_tokens": prompt + completion,
    }
