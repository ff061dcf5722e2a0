"""What the service says of prompts and prefix caches, and the rule to paste for a line."""

from __future__ import annotations

import json
from collections.abc import Iterable

from orchestrator.cli.figures import plain
from orchestrator.cli.view import Count, View
from orchestrator.prompts.report import suggested_rule


class LineView(View):
    """A line of an agent's instructions, without what it says: see `orchestrator.prompts.ChangedLine`."""

    role: str
    line: int
    offset: Count = 0
    shape: str = ""
    pattern: str | None = None

    @property
    def place(self) -> str:
        """As `line 1 of the system message (x-session: ????)`."""
        shape = f" ({plain(self.shape)})" if self.shape else ""
        return f"line {self.line} of the {plain(self.role)} message{shape}"


class BusterView(LineView):
    """A line that keeps changing: see `orchestrator.prompts.Buster`."""

    seen: Count = 0
    turns: Count = 0
    lost_bytes: Count = 0
    n_bytes: Count = 0


class AgentPrefixes(View):
    """The lines of one agent's instructions that keep changing in one pool."""

    pool: str
    agent: str
    lines: tuple[BusterView, ...]


class PrefixList(View):
    """`GET /swarm/prefixes`."""

    prefixes: tuple[AgentPrefixes, ...]


class PromptView(View):
    """What a turn's prompt has in common with others: see `orchestrator.prompts.Observation`."""

    n_bytes: Count = 0
    like: str | None = None
    same_bytes: Count = 0
    lost_bytes: Count = 0
    lines: tuple[LineView, ...] = ()
    tools_changed: bool = False
    ruled_lines: Count = 0


def rule_for(lines: Iterable[LineView]) -> str | None:
    """The agent's `stable_prefix` for these lines, in one line of YAML; None where no line has a pattern."""
    rules: dict[str, list[str]] = {}
    for line in lines:
        rule = suggested_rule(line.pattern)
        if rule is not None and line.pattern not in rules.get(rule, ()):
            rules.setdefault(rule, []).append(plain(line.pattern))
    # In JSON's quotes, which are YAML's as well.
    parts = [
        f"{rule}: [{', '.join(map(json.dumps, rules[rule]))}]" for rule in ("pin", "move") if rule in rules
    ]
    return f"stable_prefix: {{{', '.join(parts)}}}" if parts else None
