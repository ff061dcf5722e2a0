"""A streaming client for benches and demo agents that costs next to no CPU.

On a machine without a GPU the client, the service and the engine share cores, so what the client spends on a
token it takes from the engine. Bytes are parsed where the event loop hands them over, without a task switch,
a queue or an object per token; timestamps are taken there as well.

It speaks the subset of HTTP/1.1 that both servers use: one request a connection, a reply that is chunked, of
a given length or until the end of the connection, and server-sent events in it.

When a turn *started*, that is took its decode slot, is visible on the wire of both servers:

- the service sends the comment ``: started``;
- llama.cpp, asked with ``return_progress: true`` in the body, sends an event with ``prompt_progress`` when
  the slot takes the task at a step boundary, before the first batch of the prompt.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import orjson

CONNECT_BOUND_S = 10.0
TURN_BOUND_S = 900.0
MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_PLAIN_BYTES = 16 * 1024 * 1024
_COMMENTS_KEPT = 64
_CLOSE_BOUND_S = 1.0


class MalformedReply(Exception):
    """The server's bytes are not a reply that this client understands."""


@dataclass
class TurnResult:
    """What became of one turn. While it runs the same object shows how far it is.

    Times are `time.monotonic()` seconds, None for what did not happen. `times` has one entry for each piece
    of text as it arrived; `pieces` counts them. `tokens` is the server's own count where it sent one, else
    `pieces`: a piece is a token, except that tokens which end within a character wait for the next one.
    """

    sent: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    aborted: bool = False
    """Whether this client closed the connection itself: it had enough tokens, or was cancelled."""
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Reply headers, names in lower case."""
    comments: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_COMMENTS_KEPT))
    """The last SSE comments with their times."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    timings: dict[str, Any] | None = None
    """llama.cpp's own account of the turn, where sent."""

    @property
    def pieces(self) -> int:
        """How many pieces of text arrived."""
        return len(self.times)

    @property
    def turn_id(self) -> str | None:
        """The service's name for the turn."""
        return self.headers.get("x-swarm-turn")

    @property
    def wait_s(self) -> float | None:
        """From sending to the decode slot."""
        return None if self.sent is None or self.started is None else self.started - self.sent

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return None if self.sent is None or self.first_token is None else self.first_token - self.sent

    @property
    def total_s(self) -> float | None:
        """From sending to the end of the reply."""
        return None if self.sent is None or self.ended is None else self.ended - self.sent


