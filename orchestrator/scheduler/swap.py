"""The swap folder's books: which file holds whose KV, and how many bytes all of them take.

A file is WRITING until the engine has saved it, then READY. While the engine slot still holds the same
KV, the file is that slot's *copy*: giving the slot up costs nothing then. A file belongs to a paused turn,
which needs it for its resume, or is the idle cache of an agent. Room is made by removing idle caches, the
least recently used first; a paused turn's file goes only with its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.scheduler.commands import Command, Forget
from orchestrator.scheduler.ledger import Ledger
from orchestrator.scheduler.policy import SwapPolicy
from orchestrator.scheduler.prefix import Prefix, shared_tokens
from orchestrator.scheduler.slots import Slot


@dataclass(slots=True, eq=False)
class SwapFile:
    """One saved file. `readers` is how many turns are about to be restored from it."""

    key: str
    turn: str | None
    agent: str
    priority: int
    kv_tokens: int
    prompt_tokens: int
    prefix: Prefix
    slot: Slot | None
    ready: bool = False
    readers: int = 0
    order: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing but the hope of a next turn keeps it."""
        return self.turn is None and not self.readers and self.ready


@dataclass(frozen=True, slots=True)
class SwapView:
    """The swap folder as it stood when asked."""

    budget_bytes: int
    used_bytes: int
    files: int
    turns: int
    saves: int
    restores: int
    failures: int
    stalls: int
    paused_until: float | None


@dataclass(slots=True)
class SwapTable:
    """All files of one backend. Without a policy there are none."""

    policy: SwapPolicy | None
    ledger: Ledger = field(init=False)
    files: dict[str, SwapFile] = field(default_factory=dict)
    writing: SwapFile | None = None
    saves: int = 0
    restores: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    stalls: int = 0
    paused_until: float = 0.0
    _clock: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.policy.budget_bytes if self.policy is not None else 0)

    # Room --------------------------------------------------------------------------------------------

    def usable(self, now: float) -> bool:
        """Whether a save may be tried."""
        return self.policy is not None and now >= self.paused_until

    def could_hold(
        self, slot: Slot, keep: SwapFile | None = None, commands: list[Command] | None = None
    ) -> bool:
        """Whether the slot's KV fits once idle caches but `keep` are gone; with `commands` they go."""
        if self.policy is None:
            return False
        need = self.policy.file_bytes(slot.kv_tokens)
        free = self.ledger.free or 0
        if need <= free:
            return True
        # A copy is what makes its slot free to take; an idle cache is not worth another's copy, and two
        # that took it from each other would never come to rest.
        for_turn = slot.turn is not None
        idle = [
            file
            for file in self.files.values()
            if file.idle and file is not keep and file.slot is not slot and (for_turn or not file.slot)
        ]
        gone: list[SwapFile] = []
        for file in sorted(idle, key=lambda f: (f.slot is None, f.order)):
            if need <= free:
                break
            gone.append(file)
            free += self.ledger.of(file.key)
        if need > free:
            return False
        if commands is not None:
            for file in gone:
                self.remove(file, commands)
        return True

    # Life of a file ----------------------------------------------------------------------------------

    def write(self, slot: Slot, commands: list[Command], keep: SwapFile | None = None) -> SwapFile:
        """Book a file for the slot's KV; `could_hold` has to have said yes."""
        assert self.policy is not None
        self.could_hold(slot, keep, commands)
        self._clock += 1
        file = SwapFile(
            key=f"{self.policy.tag}-{self._clock}",
            turn=slot.turn,
            agent=slot.agent or "",
            priority=slot.priority,
            kv_tokens=slot.kv_tokens,
            prompt_tokens=slot.prompt_tokens,
            prefix=slot.prefix,
            slot=slot,
            order=self._clock,
        )
        self.ledger.open(file.key, self.policy.file_bytes(slot.kv_tokens))
        self.files[file.key] = file
        slot.copy = file.key
        self.writing = file
        return file

    def written(self, key: str, kv_tokens: int, file_bytes: int) -> SwapFile | None:
        """A save is over; None when nobody wants the file any more."""
        file = self._over(key)
        self.saves += 1
        self.failures_in_a_row = 0
        if file is None:
            return None
        file.ready = True
        file.kv_tokens = kv_tokens
        # What is on the disk is a fact, within the budget or not.
        free = self.ledger.free or 0
        self.ledger.change(key, min(file_bytes, self.ledger.of(key) + free))
        return file

    def failed(self, key: str, now: float) -> SwapFile | None:
        """A save did not work: after several in a row none is tried for a while."""
        file = self._over(key)
        self.fault(now)
        if file is not None:
            self._drop(file)
        return file

    def fault(self, now: float) -> None:
        """Count a failure of a save, and back off."""
        assert self.policy is not None
        self.failures += 1
        self.failures_in_a_row += 1
        doubled = 2.0 ** min(self.failures_in_a_row - 1, 64)
        self.paused_until = now + min(self.policy.retry_s * doubled, self.policy.retry_most_s)

    def another_engine(self) -> None:
        """Saves may be tried again."""
        self.failures_in_a_row = 0
        self.paused_until = 0.0

    def _over(self, key: str) -> SwapFile | None:
        if self.writing is not None and self.writing.key == key:
            self.writing = None
        return self.files.get(key)

    def touch(self, file: SwapFile) -> None:
        """Mark it as used last."""
        self._clock += 1
        file.order = self._clock

    def remove(self, file: SwapFile, commands: list[Command]) -> None:
        """Give the file up; one that is being written is removed once that is over."""
        self._drop(file)
        if file.ready:
            commands.append(Forget(file.key))

    def _drop(self, file: SwapFile) -> None:
        del self.files[file.key]
        self.ledger.close(file.key)
        self.detach(file)

    def detach(self, file: SwapFile) -> None:
        """The slot no longer holds the same KV."""
        if file.slot is not None:
            if file.slot.copy == file.key:
                file.slot.copy = None
            file.slot = None

    def copy_of(self, slot: Slot) -> SwapFile | None:
        """The finished copy of what the slot holds."""
        file = self.files.get(slot.copy) if slot.copy is not None else None
        return file if file is not None and file.ready else None

    def best_for(self, prefix: Prefix, most_tokens: int) -> tuple[int, SwapFile | None]:
        """The file that shares the most tokens with a prompt, and how many."""
        best, best_tokens = None, 0
        for file in self.files.values():
            if not file.ready or file.kv_tokens > most_tokens:
                continue
            tokens = shared_tokens(prefix, file.prefix, file.prompt_tokens, file.kv_tokens)
            if (tokens, -file.kv_tokens) > (best_tokens, -(best.kv_tokens if best else 0)):
                best, best_tokens = file, tokens
        return best_tokens, best

    def view(self, now: float) -> SwapView:
        """A frozen picture."""
        return SwapView(
            budget_bytes=self.ledger.budget or 0,
            used_bytes=self.ledger.charged,
            files=len(self.files),
            turns=sum(file.turn is not None for file in self.files.values()),
            saves=self.saves,
            restores=self.restores,
            failures=self.failures,
            stalls=self.stalls,
            paused_until=self.paused_until if now < self.paused_until else None,
        )
