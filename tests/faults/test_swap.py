"""Swapped KV outlives the engine that it was saved from; and nothing is lost where it does not."""

from __future__ import annotations

import os
import signal
from functools import partial

import anyio
import pytest
from anyio.from_thread import BlockingPortal

from backends.managed import ManagedEngine
from tests.e2e.conftest import Streamed
from tests.e2e.test_tiers import REPLY_TOKENS, STACK, body, do_harm, swarm_with_room_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]


@pytest.mark.usefixtures("redis")
@pytest.mark.parametrize("files", ["kept", "lost"])
async def test_an_engine_that_is_killed_between_save_and_restore(
    valkey_url: str, engine: ManagedEngine, portal: BlockingPortal, files: str
) -> None:
    folder = engine.save_path
    assert folder is not None
    async with swarm_with_room_for(2.3, valkey_url, engine.url, folder) as swarm:
        turns = {agent: Streamed() for agent in STACK}
        async with anyio.create_task_group() as tasks:
            for agent in STACK:
                tasks.start_soon(partial(swarm.stream, body(agent), agent=agent, seen=turns[agent]))
                with anyio.fail_after(60):
                    while turns[agent].chunks < 10:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
            await swarm.until_tier(turns["drudge"].id, "swapped")
            os.kill(engine.pid, signal.SIGKILL)
            if files == "lost":
                do_harm(folder, "deleted")
            await anyio.to_thread.run_sync(portal.call, engine.wait)
            await anyio.to_thread.run_sync(portal.call, engine.restart)
        for seen in turns.values():
            assert seen.error is None
            assert seen.usage is not None and seen.usage["completion_tokens"] == REPLY_TOKENS
        timeline = await swarm.timeline(turns["drudge"].id)
        [resumed] = [line for line in timeline if line["event"] == "resumed"]
        if files == "kept":
            assert resumed["tier"] == "swapped" and resumed["tokens_reevaluated"] <= 2
        else:
            assert resumed["tier"] == "dropped"
            assert "swap_failed" in [line["event"] for line in timeline]
