"""The state as a screen: what it shows, and that it never outgrows the terminal."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from orchestrator.cli.render import bar, joined, screen
from orchestrator.cli.render_backend import OWNERS, stack
from orchestrator.cli.render_turns import timeline, turn_head, turn_lines, what_happened
from orchestrator.cli.rows import Classes, short_turn
from orchestrator.cli.view import Kv, SwarmState, TimelineEntry, TurnStory, TurnSummary
from tests.cli import samples

SNAPSHOTS = Path(__file__).parent / "snapshots"
CLASSES = Classes({value: name for name, value in samples.CLASSES.items()})


def text_of(*pages: RenderableType, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    for page in pages:
        console.print(page)
    return console.export_text()


def lines_of(raw: dict[str, Any], width: int, height: int | None, **options: Any) -> list[str]:
    page = screen(SwarmState.model_validate(raw), width, height, classes=CLASSES, **options)
    return text_of(page, width=width).splitlines()


def check_snapshot(name: str, text: str) -> None:
    """Compare with the stored text; SWARM_SNAPSHOTS=write in the environment stores it anew."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("SWARM_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("width", [80, 140, 200])
def test_state_looks_as_before(width: int) -> None:
    shown = [
        *lines_of(samples.busy_state(), width, None),
        "",
        *lines_of(samples.busy_state(per_token=None), width, 20, cut=True),
        "",
        *lines_of(samples.swap_trouble(), width, 20, cut=True),
        "",
        *lines_of(samples.older_state(), width, None),
        "",
        *lines_of(samples.down_state(), width, None),
    ]
    check_snapshot(f"state-{width}", "\n".join(shown) + "\n")


@pytest.mark.parametrize("width", [80, 140])
def test_turns_look_as_before(width: int) -> None:
    states = [
        samples.summary(1, "running"),
        samples.summary(2, "paused", tier="swapped"),
        samples.summary(3, "queued", tokens_generated=0, preemptions=0),
        samples.summary(4, "done", finish_reason="stop"),
        samples.summary(5, "failed", error="the engine failed 5 times: it broke off in the middle"),
    ]
    turns = [TurnSummary.model_validate(raw) for raw in states]
    story = TurnStory.model_validate(samples.story())
    pages: list[RenderableType] = [
        joined(turn_lines(turns, width, 1_800_000_123.0)),
        *turn_head(story),
        timeline(story),
    ]
    check_snapshot(f"turns-{width}", text_of(*pages, width=width))


def test_twelve_slots_and_paused_turns_fit_a_small_terminal() -> None:
    lines = lines_of(samples.busy_state(), 80, 24)
    assert len(lines) <= 24
    shown = "\n".join(lines)
    assert "empty slots: 11" in shown
    assert "..." not in shown
    assert all(tier in shown for tier in ("resident", "held", "swapped", "dropped"))
    assert [line.split()[0] for line in lines[2:5]] == ["KV", "swap", "cost"]


@pytest.mark.parametrize("width", [20, 40, 63, 79, 80, 81, 100, 130, 200])
@pytest.mark.parametrize("height", [12, 16, 20, 24, 50])
@pytest.mark.parametrize("slots", [12, 64])
def test_screen_never_outgrows_the_terminal(width: int, height: int, slots: int) -> None:
    raw = samples.busy_state()
    backend = raw["backends"][0]
    backend["model"] = "a-model-with-a-name-that-goes-on-and-on-" * 3
    while len(backend["slots"]) < slots:
        agent = "agent-with-a-long-name-" + "x" * len(backend["slots"])
        turn = samples.turn_id(100 + len(backend["slots"]))
        backend["slots"].append(
            samples.slot(len(backend["slots"]), "running", agent, 20, 7, 9, 70, turn=turn)
        )
    lines = lines_of(raw, width, height, cut=True)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("queue") for line in lines), "the last lines stay on the screen"


def test_paused_slots_are_drawn_together_before_rows_are_cut() -> None:
    lines = lines_of(samples.busy_state(), 80, 18, cut=True)
    assert any("paused: 8-9" in line for line in lines)
    assert not any("more slot" in line for line in lines)


