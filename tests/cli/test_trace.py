"""`swarm trace` against a service with canned replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from orchestrator.simulation.trace import read_trace
from orchestrator.simulation.workload import Arrival
from tests.cli import samples
from tests.cli.conftest import FakeService, Swarm


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no config.yaml is."""
    monkeypatch.chdir(tmp_path)


def turn(number: int, created: float, state: str = "done", **changes: Any) -> dict[str, Any]:
    return {
        **samples.summary(number, state),
        "pool": "default",
        "created": created,
        "agent": "tester",
        "priority_class": "background",
        "prompt_tokens": 100,
        "tokens_generated": 20,
        **changes,
    }


@pytest.fixture
def run(service: FakeService) -> FakeService:
    """A run: the newest turn first, as the service lists them."""
    turns = [
        turn(4, 1000.0, "running", tokens_generated=5),
        turn(3, 1003.5, agent="editor", priority_class="foreground", prompt_tokens=40, tokens_generated=7),
        turn(2, 1002.25, "cancelled", tokens_generated=0),
        turn(1, 1001.0, "failed"),
        turn(5, 1002.0, pool="other"),
    ]
    service.reply("GET /swarm/turns", {"turns": turns})
    return service


def test_ended_turns_become_arrivals(swarm: Swarm, run: FakeService, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    result = swarm("trace", "export", "-o", path, "--pool", "default", "--url", run.url)
    assert (result.code, result.out) == (0, "")
    assert result.err.splitlines() == [
        "2 turns over 2.50 s, begun with the first one's arrival",
        "left out: 1 turn that ended without a token",
        "left out: 1 turn not over yet",
    ]
    assert list(read_trace(path)) == [
        Arrival(0.0, "tester", "background", 100, 20),
        Arrival(2.5, "editor", "foreground", 40, 7),
    ]


def test_without_a_file_it_goes_to_standard_output(swarm: Swarm, run: FakeService) -> None:
    result = swarm("trace", "export", "--url", run.url)
    lines = [orjson.loads(line) for line in result.out.splitlines()]
    assert [line["t"] for line in lines] == [0, 1, 2.5]


def test_what_was_in_kv_is_asked_for_each_turn(swarm: Swarm, run: FakeService) -> None:
    for number, cached in ((1, 64), (3, 1000), (5, None)):
        started = {"t": 1.0, "event": "started", "cached_tokens": cached}
        story = {**turn(number, 1000.0), "timeline": [{"t": 0.5, "event": "queued"}, started]}
        run.reply(f"GET /swarm/turns/{samples.turn_id(number)}", story)
    result = swarm("trace", "export", "--shared", "--url", run.url)
    lines = [orjson.loads(line) for line in result.out.splitlines()]
    assert [line.get("shared") for line in lines] == [64, None, 40], "never more than the prompt has"


def test_since_leaves_older_turns_out(
    swarm: Swarm, run: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.trace.time.time", lambda: 1062.5)
    result = swarm("trace", "export", "--since", "1m", "--url", run.url)
    assert len(result.out.splitlines()) == 1
    assert "editor" in result.out


def test_following_collects_each_turn_once(
    swarm: Swarm, run: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            later = [turn(6, 1010.0), turn(3, 1003.5)]
            run.reply("GET /swarm/turns", {"turns": later})
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.cli.trace.time.sleep", sleep)
    result = swarm("trace", "export", "--follow", "10m", "--url", run.url)
    assert result.code == 0
    assert [orjson.loads(line)["t"] for line in result.out.splitlines()] == [0, 1, 2.5, 9]
    assert "stopped" in result.err


def test_a_service_that_goes_away_does_not_cost_what_was_collected(
    swarm: Swarm, run: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orchestrator.cli.trace.time.sleep", lambda seconds: run.reply("GET /swarm/turns", {"no": 1})
    )
    result = swarm("trace", "export", "--follow", "1h", "--url", run.url)
    assert (result.code, len(result.out.splitlines())) == (0, 3)
    assert "stopped early" in result.err


def test_a_full_list_is_said_to_be_short(swarm: Swarm, service: FakeService) -> None:
    turns = [turn(number, 1000.0 + number) for number in range(1000)]
    service.reply("GET /swarm/turns", {"turns": turns})
    result = swarm("trace", "export", "--url", service.url)
    assert len(result.out.splitlines()) == 1000
    assert "turns may be missing" in result.err
    assert "--follow" in result.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["export", "--since", "soon"], 2),
        (["export", "--since", "0s"], 2),
        (["export", "--follow", "-1m"], 2),
        (["export", "--url", "http://127.0.0.1:9"], 1),
        (["show", "missing.jsonl"], 1),
    ],
)
def test_mistakes_are_one_line(swarm: Swarm, words: list[str], code: int) -> None:
    result = swarm("trace", *words)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)


def test_nothing_to_write_is_an_error(swarm: Swarm, service: FakeService, tmp_path: Path) -> None:
    service.reply("GET /swarm/turns", {"turns": []})
    path = tmp_path / "run.jsonl"
    result = swarm("trace", "export", "-o", path, "--url", service.url)
    assert (result.code, path.exists()) == (1, False)
    assert result.err == "trace export: no turn has ended with a token yet; nothing is written\n"


def test_an_unwritable_file_is_one_line(swarm: Swarm, run: FakeService, tmp_path: Path) -> None:
    result = swarm("trace", "export", "-o", tmp_path, "--url", run.url)
    assert (result.code, result.err.splitlines()[-1]) == (1, "trace export: Is a directory")


def test_show_prints_what_is_asked_for(swarm: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"t":0,"agent":"tester","class":"background","prompt":1200,"output":300}\n'
        '{"t":90,"agent":"editor","class":"foreground","prompt":40,"output":60}\n'
    )
    result = swarm("trace", "show", path)
    assert result.code == 0
    assert "1.2k  1.2k  1.2k  1.2k" in result.out
    assert "2 turns over 1 min 30 s, at most 1 in a minute; 1,240 prompt and 360 output tokens" in " ".join(
        result.out.split()
    )
    assert "asked for: 4.0 output tokens/s on average" in result.out


def test_show_names_the_line(swarm: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"t": 0}\n')
    result = swarm("trace", "show", path)
    assert (result.code, result.err) == (1, "trace show: run.jsonl, line 1: agent is missing\n")
