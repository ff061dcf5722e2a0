"""The step loop: the one task that advances every busy slot.

As in a real engine with continuous batching, everything happens at step boundaries. One step is:

1. Boundary: cancelled requests leave their slots, park and unpark take effect, then the queue is walked in
   arrival order and every request or slot action whose slot is free gets it.
2. Plan: one token for every decoding slot, and prompt tokens of prefilling slots up to `n_batch` in all.
3. Wait for the duration the timing profile gives to that batch.
4. Commit: KV grows, tokens are sampled, chunks go into the requests' outboxes.

A cancel that arrives during a step therefore takes effect when the step ends: within one decode step, or
within one batch of a prefill.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from backends.simulated.config import SimulatedConfig
from backends.simulated.events import Failed
from backends.simulated.faults import FaultBook
from backends.simulated.generation import Generation
from backends.simulated.slot_actions import SlotAction, SlotActions
from backends.simulated.slots import Slot, SlotTable, choose_slot, reusable_prefix

_SHORTEST_SLEEP_S = 0.0002
_MOST_CATCH_UP_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and what is going on now."""

    requests: int = 0
    disconnects: int = 0
    """Clients that left before the end of their reply."""
    steps: int = 0
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0
    max_concurrent_decode: int = 0
    parks: int = 0
    pool_exhaustions: int = 0
    running: int = 0
    queued: int = 0
    resident_kv_tokens: int = 0


@dataclass(slots=True)
class _Plan:
    decoding: list[tuple[Slot, Generation]]
    prefilling: list[tuple[Slot, Generation, int]]
    duration_s: float = 0.0


