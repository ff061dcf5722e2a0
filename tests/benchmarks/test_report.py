"""Percentiles, cells, tables and the JSON that benches report with; and the CPU figures of a process tree."""

import io
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.harness import BenchError, EngineShape, run_async, service
from benchmarks.overhead import cpu_times, ps_seconds
from benchmarks.report import (
    Report,
    Summary,
    figure,
    microseconds,
    milliseconds,
    percentile,
    progress_bar,
    ratio,
)
from benchmarks.wait import Column, WaitSettings, bars
from benchmarks.wait import report as wait_report


@dataclass(frozen=True)
class Settings:
    rounds: int = 2
    folder: Path = Path("results")


REPORT = Report(
    bench="wait",
    title="Foreground wait",
    columns=["", "off", "on"],
    rows=[["wait p99", "6,170.0 ms", "29.0 ms"]],
    notes=["p99 [on]: 1.12 decode steps"],
    parameters={"settings": Settings()},
    data={"wait_s": Summary.of([0.029, 0.017]), "nothing": Summary.of([])},
)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_within_its_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_summary_is_in_order(values: list[float]) -> None:
    summary = Summary.of(values)
    assert summary.n == len(values)
    assert summary.p50 <= summary.p90 <= summary.p95 <= summary.p99 <= summary.max
    assert summary.mean == pytest.approx(sum(values) / len(values))


def test_cells() -> None:
    assert milliseconds(0.0294) == "29.4 ms"
    assert milliseconds(-0.0021, 2) == "-2.10 ms"
    assert milliseconds(6.17) == "6,170.0 ms"
    assert milliseconds(31.0) == "31.00 s"
    assert microseconds(0.000181) == "181 us"
    assert figure(1234.56) == "1,234.6"
    assert {milliseconds(math.nan), microseconds(math.nan), figure(math.nan)} == {"-"}


def test_a_ratio_without_a_whole_is_not_measured() -> None:
    assert ratio(6.0, 3.0) == 2.0
    assert math.isnan(ratio(1.0, 0.0))
    assert math.isnan(ratio(1.0, math.nan))


def test_the_table_and_its_notes_are_printed(tmp_path: Path) -> None:
    output = io.StringIO()
    path = tmp_path / "new" / "wait.json"
    REPORT.finish(Console(file=output, width=100), path)
    printed = output.getvalue()
    assert "Foreground wait" in printed
    assert "6,170.0 ms" in printed
    assert "p99 [on]: 1.12 decode steps\n" in printed
    assert f"written: {path}" in printed


def test_the_json_has_the_machine_and_null_for_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "wait.json"
    REPORT.finish(Console(file=io.StringIO()), path)
    written = orjson.loads(path.read_bytes())
    assert (written["schema"], written["bench"]) == (1, "wait")
    assert written["parameters"]["settings"] == {"rounds": 2, "folder": "results"}
    assert written["results"]["wait_s"]["max"] == 0.029
    assert written["results"]["nothing"] == {
        "n": 0,
        **dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max")),
    }
    machine = written["machine"]
    assert machine["cpus"] == os.cpu_count()
    assert machine["python"] == sys.version.split()[0]
    assert machine["date"].endswith("+00:00")


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    REPORT.finish(Console(file=io.StringIO()), None)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2.0, "starting") as advance:
        advance(1.0, "half")
    assert capsys.readouterr() == ("", "")


# The wait bench's figures -------------------------------------------------------------------------


def column(waits: list[float], step_s: float, rate: float) -> Column:
    return Column(
        waits=waits,
        first_tokens=[wait + 0.05 for wait in waits],
        steps=[step_s] * 9 + [100 * step_s],
        seconds=10.0,
        background_tokens=rate * 10,
        foreground_tokens=10.0,
    )


def test_the_goals_compare_columns_of_one_run() -> None:
    columns = {
        "off": column([6.0] * 4, 0.025, 300),
        "on": column([0.03] * 4, 0.025, 297),
        "limit": column([0.024] * 4, 0.025, 300),
    }
    found = bars(columns)
    assert found["p99_wait_in_steps"] == pytest.approx(1.2)
    assert found["p99_times_shorter"] == pytest.approx(200)
    assert found["p99_over_limit_s"] == pytest.approx(0.006)
    assert found["background_throughput"] == pytest.approx(0.99)


def test_a_pause_does_not_count_as_a_decode_step() -> None:
    measured = column([], 0.025, 300)
    assert [measured.step_s, measured.mean_step_s] == pytest.approx([0.025, 0.025])


def test_the_wait_table_shows_the_measured_columns_and_their_errors() -> None:
    columns = {"bare": column([1.0], 0.02, 300), "limit": column([], 0.02, 300)}
    columns["bare"].errors.append("background: HTTP 500: oh")
    made = wait_report(WaitSettings(columns=("bare", "limit")), columns)
    assert list(made.columns) == ["", "bare engine", "limit: idle slot"]
    assert all(len(row) == 3 for row in made.rows)
    assert made.data["bars"] == {}
    assert list(made.notes) == ["bare engine: 1 errors, the first: background: HTTP 500: oh"]
    empty = wait_report(WaitSettings(), {"on": Column(), "off": Column(), "limit": Column()})
    assert any("nan" in note for note in empty.notes)


def test_long_prompts_fit_into_their_slots() -> None:
    settings = WaitSettings().long_prompt(3000)
    assert settings.shape.slot_context >= 3000 + 64
    assert settings.columns == ("on", "limit")
    assert replace(WaitSettings(), rounds=1).quick().total_s == 4 * 35


def test_the_bare_engine_and_the_service_run_the_same_engine() -> None:
    shape = EngineShape(threads=2)
    settings, managed = shape.settings(), shape.managed()
    for name in ("decode_slots", "engine_slots", "context", "batch_tokens", "threads", "nice", "model"):
        assert getattr(settings, name) == managed[name]
    assert shape.settings(8).context == 8 * shape.slot_context
    assert "threads" not in EngineShape().managed()


# Running a bench ----------------------------------------------------------------------------------


async def fail_in_a_task() -> int:
    async def fail() -> None:
        raise BenchError("the engine is gone")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        await anyio.sleep(10)
    return 1


def test_an_error_in_a_task_is_raised_as_itself() -> None:
    with pytest.raises(BenchError, match="the engine is gone"):
        run_async(fail_in_a_task)


def test_sigterm_ends_a_bench_in_order() -> None:
    left = False

    async def measure() -> None:
        nonlocal left
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep(10)
        finally:
            left = True

    with pytest.raises(BenchError, match="SIGTERM"):
        run_async(measure)
    assert left


def test_a_service_that_does_not_start_says_why() -> None:
    async def start() -> None:
        async with service({"backends": [], "agents": {}}):
            pass

    with pytest.raises(BenchError, match=r"the service ended with exit code \d: .*at least one"):
        run_async(start)


# CPU figures --------------------------------------------------------------------------------------


def test_ps_times() -> None:
    assert ps_seconds("0:00.12") == 0.12
    assert ps_seconds("01:02:03") == 3723
    assert ps_seconds("2-00:00:10") == 172_810


def test_a_process_and_its_children_are_counted() -> None:
    burn = "x = 0\nfor i in range(3_000_000): x += i\n"
    parent = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {burn + 'input()'!r}])\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 20
            while cpu_times(process.pid).service_s < 0.05 and time.monotonic() < deadline:
                time.sleep(0.02)
            used = cpu_times(process.pid)
        finally:
            process.kill()
    assert used.service_s >= 0.05
    assert used.valkey_s == 0.0
    assert cpu_times(process.pid).service_s == 0.0
