"""Scripted faults: what the simulated engine does wrong, to which request, and how often.

A fault is chosen when a request arrives, so a test that sends its requests in order gets the same faults
every time. `nth_request` and `times` count only the requests that the fault's `match` accepts, from the
moment the fault was set.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

FaultKind = Literal[
    "disconnect",
    "http_500",
    "hang",
    "truncated_sse",
    "html_error",
    "invalid_utf8",
    "ignore_disconnect",
    "slow_health",
    "refuse",
    "save_fails",
    "save_short",
    "slow_save",
    "restore_fails",
    "restore_short",
    "slow_restore",
]
"""What goes wrong:

- `disconnect`: the connection is closed without an end of the body, after `after_tokens` tokens.
- `http_500`: a JSON error with status 500; after the first token, an error event in the stream.
- `hang`: no output and no end; the slot stays busy until the client leaves.
- `truncated_sse`: the body ends in the middle of an event, but the HTTP response ends properly.
- `html_error`: status 502 with an HTML page, as from a proxy; later, the page in the middle of the stream.
- `invalid_utf8`: the next event holds bytes that are not UTF-8; the stream goes on after it.
- `ignore_disconnect`: the engine goes on generating for a client that has left.
- `slow_health`: `GET /health` takes `delay_s`.
- `refuse`: every connection is closed without an answer, whatever it asks for.
- `save_fails`: a full disk: HTTP 500, and half of the file.
- `save_short`: a full disk that nobody notices: half of the file, and an answer as if it were whole.
- `restore_fails`: HTTP 400, and the slot is empty.
- `restore_short`: half of the tokens come back, and the answer says so.
- `slow_save`, `slow_restore`: the copy stalls every slot `delay_s` longer.
"""

GENERATION_FAULTS: frozenset[FaultKind] = frozenset(
    {"disconnect", "http_500", "hang", "truncated_sse", "html_error", "invalid_utf8", "ignore_disconnect"}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted fault."""

    kind: FaultKind
    after_tokens: int = 0
    """Generated tokens the client gets first; 0 means before the response's headers."""
    match: str = ""
    """Only requests whose prompt, or file name, contains this text; empty for all."""
    nth_request: int = 1
    """The first matching request that is hit, counted from 1."""
    times: int | None = 1
    """How many requests are hit from then on; None for all."""
    delay_s: float = 5.0
    """Only for `slow_health`, `slow_save` and `slow_restore`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"unknown fault kind {self.kind!r}; one of {', '.join(get_args(FaultKind))}")
        if self.after_tokens < 0 or self.delay_s < 0:
            raise ValueError("after_tokens and delay_s must not be negative")
        if self.nth_request < 1 or (self.times is not None and self.times < 1):
            raise ValueError("nth_request and times must be at least 1")


class FaultBook:
    """The faults in force and how often each was met."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._entries: list[_Entry] = []
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Puts more faults in force; they count requests from now on."""
        self._entries.extend(_Entry(fault) for fault in faults)

    def clear(self) -> None:
        """Ends all faults; requests already hit stay hit."""
        self._entries.clear()

    def for_request(self, prompt_text: Callable[[], str]) -> Fault | None:
        """The fault that hits this generation request. `prompt_text` is only called if a fault matches on
        text."""
        return self._take(GENERATION_FAULTS, prompt_text)

    def take(self, kind: FaultKind, filename: str = "") -> Fault | None:
        """The fault of this kind that hits the current (non-generation) request."""
        return self._take(frozenset((kind,)), lambda: filename)

    def snapshot(self) -> list[dict[str, Any]]:
        """The faults in force with their counters, as plain data."""
        return [asdict(e.fault) | {"seen": e.seen, "fired": e.fired} for e in self._entries]

    def _take(self, kinds: frozenset[FaultKind], prompt_text: Callable[[], str]) -> Fault | None:
        hit: Fault | None = None
        for entry in self._entries:
            fault = entry.fault
            if fault.kind not in kinds or (fault.match and fault.match not in prompt_text()):
                continue
            entry.seen += 1
            spent = fault.times is not None and entry.fired >= fault.times
            if hit is None and entry.seen >= fault.nth_request and not spent:
                entry.fired += 1
                hit = fault
        return hit


@dataclass(slots=True)
class _Entry:
    fault: Fault
    seen: int = 0
    fired: int = 0
