"""A bounded pool of connections whose callers wait for one.

redis-py's plain pool refuses the command that finds it exhausted, which a burst of clients can do to a
pool of any size; its blocking one takes a lock and sets a timer for each command, 20 us on the way of
every token. Here an uncontended command costs neither.
"""

from __future__ import annotations

from typing import Any

import anyio
from redis.asyncio import ConnectionPool


class PatientPool(ConnectionPool):
    """`max_connections` at once; who comes later waits in order for one to come free."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = anyio.Semaphore(self.max_connections, fast_acquire=True)
        self._placed: set[Any] = set()

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        """A connected connection, to be given back by `release`."""
        await self._places.acquire()
        try:
            connection = await super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._places.release()
            raise
        self._placed.add(connection)
        return connection

    async def release(self, connection: Any) -> None:
        """Take a connection back; the base class does so too with one that it could not connect."""
        try:
            await super().release(connection)
        finally:
            if connection in self._placed:
                self._placed.remove(connection)
                self._places.release()
