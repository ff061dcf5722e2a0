"""The pure scheduler: ``handle(event, now) -> commands``. No I/O, no clock, no randomness.

It owns one backend: its decode slots (the right to be in the running batch) and its engine slots
(the engine's places for KV). It knows every turn it may place, decides who runs, and never learns
how: a dispatcher carries the commands out and reports each one's end as an event.
"""

from orchestrator.scheduler.commands import (
    Abort,
    Claim,
    Command,
    Discard,
    Erase,
    MarkDropped,
    Pause,
    Resume,
    Start,
)
from orchestrator.scheduler.events import (
    CancelRequested,
    Claimed,
    ClaimLost,
    Ended,
    EngineLost,
    EngineReady,
    Erased,
    Event,
    HoldRequested,
    Paused,
    Progressed,
    Recovered,
    ReleaseRequested,
    Started,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.scheduler.policy import Policy
from orchestrator.scheduler.scheduler import Scheduler, SchedulerView
from orchestrator.scheduler.slots import SlotView
from orchestrator.scheduler.turn import TurnView

__all__ = [
    "Abort",
    "CancelRequested",
    "Claim",
    "ClaimLost",
    "Claimed",
    "Command",
    "Discard",
    "Ended",
    "EngineLost",
    "EngineReady",
    "Erase",
    "Erased",
    "Event",
    "HoldRequested",
    "MarkDropped",
    "Pause",
    "Paused",
    "Policy",
    "Progressed",
    "Recovered",
    "ReleaseRequested",
    "Resume",
    "Scheduler",
    "SchedulerView",
    "SlotView",
    "Start",
    "Started",
    "Tick",
    "TurnQueued",
    "TurnView",
    "Withdrawn",
]
