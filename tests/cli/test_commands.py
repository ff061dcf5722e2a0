"""The commands against a service with canned replies, and what a user can do wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import free_port
from orchestrator import __version__
from tests.cli import samples
from tests.cli.conftest import FakeService, Swarm, error

CONFIG = """
server: {port: %d}
backends: [{name: mine, url: "http://127.0.0.1:9"}]
agents: {editor: {priority: foreground}, tester: {priority: background}}
"""

SERVICE_COMMANDS = (
    ["ps"],
    ["ps", "--json"],
    ["turns"],
    ["turns", "--json"],
    ["turn", samples.turn_id(3)],
    ["turn", "3c6ef"],
    *([action, samples.turn_id(3)] for action in ("preempt", "resume", "cancel")),
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no config.yaml is."""
    monkeypatch.chdir(tmp_path)


def config_file(folder: Path, port: int) -> Path:
    path = folder / "swarm.yaml"
    path.write_text(CONFIG % port)
    return path


def test_version(swarm: Swarm) -> None:
    assert swarm("--version").out == f"swarm {__version__}\n"


def test_runs_as_a_module() -> None:
    argv = [sys.executable, "-m", "orchestrator.cli", "--version"]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == f"swarm {__version__}\n"


def test_help_names_every_command(swarm: Swarm) -> None:
    shown = swarm("--help").out
    for command in [
        "up",
        "demo",
        "ps",
        "turns",
        "turn",
        "preempt",
        "resume",
        "cancel",
        "config",
        "key",
        "doctor",
        "bench",
    ]:
        assert f" {command} " in shown


# ps and turns -------------------------------------------------------------------------------------


def test_ps_shows_the_state(swarm: Swarm, service: FakeService) -> None:
    result = swarm("ps", "--url", service.url)
    assert result.code == 0
    assert "decoding 8/8  slots 12  KV 138 MiB of 540 MiB unified  step 25.3 ms" in result.out
    assert "queue   3 turns waiting: background 2, batch 1" in result.out
    assert "\x1b" not in result.out, "no colours where there is no terminal"


def test_ps_names_classes_by_the_configuration(swarm: Swarm, service: FakeService, tmp_path: Path) -> None:
    path = config_file(tmp_path, int(service.url.rpartition(":")[2]))
    assert "foreground" in swarm("ps", "-c", path).out
    assert "foreground" not in swarm("ps", "--url", service.url).out


def test_json_is_the_reply_as_it_is(swarm: Swarm, service: FakeService) -> None:
    assert json.loads(swarm("ps", "--json", "--url", service.url).out) == samples.busy_state()
    turn = swarm("turn", samples.turn_id(3), "--json", "--url", service.url).out
    assert json.loads(turn) == samples.story()
    assert len(json.loads(swarm("turns", "--json", "--url", service.url).out)["turns"]) == 2


def test_url_may_leave_the_scheme_out(swarm: Swarm, service: FakeService) -> None:
    assert swarm("ps", "--url", service.url.removeprefix("http://")).code == 0


def test_watch_needs_a_terminal(swarm: Swarm, service: FakeService) -> None:
    assert swarm("ps", "--watch", "--url", service.url).code == 2
    assert swarm("ps", "--watch", "--json", "--url", service.url).code == 2


def test_turns_lists(swarm: Swarm, service: FakeService) -> None:
    result = swarm("turns", "--url", service.url)
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == ["turn", "9e3779b9", "3c6ef372"]
    service.reply("GET /swarm/turns", {"turns": []})
    assert swarm("turns", "--url", service.url).out == "no turns yet\n"


def test_turn_tells_its_story(swarm: Swarm, service: FakeService) -> None:
    result = swarm("turn", samples.turn_id(3), "--url", service.url)
    assert "stopped in 18.3 ms" in result.out
    assert "after 4.25 s" in result.out
    assert "preempted 2 times, 232 tokens re-evaluated" in result.out
    assert all(event in result.out for event in ("swapped", "restored", "swap failed", "dropped"))


