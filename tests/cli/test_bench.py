"""`swarm bench`: options to settings, errors to lines. The benches themselves are tested elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarks.broker
import benchmarks.cuts
import benchmarks.overhead
import benchmarks.resume
import benchmarks.scheduler
import benchmarks.wait
from benchmarks.harness import BenchError
from tests.cli.conftest import Swarm


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path | None]]:
    """The settings and JSON path of each run, which are not carried out."""
    runs: list[tuple[Any, Path | None]] = []

    def run(settings: Any, *, json_path: Path | None = None) -> None:
        runs.append((settings, json_path))

    for module in (
        *(benchmarks.broker, benchmarks.cuts, benchmarks.overhead, benchmarks.resume),
        *(benchmarks.scheduler, benchmarks.wait),
    ):
        monkeypatch.setattr(module, "run", run)
    return runs


def test_defaults_are_the_benchs(swarm: Swarm, ran: list[Any]) -> None:
    assert swarm("bench", "wait").code == 0
    assert swarm("bench", "broker").code == 0
    assert ran == [(benchmarks.wait.WaitSettings(), None), (benchmarks.broker.BrokerSettings(), None)]


def test_options_change_the_settings(swarm: Swarm, ran: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "wait.json"
    words = ["--seconds", 30, "--rounds", 1, "--columns", "on, limit", "--seed", 7, "--json", path]
    assert swarm("bench", "wait", *words).code == 0
    ((settings, json_path),) = ran
    assert (settings.duration_s, settings.rounds, settings.seed) == (30.0, 1, 7)
    assert settings.columns == ("on", "limit")
    assert json_path == path


def test_quick_and_long_prompt(swarm: Swarm, ran: list[Any]) -> None:
    swarm("bench", "wait", "--quick", "--long-prompt", 3000)
    assert ran[0][0] == benchmarks.wait.WaitSettings().quick().long_prompt(3000)
    swarm("bench", "resume", "--quick", "--lengths", "100,200")
    assert ran[1][0].lengths == (100, 200)
    assert ran[1][0].repeats == 1
    swarm("bench", "overhead", "--pairs", 5)
    assert ran[2][0].pairs == 5
    swarm("bench", "scheduler", "--events", 500, "--seed", 3)
    assert (ran[3][0].events, ran[3][0].seed) == (500, 3)
    swarm("bench", "cuts", "--cuts", 7, "--kinds", "plain, tool call")
    assert (ran[4][0].cuts, ran[4][0].kinds) == (7, ("plain", "tool call"))


@pytest.mark.parametrize(
    "words",
    [
        ["wait", "--columns", "off,fast"],
        ["wait", "--columns", ","],
        ["resume", "--lengths", "1,x"],
        ["resume", "--lengths", "0"],
        ["overhead", "--engines", "warp"],
        ["cuts", "--kinds", "plain,fancy"],
    ],
    ids=" ".join,
)
def test_wrong_lists_are_one_line(swarm: Swarm, ran: list[Any], words: list[str]) -> None:
    result = swarm("bench", *words)
    assert (result.code, result.out, result.err.count("\n"), ran) == (2, "", 1, [])


def test_unwritable_json_is_said_before_the_run(swarm: Swarm, ran: list[Any], tmp_path: Path) -> None:
    result = swarm("bench", "broker", "--json", tmp_path)
    assert (result.code, result.err.count("\n"), ran) == (2, 1, [])


@pytest.mark.parametrize("error", [BenchError("it broke"), ExceptionGroup("", [BenchError("it broke")])])
def test_failure_is_one_line(swarm: Swarm, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(settings: Any, *, json_path: Path | None = None) -> None:
        raise error

    monkeypatch.setattr(benchmarks.broker, "run", run)
    result = swarm("bench", "broker")
    assert (result.code, result.err) == (1, "bench broker: it broke\n")
