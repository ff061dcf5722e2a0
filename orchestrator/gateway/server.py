"""The HTTP server: uvicorn inside a task group, with an end that is bounded."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.gateway.connections import prepare
from orchestrator.gateway.limits import LimitedConnection

BACKLOG = 2048
KEEP_ALIVE_S = 75
# Replies may still end by themselves for so long after the service was told to stop.
GRACE_S = 2.0
# Then they are told to stop, which includes cancelling their turns.
STOP_BOUND_S = 7.0
# A host name may have an address of a family that this machine does not have.
NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class _Requests:
    """The application, and the requests that it is answering."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._scopes: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as cancel_scope:
            self._scopes.add(cancel_scope)
            try:
                await self._app(scope, receive, send)
            finally:
                self._scopes.discard(cancel_scope)
                if not self._scopes:
                    self._idle.set()

    async def wait(self, bound_s: float) -> None:
        """Return when no request is left, or after the bound."""
        with anyio.move_on_after(bound_s):
            while self._scopes:
                self._idle = anyio.Event()
                await self._idle.wait()

    def cancel(self) -> None:
        """Make every request end; each still says so to its client."""
        for scope in list(self._scopes):
            scope.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to the service, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets)
        self.listening.set()

    def abort_connections(self) -> None:
        """Close what still has unsent bytes; its client does not read."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


async def serve(
    app: ASGIApp, host: str, port: int, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled. Reports the port it listens on; raises OSError when it cannot.

    When cancelled: no new connections, then `GRACE_S` for running replies, then their end.
    """
    requests = _Requests(app)
    sockets = await _bind(host, port)
    server = _Server(
        uvicorn.Config(
            requests,
            loop="none",
            http=LimitedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GRACE_S + STOP_BOUND_S) + 1,
        )
    )

    async def run() -> None:
        # It ends by `should_exit`, so that connections are closed in order.
        with anyio.CancelScope(shield=True):
            await server.serve(sockets)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            await server.listening.wait()
            task_status.started(sockets[0].getsockname()[1])
            await anyio.sleep_forever()
        finally:
            server.should_exit = True
            with anyio.CancelScope(shield=True):
                await requests.wait(GRACE_S)
                requests.cancel()
                await requests.wait(STOP_BOUND_S)
                server.abort_connections()


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Sockets for every address of the host, all on one port; 0 takes a free one."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in dict.fromkeys((family, address[0]) for family, _, _, _, address in found):
        try:
            bound = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno in NO_SUCH_FAMILY:
                missing = error
                continue
            for other in sockets:
                other.close()
            raise
        prepare(bound)
        bound.setblocking(False)
        sockets.append(bound)
        port = bound.getsockname()[1]
    if not sockets:
        raise missing or OSError(f"{host} has no address")
    return sockets
