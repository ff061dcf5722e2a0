"""The connections under the replies: how a client that is gone, or does not read, is noticed.

A client that closes its connection is heard at once. One that vanishes without a word (a machine that went
to sleep, a NAT that forgot) is found by the kernel: by probes where nothing is being sent, by missing
acknowledgements where something is. One that is there and does not read fills the buffers below, and then
the reply waits; `Endpoint` ends it after a while.

| where | most bytes for each client that does not read |
|---|---|
| the kernel's send buffer | 2 x `SEND_BUFFER_BYTES` (Linux doubles it for its own books) |
| the server's write buffer | 64 KiB, and one piece of the stream |
| the turn's entries | `BACKLOG` of them; the rest stays in the log |

Options are set on the listening socket; accepted ones inherit them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Where a request's scope has its connection.
TRANSPORT = "swarm.transport"

# More would only hold more of a stream that nobody reads; enough for 5 MB/s at 50 ms.
SEND_BUFFER_BYTES = 128 * 1024
# A client whose machine is gone is noticed within a minute, whether or not something is being sent to it.
PROBE_AFTER_S = 30
PROBE_EVERY_S = 10
PROBES = 3
UNACKNOWLEDGED_BOUND_S = 60

# struct linger (socket(7)): on, for no time.
_NO_LINGER = struct.pack("ii", 1, 0)

# By the names they have on Linux (tcp(7)) and on macOS (tcp(4)); a system has those that it knows.
_TCP_OPTIONS = {
    # asyncio sets this only on sockets whose protocol is named, which create_server does not do; without
    # it a chunk may wait 40 ms for the acknowledgement of the one before.
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": PROBE_AFTER_S,
    "TCP_KEEPALIVE": PROBE_AFTER_S,
    "TCP_KEEPINTVL": PROBE_EVERY_S,
    "TCP_KEEPCNT": PROBES,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_BOUND_S * 1000,
}


def prepare(listener: socket.socket) -> None:
    """Set what every accepted connection is to have."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HttpConnection(HttpToolsProtocol):
    """Shows a request its connection: ASGI has no way to see what was not sent yet, or to break off."""

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[TRANSPORT] = self.transport


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once: neither this process nor the kernel keeps what was not sent yet."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def unsent_bytes(transport: asyncio.WriteTransport | None) -> int:
    """What the kernel did not take yet; 0 for a request that came without a connection."""
    return 0 if transport is None else transport.get_write_buffer_size()
