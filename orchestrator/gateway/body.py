"""A request's bytes, never more than the limit in memory, and not for ever."""

from __future__ import annotations

import anyio
from starlette.types import Receive

from orchestrator.gateway.errors import ApiError, ClientGone
from orchestrator.gateway.identity import Headers

# For the whole body: a client that sends it byte by byte holds a place among the open requests.
BODY_BOUND_S = 60.0


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError (413, 408), ClientGone.

    A body that announces its length is refused before a byte of it is read.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit)
    try:
        with anyio.fail_after(BODY_BOUND_S):
            return await _read(receive, limit)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_BOUND_S:g} s"
        raise ApiError(408, message, code="body_timeout") from None


async def _read(receive: Receive, limit: int) -> bytes:
    # Not a list of parts: a body in single bytes would take a hundred times its size.
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        more = message.get("more_body", False)
        if len(whole) + len(part) > limit:
            raise _too_large(limit)
        if not more and not whole:
            return bytes(part)
        whole += part
        if not more:
            return bytes(whole)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes", code="body_too_large")