@pytest.mark.parametrize("typed", ["daa6", "turn-daa6", "daa66d2c"])
def test_beginning_of_an_id_is_enough(swarm: Swarm, service: FakeService, typed: str) -> None:
    service.reply("GET /swarm/turns", {"turns": [samples.summary(number, "done") for number in (1, 2, 3)]})
    assert samples.turn_id(3) in swarm("turn", typed, "--url", service.url).out


def test_beginning_of_two_ids_is_not(swarm: Swarm, service: FakeService) -> None:
    turns = [samples.summary(1, "done", id="turn-ab1"), samples.summary(1, "done", id="turn-ab2")]
    service.reply("GET /swarm/turns", {"turns": turns})
    result = swarm("turn", "ab", "--url", service.url)
    assert result.code == 1
    assert result.err == "ab is the beginning of 2 turns (ab1, ab2): give more of it\n"


@pytest.mark.parametrize(
    ("action", "state", "said"),
    [
        ("preempt", "running", "gives its slot up at the next token; it is held until: swarm resume turn-"),
        ("preempt", "paused", "was paused; it is held until: swarm resume turn-"),
        ("resume", "paused", "may run again, as soon as it is its turn"),
        ("cancel", "queued", "was queued; it is being cancelled"),
    ],
)
def test_actions_say_what_happens(
    swarm: Swarm, service: FakeService, action: str, state: str, said: str
) -> None:
    turn = samples.turn_id(3)
    service.reply(f"POST /swarm/turns/{turn}/{action}", {"id": turn, "requested": action, "state": state})
    result = swarm(action, turn, "--url", service.url)
    assert (result.code, result.err) == (0, "")
    assert said in result.out
    assert result.out.count("\n") == 1
    assert service.asked == [f"POST /swarm/turns/{turn}/{action}"]


@pytest.mark.parametrize("status", [404, 409])
@pytest.mark.parametrize("action", ["preempt", "resume", "cancel"])
def test_refused_action_is_one_line(swarm: Swarm, service: FakeService, action: str, status: int) -> None:
    turn = samples.turn_id(3)
    service.replies[f"POST /swarm/turns/{turn}/{action}"] = error(status, "it has\nended")
    result = swarm(action, turn, "--url", service.url)
    assert (result.code, result.out, result.err) == (1, "", "it has ended\n")


@pytest.mark.parametrize("typed", ["nope", "../../healthz", "a b?c#d", "\udcff", "%2e%2e"])
def test_strange_ids_are_one_line(swarm: Swarm, service: FakeService, typed: str) -> None:
    result = swarm("turn", typed, "--url", service.url)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert all(asked.startswith("GET /swarm/turns") for asked in service.asked)


def test_empty_id(swarm: Swarm, service: FakeService) -> None:
    assert swarm("cancel", "", "--url", service.url).err == "the turn's id is empty\n"


# No service, another service ----------------------------------------------------------------------


