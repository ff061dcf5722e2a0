"""The state as a screen: what it shows, and that it never outgrows the terminal."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from orchestrator.cli.render import Classes, bar, joined, screen, short_turn
from orchestrator.cli.render_turns import timeline, turn_head, turn_lines, what_happened
from orchestrator.cli.view import SwarmState, TimelineEntry, TurnStory, TurnSummary
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


@pytest.mark.parametrize("width", [80, 140])
def test_state_looks_as_before(width: int) -> None:
    shown = [
        *lines_of(samples.busy_state(), width, None),
        "",
        *lines_of(samples.busy_state(per_token=None), width, 20, cut=True),
        "",
        *lines_of(samples.down_state(), width, None),
    ]
    check_snapshot(f"state-{width}", "\n".join(shown) + "\n")


@pytest.mark.parametrize("width", [80, 140])
def test_turns_look_as_before(width: int) -> None:
    states = [
        samples.summary(1, "running"),
        samples.summary(2, "paused", tier="resident"),
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
    assert all(turn in shown for turn in ("resident", "held", "dropped"))


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
    entry = TimelineEntry(t=1.0, event="swapped", file_bytes=12, swap_s=0.25, why="memory")  # type: ignore[call-arg]
    assert what_happened(entry) == "file_bytes 12, swap_s 250 ms, why memory"
