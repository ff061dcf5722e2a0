"""What `swarm doctor` finds about prompts: lines that keep a prefix cache from being of any use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio.to_thread

from orchestrator.cli.figures import count, plain, plural, size
from orchestrator.cli.findings import Finding, ok, warn
from orchestrator.cli.prefix_view import AgentPrefixes, PrefixList, rule_for
from orchestrator.cli.service_client import ServiceClient, ServiceProblem, service_url
from orchestrator.config import Config
from orchestrator.prompts.report import BYTES_PER_TOKEN

WHAT = "prefix caches"


async def prefix_findings(config: Config) -> AsyncIterator[Finding]:
    """Agents whose prompts differ from turn to turn in a line at the top. Only a running service knows."""
    try:
        found = await anyio.to_thread.run_sync(_ask, config)
    except ServiceProblem as problem:
        yield ok(WHAT, f"not looked at: {problem}")
        return
    for agent in found.prefixes:
        if agent.lines:
            yield _finding(config, agent)
    if not any(agent.lines for agent in found.prefixes):
        yield ok(WHAT, "no agent's instructions have a line that keeps changing")


def _ask(config: Config) -> PrefixList:
    with ServiceClient(service_url(config, None)) as client:
        return client.read(PrefixList, client.get("/swarm/prefixes"))


def _finding(config: Config, agent: AgentPrefixes) -> Finding:
    lines = agent.lines
    worst = max(lines, key=lambda line: line.lost_bytes)
    name = plain(agent.agent)
    places = ", ".join(line.place for line in lines[:3]) + (", ..." if len(lines) > 3 else "")
    text = (
        f"{places} changed in {worst.seen} of the last {plural(worst.turns, 'turn')}: each time "
        f"about {count(worst.lost_bytes // BYTES_PER_TOKEN)} tokens were evaluated again although they were "
        f"the same ({size(worst.lost_bytes)} of {size(worst.n_bytes)})"
    )
    return warn(f"{name} prompts", text, _remedy(config, agent))


def _remedy(config: Config, agent: AgentPrefixes) -> str:
    known = config.agents.get(agent.agent)
    have = () if known is None else (*known.stable_prefix.pin, *known.stable_prefix.move)
    named = [line for line in agent.lines if line.pattern is not None]
    if named and all(line.pattern in have for line in named):
        return "restart the service: the configuration has a rule for it"
    rule = rule_for(line for line in named if line.pattern not in have)
    if rule is None:
        rule = 'stable_prefix: {move: ["BEGINNING OF THAT LINE*"]}'
    return f"let the client leave it out, or set under agents.{plain(agent.agent)}: {rule}"
