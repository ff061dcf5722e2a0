"""How many tokens a turn may occupy.

Most turns are far from their limits, so a bound is enough: a byte-level tokeniser never makes more
tokens than the text has bytes, and a body's JSON has at least as many bytes as the text in it. To that
comes what a chat template adds. Only when bound and generation limit do not fit into one slot's fair
share of the KV is the engine asked for the exact number.
"""

from __future__ import annotations

from typing import Any

import anyio
import structlog

from backends.protocol import EngineInfo, EngineRefused, EngineUnavailable
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.validate import Ask
from orchestrator.turns import TurnSize

TEMPLATE_TOKENS = 64
MESSAGE_TOKENS = 16
# Templates put instructions before tool schemas (150 tokens in Qwen's) and indent them.
TOOLS_TOKENS = 512
# Counting tokenises the prompt; a count that takes longer than this is worth less than a start.
COUNT_BOUND_S = 10.0

_log = structlog.get_logger(__name__)


def prompt_bound(body: dict[str, Any], body_bytes: int) -> int:
    """The most tokens the prompt can have."""
    messages = body.get("messages")
    count = len(messages) if isinstance(messages, list) else 1
    tools = TOOLS_TOKENS if body.get("tools") or body.get("functions") else 0
    return body_bytes + MESSAGE_TOKENS * count + TEMPLATE_TOKENS + tools


def is_text(body: dict[str, Any]) -> bool:
    """Whether a chat's bound holds: an image's address is shorter than the image's tokens."""
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list) and not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
        ):
            return False
    return True


def fits(info: EngineInfo, bound: int, limit: int) -> bool:
    """Whether a turn of that size takes no more than one slot's fair share."""
    return bound + limit <= min(info.slot_context, info.kv_budget_tokens // info.engine_slots)


def exact_size(info: EngineInfo, prompt_tokens: int, limit: int, param: str) -> TurnSize:
    """The size of a turn whose prompt was counted. Raises ApiError (400) when it is too long."""
    context = info.slot_context
    if prompt_tokens >= context:
        message = (
            f"the prompt has {prompt_tokens:,} tokens, but the context of this model is {context:,} tokens"
            " and the reply needs room too"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return TurnSize(prompt_tokens, min(limit, context - prompt_tokens), exact=True)


def uncounted_size(info: EngineInfo, bound: int, limit: int) -> TurnSize:
    """The size of a turn that could not be counted: at most a whole context."""
    limit = min(limit, info.slot_context - 1)
    return TurnSize(min(bound, info.slot_context - limit), limit, exact=False)


async def size_turn(engines: Engines, pool: str, api: str, ask: Ask, max_turn_tokens: int) -> TurnSize:
    """Size a turn. Raises ApiError when the prompt does not fit or the engine refuses it."""
    limit = max_turn_tokens if ask.max_tokens is None else min(ask.max_tokens, max_turn_tokens)
    bound = prompt_bound(ask.body, len(ask.raw))
    info = engines.info(pool)
    if info is None:
        # The dispatcher knows the engine by the time it takes the turn.
        return TurnSize(bound, limit, exact=False)
    if fits(info, bound, limit) and (api != "chat" or is_text(ask.body)):
        return TurnSize(bound, limit, exact=False)
    try:
        with anyio.fail_after(COUNT_BOUND_S):
            count = await engines.count_tokens(pool, api, ask.body)
    except EngineRefused as error:
        status = error.status if 400 <= error.status < 500 else 400
        raise ApiError(status, str(error), error.kind) from error
    except (EngineUnavailable, TimeoutError) as error:
        _log.warning("prompt not counted; taking its bound", pool=pool, reason=type(error).__name__)
        return uncounted_size(info, bound, limit)
    return exact_size(info, count, limit, "messages" if api == "chat" else "prompt")
