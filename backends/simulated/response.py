"""The HTTP response of a generation request, with its faults.

As in the llama.cpp server the headers go out with the first result, so an error before it has a proper
status. A client that leaves is noticed at once, and the request is cancelled at the next step boundary.
"""

import asyncio
from typing import cast

import anyio
from anyio.lowlevel import checkpoint
from starlette.types import Receive, Scope, Send

from backends.simulated.events import Event, Failed, Finished, Notice, Progress, TokenOut
from backends.simulated.faults import Fault
from backends.simulated.generation import Generation
from backends.simulated.loop import StepLoop
from backends.simulated.wire import Renderer, error_json

TRANSPORT_KEY = "simulated.transport"
"""Where the server puts a connection's transport into the ASGI scope, for faults to close it."""

_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\n"
_INVALID = b"\xff\xfe\xc3("
_TEXT_FIELDS = (b'"content":"', b'"text":"', b'"arguments":"')


class GenerationResponse:
    """An ASGI application that runs one generation request and sends its reply."""

    def __init__(
        self,
        loop: StepLoop,
        generation: Generation,
        renderer: Renderer,
        *,
        stream: bool,
        fault: Fault | None,
        keepalive_s: float,
    ) -> None:
        self._loop = loop
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._fault = fault
        self._keepalive_s = keepalive_s
        self._tokens_sent = 0
        self._headers_sent = False
        self._parked = False
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
                await self._reply()
                tasks.cancel_scope.cancel()
        finally:
            self._loop.cancel(self._generation)

    async def _watch_client(self, receive: Receive, request: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._loop.abandon(self._generation)
        request.cancel()

    async def _reply(self) -> None:
        if self._fault_due():
            await self._strike()
            return
        self._loop.submit(self._generation)
        await (self._reply_in_chunks() if self._stream else self._reply_at_once())

    async def _reply_in_chunks(self) -> None:
        while not self._over:
            out = b""
            for event in await self._next_events():
                if isinstance(event, Failed) and not out and not self._headers_sent:
                    await self._answer(event.status, error_json(event))
                    return
                out += self._payloads(event)
                if self._fault_due():
                    await self._strike(out)
                    return
            await self._write(out, more=not self._over)

    async def _reply_at_once(self) -> None:
        while True:
            for event in await self._generation.outbox.take():
                if isinstance(event, Failed):
                    await self._answer(event.status, error_json(event))
                    return
                if isinstance(event, Finished):
                    await self._answer(200, self._spoilt(self._renderer.whole(event)))
                    return
                if isinstance(event, TokenOut):
                    self._tokens_sent += 1
                    if self._fault_due():
                        await self._strike()
                        return

    async def _next_events(self) -> list[Event]:
        while self._parked:
            with anyio.move_on_after(self._keepalive_s):
                return await self._generation.outbox.take()
            await self._write(b": preempt-keepalive\n\n")
        return await self._generation.outbox.take()

    def _payloads(self, event: Event) -> bytes:
        match event:
            case Notice():
                self._parked = event.comment == "preempted"
                return f": {event.comment}\n\n".encode()
            case Failed():
                self._over = True
                return _sse(error_json(event))
            case Finished():
                self._over = True
                return self._rendered(event) + (_sse(self._renderer.end) if self._renderer.end else b"")
            case TokenOut():
                self._tokens_sent += 1
                return self._spoilt(self._rendered(event))
            case Progress():
                return self._rendered(event)

    def _rendered(self, event: Progress | TokenOut | Finished) -> bytes:
        return b"".join(map(_sse, self._renderer.chunks(event)))

    # Faults

    def _fault_due(self) -> bool:
        fault = self._fault
        if fault is None or fault.kind in ("hang", "ignore_disconnect", "invalid_utf8"):
            return False
        return self._tokens_sent >= fault.after_tokens

    def _spoilt(self, payload: bytes) -> bytes:
        """The payload with invalid bytes in its text, if that is the fault and this is the moment."""
        fault = self._fault
        if fault is None or fault.kind != "invalid_utf8" or self._tokens_sent <= fault.after_tokens:
            return payload
        self._fault = None
        field = next((name for name in _TEXT_FIELDS if name in payload), b"{")
        return payload.replace(field, field + _INVALID, 1)

    async def _strike(self, unsent: bytes = b"") -> None:
        """Ends the reply by the fault; `unsent` are chunks that the client still gets first."""
        assert self._fault is not None
        kind = self._fault.kind
        self._over = True
        if kind == "disconnect":
            if unsent:
                await self._write(unsent)
            await close_connection(self._scope, self._receive)
        elif kind == "truncated_sse":
            cut = b'data: {"index":0,"content":"cut sho' if self._stream else b'{"index":0,"content":"cut sho'
            await self._write(unsent + cut, more=False)
        else:
            html = kind == "html_error"
            error = error_json(Failed(500, "server_error", "simulated fault"))
            if unsent or self._headers_sent:
                await self._write(unsent + (_HTML if html else _sse(error)), more=False)
            else:
                await self._answer(502 if html else 500, _HTML if html else error, html=html)

    # HTTP

    async def _answer(self, status: int, body: bytes, *, html: bool = False) -> None:
        kind = b"text/html" if html else b"application/json; charset=utf-8"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        self._headers_sent = self._over = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            kind = b"text/event-stream" if self._stream else b"application/json; charset=utf-8"
            headers = [(b"content-type", kind)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def close_connection(scope: Scope, receive: Receive) -> None:
    """Closes the client's connection as it stands, after what was written so far."""
    transport = cast("asyncio.Transport | None", scope.get(TRANSPORT_KEY))
    if transport is None:
        raise RuntimeError("this fault needs the simulated engine's own server")
    while transport.get_write_buffer_size():
        await checkpoint()
    transport.abort()
    while (await receive())["type"] != "http.disconnect":
        pass


def _sse(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
