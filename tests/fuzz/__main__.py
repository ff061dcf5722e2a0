"""`make fuzz`: ten minutes of requests of all kinds to the whole service, and a JSON of what came of them."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from benchmarks.report import Report
from orchestrator.gateway.body import BODY_BOUND_S
from orchestrator.gateway.limits import UNREAD_BOUND_S
from tests.fuzz.by_schema import SchemaFuzz
from tests.fuzz.raw import RawFuzz, hold
from tests.fuzz.stage import Stage, stage
from tests.fuzz.tally import Tally

RAW_LOT = 100
#: Whoever holds a connection is sent away by then: a body's bounds, and what a busy machine adds.
HOLD_BOUND_S = BODY_BOUND_S + UNREAD_BOUND_S + 30.0


@dataclass(frozen=True)
class FuzzSettings:
    """How long, from which seed, and how many requests of a kind to an operation at a time."""

    seconds: float
    seed: int
    examples: int = 10


async def _raw(staged: Stage, tally: Tally, settings: FuzzSettings, until: float) -> None:
    fuzz = RawFuzz(staged.port, tally, settings.seed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, staged.port, tally, HOLD_BOUND_S)
        while time.monotonic() < until:
            await fuzz.run(RAW_LOT)


def run(settings: FuzzSettings) -> Tally:
    """Requests of both kinds at a time, until the time is over; then nothing may be left of them."""
    tally = Tally()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stage()) as staged:
        until = time.monotonic() + settings.seconds
        raw = portal.start_task_soon(_raw, staged, tally, settings, until)
        fuzz = SchemaFuzz(staged.url, tally)
        for _ in fuzz.rounds(settings.seed, settings.examples):
            if time.monotonic() > until:
                break
        fuzz.close()
        raw.result()
        for what in portal.call(staged.settled):
            tally.problem("left behind", what)
        for line in staged.traces():
            tally.problem("a trace in the log", line)
    return tally


def report(settings: FuzzSettings, tally: Tally) -> Report:
    """Replies by endpoint and status."""
    found = tally.data()
    rows = [
        (
            endpoint,
            " ".join(f"{status}: {count:,}" for status, count in entry["statuses"].items()),
            f"{entry['slowest_s']:.2f} s",
        )
        for endpoint, entry in found["endpoints"].items()
    ]
    notes = [
        f"{found['requests']:,} requests in {found['seconds']:.0f} s: "
        f"{found['responses_of_500']} responses of 500, {found['hung']} hung (goal: none)",
        "status 0: the client left, or what it sent was no request; 501: this engine makes no vectors",
        *tally.examples,
    ]
    columns = ("request", "replies by status", "slowest")
    parameters = {"settings": asdict(settings)}
    return Report("fuzz", f"Fuzz, seed {settings.seed}", columns, rows, notes, parameters, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="that of an earlier run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file as well")
    given = parser.parse_args(arguments)
    settings = FuzzSettings(given.seconds, secrets.randbits(32) if given.seed is None else given.seed)
    tally = run(settings)
    report(settings, tally).finish(Console(), given.json)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
