"""`swarm simulate`: its tables, its drawings, and what it says to bad options."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from orchestrator.config import parse_config
from orchestrator.scheduler import Policy
from orchestrator.simulation.event_log import replay
from orchestrator.simulation.presets import PRESETS
from tests.cli.conftest import Outcome, Swarm

SHORT = ("simulate", "--preset", "rx9070xt", "--hours", "0.1", "--replications", "2")
CONFIG = """
backends:
  - name: gpu
    managed: {model: smollm2-135m, decode_slots: 2, engine_slots: 4, context: 4096}
agents:
  editor: {priority: foreground, workload: {mean_tokens: 12, think_s: 2}}
  worker: {priority: background, workload: {clients: 4, mean_tokens: 80, tail: heavy}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def figures(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def refused(outcome: Outcome) -> str:
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("simulate: ") and outcome.err.count("\n") == 1
    return outcome.err


def test_the_preset_beside_what_was_published(swarm: Swarm) -> None:
    outcome = swarm(*SHORT)
    assert (outcome.code, outcome.err) == (0, "")
    assert all(len(line) <= 80 for line in outcome.out.splitlines())
    rows = [line.split() for line in outcome.out.splitlines()]
    assert [row[1:] for row in rows if row[:1] == ["published"]] == [
        ["760", "ms", "2.45", "s", "6.17", "s", "31.0", "s"],
        ["17.0", "ms", "17.0", "ms", "29.0", "ms", "30.0", "ms"],
    ]
    assert "±" in outcome.out and "times shorter" in outcome.out
    assert "the published p90 with preemption equals its p50" in " ".join(outcome.out.split())


def test_one_column_has_nothing_to_compare(swarm: Swarm) -> None:
    outcome = swarm(*SHORT, "--on")
    assert "times shorter" not in outcome.out and "no preemption" not in outcome.out


def test_json_has_the_same_figures_and_is_repeatable(swarm: Swarm) -> None:
    once, twice = swarm(*SHORT, "--json"), swarm(*SHORT, "--json")
    assert once == twice
    found = figures(once)
    on = found["columns"]["on"]
    assert on["published_s"]["p99"] == 0.029
    assert on["classes"]["foreground"]["wait_s"]["worst"] <= 0.0297
    assert len(on["backends"]["gpu"]) == 2
    assert figures(swarm(*SHORT, "--seed", "2", "--json")) != found


def test_the_timeline_as_text(swarm: Swarm) -> None:
    lines = swarm(*SHORT, "--text").out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    third = [line for line in lines if line.startswith("slot 3")]
    assert len(third) == 2
    assert third[0].count("▓") > 50 > third[0].count("█") > 5
    assert "▓█" in third[0] and "▓█" in third[1] and "█▓" in third[1] and "█▓" not in third[0]
    assert [line.split("waits ")[1].strip() for line in lines if "waits " in line] == ["20.1 s", "29.6 ms"]


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_the_timeline_as_a_picture(swarm: Swarm, tmp_path: Path, ending: str) -> None:
    path, again = tmp_path / f"one{ending}", tmp_path / f"two{ending}"
    assert swarm(*SHORT, "--on", "--chart", path).code == 0
    assert swarm(*SHORT, "--on", "--chart", again).code == 0
    assert path.read_bytes() == again.read_bytes()
    if ending == ".svg":
        text = " ".join(ElementTree.parse(path).getroot().itertext())
        assert "waits 20.1 s" in text or "<!-- waits 20.1 s -->" in path.read_text()
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib(swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "[charts] extra" in refused(swarm(*SHORT, "--chart", tmp_path / "one.png"))


def test_a_swarm_of_ones_own(swarm: Swarm, config: Path) -> None:
    outcome = swarm("simulate", "-c", config, "--hours", "0.05")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(len(line) <= 80 for line in outcome.out.splitlines())
    names = [
        line.split()[0] for line in outcome.out.splitlines() if line.startswith((" foreground", " back"))
    ]
    assert names == ["foreground", "background"]


def test_its_engine_is_what_the_configuration_says(swarm: Swarm, config: Path) -> None:
    found = figures(swarm("simulate", "-c", config, "--turns", "60", "--json"))
    on, off = found["columns"]["on"], found["columns"]["off"]
    assert on["backends"]["gpu"][0]["most_lanes"] == 2
    assert sum(each["turns"] for each in on["classes"].values()) == 3 * 60
    waits = [column["classes"]["foreground"]["wait_s"]["p90"]["mean"] for column in (off, on)]
    assert waits[1] < 0.2 * waits[0]


def test_an_engine_from_a_preset(swarm: Swarm, config: Path) -> None:
    words = ("simulate", "-c", config, "--turns", "50", "--engine", "rx9070xt", "--on", "--json")
    found = figures(swarm(*words))
    assert found["remarks"] == []
    assert found["columns"]["on"]["classes"]["foreground"]["wait_s"]["worst"] < 0.0297


def test_a_trace_instead_of_the_workloads(swarm: Swarm, config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"t": %d, "agent": "worker", "class": "background", "prompt": 20, "output": 30}\n'
    trace.write_text("".join(line % second for second in range(10)))
    found = figures(swarm("simulate", "-c", config, "--trace", trace, "--on", "--json"))
    assert found["columns"]["on"]["classes"]["background"]["turns"] == 10


def test_events_replay(swarm: Swarm, config: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "events", tmp_path / "again"
    for each in (path, again):
        assert swarm("simulate", "-c", config, "--turns", "40", "--on", "--events", each).code == 0
    lines = path.read_bytes().splitlines()
    assert lines == again.read_bytes().splitlines()
    priorities = tuple(sorted(parse_config(CONFIG).priorities.values()))
    policy = Policy(2, 4, first_slots=1, priorities=priorities)
    assert replay(lines, {"gpu": policy}) == len(lines) > 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --preset (rx9070xt) or --config FILE"),
        (("--preset", "rx9070xt", "-c", "x.yaml"), "not both"),
        (("--preset", "h100"), "--preset: h100 is not among rx9070xt"),
        (("--preset", "rx9070xt", "--hours", "1", "--turns", "5"), "give one"),
        (("--preset", "rx9070xt", "--engine", "x.json"), "--engine goes with --config"),
        (("--preset", "rx9070xt", "--chart", "x.pdf"), "does not end in .png or .svg"),
        (("--preset", "rx9070xt", "--chart", "/nowhere/x.png"), "--chart: /nowhere/x.png cannot be written"),
        (("--preset", "rx9070xt", "--events", "/nowhere/x"), "--events: /nowhere/x cannot be written"),
        (("-c", "CONFIG", "--text"), "the timeline is a preset's"),
        (
            ("-c", "CONFIG", "--engine", "nothing.json"),
            "nothing.json is neither rx9070xt nor a file",
        ),
        (("-c", "CONFIG", "--engine", "CONFIG"), "--engine: config.yaml: not JSON"),
        (("-c", "CONFIG", "--trace", "nothing.jsonl"), "--trace: nothing.jsonl cannot be read"),
        (("-c", "CONFIG", "--pool", "other"), "--pool: other is not among default"),
    ],
)
def test_a_mistake_is_one_line(swarm: Swarm, config: Path, words: tuple[str, ...], message: str) -> None:
    given = [config if word == "CONFIG" else word for word in words]
    assert message in refused(swarm("simulate", *given))


def test_a_swarm_without_workloads(swarm: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG[: CONFIG.index("agents:")] + "agents: {editor: {priority: foreground}}\n")
    assert "no agent has a workload" in refused(swarm("simulate", "-c", path))


def test_an_external_engine_needs_its_slots(swarm: Swarm, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    managed = "managed: {model: smollm2-135m, decode_slots: 2, engine_slots: 4, context: 4096}"
    path.write_text(CONFIG.replace(managed, "url: http://127.0.0.1:1"))
    assert "backend gpu: set decode_slots" in refused(swarm("simulate", "-c", path))
    path.write_text(CONFIG.replace(managed, "url: http://127.0.0.1:1\n    decode_slots: 2"))
    assert swarm("simulate", "-c", path, "--turns", "20", "--on").code == 0


def test_a_terminal_that_is_wide_shows_more(
    swarm: Swarm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    outcome = swarm("simulate", "-c", config, "--turns", "60")
    assert "tokens/s" in outcome.out and "±" in outcome.out


def test_presets_are_named_in_the_help(swarm: Swarm) -> None:
    assert all(name in swarm("simulate", "--help").out for name in PRESETS)


def test_a_sweep_is_a_table_a_csv_and_a_chart(swarm: Swarm, tmp_path: Path) -> None:
    table, chart = tmp_path / "s.csv", tmp_path / "s.svg"
    words = ("simulate", "--preset", "rx9070xt", "--hours", "0.05", "--sweep", "slots=4,8 preemption=on,off")
    outcome = swarm(*words, "--csv", str(table), "--chart", str(chart))
    assert outcome.code == 0, outcome.err
    lines = table.read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("slots,spare,preemption,load,")
    assert "preemption" in outcome.out and "worst" in outcome.out
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    assert swarm(*words, "--json").out == table.read_text(), "the same seed, the same bytes"


def test_a_sweep_of_ones_own_swarm(swarm: Swarm, config: Path) -> None:
    grid = "slots=1,2 load=1,3 kv=f16,q8_0"
    outcome = swarm("simulate", "-c", config, "--hours", "0.05", "--sweep", grid, "--json")
    assert outcome.code == 0, outcome.err
    rows = list(csv.DictReader(outcome.out.splitlines()))
    assert len(rows) == 8
    assert {row["kv_budget_tokens"] for row in rows if row["kv"] == "q8_0"} != {
        row["kv_budget_tokens"] for row in rows if row["kv"] == "f16"
    }
    waits = {(row["slots"], row["load"]): float(row["background_whole_mean_s"]) for row in rows}
    assert waits["1", "3"] > waits["1", "1"] > waits["2", "1"]


def test_a_sweep_of_several_backends_is_refused(swarm: Swarm, config: Path) -> None:
    other = "  - {name: two, url: 'http://127.0.0.1:1', decode_slots: 2}\nagents:"
    config.write_text(CONFIG.replace("agents:", other))
    assert "--sweep varies one backend" in refused(swarm("simulate", "-c", config, "--sweep", "slots=4"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "slots=4"), "give --preset (rx9070xt) or --config FILE"),
        (("--preset", "rx9070xt", "--sweep", "slots=4", "--turns", "9"), "leave --trace and --turns out"),
        (("--preset", "rx9070xt", "--sweep", "speed=9"), "'speed=9' is not one of"),
        (("--preset", "rx9070xt", "--csv", "x.csv"), "--csv goes with --sweep"),
        (("--calibrate", "x.json"), "--calibrate goes with --config"),
    ],
)
def test_a_sweep_or_calibration_that_cannot_be(swarm: Swarm, words: tuple[str, ...], says: str) -> None:
    assert says in refused(swarm("simulate", *words))
