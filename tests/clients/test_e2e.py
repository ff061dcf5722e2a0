"""Real clients work through a tool call that is cut in the middle: call, result, answer.

The engine is simulated and plays its part from a script, as a small model calls no tools. Each client runs in
the background; a foreground turn takes the only decode slot while the engine is in the middle of the call.
`make check-clients` runs the same clients on the real engine.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest

from backends.simulated import SimulatedConfig, TimingProfile
from tests.clients.runner import prepare, run
from tests.clients.scripted import ANSWER, TEXT, ScriptedEngine, scripted
from tests.clients.spec import read_clients
from tests.clients.stage import Stage, config_text, stage
from tests.clients.verdict import judge

pytestmark = [pytest.mark.timeout(180), pytest.mark.keys_without_ttl("swarm:{*}:*"), pytest.mark.slow]

CLIENTS = read_clients()
PROMPT = "Write the notes."
ENGINE = SimulatedConfig(
    n_slots=4,
    n_ctx=4 * 65_536,
    profile=TimingProfile(base_step_s=0.02, prefill_tokens_per_s=200_000, n_batch=2048),
)
#: How far into a call the cuts are, in tokens.
CUTS = (10, 20)
RUN_BOUND_S = 120.0


async def cut(on_stage: Stage, engine: ScriptedEngine, url: str) -> None:
    """Preempt the turn that plays the call, each time it is so many tokens into it."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for depth in CUTS:
            while not engine.playing or await _depth(http) < depth:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            await on_stage.ask()


async def _depth(http: httpx.AsyncClient) -> int:
    slots = (await http.get("/slots")).json()
    return max((slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"]), default=0)


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_finishes_its_loop_though_the_call_is_cut(
    name: str, valkey_url: str, redis: object, tmp_path: Path
) -> None:
    client = CLIENTS[name]
    if reason := client.missing():
        pytest.skip(reason)
    file = tmp_path / "work" / "notes.txt"
    with scripted(client, file, ENGINE) as (engine, url):
        backend = f'    url: "{url}"\n    decode_slots: 1\n    kv_layout: split\n    batch_tokens: 2048'
        text = config_text(f'{{url: "{valkey_url}"}}', backend, max_turn_tokens=2048)
        async with stage(text) as on_stage:
            place = on_stage.place(PROMPT)
            room = await prepare(client, place, tmp_path)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cut, on_stage, engine, url)
                ran = await run(client, place, room, on_stage.outside, RUN_BOUND_S)
                tasks.cancel_scope.cancel()
            seen = judge(client, ran, on_stage.tap.exchanges, await on_stage.turns())
    assert (seen.faults, seen.gave_up) == ((), "")
    assert file.read_text().strip() == TEXT.strip()
    assert ANSWER in ran.output
    assert seen.preemptions >= len(CUTS)
    cut_streams = [one for one in on_stage.tap.exchanges if "paused" in one.comments]
    assert bool(cut_streams) == client.streams
    assert on_stage.foreground.failed == []