def test_memory_lines_go_one_by_one_before_rows_are_cut() -> None:
    seen = []
    for height in range(24, 15, -1):
        lines = lines_of(samples.busy_state(), 80, height, cut=True)
        labels = [line.split()[0] for line in lines if line.startswith("  ")]
        seen.append([label for label in ("KV", "swap", "cost") if label in labels])
        assert seen[-1] == ["KV", "swap", "cost"][: len(seen[-1])]
        if any("more" in line for line in lines):
            assert not seen[-1]
    counts = [len(labels) for labels in seen]
    assert counts == sorted(counts, reverse=True) and set(counts) == {0, 1, 2, 3}


@pytest.mark.parametrize("height", [14, 20, 50])
def test_suspended_swap_is_said_whatever_the_height(height: int) -> None:
    lines = lines_of(samples.swap_trouble(), 80, height, cut=True)
    assert lines[2].startswith("  swap  suspended after failures for 27.4 s")
    assert sum("swap  " in line for line in lines) == 1


def test_swap_that_is_off_takes_no_line() -> None:
    raw = samples.busy_state()
    raw["backends"][0]["swap"] = {"enabled": False}
    shown = lines_of(raw, 80, None)
    assert shown[1].endswith("swap off")
    assert not any(line.startswith("  swap") for line in shown)


@pytest.mark.parametrize("width", [80, 200])
def test_owners_add_up_to_what_is_charged(width: int) -> None:
    (line,) = [line for line in lines_of(samples.busy_state(), width, None) if line.startswith("  KV ")]
    owners = samples.busy_state()["backends"][0]["kv"]["owners"]
    assert all(f"{name} " in line for name in owners)
    if width == 200:
        assert all(f"{name} {owned:,}" in line for name, owned in owners.items())
        assert f"charged {sum(owners.values()):,} of 24,576 tokens" in line


@pytest.mark.parametrize(
    ("owners", "shown"),
    [
        ({}, "··········"),
        ({"running": 50, "paused": 20, "idle": 10, "reserved": 20}, "█████▓▓▒░░"),
        ({"running": 30, "reserved": 30}, "███░░░····"),
        ({"paused": 1}, "··········"),
        ({"running": 900, "paused": 20}, "██████████"),
        ({"stranger": 50, "idle": 50}, "▒▒▒▒▒·····"),
    ],
)
def test_stack_reads_without_colours(owners: dict[str, int], shown: str) -> None:
    assert stack(Kv(budget_tokens=100, charged_tokens=0, owners=owners), 10).plain == shown


def test_owners_differ_without_colours() -> None:
    assert len({mark for mark, _ in OWNERS.values()}) == len(OWNERS)


def test_a_wide_screen_says_what_each_tier_would_cost() -> None:
    lines = lines_of(samples.busy_state(), 200, None)
    (header,) = [line for line in lines if line.startswith("slot state")]
    assert header.split()[-4:] == ["next:", "resident", "swapped", "dropped"]
    (running,) = [line for line in lines if samples.turn_id(4) in line]
    assert running.endswith("25.3 ms 27.7 ms  2.58 s")
    (dropped,) = [
        line for line in lines if " dropped " in line and "next" not in line and "turns" not in line
    ]
    assert dropped.endswith("4.21 s") and dropped.count(" ms") == 0
    assert "9.31 s" in dropped, "what its resumes took"


def test_a_swapped_turn_shows_its_file_and_has_its_own_style() -> None:
    state = SwarmState.model_validate(samples.busy_state())
    console = Console(width=80, record=True, file=io.StringIO(), highlight=False, color_system="standard")
    console.print(screen(state, 80, classes=CLASSES))
    styled = console.export_text(styles=True).splitlines()
    (swapped,) = [line for line in styled if "swapped  refactorer" in line]
    (resident,) = [line for line in styled if "resident reviewer" in line]
    assert "30.0 MiB" in swapped
    assert swapped.split("m")[0] != resident.split("m")[0]


def test_absent_and_null_figures_are_left_out() -> None:
    for raw, gone in _without_each(samples.busy_state()):
        for width in (80, 200):
            shown = "\n".join(lines_of(raw, width, None))
            assert "None" not in shown, gone
            assert shown.endswith("resumed 14 ") or "re-evaluated 14" in shown


