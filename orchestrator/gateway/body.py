"""A request's bytes, never more than the limit in memory."""

from __future__ import annotations

from starlette.types import Receive

from orchestrator.gateway.errors import ApiError, ClientGone
from orchestrator.gateway.identity import Headers


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError (413), ClientGone.

    A body that announces its length is refused before a byte of it is read.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        length += len(part)
        if length > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes", code="body_too_large")
