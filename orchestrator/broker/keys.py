"""Names of every Redis key, and what bounds its life.

All keys of a pool share the hash tag ``{pool}``, so each Lua script touches one cluster node.

| key | type | bound |
|---|---|---|
| `swarm:{P}:turn:ID` | hash: the record | TTL: `ACTIVE_TTL_S` while it lives, `turn_ttl_s` after its end |
| `swarm:{P}:turn:ID:log` | list: the output log | as the record |
| `swarm:{P}:turn:ID:timeline` | list: what happened to it | as the record |
| `swarm:{P}:queue` | zset: waiting turns | an entry leaves on claim or cancel |
| `swarm:{P}:seq` | counter | one key a pool |
| `swarm:{P}:events` | stream | trimmed to about `EVENTS_LENGTH` |
| `swarm:{P}:recent` | zset: ended turns by time | trimmed to `RECENT_LENGTH` |
| `swarm:{P}:counters` | hash | one key a pool |
| `swarm:{P}:backend:B:lease` | string | TTL |
| `swarm:{P}:backend:B:fence` | counter | one key a backend |
| `swarm:{P}:backend:B:turns` | set: turns it owns | an entry leaves at the turn's end |
| `swarm:{P}:backend:B:state` | string: what `/swarm/state` shows | TTL |
| `swarm:{P}:agent:A:prompts` | list: how alike its last prompts were | trimmed to 32, TTL |
| `swarm:{P}:agent:A:pins` | hash: lines that its prompts keep | TTL |
"""

from __future__ import annotations

from dataclasses import dataclass

EVENTS_LENGTH = 20_000
RECENT_LENGTH = 1_000
ACTIVE_TTL_S = 7 * 24 * 3600
PRIORITY_CEILING = 1_000
_SEQ_BITS = 40


def queue_score(priority: int, seq: int) -> int:
    """Sorts by priority, highest first, then by arrival; exact in a double (below 2**51)."""
    return ((PRIORITY_CEILING - priority) << _SEQ_BITS) + seq


def queue_range(priority: int) -> tuple[int, int]:
    """The scores of all turns of one priority."""
    return queue_score(priority, 0), queue_score(priority, (1 << _SEQ_BITS) - 1)


def gateway_channel(gateway: str) -> str:
    """The pub/sub channel on which one gateway process hears all its turns' output."""
    return f"swarm:gateway:{gateway}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool."""

    pool: str

    def _key(self, rest: str) -> str:
        return f"swarm:{{{self.pool}}}:{rest}"

    @property
    def queue(self) -> str:
        return self._key("queue")

    @property
    def seq(self) -> str:
        return self._key("seq")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def recent(self) -> str:
        return self._key("recent")

    @property
    def counters(self) -> str:
        return self._key("counters")

    def turn(self, turn: str) -> str:
        return self._key(f"turn:{turn}")

    def log(self, turn: str) -> str:
        return self._key(f"turn:{turn}:log")

    def timeline(self, turn: str) -> str:
        return self._key(f"turn:{turn}:timeline")

    def lease(self, backend: str) -> str:
        return self._key(f"backend:{backend}:lease")

    def fence(self, backend: str) -> str:
        return self._key(f"backend:{backend}:fence")

    def owned(self, backend: str) -> str:
        return self._key(f"backend:{backend}:turns")

    def state(self, backend: str) -> str:
        return self._key(f"backend:{backend}:state")

    def prompts(self, agent: str) -> str:
        return self._key(f"agent:{agent}:prompts")

    def pins(self, agent: str) -> str:
        return self._key(f"agent:{agent}:pins")
