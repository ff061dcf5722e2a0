"""Settings that follow from a plan.

1. Cache type: of those asked for, in their order, the first that holds all running turns and a paused long
   one; else the first that holds the running ones and one average paused turn; else the smallest.
2. Decode slots: as many as shall run, or as many average turns as the KV budget holds, at least 1.
3. Engine slots (`-np`): a place for each decode slot and for each average paused turn that fits, at most as
   many as run; at least one, in which a foreground turn starts while its victim leaves.
4. Layout: `split` where an even share of the budget holds the long turn, because parked KV costs the running
   turns nothing there; else `unified`, where one turn may use what others leave.
5. Context (`-c`): split, the share in tokens times the engine slots; unified, the tokens that the budget
   holds when every engine slot is in use (windows and states count once for each). Rounded down to 256
   tokens a slot, which is what the engine rounds up to; no more a slot than the model was trained for.
6. Swap folder: all running turns paused once at the average context, and the long one, rounded up to
   256 MiB. It is host memory when the folder is on a memory file system. Sliding-window and recurrent
   models need more: the engine saves its checkpoints too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backends.kv_shape import KvShape
from orchestrator.planner.plan import Plan

#: The largest context that the configuration takes.
MOST_TOKENS = 100_000_000
_PAD_TOKENS = 256
_SWAP_STEP = 256 << 20


@dataclass(frozen=True, slots=True)
class Advice:
    """What to start the engine with. `context` counts all engine slots, `slot_context` one turn's most.

    `remark`: what gives way; None when everything asked for fits.
    """

    plan: Plan
    decode_slots: int
    engine_slots: int
    layout: Literal["split", "unified"]
    context: int
    slot_context: int
    swap_bytes: int
    remark: str | None


def advise(plans: Sequence[Plan], training_context: int | None = None) -> Advice | None:
    """By the rules above; None when no cache type leaves room for one turn in each of two slots."""
    plan, remark = _choose(plans)
    budget, turn, load = plan.memory.kv_budget, plan.turn, plan.load
    if budget < 2 * plan.kv.bytes(_PAD_TOKENS):
        return None
    decode_slots = min(load.running, max(1, budget // turn))
    fits = max(0, budget - decode_slots * turn) // turn
    engine_slots = decode_slots + min(max(fits, 1), decode_slots)
    # So many slots that each has at least the engine's smallest share.
    while engine_slots > 2 and _share(plan.kv, budget, engine_slots) < _PAD_TOKENS:
        engine_slots -= 1
    decode_slots = min(decode_slots, engine_slots - 1)

    longest = max(_PAD_TOKENS, _down(min(training_context or MOST_TOKENS, MOST_TOKENS // engine_slots)))
    wanted = min(load.long_context, training_context or MOST_TOKENS)
    share = min(_share(plan.kv, budget, engine_slots), longest)
    layout: Literal["split", "unified"]
    if share >= wanted:
        layout, context, slot_context = "split", share * engine_slots, min(share, training_context or share)
    else:
        layout, context = "unified", min(_pool(plan.kv, budget, engine_slots), longest * engine_slots)
        slot_context = min(context, training_context or context)
    swap = load.running * turn + plan.long_turn
    return Advice(
        plan=plan,
        decode_slots=decode_slots,
        engine_slots=engine_slots,
        layout=layout,
        context=context,
        slot_context=slot_context,
        swap_bytes=-(-swap // _SWAP_STEP) * _SWAP_STEP,
        remark=remark,
    )


def _choose(plans: Sequence[Plan]) -> tuple[Plan, str | None]:
    for plan in plans:
        if plan.headroom >= 0 and plan.long_left >= 0:
            return plan, None
    for plan in plans:
        if plan.average_paused >= 1:
            return plan, "the long paused turn does not fit: it is swapped out or recomputed"
    smallest = min(plans, key=lambda plan: plan.turn)
    if smallest.headroom >= 0:
        return smallest, "no paused turn fits beside the running ones: each is swapped out or recomputed"
    return smallest, "the running turns do not fit: fewer run at once"


def _down(tokens: int) -> int:
    return tokens // _PAD_TOKENS * _PAD_TOKENS


def _share(kv: KvShape, budget: int, slots: int) -> int:
    return _down(kv.tokens(budget // slots))


def _pool(kv: KvShape, budget: int, slots: int) -> int:
    """Tokens of all slots together, however they are spread: at worst every slot is in its window."""
    together = KvShape(
        kv.token_bytes, kv.window_token_bytes, slots * kv.window_tokens, slots * kv.fixed_bytes
    )
    return _down(together.tokens(budget))
