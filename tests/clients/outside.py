"""A proxy that lets nothing through and remembers what was asked for: a client needs the service only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketAttribute

_REFUSAL = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Outside:
    """Where the outside would be, and who was called there."""

    url: str
    wanted: list[str]

    def hosts(self) -> list[str]:
        """Who was called, each once."""
        targets = (line.split(" ")[1].removeprefix("http://") for line in self.wanted if " " in line)
        return sorted({target.partition("/")[0].partition(":")[0] for target in targets})

    def environment(self) -> dict[str, str]:
        """The variables that send every client here, save for what is on loopback."""
        proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        local = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        return dict.fromkeys(proxies, self.url) | local


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    """Serve the proxy until the block ends."""
    wanted: list[str] = []

    async def refuse(client: ByteStream) -> None:
        async with client:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                line, _, _ = (await client.receive()).partition(b"\r\n")
                wanted.append(line.decode("latin-1"))
                await client.send(_REFUSAL)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, refuse)
        yield Outside(f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}", wanted)
        tasks.cancel_scope.cancel()
