"""Traces: what is written is read again, and what cannot be used is one line with its number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.simulation.trace import (
    MAX_LINE_BYTES,
    MAX_TIME_S,
    MAX_TOKENS,
    TraceError,
    parse_trace,
    read_trace,
    summarise,
    trace_lines,
    write_trace,
)
from orchestrator.simulation.workload import Arrival

_NAMES = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20)


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    times = sorted(draw(st.lists(st.integers(0, int(MAX_TIME_S) * 1000), min_size=1, max_size=30)))
    found = []
    for at_ms in times:
        prompt = draw(st.integers(1, MAX_TOKENS))
        shared = draw(st.integers(0, prompt))
        output = draw(st.integers(1, MAX_TOKENS))
        found.append(Arrival(at_ms / 1000, draw(_NAMES), draw(_NAMES), prompt, output, shared))
    return found


@given(traces())
def test_what_is_written_is_read_again_and_written_the_same(arrivals: list[Arrival]) -> None:
    lines = list(trace_lines(arrivals))
    again = list(parse_trace(lines))
    assert again == arrivals
    assert list(trace_lines(again)) == lines


def test_a_file_and_its_exact_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    arrivals = [Arrival(0.0, "tester", "background", 10, 20), Arrival(1.25, "editor", "foreground", 9, 3, 4)]
    assert write_trace(path, arrivals) == 2
    assert path.read_bytes() == (
        b'{"t":0,"agent":"tester","class":"background","prompt":10,"output":20}\n'
        b'{"t":1.25,"agent":"editor","class":"foreground","prompt":9,"output":3,"shared":4}\n'
    )
    assert list(read_trace(path)) == arrivals


def line(**changes: Any) -> bytes:
    record = {"t": 1.0, "agent": "a", "class": "c", "prompt": 5, "output": 6, **changes}
    return orjson.dumps({key: value for key, value in record.items() if value is not ...})


def test_blank_lines_and_windows_ends_are_passed_over() -> None:
    lines = [b"\n", line() + b"\r\n", b"   \n", line(t=2)]
    assert [arrival.at_s for arrival in parse_trace(lines)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (line(output=...), "output is missing"),
        (line(extra=1), "unknown key 'extra'"),
        (line(t=-0.5), "t is -0.5"),
        (line(t="1"), "t is '1'"),
        (line(t=True), "t is True"),
        (line(t=2 * MAX_TIME_S), "t is 2000000000.0"),
        (b'{"t":NaN,"agent":"a","class":"c","prompt":5,"output":6}', "not JSON"),
        (line(prompt=0), "prompt is 0"),
        (line(prompt=5.0), "prompt is 5.0"),
        (line(output=True), "output is True"),
        (line(output=MAX_TOKENS + 1), "output is 100000001"),
        (line(shared=6), "shared is 6"),
        (line(shared=-1), "shared is -1"),
        (line(agent=""), "agent is ''"),
        (line(agent="a\nb"), "agent is 'a\\nb'"),
        (line(**{"class": None}), "class is None"),
        (line(agent="a" * 5000), f"longer than {MAX_LINE_BYTES} bytes"),
        (b"\xff\xfe", "not JSON"),
        (line(t=0.5), "sort the lines"),
    ],
)
def test_a_bad_line_is_one_line_with_its_number(bad: bytes, said: str) -> None:
    with pytest.raises(TraceError) as found:
        list(parse_trace([line(), b"", bad], "run.jsonl"))
    message = str(found.value)
    assert message.startswith("run.jsonl, line 3: ")
    assert said in message
    assert "\n" not in message
    assert len(message) < 300


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"x" * 10_000_000)
    with pytest.raises(TraceError, match="longer than"):
        next(read_trace(path))


@pytest.mark.parametrize("lines", [[], [b"\n", b" "]])
def test_a_trace_without_turns_is_an_error(lines: list[bytes]) -> None:
    with pytest.raises(TraceError, match="there are no turns in it"):
        list(parse_trace(lines))


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        ([Arrival(2.0, "a", "c", 1, 1), Arrival(1.0, "a", "c", 1, 1)], "turn 2: t is 1, before"),
        ([Arrival(0.0, "", "c", 1, 1)], "turn 1: agent is ''"),
        ([Arrival(0.0, "a", "c" * 5000, 1, 1)], "turn 1: longer than"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(arrivals: list[Arrival], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(trace_lines(arrivals))


def test_the_summary_counts_by_class_and_agent() -> None:
    arrivals = [Arrival(float(at), "b", "background", at, 10 * at) for at in range(1, 101)]
    arrivals.append(Arrival(130.0, "e", "foreground", 7, 3, 5))
    summary = summarise(arrivals)
    assert (summary.turns, summary.span_s, summary.busiest_minute) == (101, 129.0, 59)
    assert (summary.prompt_tokens, summary.output_tokens) == (5050 + 7, 50_500 + 3)
    assert summary.offered_tokens_per_s == pytest.approx(50_503 / 129)
    background, foreground = summary.parts
    assert (background.agent, background.turns, background.prompts) == ("b", 100, (50, 90, 99, 100))
    assert background.outputs == (500, 900, 990, 1000)
    assert (foreground.prompts, foreground.shared_tokens) == ((7, 7, 7, 7), 5)


def test_a_trace_of_one_moment_has_no_rate() -> None:
    assert math.isnan(summarise([Arrival(5.0, "a", "c", 1, 1)]).offered_tokens_per_s)
