"""A turn survives the crash of any one process: service, engine, broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
import redis.asyncio
from anyio.from_thread import BlockingPortal

from backends.managed import ManagedEngine
from orchestrator.broker import Broker
from tests.e2e.conftest import Streamed, Swarm, serve_swarm, swarm_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell a long story about a fox."}],
    "ignore_eos": True,
    "max_tokens": 200,
    "temperature": 0,
}


def log_text(log: list[bytes]) -> str:
    """What an output log says to a client."""
    entries = map(orjson.loads, log)
    return "".join(entry[1].get("content", "") for entry in entries if entry[0] == "d")


@asynccontextmanager
async def service_process(config: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], Swarm]]:
    """The service as a process of its own, killed hard at the end if it still runs."""
    port = orjson.loads(config.with_suffix(".port").read_bytes())
    command = [sys.executable, "-m", "orchestrator.cli", "up", "-c", str(config)]
    with config.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    swarm = Swarm(f"http://127.0.0.1:{port}")
    try:
        with anyio.fail_after(60):
            while True:
                try:
                    if (await swarm.http.get("/healthz")).status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.poll() is None, config.with_suffix(".log").read_text()
                await anyio.sleep(0.1)
        yield process, swarm
    finally:
        await swarm.http.aclose()
        if process.poll() is None:
            process.kill()
        process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(folder: Path, text: str) -> Path:
    port = free_port()
    path = folder / "swarm.yaml"
    path.write_text(text.replace("port: 0", f"port: {port}"))
    path.with_suffix(".port").write_bytes(orjson.dumps(port))
    return path


async def test_a_turn_survives_a_killed_service(
    valkey_url: str, engine_url: str, redis: redis.asyncio.Redis, tmp_path: Path
) -> None:
    config = write_config(tmp_path, swarm_config(valkey_url, engine_url))
    broker = Broker(redis)
    async with service_process(config) as (process, swarm):
        seen = Streamed()
        with pytest.raises(httpx.TransportError):
            await swarm.stream(BODY, seen=seen, on_chunk=lambda s: process.kill() if s.chunks == 30 else None)
    async with service_process(config) as (_, swarm):
        record = await swarm.until(seen.id, "done", "failed")
        timeline = await swarm.timeline(seen.id)
    assert record["state"] == "done"
    assert record["tokens_generated"] == 200
    text = log_text(await broker.log("default", seen.id))
    assert text.startswith(seen.text)
    assert len(text) > len(seen.text)
    assert "interrupted" in [line["event"] for line in timeline]


async def test_a_turn_survives_a_killed_engine(
    valkey_url: str,
    engine: ManagedEngine,
    portal: BlockingPortal,
    redis: redis.asyncio.Redis,
) -> None:
    async with serve_swarm(swarm_config(valkey_url, engine.url)) as swarm:
        whole = await swarm.stream(BODY)
        seen = Streamed()
        before = ""

        def kill(now: Streamed) -> None:
            nonlocal before
            if now.chunks == 30:
                before = now.text
                os.kill(engine.pid, signal.SIGKILL)

        async with anyio.create_task_group() as tasks:

            async def restart() -> None:
                await anyio.to_thread.run_sync(portal.call, engine.wait)
                await anyio.to_thread.run_sync(portal.call, engine.restart)

            tasks.start_soon(restart)
            await swarm.stream(BODY, seen=seen, on_chunk=kill)
    # A recompute evaluates in batches what was decoded one by one: rounding differs, so the greedy text
    # may part ways after the crash, never before it.
    assert whole.text.startswith(before)
    assert seen.text.startswith(before)
    assert [mark for mark in seen.marks if mark != "keep-alive"] == ["started", "paused", "resumed"]
    assert seen.finish_reason == "length"
    assert seen.usage is not None
    assert seen.usage["completion_tokens"] == 200


async def test_a_turn_survives_a_killed_broker(engine_url: str, tmp_path: Path) -> None:
    text = swarm_config("embedded", engine_url).replace(
        'url: "embedded"', f'url: embedded, state_dir: "{tmp_path}"'
    )
    async with serve_swarm(text) as swarm:
        whole = await swarm.stream(BODY)
        pid = int((tmp_path / "valkey.running").read_text())
        # Everything up to here is on disk after a second; what comes later is in the dispatcher's hands.
        await anyio.sleep(1.2)
        seen = Streamed()

        def kill(now: Streamed) -> None:
            if now.chunks == 60:
                os.kill(pid, signal.SIGKILL)

        await swarm.stream({**BODY, "max_tokens": 200}, seen=seen, on_chunk=kill)
        record = await swarm.until(seen.id, "done", "failed")
    assert seen.error is None
    assert seen.text == whole.text
    assert record["state"] == "done"
