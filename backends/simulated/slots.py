"""Engine slots: who has one, what KV is in it, and which one a request gets."""

from collections.abc import Iterator, Sequence
from typing import Any

from backends.simulated.config import SimulatedConfig
from backends.simulated.generation import Generation


class Slot:
    """The engine's place for one KV sequence."""

    def __init__(self, id_slot: int) -> None:
        self.id_slot = id_slot
        self.tokens: list[int] = []
        """Token ids whose KV is in the slot. It outlives the request, for the next one to reuse."""
        self.generation: Generation | None = None
        self.has_run = False
        """Whether it had a request since the engine's start; of any other slot `GET /slots` tells little."""
        self.restored = False
        """Whether its KV comes from a file, and no request has used it yet."""
        self.manually_parked = False
        self.last_used = 0
        """Step number of the last release; the least recently used slot is given away first."""

    @property
    def parked(self) -> bool:
        return self.generation is not None and self.generation.parked

    def begin(self, generation: Generation) -> None:
        """Gives the slot to a request."""
        self.generation = generation
        self.has_run = True
        self.restored = False

    def release(self, step: int) -> None:
        """Ends the request's hold on the slot. A parked sequence's KV is gone with it."""
        if self.parked:
            self.tokens.clear()
        self.generation = None
        self.manually_parked = False
        self.last_used = step

    def view(self, config: SimulatedConfig) -> dict[str, Any]:
        """The slot's element of `GET /slots`."""
        shown: dict[str, Any] = {
            "id": self.id_slot,
            "n_ctx": config.slot_n_ctx,
            "speculative": False,
            "is_processing": self.generation is not None,
        }
        if config.native_park:
            shown["is_preempted"] = self.parked
            shown["preempt_manual"] = self.manually_parked
        if self.has_run:
            # The name misleads: what is in the slot, generated tokens included.
            shown["n_prompt_tokens"] = len(self.tokens)
            shown["n_prompt_tokens_processed"] = shown["n_prompt_tokens_cache"] = 0
            shown["next_token"] = [{"n_decoded": 0, "n_remain": -1}]
        if self.generation is not None:
            generation = self.generation
            shown["n_prompt_tokens_processed"] = generation.processed - generation.cached
            shown["n_prompt_tokens_cache"] = generation.cached
            shown["next_token"] = [{"n_decoded": generation.n_decoded, "n_remain": generation.n_remaining}]
        return shown


class SlotTable:
    """All slots, and the memory they share under a unified layout."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._slots = tuple(Slot(index) for index in range(config.n_slots))

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, id_slot: int) -> Slot:
        return self._slots[id_slot]

    def free(self, id_slot: int) -> list[Slot]:
        """The free slots a request for `id_slot` may get; -1 asks for any."""
        wanted = self._slots if id_slot < 0 else self._slots[id_slot : id_slot + 1]
        return [slot for slot in wanted if slot.generation is None]

    def resident_tokens(self) -> int:
        """Tokens whose KV is in the engine's memory; that of parked sequences is not."""
        return sum(len(slot.tokens) for slot in self._slots if not slot.parked)

    def parked_bytes(self) -> int:
        """Host memory held by parked sequences."""
        return sum(self.kv_bytes(slot) for slot in self._slots if slot.parked)

    def kv_bytes(self, slot: Slot) -> int:
        """Size of the slot's KV."""
        if not slot.tokens:
            return 0
        return self._config.kv_fixed_bytes + len(slot.tokens) * self._config.kv_bytes_per_token

    def make_room(self, new_tokens: int) -> bool:
        """Whether `new_tokens` more fit. A unified pool clears idle slots one by one until they do; with
        separate streams no slot takes room from another."""
        if not self._config.kv_unified:
            return True
        missing = self.resident_tokens() + new_tokens - self._config.n_ctx
        for slot in self._slots:
            if missing <= 0:
                break
            if slot.generation is None:
                missing -= len(slot.tokens)
                slot.tokens.clear()
        return missing <= 0


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, found by halving so that the comparing itself is done in C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def reusable_prefix(slot: Slot, prompt: list[int], *, append_only: bool) -> int:
    """Prompt tokens that need no evaluation in this slot; at least one token is always evaluated.

    `append_only` is a cache that cannot be rolled back: it is reused whole or not at all, and not at all
    when it comes from a file, which has no state to go on from.
    """
    shared = common_prefix(slot.tokens, prompt)
    if append_only:
        whole = shared == len(slot.tokens) and shared < len(prompt) and not slot.restored
        return shared if whole else 0
    return min(shared, len(prompt) - 1)


def choose_slot(free: Sequence[Slot], prompt: list[int], min_similarity: float) -> Slot:
    """The free slot that holds most of the prompt, or the least recently used one if none holds more than
    `min_similarity` of it."""
    best = max(free, key=lambda slot: common_prefix(slot.tokens, prompt))
    if prompt and common_prefix(best.tokens, prompt) > min_similarity * len(prompt):
        return best
    return min(free, key=lambda slot: (slot.last_used, slot.id_slot))
