"""Many clients at once, and the ways to run an engine."""

import os
import signal
import subprocess
import sys

import anyio
import httpx
import pytest

from backends.simulated import (
    PROFILES,
    SimulatedConfig,
    SimulatedEngine,
    serve_simulated,
    serve_simulated_in_thread,
)
from backends.simulated.__main__ import parse_arguments
from tests.backends.simulated.harness import chat_prompt, connect


async def test_200_clients_share_64_slots() -> None:
    config = SimulatedConfig(n_slots=64, n_ctx=64 * 1024, profile=PROFILES["fast"])
    async with connect(config) as client:
        expected = (await client.json("/completion", {"prompt": chat_prompt("7 [len=20]")}))["content"]
        async with anyio.create_task_group() as tasks:
            replies = [
                client.open(tasks, {"prompt": chat_prompt(f"{number} [len=20]")}) for number in range(200)
            ]
        assert all(reply.last["tokens_predicted"] == 21 for reply in replies)
        assert replies[7].text == expected
        assert len({reply.text for reply in replies}) == 200
        assert 1 < client.stats.max_concurrent_decode <= 64
        assert (client.stats.running, client.stats.queued) == (0, 0)


async def test_leaving_the_block_breaks_streams_off_and_closes_the_port() -> None:
    first_chunk = anyio.Event()

    async def ask(url: str) -> None:
        body = {"prompt": "a", "ignore_eos": True, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            async with (
                httpx.AsyncClient() as http,
                http.stream("POST", f"{url}/completion", json=body) as reply,
            ):
                async for _ in reply.aiter_raw():
                    first_chunk.set()

    async with (
        anyio.create_task_group() as tasks,
        serve_simulated(SimulatedConfig(profile=PROFILES["fast"])) as url,
    ):
        tasks.start_soon(ask, url)
        await first_chunk.wait()
    async with httpx.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_an_error_in_the_block_comes_out_and_closes_the_port() -> None:
    url = ""
    with pytest.raises(LookupError):
        async with serve_simulated() as url:
            raise LookupError
    async with httpx.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


async def test_the_app_runs_under_any_asgi_server() -> None:
    engine = SimulatedEngine()
    transport = httpx.ASGITransport(engine.app)
    async with engine.running(), httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        reply = await http.post("/completion", json={"prompt": "[len=3]"})
        assert reply.json()["tokens_predicted"] == 4


def test_an_engine_in_a_thread_serves_callers_without_an_event_loop() -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=3)) as url:
        assert httpx.get(f"{url}/props").json()["total_slots"] == 3


def test_the_process_says_where_it_listens_and_ends_on_sigterm() -> None:
    command = [sys.executable, "-m", "backends.simulated", "--slots", "3", "--profile", "fast"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:")
            assert httpx.get(line.split()[-1] + "/props").json()["total_slots"] == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


def test_the_command_line_sets_the_configuration() -> None:
    config, port = parse_arguments(
        ["--port", "8099", "--slots", "2", "--kv-unified", "--n-batch", "64", "--faults", '{"kind": "hang"}']
    )
    assert (port, config.n_slots, config.kv_unified, config.profile.n_batch) == (8099, 2, True, 64)
    assert [fault.kind for fault in config.faults] == ["hang"]


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--faults", '{"kind": "fire"}'])
    assert "fire" in capsys.readouterr().err
