"""Whose request it is, and at which priority.

1. A key (bearer token or ``x-api-key``) that belongs to an agent decides. Every key of the config is
   compared, in constant time, whichever matches.
2. A key that belongs to nobody is refused when any agent has a key. When none has one it is ignored:
   clients that need no key still send a dummy.
3. Else ``X-Swarm-Agent`` names an agent that has no key. One that has must present it.
4. Else the config's ``default_agent``; naming one there lets anybody be it, also when it has a key.

The config has the hashes of keys (`orchestrator.keys`), and hashes are what is compared. The admin key opens
``/swarm/`` and belongs to no agent; an agent's key does not open it.

``X-Swarm-Priority`` lowers the priority; a higher class than the agent's own means the agent's own. Bulk
turns (embeddings, reranking) are of the lowest class, whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.config import Config
from orchestrator.gateway.errors import ApiError, quoted
from orchestrator.keys import digest, digest_of, same

Headers = Mapping[bytes, bytes]

# Keys are printable.
NOBODYS_KEY = b"\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """The agent and what its turn may claim."""

    agent: str
    priority: int
    priority_class: str
    max_turn_tokens: int


class Identities:
    """The agents of the config."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._keys = [
            (digest_of(agent.key), name) for name, agent in config.agents.items() if agent.key is not None
        ]
        admin = config.server.admin_key
        self._admin = None if admin is None else digest_of(admin)

    def agent_of_key(self, headers: Headers) -> str | None:
        """The agent whose key was sent, None without one that counts. Raises ApiError (401)."""
        sent = _digests(headers)
        if not sent or not self._keys:
            return None
        found = self._owner(sent)
        if found is None:
            raise ApiError(401, "this key belongs to no agent", code="invalid_api_key")
        return found

    def check_admin(self, headers: Headers) -> None:
        """Raises ApiError when there is an admin key and it was not sent: 401, or 403 with an agent's key."""
        if self._admin is None:
            return
        sent = _digests(headers)
        if any([same(self._admin, one) for one in sent]):
            return
        if self._owner(sent) is not None:
            raise ApiError(403, "an agent's key does not open /swarm/: the admin key does", code="admin_only")
        raise ApiError(
            401,
            "/swarm/ takes the admin key: Authorization: Bearer KEY; the swarm command sends SWARM_ADMIN_KEY",
            code="admin_key_required",
        )

    def agent(self, headers: Headers) -> str:
        """The agent that is asking. Raises ApiError (401)."""
        name = self.agent_of_key(headers) or self._named(headers) or self._config.default_agent
        if name is None:
            raise ApiError(
                401,
                "say which agent this is: with its key (Authorization: Bearer KEY), or X-Swarm-Agent: NAME",
                code="agent_required",
            )
        return name

    def identify(self, headers: Headers) -> Caller:
        """Who is asking, and as what. Raises ApiError (401, or 400 for an unknown priority class)."""
        name = self.agent(headers)
        agent = self._config.agents[name]
        priority, own_class = self._config.agent_priority(name), agent.priority
        wanted = headers.get(b"x-swarm-priority", b"").decode("latin-1").strip()
        if not wanted:
            return Caller(name, priority, own_class, agent.max_turn_tokens)
        asked = self._config.priorities.get(wanted)
        if asked is None:
            known = ", ".join(self._config.priorities)
            message = f"X-Swarm-Priority {quoted(wanted)} is not one of {known}"
            raise ApiError(400, message, param="X-Swarm-Priority", code="unknown_priority")
        if asked >= priority:
            return Caller(name, priority, own_class, agent.max_turn_tokens)
        return Caller(name, asked, wanted, agent.max_turn_tokens)

    def for_bulk(self, caller: Caller) -> Caller:
        """The caller with the priority that bulk turns have."""
        lowest, priority = min(self._config.priorities.items(), key=lambda item: item[1])
        return replace(caller, priority=priority, priority_class=lowest)

    def _owner(self, sent: list[bytes]) -> str | None:
        """The agent of the first key that has one."""
        for one in sent:
            found = None
            for known, name in self._keys:
                if same(known, one):
                    found = name
            if found is not None:
                return found
        return None

    def _named(self, headers: Headers) -> str | None:
        name = headers.get(b"x-swarm-agent", b"").decode("latin-1").strip()
        if not name:
            return None
        agent = self._config.agents.get(name)
        if agent is None:
            raise ApiError(
                401, f"no agent {quoted(name)} is configured", param="X-Swarm-Agent", code="unknown_agent"
            )
        if agent.key is not None:
            raise ApiError(
                401,
                f"agent {quoted(name)} has a key and must send it (Authorization: Bearer KEY)",
                param="X-Swarm-Agent",
                code="invalid_api_key",
            )
        return name


def _digests(headers: Headers) -> list[bytes]:
    """The hashes of the keys that were sent."""
    sent = (_bearer(headers), headers.get(b"x-api-key", b"").strip())
    return [digest(key) for key in sent if key]


def _bearer(headers: Headers) -> bytes:
    """The credential of the Authorization header; one of another scheme is nobody's key."""
    value = headers.get(b"authorization", b"").strip()
    scheme, _, credential = value.partition(b" ")
    if not value or scheme.lower() == b"bearer":
        return credential.strip()
    return NOBODYS_KEY
