"""`swarm plan`: its figures, its drawings, and what it says to bad options."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.cli.plan import as_json
from orchestrator.cli.plan_options import Given, PlanError, Question, understand
from orchestrator.cli.plan_text import advice_lines, chart
from orchestrator.config import parse_config
from tests.backends.gguf_file import LLAMA_8B, write_gguf
from tests.cli.conftest import Outcome, Swarm

PRESET = ("plan", "--preset", "rx9070xt")
NUMBERS = ("--layers", "2", "--kv-heads", "8", "--head-dim", "64")
MACHINE = ("--vram", "16GiB", "--weights", "5GiB")


def rows(outcome: Outcome) -> dict[str, list[str]]:
    """The table's cells by the row's first."""
    lines = [line.split() for line in outcome.out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0] in ("f16", "q8", "q8_0", "given")}


def figures(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


# Figures -------------------------------------------------------------------------------------------


def test_the_reference_machine(swarm: Swarm) -> None:
    outcome = swarm(*PRESET)
    assert (outcome.code, outcome.err) == (0, "")
    assert "k = 1,024 tokens, GiB = 2^30 bytes" in outcome.out
    found = {name: " ".join(cells) for name, cells in rows(outcome).items()}
    assert found["f16"] == "0.94 GiB 7.50 GiB 2.00 GiB 2 0.50 GiB over 13,107"
    assert found["q8"] == "0.47 GiB 3.75 GiB 5.75 GiB 12 4.50 GiB left 75,366"
    assert found["q8_0"] == "0.50 GiB 3.98 GiB 5.52 GiB 11 4.19 GiB left 68,041"


def test_options_change_the_preset(swarm: Swarm) -> None:
    found = figures(swarm(*PRESET, "--context", "3k", "--slots", "4", "--cache-type", "q4_0", "--json"))
    assert found["load"] == {"running": 4, "context": 3072, "long_context": 16_384}
    assert [entry["cache_type"] for entry in found["cache_types"]] == ["q4_0"]
    assert found["cache_types"][0]["turn_bytes"] == 81_920 * 18 // 32 * 3072


def test_another_card_has_its_own_usable_part(swarm: Swarm) -> None:
    found = figures(swarm(*PRESET, "--vram", "24GiB", "--json"))
    assert found["memory"]["usable"] == int(24 * 1024**3 * 0.97)


def test_a_model_file(swarm: Swarm, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "eight.gguf", "llama", LLAMA_8B)
    found = figures(swarm("plan", path, "--vram", "8GiB", "--json"))
    assert found["memory"]["usable"] == int(8 * 1024**3 * 0.97)
    assert found["memory"]["weights"] == path.stat().st_size
    assert found["cache_types"][0]["kv"]["token_bytes"] == 32 * 8 * 256 * 2
    assert found["cache_types"][1]["kv"]["token_bytes"] == 32 * 8 * 256 * 34 // 32


def test_another_model_on_the_preset_brings_its_own_weights(swarm: Swarm, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "eight.gguf", "llama", LLAMA_8B)
    found = figures(swarm(*PRESET, path, "--json"))
    assert found["memory"]["weights"] == path.stat().st_size
    assert found["memory"]["usable"] == int(15.5 * 1024**3)
    assert [entry["cache_type"] for entry in found["cache_types"]] == ["f16", "q8_0"]


def test_bytes_per_token(swarm: Swarm) -> None:
    outcome = swarm("plan", "--kv-bytes-per-token", "163840", "--usable", "15.5GiB", "--weights", "5.2GiB")
    assert rows(outcome)["given"][:4] == ["0.94", "GiB", "7.50", "GiB"]


def test_a_state_has_any_length(swarm: Swarm, tmp_path: Path) -> None:
    keys = {"block_count": 2, "embedding_length": 768, "ssm.conv_kernel": 4, "ssm.inner_size": 1536}
    path = write_gguf(tmp_path / "state.gguf", "mamba", keys | {"ssm.state_size": 16, "context_length": 2048})
    outcome = swarm("plan", path, "--vram", "2GiB")
    assert rows(outcome)["f16"][-1] == "any"
    assert "recurrent layers: saved files are larger" in outcome.out
    assert "the model was trained for 2,048 tokens" in " ".join(outcome.out.split())


def test_nothing_fits(swarm: Swarm) -> None:
    outcome = swarm("plan", *NUMBERS, "--usable", "5GiB", "--weights", "5GiB")
    assert outcome.code == 0
    assert "0.80 GiB too much before any KV" in " ".join(outcome.out.split())
    assert "not even two short turns fit" in outcome.out
    assert "llama-server" not in outcome.out


def advised(outcome: Outcome) -> str:
    """The part to copy into the configuration."""
    return outcome.out[outcome.out.index("backends:") :]


@pytest.mark.parametrize("options", [(), ("--cache-type", "f16"), ("--usable", "9000MB"), ("--slots", "1")])
def test_advice_is_a_configuration(swarm: Swarm, options: tuple[str, ...]) -> None:
    text = advised(swarm(*PRESET, *options))
    agents = "agents: {editor: {priority: foreground}}\n"
    backend = parse_config(text + agents).backends[0]
    found = figures(swarm(*PRESET, *options, "--json"))
    advice = found["advice"]
    assert backend.managed is not None
    assert backend.managed.engine_slots == advice["engine_slots"]
    assert backend.managed.context == advice["context"]
    assert backend.managed.cache_type_k == backend.managed.cache_type_v == advice["cache_type"]
    assert backend.kv_budget_bytes is not None
    budget = found["memory"]["kv_budget"]
    assert budget - 3 * 1024**2 < backend.kv_budget_bytes <= budget


def test_model_names_are_quoted_for_shell_and_yaml(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a model: #1.gguf", "llama", LLAMA_8B)
    question = understand(Given(str(path), None, (), {"vram": "16GiB"}))
    advice = question.advice()
    assert advice is not None
    lines = advice_lines(advice, question.model)
    config = yaml.safe_load("\n".join(lines[lines.index("backends:") :]))
    assert config["backends"][0]["managed"]["model"] == str(path)


# Drawings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "svg", "PNG"])
def test_chart_files(swarm: Swarm, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    assert swarm(*PRESET, "--chart", path).code == 0
    if ending == "svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_plan_is_the_same_file(swarm: Swarm, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        swarm(*PRESET, "--chart", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_without_matplotlib(swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = swarm(*PRESET, "--chart", tmp_path / "plan.png")
    assert (outcome.code, outcome.err) == (2, "plan: --chart needs matplotlib: install the [charts] extra\n")
    assert swarm(*PRESET).code == 0


def bars(question: Question, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(chart(question.plans(), width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 140, 200])
def test_bars_of_text(width: int) -> None:
    lines = bars(understand(Given(None, "rx9070xt", ("f16", "q8_0"))), width)
    assert max(map(len, lines)) <= width
    columns = {line[:10].strip(): line for line in lines[1:8] if line[:10].strip()}
    assert list(columns) == ["0", "1", "2", "3", "4", "one of 16k"]
    assert ["/" in line[11:] for line in columns.values()] == [False, False, False, True, True, True]
    limits = {line.index("│") for line in columns.values()}
    assert len(limits) == 1, "the limit is one line"
    assert all("◆" in line for line in columns.values())
    assert columns["4"].endswith("17.25 GiB")


@settings(deadline=None, max_examples=50)
@given(
    width=st.integers(20, 250),
    values=st.fixed_dictionaries(
        {
            "usable": st.integers(1, 1 << 40).map("{}B".format),
            "weights": st.integers(0, 1 << 38).map("{}B".format),
            "buffers": st.integers(0, 1 << 34).map("{}B".format),
            "slots": st.integers(1, 512).map(str),
            "context": st.integers(1, 1 << 20).map(str),
            "long": st.integers(1, 1 << 20).map(str),
            "kv_bytes_per_token": st.integers(1, 1 << 22).map(str),
        }
    ),
)
def test_bars_never_outgrow_their_width(width: int, values: Mapping[str, str]) -> None:
    question = understand(Given(None, None, (), values))
    for line in bars(question, max(width, 40))[1:7]:
        assert len(line) <= max(width, 40) + 6
    assert json.dumps(as_json(question, question.plans(), question.advice()))


# Bad options ---------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "no model": (MACHINE, "a model is needed"),
    "half a model": (("--layers", "4", *MACHINE), "a model is needed"),
    "two models": ((*NUMBERS, "--kv-bytes-per-token", "5", *MACHINE), "one of them"),
    "no memory": ((*NUMBERS, "--weights", "1GiB"), "--vram is needed"),
    "no weights": ((*NUMBERS, "--vram", "1GiB"), "--weights is needed"),
    "no unit": ((*NUMBERS, "--vram", "16", "--weights", "1GiB"), "--vram: '16' is not a size such as 9.5GiB"),
    "no size": ((*NUMBERS, *MACHINE, "--buffers", "much"), "--buffers: 'much' is not a size"),
    "no memory at all": (
        (*NUMBERS, "--usable", "0GiB", "--weights", "1GiB"),
        "--usable: '0GiB' is not a size",
    ),
    "too many percent": ((*NUMBERS, *MACHINE, "--usable", "101%"), "--usable: 101% is not"),
    "none percent": ((*NUMBERS, *MACHINE, "--usable", "0%"), "--usable: 0% is not"),
    "more than there is": ((*NUMBERS, *MACHINE, "--usable", "17GiB"), "17GiB is more than --vram 16GiB"),
    "no layers": (
        ("--layers", "0", *NUMBERS[2:], *MACHINE),
        "--layers: '0' is not a whole number from 1 to 512",
    ),
    "no tokens": ((*NUMBERS, *MACHINE, "--context", "6q"), "--context: '6q' is not a number of tokens"),
    "no token": ((*NUMBERS, *MACHINE, "--long", "0"), "--long: '0' is not a number of tokens"),
    "no slots": ((*NUMBERS, *MACHINE, "--slots", "-1"), "--slots: '-1' is not a whole number"),
    "no type": ((*NUMBERS, *MACHINE, "--cache-type", "q3"), "--cache-type: 'q3' is not among f32, f16"),
    "five types": (
        (*NUMBERS, *MACHINE, *(f"--cache-type={name}" for name in ("f16", "f32", "q8", "q8_0", "q4_0"))),
        "at most 4",
    ),
    "a type of given bytes": (
        ("--kv-bytes-per-token", "5", *MACHINE, "--cache-type", "f16"),
        "are those of one type already",
    ),
    "heads that do not divide": (
        ("--layers", "2", "--kv-heads", "8", "--head-dim", "80", *MACHINE),
        "q8_0 needs heads of a multiple of 32 elements, the model's have 80; give --kv-bytes-per-token",
    ),
    "no preset": (("--preset", "gtx"), "--preset: 'gtx' is not among rx9070xt"),
    "no file": (("none.gguf", *MACHINE), "none.gguf does not exist"),
    "no such folder": (
        (*NUMBERS, *MACHINE, "--chart", "/nonexistent/plan.png"),
        "--chart: /nonexistent/plan.png",
    ),
    "no such picture": ((*NUMBERS, *MACHINE, "--chart", "plan.txt"), "does not end in .png or .svg"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(swarm: Swarm, case: str) -> None:
    words, message = BAD[case]
    outcome = swarm("plan", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("plan: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


def test_files_that_say_too_little(swarm: Swarm, tmp_path: Path) -> None:
    unknown = write_gguf(tmp_path / "new.gguf", "nonesuch", LLAMA_8B)
    outcome = swarm("plan", unknown, *MACHINE)
    assert outcome.code == 2
    assert "the layers of architecture nonesuch are not known here; give --kv-bytes-per-token" in outcome.err
    (tmp_path / "text.gguf").write_text("hello")
    assert "text.gguf is not a GGUF file" in swarm("plan", tmp_path / "text.gguf", *MACHINE).err
    part = tmp_path / "big-00001-of-00002.gguf"
    unknown.rename(part)
    assert "--weights: big-00002-of-00002.gguf cannot be read" in swarm("plan", part, "--vram", "1GiB").err


MODEL_OPTIONS = ("layers", "kv_heads", "head_dim", "kv_bytes_per_token")
OPTIONS = (*MODEL_OPTIONS, "vram", "usable", "weights", "buffers", "slots", "context", "long")
TEXT = st.text(max_size=20) | st.sampled_from(
    ["6k", "1e9", "-5GiB", "0.0000001GiB", "9" * 12, "٣", "1.5K", "50 %"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(
    model=st.none() | TEXT,
    preset=st.none() | st.just("rx9070xt") | TEXT,
    types=st.lists(TEXT | st.sampled_from(["f16", "q8", "q8_0", "given"]), max_size=3),
    values=st.dictionaries(
        st.sampled_from(OPTIONS),
        TEXT,
    ),
)
def test_any_text_is_understood_or_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
    preset: str | None,
    types: list[str],
    values: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        question = understand(Given(model, preset, tuple(types), values))
        as_json(question, question.plans(), question.advice())
    except PlanError as error:
        assert str(error).isprintable()


# Documentation -------------------------------------------------------------------------------------


def test_the_documented_table_is_what_is_printed(swarm: Swarm) -> None:
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    documented = [
        line.rstrip() for line in text.splitlines() if line.startswith((" cache", " type", " f16", " q8"))
    ]
    printed = [line.rstrip() for line in swarm(*PRESET).out.splitlines()]
    assert len(documented) == 5
    assert [line for line in printed if line in documented] == documented
