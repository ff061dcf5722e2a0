"""`swarm ps`: who decodes, who is paused, who waits."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from orchestrator.cli.common import fail
from orchestrator.cli.render import screen
from orchestrator.cli.rows import Classes
from orchestrator.cli.service_client import (
    DEFAULT_CONFIG,
    JsonFlag,
    ServiceClient,
    ServiceConfigOption,
    ServiceProblem,
    UrlOption,
    service_url,
    settings_for,
)
from orchestrator.cli.styles import BAD, FAINT
from orchestrator.cli.terminal import screen_of, wait_for_quit
from orchestrator.cli.view import SwarmState

REFRESH_S = 0.25


def _once(client: ServiceClient, classes: Classes, console: Console) -> None:
    state = client.read(SwarmState, client.get("/swarm/state"))
    # The prompt that follows needs a line as well.
    height = console.height - 1 if console.is_terminal else None
    console.print(screen(state, console.width, height, classes=classes))


def _watch(client: ServiceClient, classes: Classes, console: Console) -> None:
    """Draw until q or Ctrl-C. A service that goes away is waited for, its last state still shown."""
    state = client.read(SwarmState, client.get("/swarm/state"))
    problem: ServiceProblem | None = None
    asked = time.monotonic()
    with screen_of(console) as terminal:
        while True:
            head = _watch_line(client.url, problem)
            page = screen(state, terminal.width, terminal.height, classes=classes, head=(head,), cut=True)
            terminal.draw(page)
            if wait_for_quit(max(0.01, REFRESH_S - (time.monotonic() - asked))):
                return
            asked = time.monotonic()
            try:
                state = client.read(SwarmState, client.get("/swarm/state"))
                problem = None
            except ServiceProblem as error:
                problem = error


def _watch_line(url: str, problem: ServiceProblem | None) -> Text:
    if problem is not None:
        return Text(f"stale: {problem}", style=BAD, no_wrap=True, overflow="ellipsis")
    line = Text(f"{url}  {time.strftime('%H:%M:%S')}  q quits", style=FAINT)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def ps(
        config: ServiceConfigOption = None,
        url: UrlOption = None,
        as_json: JsonFlag = False,
        watch: Annotated[
            bool, typer.Option("--watch", "-w", help="Refresh four times a second; q quits.")
        ] = False,
    ) -> None:
        """Show backends, slots, paused and waiting turns."""
        if watch and as_json:
            fail("--watch and --json exclude each other")
        console = Console(highlight=False)
        if watch and not console.is_terminal:
            fail("--watch needs a terminal")
        settings = settings_for(config, url)
        names = {} if settings is None else {value: name for name, value in settings.priorities.items()}
        try:
            with ServiceClient(service_url(settings, url), config=config or DEFAULT_CONFIG) as client:
                if as_json:
                    raw = client.get("/swarm/state")
                    client.read(SwarmState, raw)
                    sys.stdout.write(raw.decode() + "\n")
                elif watch:
                    _watch(client, Classes(names), console)
                else:
                    _once(client, Classes(names), console)
        except ServiceProblem as problem:
            fail(str(problem), 1)
        except KeyboardInterrupt:
            raise typer.Exit(0 if watch else 130) from None
