"""What is fuzzed: the whole service in a process of its own, before simulated engines that take no time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx

from backends.simulated import ScriptedReply, SimulatedConfig, SimulatedEngine, serve_simulated
from benchmarks.harness import running_service
from orchestrator.turns import FINAL_STATES

MODELS = ("sim", "vectors")
AGENTS = ("editor", "indexer", "guest")
CLASSES = ("foreground", "background", "batch")
MAX_BODY_BYTES = 256 * 1024
SETTLE_BOUND_S = 30.0
# What a log line has that comes from a bug.
TRACES = (b"Traceback (most recent call last)", b"request failed", b"a segment failed", b"cannot be read")

SCRIPTS = (
    ScriptedReply(
        "call",
        (
            {"content": "I read. "},
            {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "read", "arguments": '{"path":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"a"}'}}]},
        ),
        "tool_calls",
    ),
    ScriptedReply("think", ({"reasoning_content": "hm "}, {"content": "so"})),
)


@dataclass
class Stage:
    """A running service and its engines."""

    url: str
    log_path: Path
    engines: dict[str, SimulatedEngine]
    seen_log_bytes: int = field(default=0)

    @property
    def port(self) -> int:
        """Where the service listens on loopback."""
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def traces(self) -> list[str]:
        """Lines of the service's log, since this was last asked, that only a bug can have written."""
        said = self.log_path.read_bytes()
        new, self.seen_log_bytes = said[self.seen_log_bytes :], len(said)
        return [
            line.decode(errors="replace")[:300] for line in new.split(b"\n") if any(t in line for t in TRACES)
        ]

    async def settled(self) -> list[str]:
        """Wait until nothing is left of any request; what is left after the bound, one line each."""
        left = ["nobody has looked"]
        with anyio.move_on_after(SETTLE_BOUND_S):
            async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=10.0) as client:
                while left:
                    left = await self._left(client)
                    if left:
                        await anyio.sleep(0.1)
        return left

    async def _left(self, client: httpx.AsyncClient) -> list[str]:
        state = (await client.get("/swarm/state")).json()
        turns = (await client.get("/swarm/turns", params={"limit": 1000})).json()["turns"]
        left = [
            f"turn {turn['id']} is {turn['state']}" for turn in turns if turn["state"] not in FINAL_STATES
        ]
        left += [f"{state['queue']['waiting']} turns wait"] if state["queue"]["waiting"] else []
        left += [f"turn {turn} is paused" for turn in state["paused"]]
        for backend in state["backends"]:
            owners: dict[str, Any] = backend["kv"]["owners"]
            left += [
                f"{backend['name']}: {owners[what]} tokens of KV are {what}"
                for what in ("running", "paused", "reserved")
                if owners[what]
            ]
            left += [] if backend["healthy"] else [f"{backend['name']} is not healthy"]
        for name, engine in self.engines.items():
            stats = engine.stats()
            if stats.running or stats.queued:
                left.append(f"engine {name} still runs {stats.running} and has {stats.queued} queued")
        return left


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """Start everything, on free ports."""
    engines = {
        "sim": SimulatedEngine(SimulatedConfig(n_slots=6, n_ctx=6 * 2048, scripts=SCRIPTS)),
        "vectors": SimulatedEngine(SimulatedConfig(n_slots=3, n_ctx=3 * 2048, embeddings=True)),
    }
    async with (
        serve_simulated(engines["sim"]) as chat_url,
        serve_simulated(engines["vectors"]) as vectors_url,
    ):
        backends = [
            {"name": "sim", "url": chat_url, "model": "sim", "decode_slots": 4},
            {"name": "vectors", "pool": "vectors", "url": vectors_url, "model": "vectors", "decode_slots": 2},
        ]
        config = {
            "server": {"keepalive_s": 0.5, "header_wait_s": 0.2, "max_body_bytes": MAX_BODY_BYTES},
            "backends": [{**backend, "kv_layout": "split", "batch_tokens": 64} for backend in backends],
            "agents": {
                "editor": {"priority": "foreground", "max_turn_tokens": 16},
                "indexer": {"priority": "background", "max_turn_tokens": 64},
                "guest": {"priority": "normal", "max_turn_tokens": 24},
            },
            "default_agent": "guest",
        }
        async with running_service(config) as service:
            yield Stage(service.base_url, service.log_path, engines)
