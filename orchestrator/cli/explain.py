"""`swarm explain`: why a turn took as long as it did, in plain sentences."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.common import fail
from orchestrator.cli.explain_facts import (
    AT_ONCE_S,
    ExplainedTurn,
    Facts,
    Neighbour,
    Point,
    facts_of,
    neighbours,
    takers,
)
from orchestrator.cli.explain_text import explain, lines
from orchestrator.cli.render_turns import turn_head
from orchestrator.cli.service_client import (
    DEFAULT_CONFIG,
    JsonFlag,
    ServiceClient,
    ServiceConfigOption,
    ServiceProblem,
    UrlOption,
    service_url,
    settings_for,
    turn_path,
)
from orchestrator.cli.styles import FAINT
from orchestrator.cli.turns import TurnArgument, resolve
from orchestrator.cli.view import TurnStory, TurnSummary, View

#: Of the turns that may have run beside a waiting one so many are looked at, and of those that took its slot.
MAX_LISTED = 200
MAX_BESIDE = 64
MAX_TAKERS = 16
LABEL_WIDTH = 8


class _Listed(TurnSummary):
    pool: str = ""


class _List(View):
    turns: tuple[_Listed, ...]


def _stories(client: ServiceClient, ids: Iterable[str]) -> dict[str, TurnStory]:
    """The stories of turns that are still known."""
    found = {}
    for turn in ids:
        try:
            found[turn] = client.read(TurnStory, client.get(turn_path(turn)))
        except ServiceProblem:
            continue
    return found


def _beside(client: ServiceClient, story: ExplainedTurn, facts: Facts, now: float) -> list[Neighbour] | None:
    """The turns that ran while this one waited for its first slot; None when it did not wait."""
    until = facts.slot_at or facts.ended_at or now
    if until - facts.queued_at < AT_ONCE_S:
        return None
    listed = client.read(_List, client.get("/swarm/turns", {"limit": MAX_LISTED})).turns
    others: list[TurnStory] = []
    for turn in listed:
        if turn.id == story.id or turn.pool != story.pool or turn.state == "queued" or turn.created >= until:
            continue
        if len(others) == MAX_BESIDE:
            break
        known = list(_stories(client, [turn.id]).values())
        others += known
        ended_at = facts_of(known[0]).ended_at if known else None
        if ended_at is not None and ended_at < facts.queued_at:
            # The list has ended turns last, and of those the latest first.
            break
    return list(neighbours(story, others, facts.queued_at, until))


def _as_data(story: ExplainedTurn, facts: Facts, points: list[Point], now: float) -> dict[str, Any]:
    return {
        "id": story.id,
        "state": story.state,
        "agent": story.agent,
        "priority_class": story.priority_class,
        "backend": story.backend,
        "waited_s": facts.waited_s,
        "paused_s": facts.paused_s(now),
        "preemptions": story.preemptions,
        "prompt_tokens": facts.prompt_tokens,
        "cached_tokens": facts.cached_tokens,
        "tokens_generated": story.tokens_generated,
        "tokens_reevaluated": story.tokens_reevaluated,
        "prompt": None if story.prompt is None else story.prompt.model_dump(),
        "points": [asdict(point) for point in points],
    }


def print_points(console: Console, story: ExplainedTurn, points: list[Point]) -> None:
    """Paragraphs on a terminal, elsewhere one line a point."""
    for line in list(turn_head(story))[:2]:
        console.print(line)
    if not console.is_terminal:
        for text in lines(points):
            console.print(Text(text), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL_WIDTH)
    table.add_column(ratio=1)
    for point in points:
        table.add_row(Text(point.about, style=FAINT), Text(point.text))
        if point.help:
            table.add_row(Text("  help", style=FAINT), Text(point.help, style="cyan"))
    console.print(table)


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command("explain")
    def explain_turn(
        turn_id: TurnArgument,
        config: ServiceConfigOption = None,
        url: UrlOption = None,
        as_json: JsonFlag = False,
    ) -> None:
        """Explain one turn: what it waited for, what its pauses cost, what of its prompt was found in KV."""
        settings = settings_for(config, url)
        try:
            with ServiceClient(service_url(settings, url), config=config or DEFAULT_CONFIG) as client:
                story = client.read(ExplainedTurn, client.get(turn_path(resolve(client, turn_id))))
                now = time.time()
                facts = facts_of(story)
                beside = _beside(client, story, facts, now)
                took = _stories(client, takers(facts)[:MAX_TAKERS])
        except ServiceProblem as problem:
            fail(str(problem), 1)
        points = explain(story, facts, beside, took, now)
        if as_json:
            sys.stdout.write(orjson.dumps(_as_data(story, facts, points, now)).decode() + "\n")
        else:
            print_points(Console(highlight=False), story, points)
