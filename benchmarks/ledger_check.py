"""Whether the service's account of an engine's KV is what the engine itself says.

The service publishes its state a few times a second; the engine is asked for its slots in between. A slot of
which the state says the same before and after did not change meanwhile, so the engine must agree:

- a slot that does not run holds exactly as many tokens as the account says;
- one that decodes holds a number between the two states' figures. The last token that a turn has got is in
  its count and not yet in the KV, so the lower bound is one less;
- one whose turn left nothing that can be built upon is charged with the most that may be left: an upper
  bound, counted apart (`bounded`).

The rest is counted as `moving`: slots that changed hands between the looks, or whose prompt was under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from benchmarks.harness import BenchError, ask

_STILL = ("paused", "idle", "empty")
_LOOK_S = 0.05
_LOOK_BOUND_S = 10.0
_MISMATCHES_KEPT = 50


@dataclass
class LedgerTruth:
    """What all samples together showed."""

    samples: int = 0
    still: int = 0
    running: int = 0
    bounded: int = 0
    moving: int = 0
    most_charged_tokens: int = 0
    most_held_tokens: int = 0
    """Most tokens in all slots together, by the engine's own figures."""
    budget_tokens: int = 0
    over_budget: int = 0
    """Samples in which more was charged, or held by the engine, than the budget."""
    mismatches: int = 0
    first_mismatches: list[dict[str, Any]] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """Slots that were compared."""
        return self.still + self.running + self.bounded

    def add(
        self, before: Mapping[str, Any], engine: Sequence[Mapping[str, Any]], after: Mapping[str, Any]
    ) -> None:
        """Count one sample: two states of one backend, and the engine's slots as they were in between."""
        self.samples += 1
        held = sum(_held(slot) for slot in engine)
        kv = after["kv"]
        self.budget_tokens = kv["budget_tokens"]
        self.most_charged_tokens = max(self.most_charged_tokens, kv["charged_tokens"])
        self.most_held_tokens = max(self.most_held_tokens, held)
        self.over_budget += (
            max(before["kv"]["charged_tokens"], kv["charged_tokens"], held) > kv["budget_tokens"]
        )
        if sum(kv["owners"].values()) != kv["charged_tokens"]:
            self._mismatch("owners do not add up to what is charged", before, {}, kv)
        for one, slot, two in zip(before["slots"], engine, after["slots"], strict=True):
            self._slot(one, slot, two, kv["bytes_per_token"])

    def _slot(
        self, one: Mapping[str, Any], slot: Mapping[str, Any], two: Mapping[str, Any], token_bytes: int
    ) -> None:
        if two["kv_bytes"] != two["kv_tokens"] * token_bytes:
            self._mismatch("bytes are not tokens x bytes per token", one, slot, two)
        same = all(one[key] == two[key] for key in ("state", "turn", "agent", "preemptions"))
        held = _held(slot)
        if same and two["state"] == "running":
            if not (slot["is_processing"] and _decoding(slot) and two["tokens"]):
                self.moving += 1
                return
            self.running += 1
            if not one["kv_tokens"] - 1 <= held <= two["kv_tokens"]:
                self._mismatch("a running slot is not between the two states", one, slot, two)
        elif not _stayed(one, slot, two, same):
            self.moving += 1
        elif two["state"] == "idle" and two["agent"] is None:
            self.bounded += 1
            if held > two["kv_tokens"]:
                self._mismatch("a slot holds more than what may be left in it", one, slot, two)
        else:
            self.still += 1
            if held != two["kv_tokens"]:
                self._mismatch("a slot that does not run holds another number of tokens", one, slot, two)

    def _mismatch(
        self, what: str, one: Mapping[str, Any], slot: Mapping[str, Any], two: Mapping[str, Any]
    ) -> None:
        self.mismatches += 1
        if len(self.first_mismatches) < _MISMATCHES_KEPT:
            shown = {key: value for key, value in slot.items() if key not in ("params", "prompt")}
            self.first_mismatches.append(
                {
                    "sample": self.samples,
                    "what": what,
                    "before": dict(one),
                    "engine": shown,
                    "after": dict(two),
                }
            )


def _stayed(one: Mapping[str, Any], slot: Mapping[str, Any], two: Mapping[str, Any], same: bool) -> bool:
    return (
        same and two["state"] in _STILL and one["kv_tokens"] == two["kv_tokens"] and not slot["is_processing"]
    )


def _held(slot: Mapping[str, Any]) -> int:
    """Tokens in an engine's slot: absent where nothing ran since the start, an erase or a restore."""
    return int(slot.get("n_prompt_tokens") or 0)


def _decoding(slot: Mapping[str, Any]) -> bool:
    progress = slot.get("next_token") or [{}]
    first = progress[0] if isinstance(progress, list) else progress
    return int(first.get("n_decoded", 0)) > 0


async def sample_ledger(
    admin: httpx.AsyncClient, engine: httpx.AsyncClient, truth: LedgerTruth, every_s: float
) -> None:
    """Sample until cancelled. Raises BenchError when one of the two does not answer."""
    while True:
        before = await _state(admin)
        slots = await ask(engine, "GET", "/slots")
        # What is published twice after the engine's answer was also computed after it.
        after = await _changed(admin, await _changed(admin, await _state(admin)))
        if before["slots"] and len(before["slots"]) == len(slots):
            truth.add(before, slots, after)
        await anyio.sleep(every_s)


async def _state(admin: httpx.AsyncClient) -> dict[str, Any]:
    """The one backend's entry in the state, its paused turns with it."""
    state = await ask(admin, "GET", "/swarm/state")
    entry: dict[str, Any] = state["backends"][0]
    return entry | {"paused": state["paused"]}


async def _changed(admin: httpx.AsyncClient, state: dict[str, Any]) -> dict[str, Any]:
    """The next state that is another one; the same when nothing changes for long."""
    with anyio.move_on_after(_LOOK_BOUND_S):
        while True:
            now = await _state(admin)
            if not now["slots"]:
                raise BenchError("the service does not publish its backend's state any more")
            if now != state:
                return now
            await anyio.sleep(_LOOK_S)
    return state
