"""The whole service on the session's real engine and real Valkey."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import pytest
import redis.asyncio

from orchestrator.config import parse_config
from orchestrator.service import run_service

CONFIG = """
server: {{port: 0, header_wait_s: 0.2, keepalive_s: 0.5}}
redis: {{url: "{redis}"}}
backends:
  - name: local
    url: "{engine}"
    decode_slots: {decode_slots}
    kv_layout: split
    batch_tokens: 64
    model: small{extra}
policy: {{preemption: {preemption}}}
agents:
  editor: {{priority: foreground}}
  helper: {{priority: normal}}
  worker: {{priority: background}}
  drudge: {{priority: batch}}
default_agent: editor
"""


@dataclass
class Streamed:
    """What a client saw of one streamed turn."""

    id: str = ""
    text: str = ""
    marks: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    chunks: int = 0


class Swarm:
    """A running service and a client of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    async def until_ready(self) -> None:
        """Wait until turns can be served."""
        with anyio.fail_after(30):
            while True:
                if (await self.http.get("/healthz")).status_code == 200:
                    return
                await anyio.sleep(0.05)

    async def stream(
        self,
        body: dict[str, Any],
        agent: str = "worker",
        seen: Streamed | None = None,
        on_chunk: Callable[[Streamed], None] | None = None,
        path: str = "/v1/chat/completions",
    ) -> Streamed:
        """Run a streamed turn to its end; `seen` is filled while it runs."""
        seen = seen if seen is not None else Streamed()
        body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
        async with self.http.stream("POST", path, json=body, headers={"X-Swarm-Agent": agent}) as reply:
            seen.id = reply.headers["x-swarm-turn"]
            if reply.status_code != 200:
                seen.error = json.loads(await reply.aread())["error"]
                return seen
            async for line in reply.aiter_lines():
                if line.startswith(": "):
                    seen.marks.append(line[2:])
                elif line.startswith("data: {"):
                    before = seen.chunks
                    self._take(json.loads(line[6:]), seen)
                    if on_chunk is not None and seen.chunks > before:
                        on_chunk(seen)
        return seen

    @staticmethod
    def _take(chunk: dict[str, Any], seen: Streamed) -> None:
        seen.error = chunk.get("error", seen.error)
        seen.usage = chunk.get("usage") or seen.usage
        for choice in chunk.get("choices", []):
            seen.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            # Not those that only keep the stream open.
            seen.chunks += bool(choice.get("text") or choice.get("delta"))
            seen.finish_reason = choice.get("finish_reason") or seen.finish_reason

    async def timeline(self, turn: str) -> list[dict[str, Any]]:
        reply = await self.http.get(f"/swarm/turns/{turn}")
        return list(reply.json()["timeline"])

    async def record(self, turn: str) -> dict[str, Any]:
        return dict((await self.http.get(f"/swarm/turns/{turn}")).json())

    async def state(self) -> dict[str, Any]:
        """The only backend's entry of `/swarm/state`."""
        [backend] = (await self.http.get("/swarm/state")).json()["backends"]
        return dict(backend)

    async def until_tier(self, turn: str, tier: str) -> None:
        """Wait until the paused turn's KV is there."""
        with anyio.fail_after(60):
            while (await self.record(turn)).get("tier") != tier:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def until(self, turn: str, *states: str) -> dict[str, Any]:
        """Wait until the turn's record says one of `states`."""
        with anyio.fail_after(60):
            while True:
                record = await self.record(turn)
                if record.get("state") in states:
                    return record
                await anyio.sleep(0.05)


def swarm_config(
    redis_url: str, engine_url: str, *, decode_slots: int = 4, preemption: bool = True, **backend: object
) -> str:
    """The configuration's text; `backend`: further keys of the backend."""
    return CONFIG.format(
        redis=redis_url,
        engine=engine_url,
        decode_slots=decode_slots,
        preemption=str(preemption).lower(),
        extra="".join(f"\n    {key}: {json.dumps(value)}" for key, value in backend.items()),
    )


@asynccontextmanager
async def serve_swarm(text: str) -> AsyncIterator[Swarm]:
    """Run the service in this event loop until the block ends."""
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(run_service, parse_config(text))
        swarm = Swarm(f"http://127.0.0.1:{port}")
        try:
            await swarm.until_ready()
            yield swarm
        finally:
            with anyio.CancelScope(shield=True):
                await swarm.http.aclose()
            tasks.cancel_scope.cancel()


SwarmFactory = Callable[..., AbstractAsyncContextManager[Swarm]]


@pytest.fixture
def swarm(valkey_url: str, engine_url: str, redis: redis.asyncio.Redis) -> SwarmFactory:
    """Starts the service on the session's engine: ``async with swarm(decode_slots=2) as s:``."""

    def start(**options: Any) -> AbstractAsyncContextManager[Swarm]:
        return serve_swarm(swarm_config(valkey_url, engine_url, **options))

    return start
