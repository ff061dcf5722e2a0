"""One backend: the scheduler, driven as the dispatcher drives it, upon a model engine.

Nothing is decided here. Events go to the scheduler in the order in which things happen, and its commands
to the engine (`call_s` later), to the pool (claims) or into the books.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from orchestrator.scheduler import (
    Claim,
    Claimed,
    ClaimLost,
    Command,
    Ended,
    EngineReady,
    Erase,
    Erased,
    Event,
    Forget,
    MarkDropped,
    MarkSwapped,
    Pause,
    Paused,
    Prefilled,
    Progressed,
    Refuse,
    Restored,
    Resume,
    Save,
    Saved,
    SaveFailed,
    Scheduler,
    Start,
    Started,
    Stepped,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.simulation.engine import Engine
from orchestrator.simulation.setup import BackendSetup, Setup, SimulationError
from orchestrator.simulation.turn import Turn

#: As in the dispatcher's meter: fewer gaps than this tell nothing, and how far a new one moves the mean.
MIN_GAPS, SMOOTHING = 4, 0.2

EventLog = Callable[[float, str, Event, tuple[Command, ...]], None]


class Pool(Protocol):
    """What the backends of a pool share."""

    def at(self, at_s: float, call: Callable[[float], None]) -> None:
        """Call it at that time, after what was asked for before."""

    def tell(self, backend: Backend, event: Event, now: float) -> None:
        """Let the backend handle the event after those that were told before."""

    def claim(self, backend: Backend, turn: str, now: float) -> Turn | None:
        """The turn, if nobody was quicker."""

    def over(self, backend: Backend, turn: Turn, now: float) -> None:
        """The turn has ended."""


class Backend:
    """Scheduler and engine of one backend, and the dispatcher's part between them."""

    def __init__(self, setup: Setup, backend: BackendSetup, pool: Pool, log: EventLog | None) -> None:
        self.name = backend.name
        self.setup = backend
        self.scheduler = Scheduler(backend.policy)
        self.engine = Engine(
            backend.model,
            backend.policy.engine_slots,
            self,
            slot_tokens=backend.slot_tokens,
            budget_tokens=backend.policy.kv_budget_tokens,
            stride=setup.stride,
        )
        self.figures = self.engine.figures
        self.events = 0
        self._pool = pool
        self._log = log
        self._turns: dict[str, Turn] = {}
        self._call_s = backend.model.call_s
        self._wakes = 0
        self._step_s: float | None = None
        self._gaps_s = 0.0
        self._gaps = 0
        self._mixed = False

    def queue_delay_s(self) -> float:
        """From an arrival until the scheduler hears of it."""
        return max(0.0, self.setup.model.control_s - self._call_s)

    # Events in, commands out -----------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The engine is there."""
        self._pool.tell(self, EngineReady(), now)

    def queued(self, turn: Turn) -> TurnQueued:
        """What tells it that a turn stands in the pool's queue."""
        return TurnQueued(turn.id, turn.agent, turn.priority, turn.number, turn.prompt + turn.limit)

    def withdrawn(self, turn: Turn, now: float) -> None:
        """Another backend has claimed it."""
        self._pool.tell(self, Withdrawn(turn.id), now)

    def handle(self, event: Event, now: float) -> None:
        """Hand one event to the scheduler and carry out what it wants."""
        self.events += 1
        commands = self.scheduler.handle(event, now)
        if self._log is not None:
            self._log(now, self.name, event, tuple(commands))
        for command in commands:
            self._carry_out(command, now)

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Claim(turn_id):
                claimed = self._pool.claim(self, turn_id, now)
                if claimed is None:
                    self.figures.claims_lost += 1
                    self._pool.tell(self, ClaimLost(turn_id), now)
                else:
                    self._turns[turn_id] = claimed
                    self._pool.tell(self, Claimed(turn_id, claimed.prefix, claimed.limit), now)
            case Start(turn_id, slot, source):
                self._run(self._turns[turn_id], slot, source, now)
            case Resume(turn_id, slot, tier, source):
                turn = self._turns[turn_id]
                turn.tier = tier
                self._run(turn, slot, source, now)
            case Pause(turn_id, _):
                self._call(partial(self.engine.stop, self._turns[turn_id]), now)
            case Save(slot, key, _):
                self._call(partial(self.engine.save, slot, key), now)
            case Erase(slot):
                self._call(partial(self.engine.erase, slot), now)
            case Forget(key):
                self.engine.forget(key)
            case Refuse():
                pass  # another backend has the room: what fits nowhere was refused before it was queued
            case MarkSwapped():
                self.figures.swapped += 1
            case MarkDropped():
                self.figures.dropped += 1
            case _:
                raise SimulationError(f"{now:.3f} s: nobody asked for {command}")

    def _run(self, turn: Turn, slot: int, source: str | None, now: float) -> None:
        turn.asked_s = now
        self._call(partial(self.engine.run, turn, slot, source), now)

    def _call(self, call: Callable[[float], None], now: float) -> None:
        if self._call_s > 0:
            self._pool.at(now + self._call_s, call)
        else:
            call(now)

    # What the engine does --------------------------------------------------------------------------

    def wake(self, at_s: float) -> None:
        """Let the engine act then, and not at an earlier appointment."""
        self._wakes += 1
        self._pool.at(at_s, partial(self._wake, self._wakes))

    def _wake(self, appointment: int, now: float) -> None:
        if appointment == self._wakes:
            self.engine.act(now)

    def started(self, turn: Turn, prompt: int, cached: int, now: float) -> None:
        """See `Host`."""
        turn.evaluating = prompt - cached
        if turn.wait_s is None:
            turn.wait_s = now - turn.arrival_s
            turn.cached = cached
        else:
            turn.evaluated_again += prompt - cached
            if turn.tier is not None:
                turn.resumes[turn.tier] = turn.resumes.get(turn.tier, 0) + 1
        turn.running = True
        self._pool.tell(self, Started(turn.id, prompt, cached), now)

    def first_token(self, turn: Turn, now: float) -> None:
        """See `Host`."""
        if turn.first_token_s is None:
            turn.first_token_s = now - turn.arrival_s
        turn.marked_s, turn.marked = now, turn.generated
        took_s = max(0.0, now - turn.asked_s - (self._step_s or 0.0))
        self._pool.tell(self, Prefilled(turn.evaluating, took_s, turn.id), now)

    def finished(self, turn: Turn, kv_tokens: int, now: float) -> None:
        """See `Host`."""
        self._meter(turn, turn.generated, turn.last_s)
        del self._turns[turn.id]
        self._pool.tell(self, Ended(turn.id, kv_tokens, resident=True), now)
        self._pool.over(self, turn, now)

    def stopped(self, turn: Turn, kv_tokens: int, now: float) -> None:
        """See `Host`."""
        if turn.running:  # else nobody had heard of it, and it is no preemption to its user
            turn.running = False
            turn.preemptions += 1
            if turn.marked:
                self._meter(turn, turn.generated, turn.last_s)
        self._pool.tell(self, Paused(turn.id, kv_tokens, resident=True), now)

    def erased(self, slot: int, now: float) -> None:
        """See `Host`."""
        self._pool.tell(self, Erased(slot), now)

    def saved(self, slot: int, key: str, kv_tokens: int, stall_s: float, now: float) -> None:
        """See `Host`."""
        swap = self.setup.policy.swap
        if not kv_tokens or swap is None:
            self._pool.tell(self, SaveFailed(slot, key), now)
            return
        held = sum(map(swap.file_bytes, self.engine.files()))
        self.figures.most_swap_bytes = max(self.figures.most_swap_bytes, held)
        self._pool.tell(self, Saved(slot, key, kv_tokens, swap.file_bytes(kv_tokens), stall_s), now)

    def restored(self, turn: Turn, kv_tokens: int, stall_s: float, now: float) -> None:
        """See `Host`."""
        turn.asked_s = now
        self._pool.tell(self, Restored(turn.id, kv_tokens, stall_s), now)

    # What is told now and then -----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._pool.tell(self, Tick(), now)

    def report(self, now: float) -> None:
        """How far the running turns are, and how long their steps take."""
        seated = self.engine.seated()
        if not seated:
            self._take_step(False)
            return
        done, last_s = self.engine.progress(now)
        prefilling = False
        for turn in seated:
            if turn.left is None:
                prefilling = True
                continue
            made = turn.generated
            if turn.decodes:
                made += done
                self._meter(turn, made, last_s if done else turn.last_s)
            else:
                prefilling = True
            kv_tokens = turn.prompt + made - turn.left
            self._pool.tell(self, Progressed(turn.id, kv_tokens), now)
        step_s = self._take_step(prefilling)
        if step_s is not None:
            self._pool.tell(self, Stepped(step_s), now)

    def _meter(self, turn: Turn, made: int, last_s: float) -> None:
        """Count the gaps between a turn's tokens since it was last looked at."""
        if made > turn.marked:
            self._gaps_s += last_s - turn.marked_s
            self._gaps += made - turn.marked
            turn.marked_s, turn.marked = last_s, made

    def _take_step(self, prefilling: bool) -> float | None:
        """The mean step since the last report; None for too few, or where a prefill made them longer."""
        gaps_s, gaps, mixed = self._gaps_s, self._gaps, self._mixed or prefilling
        self._gaps_s, self._gaps, self._mixed = 0.0, 0, prefilling
        if mixed or gaps < MIN_GAPS:
            return None
        step_s = gaps_s / gaps
        before = self._step_s
        self._step_s = step_s if before is None else before + SMOOTHING * (step_s - before)
        return step_s
