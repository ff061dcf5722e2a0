"""Options of the benches that share nothing with others' options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import benchmarks.pressure
import benchmarks.reuse
from orchestrator.cli.main import app


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each run, which is not carried out."""
    runs: list[Any] = []

    def run(settings: Any, *, json_path: Path | None = None) -> None:
        runs.append(settings)

    for module in (benchmarks.pressure, benchmarks.reuse):
        monkeypatch.setattr(module, "run", run)
    return runs


def test_options_change_the_settings(ran: list[Any]) -> None:
    runner = CliRunner()
    words = ["--layout", "split", "--seconds", "30", "--references", "0", "--seed", "7"]
    assert runner.invoke(app, ["bench", "pressure", *words]).exit_code == 0
    words = ["--quick", "--slots", "8,2", "--columns", "bare,service", "--turns", "4"]
    assert runner.invoke(app, ["bench", "reuse", *words]).exit_code == 0
    pressure, reuse = ran
    assert (pressure.layout, pressure.duration_s, pressure.references, pressure.seed) == ("split", 30, 0, 7)
    assert (reuse.slots, reuse.columns, reuse.turns) == ((8, 2), ("bare", "service"), 4)
    assert reuse.system_tokens == benchmarks.reuse.ReuseSettings().quick().system_tokens


@pytest.mark.parametrize(
    "words",
    [["pressure", "--layout", "both"], ["reuse", "--slots", "4,x"], ["reuse", "--columns", "vllm"]],
    ids=" ".join,
)
def test_wrong_words_are_one_line(ran: list[Any], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert (result.exit_code, result.stderr.count("\n"), ran) == (2, 1, [])
