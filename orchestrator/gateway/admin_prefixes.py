"""``/swarm/prefixes``: lines that keep the prompts of an agent from being found in KV."""

from __future__ import annotations

import orjson
from starlette.types import Receive, Scope

from orchestrator.gateway.endpoint import Handler
from orchestrator.gateway.generate import Gateway
from orchestrator.gateway.reply import Reply
from orchestrator.prompts import find_busters


def prefixes(gateway: Gateway) -> Handler:
    """``GET /swarm/prefixes``: by pool and agent the lines that keep changing, in their order."""

    async def handle(scope: Scope, receive: Receive, reply: Reply) -> None:
        agents = list(gateway.config.agents)
        found = []
        for pool in gateway.models.pools:
            for agent, observed in (await gateway.prefixes.notes.recent(pool, agents)).items():
                lines = [buster.data() for buster in find_busters(observed)]
                if lines:
                    found.append({"pool": pool, "agent": agent, "lines": lines})
        await reply.json(orjson.dumps({"prefixes": found}))

    return handle
