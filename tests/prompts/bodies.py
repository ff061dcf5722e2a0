"""Chat bodies as agents send them: a long system prompt, tools, and a conversation that grows."""

from __future__ import annotations

from typing import Any

RULES = [f"Rule {number}: say what you change in {number} words, and why." for number in range(60)]
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def chat(
    *top: str, said: int = 0, user: str = "Fix the parser.", tail: tuple[str, ...] = (), **fields: Any
) -> dict[str, Any]:
    """A system prompt from the lines `top` to the lines `tail`, then `said` answered messages."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n".join([*top, *RULES, *tail])}]
    for number in range(said):
        messages += [
            {"role": "user", "content": f"{user} Part {number} of it, the one with the long lines."},
            {"role": "assistant", "content": f"Part {number} is done, and nothing else has changed."},
        ]
    messages.append({"role": "user", "content": f"{user} Part {said} of it, the one with the long lines."})
    return {"messages": messages, "tools": TOOLS, **fields}
