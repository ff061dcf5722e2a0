"""What the doctor finds, on engines and brokers with known faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import yaml

from backends.simulated import PROFILES, SimulatedConfig, serve_simulated_in_thread
from benchmarks.harness import free_port
from orchestrator.keys import hash_key
from tests.cli.conftest import FakeService, Swarm

AGENTS = {
    "editor": {"priority": "foreground", "key": hash_key("one"), "max_turn_tokens": 256},
    "tester": {"priority": "background", "key": hash_key("two"), "max_turn_tokens": 256},
}


def write(folder: Path, **parts: Any) -> Path:
    """A configuration without faults but for `parts`."""
    path = folder / "swarm.yaml"
    document = {
        "server": {"port": free_port()},
        "redis": {"url": "embedded", "state_dir": str(folder / "state")},
        "backends": [
            {"name": "mine", "url": "http://127.0.0.1:9", "kv_layout": "split", "batch_tokens": 256}
        ],
        "agents": AGENTS,
    }
    path.write_text(yaml.safe_dump(document | parts))
    return path


def examine(swarm: Swarm, path: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = swarm("doctor", "-c", path, "--json", *words)
    assert result.err == ""
    found = {finding["what"]: finding for finding in json.loads(result.out)}
    for finding in found.values():
        assert (finding["remedy"] is None) == (finding["level"] == "ok"), finding
        assert "\n" not in finding["text"]
    return result.code, found


def level(found: dict[str, dict[str, Any]], what: str) -> str:
    return str(found[what]["level"])


def with_engine(url: str, **changes: Any) -> list[dict[str, Any]]:
    backend = {"name": "mine", "url": url, "kv_layout": "split", "batch_tokens": 256, "decode_slots": 4}
    backend |= changes
    return [{key: value for key, value in backend.items() if value is not None}]


def test_nothing_to_complain_about(swarm: Swarm, tmp_path: Path) -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=6, n_ctx=12_288)) as url:
        backends = with_engine(url, kv_bytes_per_token=23_040)
        code, found = examine(swarm, write(tmp_path, backends=backends))
    assert code == 0
    assert {finding["level"] for finding in found.values()} == {"ok"}, found
    assert "2 spare" in found["mine slots"]["text"]


def test_lines_are_for_grep(swarm: Swarm, tmp_path: Path) -> None:
    result = swarm("doctor", "-c", write(tmp_path))
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[-1] == f"1 failure, 0 warnings, {len(lines) - 2} ok"
    assert all(line.startswith(("ok   ", "warn ", "fail ")) for line in lines[:-1])
    assert all("; remedy: " in line for line in lines if line.startswith(("warn", "fail")))


def test_engine_that_is_not_there(swarm: Swarm, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, found = examine(swarm, write(tmp_path, backends=with_engine(url)))
    assert code == 1
    assert level(found, "mine engine") == "fail"
    assert url in found["mine engine"]["text"]
    assert "llama-server" in found["mine engine"]["remedy"]


def test_something_else_at_the_engines_address(swarm: Swarm, tmp_path: Path, service: FakeService) -> None:
    _, found = examine(swarm, write(tmp_path, backends=with_engine(service.url)))
    assert "not as llama.cpp's server does" in found["mine engine"]["text"]


def test_engine_that_loads(swarm: Swarm, tmp_path: Path, service: FakeService) -> None:
    service.reply("GET /health", {"error": {"message": "Loading model"}}, 503)
    code, found = examine(swarm, write(tmp_path, backends=with_engine(service.url)))
    assert (code, level(found, "mine engine")) == (1, "fail")
    assert "still loading" in found["mine engine"]["text"]


def test_engine_without_slots(swarm: Swarm, tmp_path: Path, service: FakeService) -> None:
    service.reply("GET /health", {"status": "ok"})
    service.reply("GET /props", {"model_path": "/models/m.gguf"})
    service.reply("GET /slots", {"error": {"message": "not supported"}}, 501)
    _, found = examine(swarm, write(tmp_path, backends=with_engine(service.url)))
    assert found["mine slots"]["remedy"] == "start the server with --slots"


@pytest.mark.parametrize(("decode_slots", "expected"), [(3, "ok"), (4, "warn"), (5, "fail"), (None, "ok")])
def test_spare_slots(swarm: Swarm, tmp_path: Path, decode_slots: int | None, expected: str) -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=4, n_ctx=8192)) as url:
        backends = with_engine(url, decode_slots=decode_slots)
        code, found = examine(swarm, write(tmp_path, backends=backends))
    assert level(found, "mine slots") == expected
    assert code == (1 if expected == "fail" else 0)


@pytest.mark.parametrize(
    ("changes", "expected", "said"),
    [
        ({"batch_tokens": 512}, "ok", "512 tokens"),
        ({"batch_tokens": None}, "warn", "unknown: preemptible prompts are sent in pieces of 512"),
        ({"batch_tokens": 2048}, "warn", "2,048 tokens: preemptible prompts are sent in pieces of 512"),
        ({"batch_tokens": 2048, "prefill_piece_tokens": 0}, "warn", "prompts are sent whole"),
    ],
)
def test_batch(swarm: Swarm, tmp_path: Path, changes: dict[str, Any], expected: str, said: str) -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=6, n_ctx=12_288)) as url:
        _, found = examine(swarm, write(tmp_path, backends=with_engine(url, **changes)))
    assert level(found, "mine batch") == expected
    assert said in found["mine batch"]["text"]


@pytest.mark.parametrize("layout", [None, "unified"])
def test_kv_layout(swarm: Swarm, tmp_path: Path, layout: str | None) -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=6, n_ctx=12_288)) as url:
        _, found = examine(swarm, write(tmp_path, backends=with_engine(url, kv_layout=layout)))
    assert level(found, "mine KV layout") == "warn"
    wanted = "--no-cache-idle-slots" if layout else "backends[].kv_layout"
    assert wanted in found["mine KV layout"]["remedy"]


def test_context_too_short_for_a_reply(swarm: Swarm, tmp_path: Path) -> None:
    agents = AGENTS | {"editor": {**AGENTS["editor"], "max_turn_tokens": 4096}}
    with serve_simulated_in_thread(SimulatedConfig(n_slots=6, n_ctx=12_288)) as url:
        _, found = examine(swarm, write(tmp_path, backends=with_engine(url), agents=agents))
    assert "4,096" in found["mine context"]["text"]
    assert level(found, "mine context") == "warn"


def test_deep_measures_a_cancel_and_tries_a_save(swarm: Swarm, tmp_path: Path) -> None:
    slow = SimulatedConfig(n_slots=2, n_ctx=16_384, profile=PROFILES["reference"], slot_save_path=tmp_path)
    with serve_simulated_in_thread(slow) as url:
        backends = with_engine(url, decode_slots=1, save_path=str(tmp_path))
        _, found = examine(swarm, write(tmp_path, backends=backends), "--deep")
    assert found["mine cancel in prefill"]["text"].startswith("took ")
    assert level(found, "mine save path") == "ok"
    assert found["mine KV measured"]["text"].endswith("B a token, by a save")
    assert not (tmp_path / "swarm-doctor.bin").exists()


def test_deep_without_a_save_path(swarm: Swarm, tmp_path: Path) -> None:
    with serve_simulated_in_thread(SimulatedConfig(n_slots=2, n_ctx=16_384)) as url:
        _, found = examine(swarm, write(tmp_path, backends=with_engine(url, decode_slots=1)), "--deep")
    assert "too soon" in found["mine cancel in prefill"]["text"]
    assert level(found, "mine save path") == "warn"


@pytest.mark.engine
def test_deep_on_the_real_engine(swarm: Swarm, tmp_path: Path, engine_url: str) -> None:
    backends = with_engine(engine_url, batch_tokens=64, decode_slots=4)
    code, found = examine(swarm, write(tmp_path, backends=backends), "--deep")
    assert code == 0
    assert found["mine cancel in prefill"]["text"].startswith(("took ", "a prompt of"))
    assert level(found, "mine save path") == "ok"
    assert level(found, "mine preemption") == "ok"
    per_token = int(found["mine KV measured"]["text"].split()[0].replace(",", ""))
    assert per_token == pytest.approx(23_040, rel=0.01)


# Managed engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("managed", "what", "said"),
    [
        ({"model": "none.gguf"}, "mine engine", "does not exist"),
        ({"model": "text.gguf"}, "mine model", "is not a GGUF file"),
        ({"command": "no-such-server -x"}, "mine engine", "not an executable file or not on the PATH"),
    ],
)
def test_engine_that_could_not_start(
    swarm: Swarm, tmp_path: Path, managed: dict[str, Any], what: str, said: str
) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    path = write(tmp_path, backends=[{"name": "mine", "managed": managed}])
    code, found = examine(swarm, path, "--deep")
    assert code == 1
    assert level(found, what) == "fail"
    assert said in found[what]["text"]
    assert "mine start" not in found, "what cannot work is not tried"


# Broker, agents, port -----------------------------------------------------------------------------


def test_redis_server(swarm: Swarm, tmp_path: Path, valkey_url: str) -> None:
    _, found = examine(swarm, write(tmp_path, redis={"url": valkey_url}))
    assert (level(found, "redis"), level(found, "appendonly"), level(found, "maxmemory-policy")) == (
        *("ok", "ok", "ok"),
    )
    assert found["redis"]["text"].startswith("Valkey 9")


async def test_redis_that_forgets(swarm: Swarm, tmp_path: Path, redis: Any) -> None:
    url = f"unix://{redis.connection_pool.connection_kwargs['path']}"
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    await redis.config_set("appendonly", "no")
    try:
        _, found = await anyio.to_thread.run_sync(lambda: examine(swarm, write(tmp_path, redis={"url": url})))
        assert (level(found, "appendonly"), level(found, "maxmemory-policy")) == ("warn", "warn")
        await redis.config_set("maxmemory", "1gb")
        code, found = await anyio.to_thread.run_sync(
            lambda: examine(swarm, write(tmp_path, redis={"url": url}))
        )
        assert (code, level(found, "maxmemory-policy")) == (1, "fail")
    finally:
        await redis.config_set("maxmemory", "0")
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("appendonly", "yes")


def test_redis_that_is_not_there(swarm: Swarm, tmp_path: Path) -> None:
    _, found = examine(swarm, write(tmp_path, redis={"url": f"redis://127.0.0.1:{free_port()}/0"}))
    assert level(found, "redis") == "fail"


def test_agents_without_keys(swarm: Swarm, tmp_path: Path) -> None:
    agents = {"editor": {"priority": "foreground"}, "tester": {"priority": "background"}}
    _, found = examine(swarm, write(tmp_path, agents=agents))
    assert "X-Swarm-Agent" in found["agents"]["text"]
    agents["tester"]["key"] = hash_key("k")
    assert level(examine(swarm, write(tmp_path, agents=agents))[1], "agents") == "ok"
    server = {"host": "0.0.0.0", "port": free_port()}
    code, found = examine(swarm, write(tmp_path, agents=agents, server=server))
    assert (code, level(found, "keys")) == (1, "fail")
    assert "no key for editor" in found["keys"]["text"]
    assert "swarm key new --all --write" in found["keys"]["remedy"]


def test_agents_of_one_priority(swarm: Swarm, tmp_path: Path) -> None:
    _, found = examine(swarm, write(tmp_path, agents={"a": {"key": hash_key("x")}, "b": {}}))
    assert level(found, "priorities") == "warn"


def test_port_in_use(swarm: Swarm, tmp_path: Path, service: FakeService) -> None:
    running = {"port": int(service.url.rpartition(":")[2])}
    _, found = examine(swarm, write(tmp_path, server=running))
    assert (level(found, "port"), "runs" in found["port"]["text"]) == ("ok", True)
    for code in ("admin_key_required", "admin_only"):
        service.reply("GET /swarm/state", {"error": {"code": code}}, 401)
        _, found = examine(swarm, write(tmp_path, server=running))
        assert level(found, "port") == "ok"
    strangers: list[Any] = [[], {"error": "no"}, {"error": {"code": "not_found"}}]
    for reply in strangers:
        service.reply("GET /swarm/state", reply)
        _, found = examine(swarm, write(tmp_path, server=running))
        assert level(found, "port") == "fail"
