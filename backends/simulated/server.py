"""Serving a simulated engine over TCP on the loopback interface."""

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, cast

import anyio
import uvicorn
from anyio.from_thread import start_blocking_portal
from anyio.lowlevel import checkpoint
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from backends.simulated.config import SimulatedConfig
from backends.simulated.engine import SimulatedEngine
from backends.simulated.response import TRANSPORT_KEY

_HOST = "127.0.0.1"


@asynccontextmanager
async def serve_simulated(
    engine: SimulatedEngine | SimulatedConfig | None = None, *, port: int = 0
) -> AsyncGenerator[str, None]:
    """Serves an engine in the running event loop and yields its URL; port 0 takes a free one.

    Leaving the block is a crash as its clients see it: open streams break off, the port is closed.
    Enter and leave it in one task, as any anyio task group. An error of the block comes out as it is. Raises
    OSError if the port is taken.
    """
    if not isinstance(engine, SimulatedEngine):
        engine = SimulatedEngine(engine)
    listener = _listen(port)
    server = _Server(
        uvicorn.Config(
            engine.app,
            http=_AbortableProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
    )
    failure: Exception | None = None
    async with engine.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve_shielded, listener)
        try:
            await server.ready.wait()
            yield f"http://{_HOST}:{listener.getsockname()[1]}"
        except Exception as error:
            failure = error
        finally:
            server.stop()
    if failure is not None:
        raise failure


@contextmanager
def serve_simulated_in_thread(
    engine: SimulatedEngine | SimulatedConfig | None = None, *, port: int = 0
) -> Generator[str, None, None]:
    """As `serve_simulated`, in an event loop of its own thread: for callers without one, and for fixtures."""
    with (
        start_blocking_portal(backend="asyncio", backend_options={"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(serve_simulated(engine, port=port)) as url,
    ):
        yield url


def _listen(port: int) -> socket.socket:
    """A listening socket. asyncio turns Nagle's algorithm off only for sockets that name their protocol;
    otherwise every other chunk of a stream would wait up to 40 ms for the client's delayed ACK."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


class _AbortableProtocol(HttpToolsProtocol):
    """Lets faults close a connection: ASGI itself has no way to end a response badly."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[TRANSPORT_KEY] = self.transport


class _Server(uvicorn.Server):
    """A server that leaves signals to the process it is embedded in and stops without a grace period."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = anyio.Event()
        self._stopped = anyio.Event()

    async def serve_shielded(self, listener: socket.socket) -> None:
        """Serves until `stop`, also if the surrounding task group is cancelled: a server that is cut off
        would leave its sockets open."""
        with anyio.CancelScope(shield=True):
            await self.serve([listener])

    def stop(self) -> None:
        """Breaks all connections off and ends `serve`."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpToolsProtocol) and connection.transport is not None:
                connection.transport.abort()
        self._stopped.set()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()

    async def main_loop(self) -> None:
        self.ready.set()
        await self.on_tick(0)
        await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for request in list(self.server_state.tasks):
            request.cancel()
        await checkpoint()
