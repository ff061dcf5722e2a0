"""Who is asking, by every combination of key, name and priority."""

from __future__ import annotations

import pytest

from orchestrator.config import parse_config
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.identity import Caller, Identities
from orchestrator.keys import hash_key

HEAD = 'backends: [{name: local, url: "http://127.0.0.1:1"}]\n'
KEYED = (
    HEAD
    + f"""
agents:
  editor: {{priority: foreground, key: {hash_key("editor-secret")}, max_turn_tokens: 10}}
  indexer: {{priority: background, key: {hash_key("indexer-secret")}}}
  guest: {{priority: normal}}
"""
)
KEYLESS = HEAD + "agents: {editor: {priority: foreground}, guest: {priority: normal}}\n"
DEFAULT = "default_agent: guest\n"


def identities(text: str) -> Identities:
    return Identities(parse_config(text))


def headers(**named: str) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode() for name, value in named.items()}


@pytest.mark.parametrize(
    ("config", "sent", "agent"),
    [
        (KEYED, headers(authorization="Bearer editor-secret"), "editor"),
        (KEYED, headers(authorization="bearer   indexer-secret "), "indexer"),
        (KEYED, headers(x_api_key="indexer-secret"), "indexer"),
        (KEYED, headers(authorization="Bearer sk-dummy", x_api_key="editor-secret"), "editor"),
        (KEYED, headers(authorization="Bearer editor-secret", x_swarm_agent="guest"), "editor"),
        (KEYED, headers(x_swarm_agent="guest"), "guest"),
        (KEYED + DEFAULT, headers(), "guest"),
        (KEYED + DEFAULT, headers(authorization="", x_api_key=""), "guest"),
        (KEYED + DEFAULT, headers(authorization="Bearer "), "guest"),
        (KEYED + "default_agent: editor\n", headers(), "editor"),
        (KEYLESS + DEFAULT, headers(authorization="Bearer sk-no-key"), "guest"),
        (KEYLESS + DEFAULT, headers(authorization="Basic abc"), "guest"),
        (KEYLESS + DEFAULT, headers(authorization="Bearer sk-no-key", x_swarm_agent="editor"), "editor"),
    ],
)
def test_identified(config: str, sent: dict[bytes, bytes], agent: str) -> None:
    assert identities(config).identify(sent).agent == agent


@pytest.mark.parametrize(
    ("config", "sent", "code"),
    [
        (KEYED + DEFAULT, headers(authorization="Bearer wrong"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(x_api_key="editor-secre"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(x_api_key="editor-secret2"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(authorization="editor-secret"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(authorization="Basic editor-secret"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(authorization="Bearer wrong", x_swarm_agent="guest"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(authorization=f"Bearer {hash_key('editor-secret')}"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(x_swarm_agent="editor"), "invalid_api_key"),
        (KEYED + DEFAULT, headers(x_swarm_agent="nobody"), "unknown_agent"),
        (KEYED + DEFAULT, {b"x-swarm-agent": b"\xff\xfe"}, "unknown_agent"),
        (KEYED + DEFAULT, {b"x-api-key": b"\xff\xfe"}, "invalid_api_key"),
        (KEYED, headers(), "agent_required"),
        (KEYLESS, headers(authorization="Bearer sk-no-key"), "agent_required"),
    ],
)
def test_refused(config: str, sent: dict[bytes, bytes], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        identities(config).identify(sent)
    assert (caught.value.status, caught.value.code) == (401, code)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("agent", "wanted", "priority", "priority_class"),
    [
        ("editor", "batch", 0, "batch"),
        ("editor", "foreground", 100, "foreground"),
        ("editor", "", 100, "foreground"),
        ("guest", "foreground", 50, "normal"),
        ("guest", " background ", 20, "background"),
    ],
)
def test_priority_is_lowered_never_raised(
    agent: str, wanted: str, priority: int, priority_class: str
) -> None:
    caller = identities(KEYLESS).identify(headers(x_swarm_agent=agent, x_swarm_priority=wanted))
    assert caller == Caller(agent, priority, priority_class, 2048)


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        identities(KEYLESS + DEFAULT).identify(headers(x_swarm_priority="urgent"))
    assert (caught.value.status, caught.value.code) == (400, "unknown_priority")
    assert "foreground, normal, background, batch" in caught.value.message
