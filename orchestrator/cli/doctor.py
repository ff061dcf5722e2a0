"""`swarm doctor`: what would keep the swarm from running well, each finding with its remedy."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio
import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.common import ConfigOption, load
from orchestrator.cli.engine_findings import backend_findings
from orchestrator.cli.figures import plural
from orchestrator.cli.findings import Finding, agent_findings, port_findings, redis_findings
from orchestrator.cli.prefix_findings import prefix_findings
from orchestrator.cli.styles import BAD, GOOD, PAUSED
from orchestrator.config import Config

_STYLES = {"ok": GOOD, "warn": PAUSED, "fail": BAD}


async def examine(config: Config, *, deep: bool) -> AsyncIterator[Finding]:
    """All findings, each as soon as it is there."""
    async for finding in redis_findings(config):
        yield finding
    for backend in config.backends:
        async for finding in backend_findings(config, backend, deep=deep):
            yield finding
    for finding in agent_findings(config):
        yield finding
    async for finding in port_findings(config):
        yield finding
    async for finding in prefix_findings(config):
        yield finding


def _print(console: Console, finding: Finding) -> None:
    """One line a finding, for grep; on a terminal the text is broken beside its level."""
    level = Text(finding.level, style=_STYLES[finding.level])
    text = Text(f"{finding.what}: ", style="bold").append(finding.text, style="not bold")
    if finding.remedy is not None:
        text.append(f"; remedy: {finding.remedy}", style="not bold cyan")
    if console.is_terminal:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=4)
        table.add_column(ratio=1)
        table.add_row(level, text)
        console.print(table)
    else:
        console.print(Text.assemble(f"{finding.level:<5}", text), soft_wrap=True)


async def _run(config: Config, *, deep: bool, as_json: bool) -> list[Finding]:
    console = Console(highlight=False)
    found = []
    async for finding in examine(config, deep=deep):
        found.append(finding)
        if not as_json:
            _print(console, finding)
    return found


def add_to(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def doctor(
        config: ConfigOption = Path("config.yaml"),
        deep: Annotated[
            bool,
            typer.Option("--deep", help="Start managed engines, and time a cancelled prefill and a save."),
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    ) -> None:
        """Check broker, engines, agents, port and prompts; exit code 1 when something fails."""
        settings = load(config)
        found = anyio.run(lambda: _run(settings, deep=deep, as_json=as_json))
        if as_json:
            sys.stdout.write(orjson.dumps([asdict(each) for each in found]).decode() + "\n")
        else:
            levels = [finding.level for finding in found]
            fails, warns = plural(levels.count("fail"), "failure"), plural(levels.count("warn"), "warning")
            typer.echo(f"{fails}, {warns}, {levels.count('ok')} ok")
        if any(finding.level == "fail" for finding in found):
            raise typer.Exit(1)