@pytest.mark.parametrize("words", SERVICE_COMMANDS, ids=" ".join)
def test_no_service(swarm: Swarm, words: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = swarm(*words, "--url", url)
    assert result.code == 1
    assert result.err == f"no service answers at {url}; start it with: swarm up -c config.yaml\n"


def test_no_service_names_the_file_to_start_it_with(swarm: Swarm, tmp_path: Path) -> None:
    path = config_file(tmp_path, free_port())
    assert swarm("ps", "-c", path).err.endswith(f"start it with: swarm up -c {path}\n")


@pytest.mark.parametrize(
    "reply",
    [b"", b"<html>", b"null", b"[]", b"{}", b'{"backends": 3}', b'{"turns": [{}]}', b"\xff", b"1e999"],
)
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("words", SERVICE_COMMANDS, ids=" ".join)
def test_garbage_is_one_line(
    swarm: Swarm, service: FakeService, words: list[str], reply: bytes, status: int
) -> None:
    turn = samples.turn_id(3)
    paths = ["GET /swarm/state", "GET /swarm/turns", f"GET /swarm/turns/{turn}"]
    paths += [f"POST /swarm/turns/{turn}/{action}" for action in ("preempt", "resume", "cancel")]
    for path in paths:
        service.reply(path, reply, status)
    result = swarm(*words, "--url", service.url)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert f"{service.url} is not a swarm's service: " in result.err


def test_not_http(swarm: Swarm, valkey_url: str) -> None:
    del valkey_url
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        result = swarm("ps", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert (result.code, result.err.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://x",
        "http://a b",
        "http://[::1",
        "http://x:99999",
        "http://x:0",
        "::",
        "http://\x00",
    ],
)
def test_wrong_url(swarm: Swarm, url: str) -> None:
    result = swarm("ps", "--url", url)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "is not an address such as http://127.0.0.1:8700" in result.err


def test_port_0_cannot_be_asked(swarm: Swarm, tmp_path: Path) -> None:
    result = swarm("ps", "-c", config_file(tmp_path, 0))
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "--url" in result.err


@pytest.mark.parametrize("words", [["turns"], ["turns", "--json"], ["ps", "--json"], ["ps"]], ids=" ".join)
def test_broken_pipe_is_no_traceback(service: FakeService, words: list[str]) -> None:
    turns = [samples.summary(number, "done", error="x" * 200) for number in range(1000)]
    service.reply("GET /swarm/turns", {"turns": turns})
    state: dict[str, Any] = samples.busy_state()
    state["backends"] *= 200
    service.reply("GET /swarm/state", state)
    root = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-m", "orchestrator.cli", *words, "--url", service.url]
    with subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(30)


# the admin key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", SERVICE_COMMANDS, ids=" ".join)
def test_admin_key_is_sent_from_the_environment(
    swarm: Swarm, service: FakeService, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("SWARM_ADMIN_KEY", " sk-swarm-x \n")
    swarm(*words, "--url", service.url)
    monkeypatch.delenv("SWARM_ADMIN_KEY")
    with_key = len(service.keys)
    swarm(*words, "--url", service.url)
    assert set(service.keys[:with_key]) == {"Bearer sk-swarm-x"}
    assert set(service.keys[with_key:]) == {None}


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb"])
def test_admin_key_that_cannot_be_sent(swarm: Swarm, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SWARM_ADMIN_KEY", key)
    result = swarm("ps", "--url", "http://127.0.0.1:9")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "SWARM_ADMIN_KEY is not a key" in result.err
    assert key not in result.err


# config check -------------------------------------------------------------------------------------


def test_valid_config(swarm: Swarm, tmp_path: Path) -> None:
    path = config_file(tmp_path, 8700)
    result = swarm("config", "check", "-c", path)
    assert (result.code, result.out) == (0, f"{path} is valid: 1 backend, 2 agents\n")


def test_every_mistake_is_a_line(swarm: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("backends: []\nagents: {a: {priority: hihg}}\nservr: {}\n")
    result = swarm("config", "check", "-c", path)
    assert (result.code, result.out) == (2, "")
    lines = result.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(str(path)) for line in lines)


@pytest.mark.parametrize("command", [["config", "check"], ["up"]], ids=" ".join)
def test_off_loopback_without_keys_is_refused(swarm: Swarm, tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "swarm.yaml"
    path.write_text((CONFIG % 8700).replace("{port", "{host: 0.0.0.0, port"))
    result = swarm(*command, "-c", path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "server.host 0.0.0.0 is reachable from other machines" in result.err
    assert "swarm key new --all --write" in result.err


@pytest.mark.parametrize("command", [["config", "check"], ["ps"], ["doctor"], ["demo"], ["up"]], ids=" ".join)
def test_missing_config(swarm: Swarm, tmp_path: Path, command: list[str]) -> None:
    result = swarm(*command, "-c", tmp_path / "none.yaml")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "there is no such file" in result.err
