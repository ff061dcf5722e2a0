"""A generation's open reply, as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx

from backends.llamacpp.wire import TRANSPORT_ERRORS, SseParser, unavailable
from backends.protocol import EngineUnavailable


class Stream:
    """An open reply. Closing it is what preempts."""

    def __init__(self, response: httpx.Response, most_bytes: int) -> None:
        self._response = response
        self._parser = SseParser()
        self._bytes_left = most_bytes

    async def groups(self) -> AsyncIterator[list[dict[str, Any] | str]]:
        """Events in the groups in which they arrived. Raises EngineUnavailable when there are too many."""
        # Not `aiter_raw`: two generators fewer on the way of every token.
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        async for chunk in self._response.stream:
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                raise EngineUnavailable("the engine goes on and on")
            yield list(self._parser.feed(chunk))

    async def flat(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON events, one by one. Raises EngineUnavailable when the connection breaks."""
        try:
            async for group in self.groups():
                for event in group:
                    if isinstance(event, dict):
                        yield event
        except TRANSPORT_ERRORS as error:
            raise unavailable(error) from None

    async def close(self) -> None:
        """Close the connection, also while being cancelled."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await self._response.aclose()
