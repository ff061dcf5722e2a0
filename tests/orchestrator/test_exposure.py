"""Off loopback the service does not start without keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from orchestrator.config import Config, exposure_problem, is_loopback, parse_config
from orchestrator.keys import hash_key
from orchestrator.service import ServiceError, run_service

HEAD = 'backends: [{name: b, url: "http://127.0.0.1:9"}]\n'


def config(host: str, *, keyed: tuple[str, ...] = (), admin: bool = False, default: str = "") -> Config:
    """Two agents, those in `keyed` with a key."""

    def lines() -> Iterator[str]:
        yield f"server: {{host: '{host}', port: 0" + (f", admin_key: {hash_key('op')}" if admin else "") + "}"
        yield "agents:"
        for name in ("editor", "worker"):
            yield f"  {name}: {{key: {hash_key(name)}}}" if name in keyed else f"  {name}: {{}}"
        if default:
            yield f"default_agent: {default}"

    return parse_config(HEAD + "\n".join(lines()))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    assert exposure_problem(config(host, default="editor")) is None


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.4", "fe80::1%eth0", "gpu-box", "localhost.evil.com"]
)
def test_everything_else_needs_keys(host: str) -> None:
    assert not is_loopback(host)
    problem = exposure_problem(config(host))
    assert problem is not None
    assert "\n" not in problem
    assert host in problem
    assert "editor, worker" in problem
    assert "swarm key new --all --write" in problem
    assert exposure_problem(config(host, keyed=("editor", "worker"), admin=True)) is None


@pytest.mark.parametrize(
    ("keyed", "admin", "default", "said", "unsaid"),
    [
        (("editor",), True, "", ["no key for worker", "swarm key new"], ["editor", "admin_key", "default"]),
        (("editor", "worker"), False, "", ["server.admin_key", "swarm key new"], ["no key", "default"]),
        (("editor", "worker"), True, "editor", ["remove default_agent"], ["swarm key new", "admin_key"]),
    ],
)
def test_the_error_says_what_to_do(
    keyed: tuple[str, ...], admin: bool, default: str, said: list[str], unsaid: list[str]
) -> None:
    problem = exposure_problem(config("0.0.0.0", keyed=keyed, admin=admin, default=default))
    assert problem is not None
    assert all(words in problem for words in said), problem
    assert not any(words in problem.partition(": ")[2] for words in unsaid), problem


async def test_the_service_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    exposed = config("0.0.0.0")
    folder = tmp_path / "state"
    redis = exposed.redis.model_copy(update={"state_dir": folder})
    with anyio.fail_after(5), pytest.raises(ServiceError, match=r"server\.host 0\.0\.0\.0 is reachable"):
        await run_service(exposed.model_copy(update={"redis": redis}))
    assert not folder.exists()
