"""`swarm turns`, `swarm turn`, and what an operator can do to a turn."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.common import fail
from orchestrator.cli.render import joined
from orchestrator.cli.render_turns import timeline, turn_head, turn_lines
from orchestrator.cli.rows import TURN_PREFIX, short_turn
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
from orchestrator.cli.view import ActionReply, TurnList, TurnStory

# As many as the service lists at once.
LIST_LIMIT = 1000

TurnArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A turn's id, or as much of it as names no other turn.")
]

_FULL_ID = re.compile(rf"{TURN_PREFIX}[0-9a-f]{{20}}")


def _ask(config: Path | None, url: str | None, command: Callable[[ServiceClient], None]) -> None:
    """Run a command against the service; what goes wrong is one line and exit code 1."""
    settings = settings_for(config, url)
    try:
        with ServiceClient(service_url(settings, url), config=config or DEFAULT_CONFIG) as client:
            command(client)
    except ServiceProblem as problem:
        fail(str(problem), 1)


def resolve(client: ServiceClient, typed: str) -> str:
    """The id that was meant, from its beginning with or without `turn-`. Raises ServiceProblem.

    What names no listed turn is returned as it is: the service says best that it does not know it.
    """
    if not typed.strip():
        raise ServiceProblem("the turn's id is empty")
    if _FULL_ID.fullmatch(typed):
        return typed
    listed = client.read(TurnList, client.get("/swarm/turns", {"limit": LIST_LIMIT})).turns
    found = [turn.id for turn in listed if turn.id == typed]
    found = found or [turn.id for turn in listed if turn.id.startswith((typed, TURN_PREFIX + typed))]
    if len(found) > 1:
        some = ", ".join(short_turn(turn) for turn in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ServiceProblem(f"{typed} is the beginning of {len(found)} turns ({some}): give more of it")
    return found[0] if found else typed


def _outcome(action: str, turn: str, state: str) -> str:
    """What the service will do now; it acts a moment after it answered."""
    if action == "cancel":
        return f"{turn} was {state}; it is being cancelled"
    if action == "preempt":
        held = f"it is held until: swarm resume {turn}"
        if state == "running":
            return f"{turn} gives its slot up at the next token; {held}"
        return f"{turn} was {state}; {held}"
    return f"{turn} may run again, as soon as it is its turn"


def _print_json(raw: bytes) -> None:
    sys.stdout.write(raw.decode() + "\n")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""

    @app.command()
    def turns(
        config: ServiceConfigOption = None,
        url: UrlOption = None,
        limit: Annotated[
            int, typer.Option("--limit", "-n", min=1, max=LIST_LIMIT, help="At most so many of each kind.")
        ] = 20,
        as_json: JsonFlag = False,
    ) -> None:
        """List turns: those on an engine, those that wait, and the last that ended."""

        def command(client: ServiceClient) -> None:
            raw = client.get("/swarm/turns", {"limit": limit})
            found = client.read(TurnList, raw).turns
            console = Console(highlight=False)
            if as_json:
                _print_json(raw)
            elif found:
                console.print(joined(turn_lines(found, console.width, time.time())))
            else:
                console.print("no turns yet")

        _ask(config, url, command)

    @app.command()
    def turn(
        turn_id: TurnArgument,
        config: ServiceConfigOption = None,
        url: UrlOption = None,
        as_json: JsonFlag = False,
    ) -> None:
        """Show one turn: its record, and what happened to it at which cost."""

        def command(client: ServiceClient) -> None:
            raw = client.get(turn_path(resolve(client, turn_id)))
            story = client.read(TurnStory, raw)
            if as_json:
                _print_json(raw)
                return
            console = Console(highlight=False)
            for line in turn_head(story):
                console.print(line)
            console.print(timeline(story))

        _ask(config, url, command)

    def act(action: str, turn_id: str, config: Path | None, url: str | None) -> None:
        def command(client: ServiceClient) -> None:
            meant = resolve(client, turn_id)
            reply = client.read(ActionReply, client.post(turn_path(meant, action)))
            typer.echo(_outcome(action, meant, reply.state))

        _ask(config, url, command)

    @app.command()
    def preempt(turn_id: TurnArgument, config: ServiceConfigOption = None, url: UrlOption = None) -> None:
        """Pause a turn at its next token, and hold it until it is resumed."""
        act("preempt", turn_id, config, url)

    @app.command()
    def resume(turn_id: TurnArgument, config: ServiceConfigOption = None, url: UrlOption = None) -> None:
        """Let a held turn run again."""
        act("resume", turn_id, config, url)

    @app.command()
    def cancel(turn_id: TurnArgument, config: ServiceConfigOption = None, url: UrlOption = None) -> None:
        """End a turn; its client gets what there is, and an error."""
        act("cancel", turn_id, config, url)
