"""Redis behind typed functions: queue, turn records, output logs, events, leases."""

from orchestrator.broker.broker import (
    Broker,
    Deposed,
    DuplicateTurn,
    Lease,
    LogAppend,
    PoolEvent,
    QueueFull,
)
from orchestrator.broker.records import (
    DELTA,
    END,
    ERROR,
    STATUS,
    TurnRecord,
    delta_entry,
    end_entry,
    error_entry,
    status_entry,
    stop_sequence_of,
    timeline_entry,
)
from orchestrator.broker.streams import Entry, OutputReader, TurnStream

__all__ = [
    "DELTA",
    "END",
    "ERROR",
    "STATUS",
    "Broker",
    "Deposed",
    "DuplicateTurn",
    "Entry",
    "Lease",
    "LogAppend",
    "OutputReader",
    "PoolEvent",
    "QueueFull",
    "TurnRecord",
    "TurnStream",
    "delta_entry",
    "end_entry",
    "error_entry",
    "status_entry",
    "stop_sequence_of",
    "timeline_entry",
]
