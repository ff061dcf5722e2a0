"""A served engine and a client that reads its streams raw, for the tests of this folder."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import orjson
from anyio.abc import TaskGroup

from backends.simulated import EngineStats, SimulatedConfig, SimulatedEngine, serve_simulated


def chat_prompt(text: str) -> str:
    """A ChatML prompt with one user message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Reply:
    """A stream as it was received."""

    status: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False
    first_chunk: anyio.Event = field(default_factory=anyio.Event)

    @property
    def text(self) -> str:
        return "".join(chunk.get("content", "") for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [t for chunk in self.chunks if "prompt_progress" not in chunk for t in chunk["tokens"]]

    @property
    def last(self) -> dict[str, Any]:
        return self.chunks[-1]


class Client:
    """Requests to one engine."""

    def __init__(self, engine: SimulatedEngine, url: str, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.url = url
        self.http = http

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(path, content=orjson.dumps(body))

    async def json(self, path: str, body: Any = None) -> Any:
        return (await self.post(path, body)).raise_for_status().json()

    async def stream(
        self,
        body: dict[str, Any],
        *,
        path: str = "/completion",
        until: int | None = None,
        into: Reply | None = None,
    ) -> Reply:
        """Reads a stream to its end, or leaves after `until` chunks."""
        reply = Reply() if into is None else into
        content = orjson.dumps({"stream": True, **body})
        async with self.http.stream("POST", path, content=content) as response:
            reply.status = response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    reply.done = True
                elif line.startswith("data: "):
                    reply.chunks.append(orjson.loads(line[6:]))
                    reply.first_chunk.set()
                elif line.startswith(":"):
                    reply.comments.append(line[1:].strip())
                if until is not None and len(reply.chunks) >= until:
                    break
        return reply

    def open(self, tasks: TaskGroup, body: dict[str, Any]) -> Reply:
        """Reads a stream in a task of the group; the reply fills while it comes."""
        reply = Reply()

        async def read() -> None:
            await self.stream(body, into=reply)

        tasks.start_soon(read)
        return reply

    async def until(self, condition: Callable[[EngineStats], bool]) -> None:
        """Returns once the engine's counters are as wanted."""
        for _ in range(5000):
            if condition(self.stats):
                return
            await anyio.sleep(0.001)
        raise TimeoutError(str(self.stats))

    async def until_idle(self) -> None:
        """Returns once no slot is busy."""
        await self.until(lambda stats: not stats.running and not stats.queued)


@asynccontextmanager
async def connect(config: SimulatedConfig) -> AsyncGenerator[Client, None]:
    """Serves an engine for the block."""
    engine = SimulatedEngine(config)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with (
        serve_simulated(engine) as url,
        httpx.AsyncClient(base_url=url, timeout=20, limits=limits, verify=False) as http,
    ):
        yield Client(engine, url, http)
