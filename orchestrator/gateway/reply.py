"""One HTTP reply as bare ASGI messages: a JSON body, or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from anyio.lowlevel import checkpoint
from starlette.types import Message, Send

from orchestrator.gateway.connections import reset, unsent_bytes
from orchestrator.gateway.errors import OPENAI_ERRORS, ApiError, ClientGone, ErrorShape

JSON_TYPE = (b"content-type", b"application/json")
# A proxy that buffers would hold back what a client waits for.
UNBUFFERED = (b"x-accel-buffering", b"no")
STREAM_HEADERS = [(b"cache-control", b"no-cache"), UNBUFFERED]
# Blanks before a JSON text are no part of it (RFC 8259, section 2).
BLANK = b"\n"

Header = tuple[bytes, bytes]


class Reply:
    """What has been sent of a reply. Every method that sends may raise ClientGone.

    `errors`: how the reply's API writes an error; may be set as long as nothing was sent. `silence`: says
    nothing in the reply's own way; None as long as there is no such way. `started`: the status has been sent.
    `sent` counts what was handed on.
    """

    def __init__(
        self, send: Send, errors: ErrorShape = OPENAI_ERRORS, transport: asyncio.Transport | None = None
    ) -> None:
        """`transport` is the connection under `send`, where there is one."""
        self.errors = errors
        self.silence: Callable[[], Awaitable[None]] | None = None
        self.sent = 0
        self._send = send
        self._transport = transport
        self._headers: list[Header] = []
        self.started = False
        self._streaming = False
        self._blanks = False
        self._complete = False
        self._sending = False

    def concerns(self, turn: str) -> None:
        """Name the turn in the reply's headers, whatever the reply will be.

        Under three names: ours, and those where OpenAI's and Anthropic's clients look for a request's id.
        """
        named = turn.encode("ascii")
        self._headers += ((b"x-swarm-turn", named), (b"x-request-id", named), (b"request-id", named))

    async def json(self, body: bytes, status: int = 200, headers: Sequence[Header] = ()) -> None:
        """Send all of the reply; all that is left of it after blanks."""
        if not self.started:
            length = (b"content-length", b"%d" % len(body))
            await self._start(status, [JSON_TYPE, length, *headers, *self._headers])
        await self.end(body)

    async def blank(self) -> None:
        """Keep the connection of a JSON reply busy before there is one. Settles its status: 200."""
        if not self.started:
            self._blanks = True
            await self._start(200, [JSON_TYPE, UNBUFFERED, *self._headers])
        await self.write(BLANK)

    async def start_stream(self, content_type: bytes) -> None:
        """Send the headers of a stream."""
        self._streaming = True
        await self._start(200, [(b"content-type", content_type), *STREAM_HEADERS, *self._headers])

    async def write(self, data: bytes) -> None:
        """Send a piece of the stream. Waits while the client reads more slowly than this writes."""
        # Once a token: no frame more than needed.
        self._sending = True
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError as error:
            raise ClientGone from error
        self._sending = False
        self.sent += 1

    async def end(self, data: bytes) -> None:
        """Send the last piece of the body."""
        await self._message({"type": "http.response.body", "body": data, "more_body": False})
        self._complete = True

    async def fail(self, error: ApiError) -> None:
        """End the reply with an error: with its own status as long as no other one was sent.

        After blanks, an error that may pass (5xx) breaks the connection off, which clients take for what it
        is and try again; any other is the body. So ends a reply that is on its way in one piece, too. Does
        nothing to one that is complete.
        """
        if self._complete:
            return
        if not self.started:
            await self.json(self.errors.body(error), error.status, error.headers)
        elif self._streaming:
            await self.end(self.errors.event(error))
        elif self._blanks and error.status < 500:
            await self.end(self.errors.body(error))
        else:
            await self.break_off()

    def held(self) -> tuple[int, int] | None:
        """None unless the client has to read before the reply can go on; changes as the client reads."""
        return (self.sent, unsent_bytes(self._transport)) if self._sending else None

    async def fill_silence(self) -> None:
        """Let the client hear something, unless it has not heard all yet. Never waits for the client."""
        if self.silence is None or self._sending or self._complete or unsent_bytes(self._transport):
            return
        await self.silence()

    async def break_off(self) -> None:
        """Close the connection without sending what is left."""
        self._complete = True
        if self._transport is not None:
            reset(self._transport)
            await checkpoint()  # the server hears of it in the loop's next round

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        await self._message({"type": "http.response.start", "status": status, "headers": headers})

    async def _message(self, message: Message) -> None:
        self._sending = True
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error
        self._sending = False
        self.sent += 1