class StepLoop:
    """Slots, queue and clock of one simulated engine."""

    def __init__(self, config: SimulatedConfig, faults: FaultBook) -> None:
        self.slots = SlotTable(config)
        self._config = config
        self._timing = config.timing
        self._actions = SlotActions(config, self.slots, faults)
        self._queue: deque[Generation | SlotAction] = deque()
        self._parking: deque[SlotAction] = deque()
        self._wake = anyio.Event()
        self._due = 0.0
        self._stats = EngineStats()
        self._steps = self._generated = self._prefilled = self._max_decode = 0

    def submit(self, generation: Generation) -> None:
        """Queues a request; its outbox gets everything that follows."""
        self._count(requests=1)
        self._queue.append(generation)
        self._wake.set()

    def abandon(self, generation: Generation) -> None:
        """The client has left: the slot is free after the current step, and keeps its KV."""
        self._count(disconnects=1)
        self.cancel(generation)

    def cancel(self, generation: Generation) -> None:
        """Ends a request without an answer, at the next boundary."""
        if not generation.params.ignore_disconnect:
            generation.cancelled = True
            self._wake.set()

    async def act(self, action: SlotAction) -> dict[str, Any]:
        """Runs a slot action and returns its JSON answer. Raises ApiError if it is refused.

        Save, restore and erase wait for the slot to be idle; park and unpark only for the next boundary.
        """
        (self._parking if action.kind in ("park", "unpark") else self._queue).append(action)
        self._wake.set()
        await action.done.wait()
        return action.answer()

    def stats(self) -> EngineStats:
        """A snapshot."""
        return replace(
            self._stats,
            steps=self._steps,
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
            max_concurrent_decode=self._max_decode,
            running=sum(slot.generation is not None for slot in self.slots),
            queued=len(self._queue),
            resident_kv_tokens=self.slots.resident_tokens(),
        )

    async def run(self) -> None:
        """Steps until cancelled."""
        while True:
            self._wake = anyio.Event()
            await self._boundary()
            plan = self._plan()
            if not plan.decoding and not plan.prefilling:
                await self._wake.wait()
                continue
            await self._pass_time(plan.duration_s)
            self._commit(plan)

    # 1. Boundary

    async def _boundary(self) -> None:
        for slot in self.slots:
            if slot.generation is not None and slot.generation.cancelled:
                slot.release(self._steps)
        while self._parking:
            await self._run_action(self._parking.popleft())
        waiting, self._queue = self._queue, deque()
        kept: list[Generation | SlotAction] = []
        for item in waiting:
            if isinstance(item, SlotAction):
                if self.slots[item.id_slot].generation is None:
                    await self._run_action(item)
                else:
                    kept.append(item)
            elif not item.cancelled and not self._place(item):
                kept.append(item)
        self._queue.extendleft(reversed(kept))

    async def _run_action(self, action: SlotAction) -> None:
        """Runs the action and stalls every slot for as long as its copy takes."""
        slot = self.slots[action.id_slot]
        was_parked = slot.parked
        stall_s = self._actions.run(action)
        self._count(parks=int(slot.parked and not was_parked))
        if stall_s:
            await self._pass_time(stall_s)
        action.done.set()

    def _place(self, generation: Generation) -> bool:
        """Gives the request a slot. False if it has to wait."""
        free = self.slots.free(generation.params.id_slot)
        if not free:
            return False
        n_ctx = self._config.slot_n_ctx
        if generation.params.evaluate_only and generation.n_prompt > self._timing.n_batch:
            message = (
                f"input ({generation.n_prompt} tokens) is too large to process. increase the physical batch "
                f"size (current batch size: {self._timing.n_batch})"
            )
            generation.fail(Failed(500, "server_error", message))
            return True
        if generation.n_prompt >= n_ctx:
            generation.fail(
                Failed(
                    400,
                    "exceed_context_size_error",
                    f"request ({generation.n_prompt} tokens) exceeds the available context size "
                    f"({n_ctx} tokens), try increasing it",
                    {"n_prompt_tokens": generation.n_prompt, "n_ctx": n_ctx},
                )
            )
            return True
        prompt = list(generation.params.prompt)
        slot = choose_slot(free, prompt, self._config.slot_prompt_similarity)
        generation.id_slot = slot.id_slot
        if not prompt:
            generation.finish("none")
            return True
        reused = 0
        if generation.params.cache_prompt:
            reused = reusable_prefix(slot, prompt, append_only=self._config.resume_reprefills)
        del slot.tokens[reused:]
        generation.cached = generation.processed = reused
        slot.begin(generation)
        self._count(tokens_reused=reused)
        if not generation.hung:
            generation.report_progress()
        return True

    # 2. Plan

    def _plan(self) -> _Plan:
        decoding: list[tuple[Slot, Generation]] = []
        waiting: list[tuple[Slot, Generation]] = []
        for slot in self.slots:
            generation = slot.generation
            if generation is None or generation.parked or generation.hung:
                continue
            (waiting if generation.prefilling else decoding).append((slot, generation))
        room = max(0, self._timing.n_batch - len(decoding))
        prefilling: list[tuple[Slot, Generation, int]] = []
        # A batch holds tasks of one kind, and what generates comes first.
        only_evaluated = not decoding and bool(waiting) and waiting[0][1].params.evaluate_only
        for slot, generation in waiting:
            if generation.params.evaluate_only != only_evaluated:
                continue
            size = min(room, generation.n_prompt - generation.processed)
            if size and (not only_evaluated or size == generation.n_prompt):
                prefilling.append((slot, generation, size))
                room -= size
        new_tokens = len(decoding) + sum(size for _, _, size in prefilling)
        if not self.slots.make_room(new_tokens):
            self._fail_running()
            return _Plan([], [])
        attended = (
            self.slots.resident_tokens()
            if self._config.kv_unified
            else sum(len(slot.tokens) for slot, _ in decoding)
        )
        duration_s = self._timing.step_s(len(decoding), attended, new_tokens - len(decoding))
        return _Plan(decoding, prefilling, duration_s)

    def _fail_running(self) -> None:
        self._count(pool_exhaustions=1)
        for slot in self.slots:
            if slot.generation is not None and not slot.parked:
                slot.generation.fail(Failed(500, "server_error", "Context size has been exceeded."))
                slot.release(self._steps)
                slot.tokens.clear()
        self._wake.set()

    # 3. Time

    async def _pass_time(self, seconds: float) -> None:
        """Waits until `seconds` after the last such moment, so that time spent computing is part of it."""
        now = anyio.current_time()
        self._due = max(self._due, now - min(seconds, _MOST_CATCH_UP_S)) + seconds
        if self._due - now >= _SHORTEST_SLEEP_S:
            await anyio.sleep(self._due - now)
        else:
            await checkpoint()

    # 4. Commit

    def _commit(self, plan: _Plan) -> None:
        self._steps += 1
        self._max_decode = max(self._max_decode, len(plan.decoding))
        for slot, generation in plan.decoding:
            slot.tokens.append(generation.last_token)
            generation.predicted_s += plan.duration_s
            self._sample(slot, generation)
        for slot, generation, size in plan.prefilling:
            start = generation.processed
            slot.tokens.extend(generation.params.prompt[start : start + size])
            generation.processed += size
            generation.prompt_s += plan.duration_s
            self._prefilled += size
            generation.report_progress()
            if generation.params.evaluate_only:
                generation.crowded = len(plan.prefilling) > 1 and not self._config.kv_unified
                generation.finish("none")
                slot.release(self._steps)
                self._wake.set()
            elif not generation.prefilling and not generation.hung:
                self._sample(slot, generation)

    def _sample(self, slot: Slot, generation: Generation) -> None:
        self._generated += 1
        context_full = len(slot.tokens) + 1 >= self._config.slot_n_ctx
        if generation.sample(context_full=context_full):
            slot.release(self._steps)
            self._wake.set()

    def _count(self, **increments: int) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in increments.items()}
        )
