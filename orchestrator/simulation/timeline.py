"""Who had which decode slot when: drawn from what the scheduler was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.scheduler import Command, Ended, Event, Pause, Paused, Started, TurnQueued
from orchestrator.simulation.setup import Setup
from orchestrator.simulation.simulation import simulate


@dataclass(frozen=True, slots=True)
class Span:
    """A turn in a decode slot, or waiting for one (`lane` None). Seconds."""

    turn: str
    agent: str
    priority: int
    lane: int | None
    start_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """The spans of one backend's run, in the order of their ends. It is a run's event log.

    A newcomer takes the decode slot of the turn that was paused for it, any other the lowest that is free.
    """

    lanes: int
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    _agents: dict[str, tuple[str, int]] = field(default_factory=dict)
    _queued: dict[str, float] = field(default_factory=dict)
    _open: dict[str, tuple[int, float]] = field(default_factory=dict)
    _promised: dict[str, int] = field(default_factory=dict)

    def __call__(self, now: float, backend: str, event: Event, commands: tuple[Command, ...]) -> None:
        """Take one event and its commands."""
        match event:
            case TurnQueued(turn, agent, priority):
                self._agents[turn] = agent, priority
                self._queued[turn] = now
            case Started(turn):
                agent, priority = self._agents[turn]
                promised = self._promised.pop(turn, None)
                self._open[turn] = (self._lowest() if promised is None else promised), now
                queued = self._queued.pop(turn, None)
                if queued is not None:
                    self.waits.append(Span(turn, agent, priority, None, queued, now))
            case Paused(turn) | Ended(turn):
                self._close(turn, now)
        for command in commands:
            if isinstance(command, Pause) and command.by is not None and command.turn in self._open:
                self._promised[command.by] = self._open[command.turn][0]

    def _close(self, turn: str, now: float) -> None:
        if turn in self._open:
            lane, start_s = self._open.pop(turn)
            self.spans.append(Span(turn, *self._agents[turn], lane, start_s, now))

    def _lowest(self) -> int:
        taken = {lane for lane, _ in self._open.values()} | set(self._promised.values())
        return next((lane for lane in range(self.lanes) if lane not in taken), self.lanes)


def record(setup: Setup, *, until_s: float) -> Timeline:
    """Run a setup of one backend once and note who had which slot."""
    timeline = Timeline(setup.backends[0].policy.decode_slots)
    simulate(setup, seed=0, until_s=until_s, log=timeline)
    return timeline
