"""`make check-clients`: each client against the service on the real engine, preempted by foreground turns.

    python -m tests.clients.check [CLIENT ...]

Prints the table of docs/clients.md, and ends with 1 if any run was not as it should be. A prompt of 14,000
tokens takes minutes on a CPU; all ten take about 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import orjson

from backends.managed.settings import model_path
from tests.clients.model import with_long_context
from tests.clients.runner import Ran, prepare, run
from tests.clients.spec import MODEL, Client, parse
from tests.clients.stage import Stage, config_text, stage
from tests.clients.verdict import Seen, judge

PROMPT = "Say hello in one short sentence. Use no tools."
SLOT_CONTEXT = 20_480
SLOTS = 3
#: Foreground turns follow each other closely until the client was preempted a few times, then at a distance:
#: a prompt of 14,000 tokens is in prefill for minutes.
ENOUGH_PREEMPTIONS = 3
PAUSE_S = 0.3
LONG_PAUSE_S = 20.0
RUN_BOUND_S = 3600.0

HEAD = (
    "client",
    "version",
    "API",
    "streaming",
    "tools",
    "preempted while running",
    "longest prompt",
    "turns",
    "no errors",
)


def main() -> None:
    """Check the clients that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.check")
    parser.add_argument("--keep", type=Path, help="keep each run's folders and what went over the wire here")
    given, chosen = parse(parser)
    folder = Path(tempfile.mkdtemp(prefix="swarm-clients-")) if given.keep is None else given.keep
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(table_line(HEAD) + table_line(("---",) * len(HEAD)))
    sys.stdout.flush()
    try:
        model = with_long_context(model_path(MODEL), folder / f"{MODEL}.gguf", SLOT_CONTEXT)
        seen = anyio.run(_check_all, chosen, model, folder)
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(any(one.faults or not one.preemptions for one in seen))


async def _check_all(clients: list[Client], model: Path, folder: Path) -> list[Seen]:
    seen = []
    for client in clients:
        sys.stderr.write(f"{client.name} ... ")
        sys.stderr.flush()
        seen.append(await check(client, model, folder / client.name))
        sys.stderr.write(f"{seen[-1].seconds:.0f} s, {'; '.join(seen[-1].faults) or 'no errors'}\n")
        sys.stdout.write(table_line(row(seen[-1])))
        sys.stdout.flush()
    return seen


async def check(client: Client, model: Path, folder: Path) -> Seen:
    """Run one client once, in `folder`."""
    backend = (
        f"    managed: {{model: {model}, decode_slots: 1, engine_slots: {SLOTS},"
        f" context: {SLOTS * SLOT_CONTEXT}, batch_tokens: 64, threads: 2, nice: 0}}"
    )
    text = config_text(f"{{state_dir: {folder / 'state'}}}", backend, client.max_turn_tokens)
    async with stage(text) as on_stage:
        place = on_stage.place(PROMPT)
        room = await prepare(client, place, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_asking, on_stage)
            ran = await run(client, place, room, on_stage.outside, RUN_BOUND_S)
            tasks.cancel_scope.cancel()
        turns = await on_stage.turns()
        _write_down(on_stage, ran, turns, folder)
        seen = judge(client, ran, on_stage.tap.exchanges, turns)
    failed = [f"a foreground turn failed: {said}" for said in on_stage.foreground.failed]
    return replace(seen, faults=(*seen.faults, *failed))


async def _keep_asking(on_stage: Stage) -> None:
    """One foreground turn after the other."""
    while True:
        await on_stage.ask()
        preemptions = sum(turn["preemptions"] for turn in await on_stage.turns())
        await anyio.sleep(PAUSE_S if preemptions < ENOUGH_PREEMPTIONS else LONG_PAUSE_S)


def _write_down(on_stage: Stage, ran: Ran, turns: list[dict[str, Any]], folder: Path) -> None:
    """What was printed, asked, answered and recorded, for a look at a run that went wrong."""
    (folder / "turns.json").write_bytes(orjson.dumps(turns, option=orjson.OPT_INDENT_2))
    (folder / "stdout").write_text(ran.output)
    (folder / "stderr").write_text(ran.complaints)
    (folder / "outside").write_text("\n".join(on_stage.outside.hosts()))
    for number, one in enumerate(on_stage.tap.exchanges):
        head = f"{one.method} {one.path}\n".encode()
        status = f"\n\n{one.status} {one.headers}\n".encode()
        (folder / f"exchange-{number:03}").write_bytes(head + one.sent + status + one.received)


def table_line(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


def row(one: Seen) -> tuple[str, ...]:
    """A run's cells, in the order of `HEAD`."""
    return (
        one.client,
        one.version,
        f"`{one.api}`",
        "yes" if one.streamed else "in one piece, as it asks",
        f"yes, {one.tools}" if one.tools else "none, as it asks",
        f"yes, {one.preemptions}x" if one.preemptions else "no",
        f"{one.prompt_tokens:,}",
        f"{one.turns}: {', '.join(one.finish_reasons)}{f'; then {one.gave_up}' * bool(one.gave_up)}",
        "yes" if not one.faults else "no",
    )


if __name__ == "__main__":
    main()
