"""The service and what a client's run needs: a tap, a closed door, foreground turns that preempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
from openai import AsyncOpenAI, OpenAIError

from orchestrator.config import parse_config
from orchestrator.keys import hash_key
from orchestrator.service import run_service
from tests.clients.outside import Outside, outside
from tests.clients.spec import KEY, MODEL, Place
from tests.clients.tap import Tap, tap

CONFIG = """
server: {{port: 0, header_wait_s: {header_wait_s}, keepalive_s: {keepalive_s}}}
redis: {redis}
backends:
  - name: local
    model: {model}
{backend}
policy: {{turn_ttl_s: 86400}}
agents:
  editor: {{priority: foreground, key: {editor_key}, max_turn_tokens: 8}}
  reviewer: {{priority: background, key: {reviewer_key}, max_turn_tokens: {max_turn_tokens}}}
"""

EDITOR_KEY = "sk-swarm-of-the-editor"
_READY_BOUND_S = 60.0
_TURN_BOUND_S = 600.0


@dataclass
class Foreground:
    """Turns of the highest class, one after the other."""

    served: Counter[str] = field(default_factory=Counter)
    """How many ended, by finish reason."""
    failed: list[str] = field(default_factory=list)


@dataclass
class Stage:
    """A running service, seen through a tap."""

    tap: Tap
    outside: Outside
    admin: httpx.AsyncClient
    editor: AsyncOpenAI
    foreground: Foreground

    def place(self, prompt: str) -> Place:
        """Where a client finds the service."""
        return Place(self.tap.url, KEY, MODEL, prompt)

    async def turns(self, agent: str = "reviewer") -> list[dict[str, Any]]:
        """The agent's turns as the service has recorded them, with their timelines, oldest first."""
        reply = await self.admin.get("/swarm/turns", params={"limit": 1000})
        ids = [turn["id"] for turn in reply.json()["turns"] if turn["agent"] == agent]
        turns = [(await self.admin.get(f"/swarm/turns/{id_}")).json() for id_ in ids]
        return sorted(turns, key=lambda turn: float(turn["created"]))

    async def ask(self) -> None:
        """One foreground turn."""
        try:
            stream = await self.editor.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Say yes or no."}],
                max_tokens=4,
                stream=True,
            )
            [reason] = [
                choice.finish_reason
                async for chunk in stream
                for choice in chunk.choices
                if choice.finish_reason
            ]
        except OpenAIError as error:
            self.foreground.failed.append(str(error))
        else:
            self.foreground.served[reason] += 1


def config_text(
    redis: str, backend: str, max_turn_tokens: int, header_wait_s: float = 0.5, keepalive_s: float = 1.0
) -> str:
    """The configuration; `redis` is YAML, and `backend` that of the backend's own keys, indented by four."""
    return CONFIG.format(
        redis=redis,
        model=MODEL,
        backend=backend,
        editor_key=hash_key(EDITOR_KEY),
        reviewer_key=hash_key(KEY),
        max_turn_tokens=max_turn_tokens,
        header_wait_s=header_wait_s,
        keepalive_s=keepalive_s,
    )


@asynccontextmanager
async def stage(text: str) -> AsyncIterator[Stage]:
    """Run the service in this event loop until the block ends."""
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(run_service, parse_config(text)))
        url = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=_TURN_BOUND_S, trust_env=False) as admin,
            AsyncOpenAI(
                base_url=f"{url}/v1", api_key=EDITOR_KEY, max_retries=0, timeout=_TURN_BOUND_S
            ) as editor,
            tap(port) as tapped,
            outside() as door,
        ):
            await _until_ready(admin)
            yield Stage(tapped, door, admin, editor, Foreground())
        tasks.cancel_scope.cancel()


async def _until_ready(admin: httpx.AsyncClient) -> None:
    with anyio.fail_after(_READY_BOUND_S):
        while (await admin.get("/healthz")).status_code != 200:  # noqa: ASYNC110
            await anyio.sleep(0.05)
