"""Slot actions: save, restore, erase, and the native park and unpark.

Each returns for how many seconds its copy stalls the step loop: in a real engine the copy runs on the only
decode thread, so every running request waits for it. What a save or a restore may do wrong is in
`backends/simulated/faults.py`.
"""

import os
from typing import Any, Literal

import anyio

from backends.simulated.config import SimulatedConfig
from backends.simulated.events import ApiError, Notice
from backends.simulated.faults import FaultBook, FaultKind
from backends.simulated.slot_files import UNREADABLE, read_slot, slot_file, write_slot
from backends.simulated.slots import Slot, SlotTable

SlotActionKind = Literal["save", "restore", "erase", "park", "unpark"]


class SlotAction:
    """An action on its way through the step loop; `done` is set once it took effect or was refused."""

    def __init__(self, kind: SlotActionKind, id_slot: int, filename: str = "") -> None:
        self.kind = kind
        self.id_slot = id_slot
        self.filename = filename
        self.done = anyio.Event()
        self._outcome: dict[str, Any] | ApiError = ApiError(500, "Not run", "server_error")

    def settle(self, outcome: dict[str, Any] | ApiError) -> None:
        """Sets what `answer` gives."""
        self._outcome = outcome

    def answer(self) -> dict[str, Any]:
        """The JSON answer. Raises ApiError if the action was refused."""
        if isinstance(self._outcome, ApiError):
            raise self._outcome
        return self._outcome


class SlotActions:
    """Carries actions out. The caller sees to it that save, restore and erase only meet idle slots."""

    def __init__(self, config: SimulatedConfig, slots: SlotTable, faults: FaultBook) -> None:
        self._config = config
        self._timing = config.timing
        self._slots = slots
        self._faults = faults

    def run(self, action: SlotAction) -> float:
        """Settles the action and returns for how many seconds it stalls the loop."""
        slot = self._slots[action.id_slot]
        try:
            match action.kind:
                case "save":
                    answer, stall_s = self._save(slot, action.filename)
                case "restore":
                    answer, stall_s = self._restore(slot, action.filename)
                case "erase":
                    answer, stall_s = {"n_erased": len(slot.tokens)}, 0.0
                    slot.tokens.clear()
                case "park":
                    answer, stall_s = self._park(slot)
                case "unpark":
                    answer, stall_s = self._unpark(slot)
        except ApiError as error:
            action.settle(error)
            return 0.0
        action.settle({"id_slot": slot.id_slot} | answer)
        return stall_s

    def _save(self, slot: Slot, filename: str) -> tuple[dict[str, Any], float]:
        path = slot_file(self._config.slot_save_path, filename)
        size = write_slot(path, self._config.model_alias, slot.tokens, self._slots.kv_bytes(slot))
        fails = self._faults.take("save_fails", filename)
        if fails is not None or self._faults.take("save_short", filename) is not None:
            os.truncate(path, size // 2)
        if fails is not None:
            raise ApiError(500, "Unable to save slot", "server_error")
        stall_s = self._timing.save_s(len(slot.tokens)) + self._delay_s("slow_save", filename)
        return {
            "filename": filename,
            "n_saved": len(slot.tokens),
            "n_written": size,
            "timings": {"save_ms": stall_s * 1000},
        }, stall_s

    def _restore(self, slot: Slot, filename: str) -> tuple[dict[str, Any], float]:
        path = slot_file(self._config.slot_save_path, filename)
        slot.tokens.clear()
        tokens, size = read_slot(path, self._config.model_alias)
        fails = self._faults.take("restore_fails", filename) is not None
        if fails or len(tokens) > self._config.slot_n_ctx or not self._fits(len(tokens)):
            raise ApiError(400, UNREADABLE)
        if self._faults.take("restore_short", filename) is not None:
            del tokens[len(tokens) // 2 :]
        slot.tokens.extend(tokens)
        slot.restored = True
        stall_s = self._timing.restore_s(len(tokens)) + self._delay_s("slow_restore", filename)
        return {
            "filename": filename,
            "n_restored": len(tokens),
            "n_read": size,
            "timings": {"restore_ms": stall_s * 1000},
        }, stall_s

    def _delay_s(self, kind: FaultKind, filename: str) -> float:
        fault = self._faults.take(kind, filename)
        return 0.0 if fault is None else fault.delay_s

    def _fits(self, tokens: int) -> bool:
        """A restore, unlike a decode step, clears no idle slot to make room."""
        return not self._config.kv_unified or self._slots.resident_tokens() + tokens <= self._config.n_ctx

    def _park(self, slot: Slot) -> tuple[dict[str, Any], float]:
        generation = slot.generation
        if generation is None:
            raise ApiError(400, "Slot is not processing")
        if generation.parked:
            return self._park_state(slot), 0.0
        if self._slots.parked_bytes() + self._slots.kv_bytes(slot) > self._config.preempt_ram_bytes:
            raise ApiError(503, "No room to park the slot in host memory", "unavailable_error")
        generation.parked = slot.manually_parked = True
        generation.outbox.put(Notice("preempted"))
        return self._park_state(slot), self._timing.save_s(len(slot.tokens))

    def _unpark(self, slot: Slot) -> tuple[dict[str, Any], float]:
        generation = slot.generation
        if generation is None or not generation.parked:
            raise ApiError(400, "Slot is not preempted")
        if not self._slots.make_room(len(slot.tokens)):
            raise ApiError(503, "No room to restore the slot", "unavailable_error")
        generation.parked = slot.manually_parked = False
        generation.outbox.put(Notice("resumed"))
        return self._park_state(slot), self._timing.restore_s(len(slot.tokens))

    def _park_state(self, slot: Slot) -> dict[str, Any]:
        return {
            "is_preempted": slot.parked,
            "preempt_ram_bytes": self._slots.kv_bytes(slot) if slot.parked else 0,
            "preempt_manual": slot.manually_parked,
        }
