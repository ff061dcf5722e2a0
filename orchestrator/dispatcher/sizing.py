"""What of an engine may be used, and so by which numbers it is scheduled. Pure."""

from __future__ import annotations

from dataclasses import replace

import structlog

from backends.protocol import EngineInfo, KvLayout
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.scheduler import Policy, SwapPolicy

#: The automatic swap budget: a part of what is free in the folder, and a ceiling.
SWAP_PART = 2
SWAP_MOST_BYTES = 8 << 30

_log = structlog.get_logger(__name__)


def within_budget(info: EngineInfo, options: DispatcherOptions) -> EngineInfo:
    """The engine with no more KV than the configuration lets it hold."""
    most = options.kv_budget_bytes
    if most is None:
        return info
    if info.kv is None:
        _log.warning("kv_budget has no effect: bytes per token are unknown", backend=options.name)
        return info
    return replace(info, kv_budget_tokens=min(info.kv_budget_tokens, info.kv.tokens(most)))


def swap_budget(options: DispatcherOptions, info: EngineInfo, free_bytes: int) -> int:
    """Bytes that swapped KV may take, 0 for no swap; `free_bytes`: what is free in the folder."""
    if not info.swap or info.kv is None:
        return 0
    if options.swap_budget is not None:
        return options.swap_budget
    return min(SWAP_MOST_BYTES, free_bytes // SWAP_PART)


def make_policy(options: DispatcherOptions, info: EngineInfo, swap_bytes: int, *, tag: str) -> Policy:
    """The scheduler's parameters. `tag` begins the names of this owner's files."""
    decode_slots = min(options.decode_slots or max(1, info.engine_slots - 1), info.engine_slots)
    shared = info.kv_layout is KvLayout.UNIFIED
    limited = info.kv_budget_tokens < info.slot_context * info.engine_slots
    swap = None
    if swap_bytes > 0 and info.kv is not None:
        swap = SwapPolicy(
            budget_bytes=swap_bytes,
            token_bytes=info.kv.token_bytes + info.kv.window_token_bytes,
            fixed_bytes=info.kv.fixed_bytes,
            tag=tag,
        )
    return Policy(
        decode_slots=decode_slots,
        engine_slots=info.engine_slots,
        # Half of the spare ones: paused turns stay where they ran, so the others rarely need these.
        first_slots=(info.engine_slots - decode_slots + 1) // 2,
        kv_budget_tokens=info.kv_budget_tokens if shared or limited else None,
        adjacent=not shared,
        swap=swap,
        preemption=options.preemption,
        min_run_s=options.min_run_s,
        max_preemptions=options.max_preemptions,
        aging_s=options.aging_s,
        priorities=options.priorities,
    )
