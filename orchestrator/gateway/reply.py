"""One HTTP reply as bare ASGI messages: a JSON body, or a stream of events."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Send

from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError, ClientGone, ErrorShape

JSON_TYPE = (b"content-type", b"application/json")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers would hold back the stream that a client waits for.
    (b"x-accel-buffering", b"no"),
]

Header = tuple[bytes, bytes]


class Reply:
    """What has been sent of a reply. Every method may raise ClientGone."""

    def __init__(self, send: Send, errors: ErrorShape = OPENAI_ERRORS) -> None:
        self._send = send
        self._errors = errors
        self._headers: list[Header] = []
        self._started = False
        self._streaming = False
        self._complete = False

    def concerns(self, turn: str) -> None:
        """Name the turn in the reply's headers, whatever the reply will be."""
        self._headers.append((b"x-swarm-turn", turn.encode("ascii")))

    async def json(self, body: bytes, status: int = 200, headers: Sequence[Header] = ()) -> None:
        """Send all of the reply."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [JSON_TYPE, length, *headers, *self._headers])
        await self.end(body)

    async def start_stream(self) -> None:
        """Send the headers of an event stream."""
        self._streaming = True
        await self._start(200, [*STREAM_HEADERS, *self._headers])

    async def write(self, data: bytes) -> None:
        """Send a piece of the stream. Waits while the client reads more slowly than this writes."""
        # Once a token: no frame more than needed.
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError as error:
            raise ClientGone from error

    async def end(self, data: bytes) -> None:
        """Send the last piece of the body."""
        await self._message({"type": "http.response.body", "body": data, "more_body": False})
        self._complete = True

    async def fail(self, error: ApiError) -> None:
        """End the reply with an error: with its own status as long as no other one was sent.

        Does nothing to a reply that is complete, or of one piece and on its way.
        """
        if not self._started:
            await self.json(self._errors.body(error), error.status, error.headers)
        elif self._streaming and not self._complete:
            await self.end(self._errors.event(error))

    async def _start(self, status: int, headers: list[Header]) -> None:
        self._started = True
        await self._message({"type": "http.response.start", "status": status, "headers": headers})

    async def _message(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error
