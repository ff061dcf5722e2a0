"""What the broker stores: turn records, log entries, pool events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.turns import Kept, TurnRequest, TurnSize, TurnState

#: What `TurnRecord.decode` reads, but for what was asked: that may be megabytes.
LISTED_FIELDS = (
    *(b"id", b"pool", b"agent", b"priority", b"class", b"api", b"model", b"stream", b"gateway", b"created"),
    *(b"size_prompt", b"size_max", b"size_exact", b"kept_path", b"state", b"seq", b"backend", b"preemptions"),
    *(b"prompt_tokens", b"tokens_generated", b"tokens_reevaluated", b"finish_reason", b"error", b"tier"),
    *(b"cancelling", b"held"),
)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn's request and where it stands.

    `usage` and `error` are set at its end; the counters grow with each segment: `preemptions`,
    `tokens_generated`, `tokens_reevaluated` (tokens that resumes evaluated though they had been before).
    `cancelling` and `held` are what its owner was told, for an owner who comes later.
    """

    request: TurnRequest
    state: TurnState
    seq: int
    backend: str | None
    preemptions: int
    prompt_tokens: int
    tokens_generated: int
    tokens_reevaluated: int
    finish_reason: str | None
    error: str | None
    tier: str | None
    cancelling: bool = False
    held: bool = False

    @classmethod
    def decode(cls, fields: dict[bytes, bytes]) -> TurnRecord:
        """Read the record's hash as Redis returns it."""

        def text(name: bytes) -> str:
            return fields.get(name, b"").decode()

        def number(name: bytes) -> int:
            return int(fields.get(name, b"0"))

        request = TurnRequest(
            id=text(b"id"),
            pool=text(b"pool"),
            agent=text(b"agent"),
            priority=number(b"priority"),
            priority_class=text(b"class"),
            api=text(b"api"),
            model=text(b"model"),
            body=fields.get(b"body", b"{}"),
            stream=text(b"stream") == "1",
            size=TurnSize(number(b"size_prompt"), number(b"size_max"), text(b"size_exact") == "1"),
            gateway=text(b"gateway"),
            created=float(fields.get(b"created", b"0")),
            kept=_kept(fields),
        )
        return cls(
            request=request,
            state=TurnState(text(b"state")),
            seq=number(b"seq"),
            backend=text(b"backend") or None,
            preemptions=number(b"preemptions"),
            prompt_tokens=number(b"prompt_tokens"),
            tokens_generated=number(b"tokens_generated"),
            tokens_reevaluated=number(b"tokens_reevaluated"),
            finish_reason=text(b"finish_reason") or None,
            error=text(b"error") or None,
            tier=text(b"tier") or None,
            cancelling=text(b"cancelling") == "1",
            held=text(b"held") == "1",
        )


def _kept(fields: dict[bytes, bytes]) -> Kept | None:
    path = fields.get(b"kept_path")
    return Kept(path.decode(), fields.get(b"kept_body", fields.get(b"body", b""))) if path else None


def request_fields(request: TurnRequest) -> list[str | bytes | int | float]:
    """The record's fields that the request sets, as the flat pairs HSET takes."""
    size, kept = request.size, request.kept
    keep: list[str | bytes | int | float] = []
    if kept is not None:
        keep += ["kept_path", kept.path]
        if kept.asked != request.body:  # a prompt is not stored twice
            keep += ["kept_body", kept.asked]
    return [
        *("id", request.id, "pool", request.pool, "agent", request.agent),
        *("priority", request.priority, "class", request.priority_class),
        *("api", request.api, "model", request.model, "body", request.body),
        *("stream", int(request.stream), "gateway", request.gateway, "created", request.created),
        *("size_prompt", size.prompt_tokens, "size_max", size.max_tokens, "size_exact", int(size.exact)),
        *keep,
    ]


def timeline_entry(event: str, **details: Any) -> bytes:
    """One line of a turn's timeline; `t` is seconds since the epoch."""
    return orjson.dumps({"t": round(time.time(), 6), "event": event, **details})


def _line(value: Any) -> bytes:
    """JSON that is kept for long.

    What orjson returns has a buffer of at least 4 KiB behind it (3.12 and 3.13), which a turn would hold for
    every token; a copy is as long as it looks.
    """
    return b"".join((orjson.dumps(value), b""))


# Output log entries: JSON lists whose first item is the kind.

DELTA = "d"
STATUS = "s"
END = "e"
ERROR = "x"


def delta_entry(part: dict[str, Any], n_tokens: int, tokens: list[int]) -> bytes:
    """A piece of the reply: the choice's new part, how many tokens it took, and their ids if known."""
    return _line([DELTA, part, n_tokens, tokens])


def status_entry(status: str, **details: Any) -> bytes:
    """The turn started, paused or resumed."""
    return _line([STATUS, status, details])


def end_entry(
    finish_reason: str,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    stop_sequence: str | None = None,
) -> bytes:
    """The reply is complete. Counts are over all segments; `cached_tokens` is the first one's.

    `stop_sequence` is in the entry only where one ended the reply: see `stop_sequence_of`.
    """
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return _line([END, finish_reason, usage, *(() if stop_sequence is None else (stop_sequence,))])


def stop_sequence_of(end: list[Any]) -> str | None:
    """The stop sequence that ended the reply, from its end entry; None where none did, or nobody knows."""
    sequence: str | None = end[3] if len(end) > 3 else None
    return sequence


def error_entry(status: int, message: str, kind: str, code: str | None = None) -> bytes:
    """The turn failed; `status` is the HTTP status that says so best."""
    return _line([ERROR, status, {"message": message, "type": kind, "param": None, "code": code}])