def _without_each(raw: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The state with each of the newer figures null, and with each absent."""
    found = []
    backend = raw["backends"][0]
    places = [
        *(("backends", 0, part) for part in ("kv", "swap", "costs", "step_s")),
        *(("backends", 0, part, key) for part in ("kv", "swap", "costs") for key in backend[part]),
        *(("backends", 0, "slots", 1, key) for key in ("copy", "resume_cost_s", "predicted_resume_s")),
        *(("backends", 0, "slots", 1, "predicted_resume_s", tier) for tier in ("resident", "swapped")),
        *(("paused", 2, key) for key in ("swap_bytes", "resume_cost_s", "predicted_resume_s", "kv_tokens")),
    ]
    for place in places:
        for absent in (False, True):
            changed: Any = copy.deepcopy(raw)
            here: Any = changed
            for step in place[:-1]:
                here = here[step]
            if absent:
                del here[place[-1]]
            else:
                here[place[-1]] = None
            found.append((changed, f"{place}"))
    return found


def test_cut_rows_are_counted() -> None:
    lines = lines_of(samples.busy_state(), 80, 14, cut=True)
    shown = [line for line in lines if "running" in line or "starting" in line]
    (more,) = [line for line in lines if "more slot" in line]
    assert more == f"  ... {8 - len(shown)} more slots"


def test_foreign_text_cannot_steer_the_terminal() -> None:
    raw = samples.busy_state()
    raw["backends"][0]["slots"][1]["agent"] = "\x1b[2Jevil\n\rline"
    raw["backends"][0]["model"] = "[bold]not markup[/bold]"
    shown = "\n".join(lines_of(raw, 140, None))
    assert "\x1b" not in shown
    assert "[bold]not markup[/bold]" in shown


def test_kv_is_told_in_tokens_where_bytes_are_not_known() -> None:
    lines = lines_of(samples.busy_state(per_token=None), 80, None)
    (header,) = [line for line in lines if line.startswith("slot state")]
    assert " KV tokens" in header
    (swapped,) = [line for line in lines if line.startswith("     swapped ")]
    assert "1,364" in swapped and "MiB" not in swapped


def test_a_very_narrow_line_still_has_its_first_figure() -> None:
    lines = lines_of(samples.busy_state(), 30, None)
    assert [line.rstrip() for line in lines[2:5]] == [
        "  KV    charged 12.4k of 24.6k",
        "  swap  44.7 MiB of 1.00 GiB …",
        "  cost  prefill 230/s",
    ]


def test_unknown_figures_are_left_blank() -> None:
    raw = samples.busy_state()
    for slot in raw["backends"][0]["slots"]:
        for key in ("tokens", "max_tokens", "kv_bytes", "preemptions"):
            del slot[key]
    raw["backends"][0]["step_s"] = None
    shown = "\n".join(lines_of(raw, 80, None))
    assert "step -" in shown
    assert "None" not in shown


def test_priorities_without_names_are_numbers() -> None:
    page = screen(SwarmState.model_validate(samples.busy_state()), 80)
    assert " 100 " in text_of(page, width=80)


@pytest.mark.parametrize(
    ("done", "whole", "shown"),
    [
        (0, 10, "────"),
        (5, 10, "━━──"),
        (4, 10, "━╾──"),
        (10, 10, "━━━━"),
        (99, 10, "━━━━"),
        (None, 10, "    "),
    ],
)
def test_bar_reads_without_colours(done: int | None, whole: int, shown: str) -> None:
    assert bar(done, whole, 4).plain == shown


def test_short_turn_leaves_out_what_all_ids_share() -> None:
    assert short_turn("turn-0123456789abcdef0123") == "01234567"
    assert short_turn("x") == "x"


def test_details_of_a_newer_service_are_shown_as_they_are() -> None:
    entry = TimelineEntry(t=1.0, event="moved", file_bytes=2048, move_s=0.25, why="memory")  # type: ignore[call-arg]
    assert what_happened(entry) == "file_bytes 2.00 KiB, move_s 250 ms, why memory"
