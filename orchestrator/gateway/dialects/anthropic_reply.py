"""What a streamed and a whole Anthropic reply have in common."""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects.base import Head
from orchestrator.gateway.errors import ApiError, quoted

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def message(head: Head, usage: dict[str, int]) -> dict[str, Any]:
    """A message that says nothing yet."""
    return {
        "id": message_id(head),
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def message_id(head: Head) -> str:
    """The reply's id, made of the turn's."""
    return f"msg_{head.turn.removeprefix('turn-')}"


def signature(head: Head) -> str:
    """What thinking blocks are signed with.

    Nobody checks it here, but clients take a block without one for cut off and do not hand it back.
    """
    return message_id(head)


def stopped(finish_reason: str, called: bool, stop_sequence: str | None) -> dict[str, str | None]:
    """Why the reply ended, as its fields; `called`: it has whole tool calls.

    Where the engine does not tell a stop sequence from the model's own end it is ``end_turn``.
    """
    if called and finish_reason != "length":
        reason = "tool_use"
    elif stop_sequence is not None and finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_sequence}
    else:
        reason = STOP_REASONS.get(finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def usage(counts: dict[str, Any]) -> dict[str, int]:
    """The tokens of a turn. Prompt tokens that were in the KV are not input tokens, but cache reads."""
    prompt = int(counts.get("prompt_tokens") or 0)
    cached = int((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(prompt, cached),
        "output_tokens": int(counts.get("completion_tokens") or 0),
    }


def tool_blocks(head: Head, reply: Collector, finish_reason: str) -> list[dict[str, Any]]:
    """The calls as ``tool_use`` blocks, with the engine's ids, so that results find their calls.

    A call that the token limit cut off is left out. Raises ApiError (502) for any other whose input is
    not an object: whoever waits for a call must not get a reply without it.
    """
    blocks = []
    for index, call in enumerate(reply.calls):
        function = call["function"]
        arguments, name = _arguments(function["arguments"]), function.get("name")
        if arguments is not None and name:
            made_up = f"toolu_{head.turn.removeprefix('turn-')}_{index}"
            blocks.append(
                {"type": "tool_use", "id": call.get("id") or made_up, "name": name, "input": arguments}
            )
        elif finish_reason != "length":
            what = f"the model called {quoted(str(name))} with something that is not a JSON object"
            raise ApiError(502, what, "api_error", code="bad_tool_call")
    return blocks


def _arguments(text: str) -> dict[str, Any] | None:
    """A call's input; None unless it is an object."""
    try:
        value = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
