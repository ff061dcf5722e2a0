"""The streams bench's figures, its options, and its readers' requests."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import benchmarks.streams
from benchmarks.streams import (
    ALL_READ,
    SOME_SLOW,
    Found,
    Phase,
    StreamsSettings,
    bulky_body,
    bulky_reply,
    report,
    resident_bytes,
)
from orchestrator.cli.main import app


def phase(kind: str, rates: list[float], seconds: float = 10.0, **fields: Any) -> Phase:
    return Phase(kind, seconds, rates, [100 << 20] * 9, **fields)


def test_a_streams_rate_is_over_all_phases_of_a_kind() -> None:
    found = Found([phase(ALL_READ, [2.0, 1.0]), phase(ALL_READ, [1.0, 1.0], seconds=30.0)])
    assert found.rates(ALL_READ) == [1.25, 1.0]


def test_what_is_kept_compares_the_same_percentile() -> None:
    fast, slow = [2.0] * 19 + [1.0], [2.0] * 18 + [0.5, 0.5]
    found = Found([phase(ALL_READ, fast), phase(SOME_SLOW, slow)])
    assert found.kept(50) == 1.0
    assert found.kept(5) == pytest.approx(0.5 / 1.95)
    assert "others' speed with slow readers: 25.6%" in report(StreamsSettings(), found).notes[0]


def test_growth_is_of_the_last_third() -> None:
    assert Phase(ALL_READ, resident_bytes=[1, 1, 1, 4, 4, 4, 5, 5, 5]).growth == pytest.approx(0.25)
    assert Phase(ALL_READ, resident_bytes=[1, 9, 4, 4]).growth == 0.0
    assert math.isnan(Phase(ALL_READ, resident_bytes=[1, 2]).growth)


def test_the_report_counts_errors_and_readers_cut_off() -> None:
    phases = [phase(ALL_READ, [2.0]), phase(SOME_SLOW, [2.0], cut_off=3, slow_cut_off=1, service_cpu_s=5.0)]
    made = report(StreamsSettings(), Found(phases, turns=7, errors=["HTTP 500: oh"]))
    cells = {row[0]: row[1:] for row in made.rows}
    assert cells["stopped readers cut off"][:2] == ["0", "3"]
    assert cells["slow readers cut off"][:2] == ["0", "1"]
    assert cells["service's share of a core"][:2] == ["0%", "50%"]
    assert made.notes[0].endswith("7 turns, 1 errors (goal 0)")
    assert made.data["phases"][1]["service_cpu_share"] == 0.5


def test_bulky_requests_are_played_from_the_script() -> None:
    reply, body = bulky_reply(), bulky_body(3)
    assert reply.match in body["messages"][-1]["content"]
    assert body["max_tokens"] >= len(reply.deltas)
    assert body["tools"]


def test_memory_is_that_of_a_process() -> None:
    assert resident_bytes(os.getpid()) > 1 << 20


def test_options_change_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[Any, Path | None]] = []
    monkeypatch.setattr(
        benchmarks.streams, "run", lambda settings, json_path: runs.append((settings, json_path))
    )
    invoke = CliRunner().invoke
    words = ["--streams", "100", "--slow", "9", "--rounds", "3", "--seed", "5"]
    assert invoke(app, ["bench", "streams", *words]).exit_code == 0
    assert runs == [(StreamsSettings(streams=100, slow=9, rounds=3, seed=5), None)]
    wrong = invoke(app, ["bench", "streams", "--streams", "9", "--slow", "9"])
    assert (wrong.exit_code, wrong.stderr.count("\n"), len(runs)) == (2, 1, 1)
