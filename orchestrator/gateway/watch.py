"""What goes on beside a reply: its client leaves, stops reading, or has heard nothing for too long.

One task a request looks a few times in each keep-alive interval. So nothing of this costs anything for each
token, and a broker that hangs silences nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog
from starlette.types import Receive

from orchestrator.gateway.errors import ClientGone
from orchestrator.gateway.reply import Reply

# A client that has something to read and takes nothing of it for so long has stopped reading. Sooner than the
# kernel gives up (`connections`), which would tell neither the client nor the log.
STALL_S = 45.0
# How often a reply is looked at: at most in seconds, and in keep-alive intervals. Silence is seen at the
# second look after its beginning, so that it never lasts for a whole interval.
LOOK_EVERY_S = 10.0
LOOK_SHARE = 0.45

_log = structlog.get_logger(__name__)


async def until_disconnect(
    receive: Receive, work: Callable[[], Awaitable[None]], reply: Reply, keepalive_s: float
) -> None:
    """Do the work until it is done or the client is gone; the body must have been read.

    Never silent for longer than `keepalive_s`, once the reply has a way to say nothing. A client that takes
    nothing for `STALL_S` is cut off, and counts as gone.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, receive, reply, keepalive_s, tasks.cancel_scope)
        try:
            await work()
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _watch(receive: Receive, reply: Reply, keepalive_s: float, scope: anyio.CancelScope) -> None:
    """Cancel the scope once there is nobody to reply to."""
    look_every_s = min(LOOK_EVERY_S, STALL_S / 4, LOOK_SHARE * keepalive_s)
    silence_s = LOOK_SHARE * keepalive_s - look_every_s / 10  # a timer may be early
    held = reply.held()
    sent = reply.sent
    taken_at = sent_at = anyio.current_time()
    while True:
        with anyio.move_on_after(look_every_s):
            while (await receive())["type"] != "http.disconnect":
                pass
            break
        now = anyio.current_time()
        held_before, held = held, reply.held()
        if held is None or held != held_before:
            taken_at = now
        elif now - taken_at >= STALL_S:
            _log.warning("a client that does not read was cut off", unread_for_s=round(now - taken_at))
            await reply.break_off()
            break
        if reply.sent != sent:
            sent, sent_at = reply.sent, now
        elif now - sent_at >= silence_s:
            try:
                await reply.fill_silence()
            except ClientGone:
                break
    scope.cancel()
