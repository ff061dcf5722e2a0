"""Turns, and how to bring one into a state."""

from __future__ import annotations

import itertools
from typing import Any

from orchestrator.broker import Broker, Lease, timeline_entry
from orchestrator.turns import TurnRequest, TurnSize, TurnState

POOL = "p"
BACKEND = "b"
GATEWAY = "gw"
PERMANENT = ("swarm:*:seq", "swarm:*:events", "swarm:*:recent", "swarm:*:counters", "swarm:*:fence")

_numbers = itertools.count(1)

# The way from the queue into each state.
PATHS: dict[TurnState, tuple[TurnState, ...]] = {
    TurnState.QUEUED: (),
    TurnState.CLAIMED: (TurnState.CLAIMED,),
    TurnState.RUNNING: (TurnState.CLAIMED, TurnState.RUNNING),
    TurnState.PAUSED: (TurnState.CLAIMED, TurnState.RUNNING, TurnState.PAUSED),
    TurnState.DONE: (TurnState.CLAIMED, TurnState.RUNNING, TurnState.DONE),
    TurnState.FAILED: (TurnState.CLAIMED, TurnState.FAILED),
    TurnState.CANCELLED: (TurnState.CLAIMED, TurnState.CANCELLED),
}


def make_request(turn: str | None = None, priority: int = 20, **fields: Any) -> TurnRequest:
    """A turn of ten tokens."""
    return TurnRequest(
        **{
            "id": turn or f"t{next(_numbers)}",
            "pool": POOL,
            "agent": "worker",
            "priority": priority,
            "priority_class": "background",
            "api": "chat",
            "model": "m",
            "body": b'{"messages":[]}',
            "stream": True,
            "size": TurnSize(3, 7, True),
            "gateway": GATEWAY,
            "created": 1.5,
            **fields,
        }
    )


async def lease_of(broker: Broker, owner: str = "me", ttl_ms: int = 60_000) -> Lease:
    """The backend's lease, which must be free."""
    lease = await broker.acquire(POOL, BACKEND, owner, ttl_ms)
    assert lease is not None
    return lease


async def turn_in(broker: Broker, lease: Lease, state: TurnState) -> str:
    """A new turn in the state."""
    request = make_request()
    await broker.submit(request, max_waiting=1000)
    for step in PATHS[state]:
        if step is TurnState.CLAIMED:
            assert await broker.claim(lease, request.id) is not None
        else:
            await broker.advance(lease, request.id, step, timeline_entry(step.value))
    return request.id


async def state_of(broker: Broker, turn: str) -> TurnState | None:
    """What the turn's record says."""
    record = await broker.record(POOL, turn)
    return None if record is None else record.state
