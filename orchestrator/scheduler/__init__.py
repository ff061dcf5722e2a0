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
    Forget,
    MarkDropped,
    MarkSwapped,
    Pause,
    Refuse,
    Resume,
    Save,
    Start,
)
from orchestrator.scheduler.costs import Costs, CostView
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
    Prefilled,
    Progressed,
    Recovered,
    ReleaseRequested,
    Restored,
    RestoreFailed,
    Saved,
    SaveFailed,
    Started,
    Stepped,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.scheduler.ledger import Ledger, LedgerError
from orchestrator.scheduler.policy import Policy, SwapPolicy
from orchestrator.scheduler.prefix import Prefix
from orchestrator.scheduler.scheduler import Scheduler
from orchestrator.scheduler.slots import SlotView
from orchestrator.scheduler.swap import SwapView
from orchestrator.scheduler.turn import TurnView
from orchestrator.scheduler.view import SchedulerView

__all__ = [
    "Abort",
    "CancelRequested",
    "Claim",
    "ClaimLost",
    "Claimed",
    "Command",
    "CostView",
    "Costs",
    "Discard",
    "Ended",
    "EngineLost",
    "EngineReady",
    "Erase",
    "Erased",
    "Event",
    "Forget",
    "HoldRequested",
    "Ledger",
    "LedgerError",
    "MarkDropped",
    "MarkSwapped",
    "Pause",
    "Paused",
    "Policy",
    "Prefilled",
    "Prefix",
    "Progressed",
    "Recovered",
    "Refuse",
    "ReleaseRequested",
    "RestoreFailed",
    "Restored",
    "Resume",
    "Save",
    "SaveFailed",
    "Saved",
    "Scheduler",
    "SchedulerView",
    "SlotView",
    "Start",
    "Started",
    "Stepped",
    "SwapPolicy",
    "SwapView",
    "Tick",
    "TurnQueued",
    "TurnView",
    "Withdrawn",
]