class ReplyParser:
    """Bytes of one reply, split anywhere, into a `TurnResult`. `done` is set at the reply's own end."""

    def __init__(self, result: TurnResult) -> None:
        self.result = result
        self.done = False
        self._text: list[str] = []
        self._buffer = bytearray()
        self._line = bytearray()
        self._plain = bytearray()
        self._head_read = False
        self._events = False
        self._chunked = False
        self._chunk_left = 0
        self._chunk_ends = False
        self._trailer = False
        self._body_left: int | None = None
        self._counted: int | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, which arrived at `now`. Raises MalformedReply."""
        if self.done:
            return
        if self._head_read and not self._chunked:
            self._sized(data, now)
            return
        self._buffer += data
        if not self._head_read and not self._head(now):
            return
        if self._chunked:
            self._chunks(now)

    def close(self, now: float) -> None:
        """The connection ended, or is about to be closed by this client: settle text, counts and error."""
        result = self.result
        if not self.done and self._head_read and not self._chunked and self._body_left is None:
            # Without a length the end of the connection is the end of the body, but events have their own.
            try:
                self._end_of_body(now)
            except MalformedReply as error:
                result.error = f"malformed reply: {error}"
        result.text = "".join(self._text)
        result.tokens = result.pieces if self._counted is None else self._counted
        if not self.done and not result.aborted and result.error is None:
            result.error = "the server closed the connection before the end of the reply"
        result.ended = now

    # HTTP -----------------------------------------------------------------------------------------

    def _head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise MalformedReply(f"reply headers over {MAX_HEAD_BYTES} bytes")
            return False
        status, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise MalformedReply(f"not an HTTP reply: {status[:80]!r}")
        if 100 <= int(code) < 200:
            return self._head(now)
        headers = self.result.headers
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.result.status = int(code)
        self._head_read = True
        self._events = headers.get("content-type", "").startswith("text/event-stream")
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if not self._chunked:
            if length is not None and not length.isdigit():
                raise MalformedReply(f"content-length {length[:40]!r}")
            self._body_left = int(length) if length is not None else None
            rest_of_body = bytes(self._buffer)
            self._buffer.clear()
            self._sized(rest_of_body, now)
        return True

    def _sized(self, data: bytes, now: float) -> None:
        if self._body_left is not None:
            data = data[: self._body_left]
            self._body_left -= len(data)
        self._body(data, now)
        if self._body_left == 0 and not self.done:
            self._end_of_body(now)

    def _chunks(self, now: float) -> None:
        buffer = self._buffer
        at = 0
        while not self.done:
            if self._chunk_left:
                piece = bytes(buffer[at : at + self._chunk_left])
                if not piece:
                    break
                at += len(piece)
                self._chunk_left -= len(piece)
                self._chunk_ends = self._chunk_left == 0
                self._body(piece, now)
                continue
            end = buffer.find(b"\n", at)
            if end < 0:
                if len(buffer) - at > MAX_HEAD_BYTES:
                    raise MalformedReply("a chunk's size is missing")
                break
            line = bytes(buffer[at:end]).rstrip(b"\r")
            at = end + 1
            if self._chunk_ends:
                if line:
                    raise MalformedReply("a chunk is longer than its size")
                self._chunk_ends = False
            elif self._trailer:
                if not line:
                    self._end_of_body(now)
            else:
                self._chunk_left = self._chunk_size(line)
                self._trailer = self._chunk_left == 0
        del buffer[:at]

    @staticmethod
    def _chunk_size(line: bytes) -> int:
        size = line.split(b";", 1)[0].strip()
        try:
            if len(size) > 8:
                raise ValueError
            number = int(size, 16)
        except ValueError:
            raise MalformedReply(f"chunk size {bytes(line[:40])!r}") from None
        if number < 0:
            raise MalformedReply(f"chunk size {bytes(line[:40])!r}")
        return number

    # Body -----------------------------------------------------------------------------------------

    def _body(self, data: bytes, now: float) -> None:
        if not self._events:
            self._plain += data
            if len(self._plain) > MAX_PLAIN_BYTES:
                raise MalformedReply(f"reply over {MAX_PLAIN_BYTES} bytes")
            return
        self._line += data
        if b"\n" not in data:
            if len(self._line) > MAX_LINE_BYTES:
                raise MalformedReply(f"an event's line over {MAX_LINE_BYTES} bytes")
            return
        *lines, self._line = self._line.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
            elif line.startswith(b":"):
                self._comment(line[1:].strip().decode(errors="replace"), now)
            elif line.startswith(b"error:"):
                self._event(b'{"error":' + line[6:].strip() + b"}", now)

    def _end_of_body(self, now: float) -> None:
        result = self.result
        if not self._events:
            self._read_plain(now)
        elif result.finish_reason is None and result.error is None:
            result.error = "the reply ended without a finish reason"
        self.done = True

    def _read_plain(self, now: float) -> None:
        result = self.result
        try:
            reply = orjson.loads(self._plain)
        except orjson.JSONDecodeError:
            said = bytes(self._plain[:200]).decode(errors="replace")
            result.error = f"HTTP {result.status}: {' '.join(said.split()) or 'no message'}"
            return
        if isinstance(reply, dict):
            self._shaped(reply, now)
        if result.error is not None or (result.status or 0) >= 400:
            result.error = f"HTTP {result.status}: {result.error or 'no message'}"

    def _comment(self, comment: str, now: float) -> None:
        self.result.comments.append((now, comment))
        if self.result.started is None and comment.split(" ", 1)[0] == "started":
            self.result.started = now

    def _event(self, payload: bytes | bytearray, now: float) -> None:
        if payload == b"[DONE]":
            self._end_of_body(now)
            return
        try:
            reply = orjson.loads(payload)
        except orjson.JSONDecodeError:
            raise MalformedReply(f"an event is not JSON: {bytes(payload[:80])!r}") from None
        if isinstance(reply, dict):
            self._shaped(reply, now)

    def _shaped(self, reply: dict[str, Any], now: float) -> None:
        try:
            self._reply(reply, now)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise MalformedReply(f"JSON of another shape: {type(error).__name__}: {error}") from None

    def _reply(self, reply: dict[str, Any], now: float) -> None:
        """One JSON object of either API, streamed or whole."""
        result = self.result
        if (error := reply.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            result.error = " ".join(str(message).split())[:400]
        if result.started is None and "prompt_progress" in reply:
            result.started = now
        if isinstance(usage := reply.get("usage"), dict):
            self._counted = int(usage.get("completion_tokens", 0))
            result.prompt_tokens = int(usage.get("prompt_tokens", 0))
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict) and details.get("cached_tokens") is not None:
                result.cached_tokens = int(details["cached_tokens"])
        if isinstance(timings := reply.get("timings"), dict):
            result.timings = timings
            if self._counted is None and "predicted_n" in timings:
                self._counted = int(timings["predicted_n"])
        choices = reply.get("choices")
        if choices:
            choice = choices[0]
            part = choice.get("delta") or choice.get("message") or {}
            text = part.get("content") or part.get("reasoning_content") or choice.get("text")
            if text or part.get("tool_calls"):
                self._piece(text or "", now)
            if choice.get("finish_reason"):
                result.finish_reason = choice["finish_reason"]
        elif "content" in reply:
            if reply["content"]:
                self._piece(reply["content"], now)
            if reply.get("stop"):
                result.finish_reason = str(reply.get("stop_type") or "stop")
                # /completion has no [DONE]: its last event is this one.
                self.done = self._events

    def _piece(self, text: str, now: float) -> None:
        result = self.result
        self._text.append(text)
        result.times.append(now)
        result.last_token = now
        if result.first_token is None:
            result.first_token = now


class _Connection(asyncio.Protocol):
    def __init__(
        self,
        request: bytes,
        parser: ReplyParser,
        abort_after: int | None,
        on_progress: Callable[[TurnResult], None] | None,
    ) -> None:
        self._request = request
        self._parser = parser
        self._abort_after = abort_after
        self._on_progress = on_progress
        self.finished = anyio.Event()
        self.closed = anyio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, not the base class.
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.is_set():
            return
        now = time.monotonic()
        result = self._parser.result
        try:
            self._parser.feed(data, now)
        except MalformedReply as error:
            result.error = f"malformed reply: {error}"
        if self._on_progress is not None:
            self._on_progress(result)
        reached = self._abort_after is not None and result.pieces >= self._abort_after
        if reached and not self._parser.done:
            result.aborted = True
        if self._parser.done or result.error is not None or result.aborted:
            self.finished.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finished.set()
        self.closed.set()


async def stream_chat(
    base_url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/chat/completions",
    into: TurnResult | None = None,
    abort_after: int | None = None,
    on_progress: Callable[[TurnResult], None] | None = None,
    timeout_s: float = TURN_BOUND_S,
) -> TurnResult:
    """Send one turn and read its reply to the end; what goes wrong is the result's `error`, never raised.

    `into` is filled in as the reply arrives, so a turn that is cancelled leaves what it got. `abort_after`
    closes the connection after so many pieces of text. `on_progress` is called from the event loop whenever
    bytes arrived; it must not block. Raises ValueError when `base_url` is no http:// address.
    """
    result = into if into is not None else TurnResult()
    host, port, prefix = _address(base_url)
    request = _request(host, port, prefix + path, body, headers or {})
    parser = ReplyParser(result)
    connection = _Connection(request, parser, abort_after, on_progress)
    loop = asyncio.get_running_loop()
    result.sent = time.monotonic()
    transport: asyncio.Transport | None = None
    try:
        with anyio.move_on_after(timeout_s) as turn_bound:
            with anyio.move_on_after(CONNECT_BOUND_S) as connect_bound:
                transport, _ = await loop.create_connection(lambda: connection, host, port)
            if connect_bound.cancelled_caught:
                result.error = f"no connection within {CONNECT_BOUND_S:g} s"
            else:
                await connection.finished.wait()
        if turn_bound.cancelled_caught and result.error is None:
            result.error = f"no end of the reply within {timeout_s:g} s"
    except anyio.get_cancelled_exc_class():
        result.aborted = True
        raise
    except OSError as error:
        result.error = f"connection failed: {error.strerror or error}"
    finally:
        if transport is not None:
            transport.abort()
            # The transport reports its end in the next round of the loop: bounded, so it may be shielded.
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_BOUND_S):
                await connection.closed.wait()
        parser.close(time.monotonic())
    return result


def _address(base_url: str) -> tuple[str, int, str]:
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"not an http:// address: {base_url!r}")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/")


def _request(host: str, port: int, target: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    payload = orjson.dumps(body)
    name = f"[{host}]" if ":" in host else host
    lines = [
        f"POST {target} HTTP/1.1",
        f"Host: {name}:{port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        f"Content-Length: {len(payload)}",
        "Connection: close",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + payload
