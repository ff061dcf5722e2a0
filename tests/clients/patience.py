"""How long each client bears a silent reply: `python -m tests.clients.patience [--seconds N] [CLIENT ...]`.

All clients at once, each on a service and a simulated engine of its own, with the settings that a user has.
The turns that run first are paused by hand at once, and resumed after so many seconds; then the client's loop
(call, result, answer) goes on to its end. Costs time, and next to no CPU. Ends with 1 if a client gave up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import anyio

from backends.simulated import SimulatedConfig, TimingProfile
from orchestrator.config.schema import Server
from tests.clients.check import table_line
from tests.clients.runner import prepare, run
from tests.clients.scripted import ANSWER, scripted
from tests.clients.spec import Client, parse
from tests.clients.stage import Stage, config_text, stage
from tests.clients.verdict import judge

#: Slow enough at prompts for the pause to come before the first token.
ENGINE = SimulatedConfig(
    n_slots=4,
    n_ctx=4 * 65_536,
    profile=TimingProfile(base_step_s=0.1, prefill_tokens_per_s=200, n_batch=256),
)
PROMPT = "Write the notes."
#: What a user has who sets nothing.
SERVER = Server()
AFTERWARDS_S = 300.0
LOOK_EVERY_S = 0.05


def main() -> None:
    """Try the clients that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.patience")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of silence")
    given, chosen = parse(parser)
    sys.exit(not anyio.run(_try_all, chosen, given.seconds))


async def _try_all(clients: list[Client], seconds: float) -> bool:
    sys.stdout.write(table_line(("client", "silent for", "turns", "waits it out")))
    sys.stdout.write(table_line(["---"] * 4))
    patient: list[bool] = []

    async def one(client: Client) -> None:
        with tempfile.TemporaryDirectory(prefix="swarm-patience-") as folder:
            turns, faults = await silence(client, seconds, Path(folder))
        patient.append(not faults)
        cells = (client.name, f"{seconds:.0f} s", str(turns), "; ".join(faults) or "yes")
        sys.stdout.write(table_line(cell.replace("\n", " ") for cell in cells))
        sys.stdout.flush()

    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(one, client)
    return all(patient)


async def silence(client: Client, seconds: float, folder: Path) -> tuple[int, list[str]]:
    """Run one client; how many turns it took, and what went wrong."""
    with scripted(client, folder / "work" / "notes.txt", ENGINE) as (_, url):
        backend = f'    url: "{url}"\n    decode_slots: 2\n    kv_layout: split\n    batch_tokens: 256'
        redis = f"{{state_dir: {folder / 'state'}}}"
        text = config_text(
            redis, backend, 2048, header_wait_s=SERVER.header_wait_s, keepalive_s=SERVER.keepalive_s
        )
        async with stage(text) as on_stage:
            room = await prepare(client, on_stage.place(PROMPT), folder)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_be_silent, on_stage, seconds)
                bound_s = seconds + AFTERWARDS_S
                ran = await run(client, on_stage.place(PROMPT), room, on_stage.outside, bound_s)
                tasks.cancel_scope.cancel()
            turns = await on_stage.turns()
            seen = judge(client, ran, on_stage.tap.exchanges, turns)
    faults = list(seen.faults)
    if ANSWER not in ran.output:
        faults.append("it did not print the answer")
    if not any(turn["preemptions"] for turn in turns):
        faults.append("none of its turns was paused")
    return len(turns), faults


async def _be_silent(on_stage: Stage, seconds: float) -> None:
    """Pause the first turns as soon as they run, and resume them after so many seconds."""
    async with anyio.create_task_group() as tasks:
        held: set[str] = set()
        with anyio.move_on_after(seconds):
            while True:
                for turn in await on_stage.turns():
                    if turn["state"] == "running" and turn["id"] not in held:
                        reply = await on_stage.admin.post(f"/swarm/turns/{turn['id']}/preempt")
                        if reply.is_success:
                            held.add(turn["id"])
                            tasks.start_soon(_resume_later, on_stage, turn["id"], seconds)
                await anyio.sleep(LOOK_EVERY_S if not held else 1.0)


async def _resume_later(on_stage: Stage, turn: str, seconds: float) -> None:
    await anyio.sleep(seconds)
    await on_stage.admin.post(f"/swarm/turns/{turn}/resume")


if __name__ == "__main__":
    main()
