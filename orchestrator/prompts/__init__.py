"""What of a chat's prompt is the same as in an earlier one, and what keeps a prefix cache from using it.

A prefix cache holds KV for a prompt's beginning: what comes after the first difference is evaluated again,
however equal it is. Some clients put a line that changes with each request (a time, a session's number, a
checksum) at the top of their system prompt, so that nothing of a long prompt is ever found again. Here such a
line is found (`history`), and taken out of the way where the configuration asks for it (`rules`).

Pure, and without prompts: what is kept of one is a fingerprint, and a line is shown by its shape.
"""

from orchestrator.prompts.fingerprint import MAX_BODY_BYTES, Prompt, read_prompt
from orchestrator.prompts.history import ChangedLine, Observation, RecentPrompts
from orchestrator.prompts.patterns import LinePattern
from orchestrator.prompts.report import Buster, find_busters
from orchestrator.prompts.rules import Hit, StableLines, apply_rules, find_lines

__all__ = [
    "MAX_BODY_BYTES",
    "Buster",
    "ChangedLine",
    "Hit",
    "LinePattern",
    "Observation",
    "Prompt",
    "RecentPrompts",
    "StableLines",
    "apply_rules",
    "find_busters",
    "find_lines",
    "read_prompt",
]
