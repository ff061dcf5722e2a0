"""A turn's output as a reply: streamed, or in one piece, through whatever silence the turn has.

A turn that waits, is paused or in prefill says nothing for minutes. A stream gets an event that adds nothing
then. A reply in one piece cannot say anything before its end, but blanks: whoever sits between and hears
nothing gives up (nginx after 60 s, Node's fetch after 300 s, OpenAI's client after 600 s), so after
`WHOLE_SILENCE_S` its status is sent, and then a blank whenever a stream would have such an event. Until
then a failure has its own status. When that is, and that the client is still there, is for `watch` to see.
"""

from __future__ import annotations

import time

from orchestrator.broker import DELTA, ERROR, Entry
from orchestrator.config import Server
from orchestrator.gateway.collect import Collector
from orchestrator.gateway.dialects import Chunks, Dialect, Head
from orchestrator.gateway.errors import ApiError, from_entry
from orchestrator.gateway.follow import Output
from orchestrator.gateway.reply import Reply

WHOLE_SILENCE_S = 45.0


async def answer(
    server: Server, output: Output, dialect: Dialect, head: Head, reply: Reply, *, stream: bool
) -> None:
    """Send all of a turn's output, as it comes or at its end. Raises ApiError, ClientGone.

    ApiError: the turn failed, and nothing of it was sent.
    """
    if stream:
        await _stream(output, dialect.chunks(head), reply, min(server.header_wait_s, server.keepalive_s))
    else:
        collector = dialect.collector(head)
        await _collect(output, collector, reply)
        await reply.json(dialect.whole(head, collector))


async def _stream(output: Output, chunks: Chunks, reply: Reply, header_wait_s: float) -> None:
    """Send events, as soon as there is one or the headers have been held back for long enough."""

    async def begin() -> None:
        if not reply.started:
            await reply.start_stream(chunks.content_type)
            reply.errors = chunks.errors
            opening = chunks.open()
            if opening:
                await reply.write(opening)

    async def say_nothing() -> None:
        await begin()
        await reply.write(chunks.keep_alive())

    reply.silence = say_nothing
    entries = await _first(output, header_wait_s)
    failed = _early_failure(entries)
    if failed is not None:
        raise failed
    await begin()
    while True:
        data = chunks.encode(entries)
        if chunks.over:
            await reply.end(data)
            return
        if data:
            await reply.write(data)
        entries = await output.next()


async def _collect(output: Output, collector: Collector, reply: Reply) -> None:
    """Take the whole output, however long that takes. Raises ApiError when the turn failed."""
    due = time.monotonic() + WHOLE_SILENCE_S

    async def blank() -> None:
        if time.monotonic() >= due:
            await reply.blank()

    reply.silence = blank
    while not collector.over:
        collector.add(await output.next())


async def _first(output: Output, wait_s: float) -> list[Entry]:
    """The first entries, or none when the turn says nothing for a while."""
    until = time.monotonic() + wait_s
    while True:
        entries = await output.next(max(0.0, until - time.monotonic()))
        if entries or time.monotonic() >= until:
            return entries


def _early_failure(entries: list[Entry]) -> ApiError | None:
    """The error that the turn ended with before it put out anything."""
    for entry in entries:
        if entry[0] == DELTA:
            return None
        if entry[0] == ERROR:
            return from_entry(entry[1], entry[2])
    return None
