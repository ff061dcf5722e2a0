"""Bounds on what a client may send, and on how slowly, where uvicorn has none.

uvicorn's httptools protocol waits for ever for the first byte of a connection and for the end of a head,
keeps a head of any size in memory, and throws away the rest of a body whose request was answered for as long
as it comes. Its only timer, for idle connections, is stopped by any byte. Here:

| what | bound | then |
|---|---|---|
| a request's first line and headers (and trailers) | `HEAD_BOUND_BYTES` | 431 |
| headers | `HEADERS_BOUND` | 431 |
| from the connection, or from a first byte after a reply, to the end of the head | `HEAD_BOUND_S` | 408 |
| the rest of a body whose request was answered already | `UNREAD_BOUND_S` | the connection is closed |
| requests sent before the one before them was answered | `PIPELINE_BOUND` | 400 |

How long a body may take while it is wanted is `body.read_body`'s business.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from orchestrator.gateway.connections import HttpConnection
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError

HEAD_BOUND_BYTES = 32 * 1024
HEADERS_BOUND = 128
HEAD_BOUND_S = 30.0
UNREAD_BOUND_S = 10.0
PIPELINE_BOUND = 8

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class _HeadTooLarge(Exception):
    """Ends the parser's work on a head."""


class _TooManyAhead(Exception):
    """Ends the parser's work on requests that were sent ahead."""


class LimitedConnection(HttpConnection):
    """uvicorn's connection with the bounds above. It has work with a request's pieces only, not a reply's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._head_bytes = 0
        # Bytes that the parser has taken without telling of anything: an unfinished line.
        self._untold_bytes = 0
        self._in_head = False
        self._in_message = False
        self._too_large = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._wait(HEAD_BOUND_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and see what is still open after that."""
        self._untold_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._untold_bytes > HEAD_BOUND_BYTES:
            self._too_large = True
            self.send_400_response("")
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            # uvicorn has just stopped its own timer.
            self._wait(HEAD_BOUND_S)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._untold_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the first line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or, after the body, a trailer."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= HEADERS_BOUND:
            self._count(HEAD_BOUND_BYTES)
        super().on_header(name, value)

    def _count(self, n_bytes: int) -> None:
        self._untold_bytes = 0
        self._head_bytes += n_bytes
        if self._head_bytes > HEAD_BOUND_BYTES:
            self._too_large = True
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        """The head is here: begin to answer."""
        self._in_head = False
        self._untold_bytes = 0
        self._wait(None)
        if len(self.pipeline) >= PIPELINE_BOUND:
            raise _TooManyAhead
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._in_message = False
        self._untold_bytes = 0
        self._wait(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is out, perhaps before the request was in."""
        super().on_response_complete()
        if self._in_message and not self._in_head and not self.transport.is_closing():
            self._wait(UNREAD_BOUND_S)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a client that offers HTTP/2 or WebSocket is answered in HTTP/1.1, which it can."""

    def send_400_response(self, msg: str) -> None:
        """Say in the API's shape why the connection is closed."""
        if self._too_large:
            bounds = f"{HEAD_BOUND_BYTES:,} bytes or {HEADERS_BOUND} headers"
            self._close(431, f"the request's head is larger than {bounds}", "headers_too_large")
        else:
            self._close(400, "the request is not valid HTTP", "bad_http")

    def _wait(self, bound_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if bound_s is None else self.loop.call_later(bound_s, self._expired)

    def _expired(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_head:
            message = f"the request's headers did not arrive within {HEAD_BOUND_S:g} s"
            self._close(408, message, "head_timeout")
        else:
            self.transport.close()

    def _close(self, status: int, message: str, code: str) -> None:
        """Send an error, unless it would end up inside a reply or after it, and close the connection."""
        in_body = self._in_message and not self._in_head
        if self.cycle is None or (
            not in_body if self.cycle.response_complete else not self.cycle.response_started
        ):
            body = OPENAI_ERRORS.body(ApiError(status, message, code=code))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()
