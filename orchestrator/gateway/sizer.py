"""How many tokens a turn may occupy.

Most turns are far from their limits, so a bound is enough: a byte-level tokeniser never makes more
tokens than the text has bytes, and a body's JSON has at least as many bytes as the text in it. To that
comes what a chat template adds. Only when bound and generation limit do not fit into one slot's fair
share of the KV is the engine asked for the exact number.

A bulk turn generates nothing, and what it holds at a time is one batch, or its longest input.

Two limits hold for every turn: the context of one slot, and the KV that the engine may hold in all its
slots. A turn that exceeds either could never run, so it is refused before it waits.
"""

from __future__ import annotations

from typing import Any

import anyio
import structlog

from backends.protocol import (
    BULK_APIS,
    BULK_BATCH_BYTES,
    EngineInfo,
    EngineRefused,
    EngineUnavailable,
    bulk_costs,
)
from orchestrator.gateway.dialects import Dialect
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import ApiError, PromptTooLong, unavailable
from orchestrator.gateway.validate import Ask
from orchestrator.turns import TurnSize

TEMPLATE_TOKENS = 64
MESSAGE_TOKENS = 16
# Templates put instructions before tool schemas (150 tokens in Qwen's) and indent them.
TOOLS_TOKENS = 512
# For an engine that has just been started; a turn that is sized without its numbers might never fit.
ENGINE_BOUND_S = 10.0
ENGINE_POLL_S = 0.05
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


def most_tokens(info: EngineInfo) -> int:
    """The longest turn that this engine can ever run, however empty it is: prompt and reply together."""
    return min(info.slot_context, info.kv_budget_tokens)


def fits(info: EngineInfo, bound: int, limit: int) -> bool:
    """Whether a turn of that size takes no more than one slot's fair share."""
    return bound + limit <= min(info.slot_context, info.kv_budget_tokens // info.engine_slots)


def exact_size(info: EngineInfo, prompt_tokens: int, limit: int, param: str) -> TurnSize:
    """The size of a turn whose prompt was counted: a limit that asks for too much is cut to what is left.

    Raises ApiError (400) when not even one token of the reply fits.
    """
    most = most_tokens(info)
    if prompt_tokens >= most:
        raise too_long(info, prompt_tokens, param)
    return TurnSize(prompt_tokens, min(limit, most - prompt_tokens), exact=True)


def uncounted_size(info: EngineInfo, bound: int, limit: int, param: str) -> TurnSize:
    """The size of a turn that could not be counted: at most the longest one. Raises ApiError (400)."""
    most = most_tokens(info)
    if most < 1:
        raise too_long(info, 0, param)
    limit = min(limit, max(1, most - 1))
    return TurnSize(min(bound, most - limit), limit, exact=False)


def too_long(info: EngineInfo, prompt_tokens: int, param: str) -> ApiError:
    """What the turn needs at least and what there is, in tokens and, where known, in bytes."""
    need, most = prompt_tokens + 1, most_tokens(info)
    by_context = info.slot_context <= info.kv_budget_tokens
    limit = "the context of this model" if by_context else "the KV budget of this model's engine"
    message = (
        f"the prompt has {prompt_tokens:,} tokens and the reply needs at least 1: {_amount(info, need)}, "
        f"but {limit} is {_amount(info, most)}"
    )
    return PromptTooLong(message, prompt_tokens, most - 1, param)


def _amount(info: EngineInfo, tokens: int) -> str:
    said = f"{tokens:,} tokens"
    return said if info.kv is None else f"{said} ({info.kv.bytes(tokens) / (1 << 20):,.1f} MiB of KV)"


async def _await_engine(engines: Engines, pool: str) -> EngineInfo:
    """The pool's engine once it is known. Raises ApiError (503) when that takes too long."""
    with anyio.move_on_after(ENGINE_BOUND_S):
        while True:
            info = await engines.described(pool)
            if info is not None:
                return info
            await anyio.sleep(ENGINE_POLL_S)
    message = "no engine of this model has answered yet; try again shortly"
    raise unavailable(message, "engine_unavailable")


async def size_turn(
    engines: Engines, pool: str, dialect: Dialect, ask: Ask, max_turn_tokens: int
) -> TurnSize:
    """Size a turn. Raises ApiError when the prompt does not fit, the engine refuses it or is not there."""
    api, param = dialect.api, dialect.prompt_field
    if api in BULK_APIS:
        return await _size_bulk(engines, pool, api, ask, param)
    limit = max_turn_tokens if ask.max_tokens is None else min(ask.max_tokens, max_turn_tokens)
    bound = prompt_bound(ask.body, len(ask.raw))
    info = engines.info(pool) or await _await_engine(engines, pool)
    if fits(info, bound, limit) and (api != "chat" or is_text(ask.body)):
        return TurnSize(bound, limit, exact=False)
    count = await _count(engines, pool, api, ask)
    if count is None:
        return uncounted_size(info, bound, limit, param)
    return exact_size(info, count, limit, param)


async def _size_bulk(engines: Engines, pool: str, api: str, ask: Ask, param: str) -> TurnSize:
    """Size a turn that generates nothing. Raises ApiError when its longest input does not fit."""
    costs = bulk_costs(api, ask.body)
    longest, exact = max(costs), False
    info = engines.info(pool) or await _await_engine(engines, pool)
    if not fits(info, longest, 0):
        count = await _count(engines, pool, api, ask)
        if count is not None:
            longest, exact = count, True
    most = most_tokens(info)
    if exact and longest > most:
        message = f"the longest has {longest:,} tokens, but this model's engine takes {most:,}"
        raise ApiError(400, f"{param}: {message}", param=param, code="context_length_exceeded")
    return TurnSize(min(most, max(longest, min(sum(costs), BULK_BATCH_BYTES))), 0, exact)


async def _count(engines: Engines, pool: str, api: str, ask: Ask) -> int | None:
    """The engine's own count, None when it does not answer in time. Raises ApiError when it refuses."""
    try:
        with anyio.fail_after(COUNT_BOUND_S):
            return await engines.count_tokens(pool, api, ask.body)
    except EngineRefused as error:
        status = error.status if 400 <= error.status < 500 else 400
        raise ApiError(status, str(error), error.kind) from error
    except (EngineUnavailable, TimeoutError) as error:
        _log.warning("prompt not counted; taking its bound", pool=pool, reason=type(error).__name__)
        return None
