"""A changing line as it may be shown: what it is called, and nothing of what it says."""

from __future__ import annotations

import re

from orchestrator.prompts.patterns import ANY

MAX_SHAPE_CHARS = 60
#: A longer name may be a sentence, and so what somebody wrote.
MAX_NAME_WORDS = 4
MAX_NAME_CHARS = 40
#: A line without a colon is known by so many words before its first figure; fewer begin other lines as well.
SENTENCE_WORDS = 3
#: Fewer characters would match lines that mean something else.
MIN_PATTERN_CHARS = 4

_LETTER = r"[^\W\d_]"
_NAME = re.compile(rf"[<#*>\- ]{{0,8}}{_LETTER}(?:{_LETTER}|[_.,'\- ])*(?P<end>[:=]|\d|$)")


def name_of(line: str) -> str:
    """What the line begins with, up to a colon or an equals sign, or some words before its first figure.

    Empty for a line that is not known by such a beginning.
    """
    line = line.strip()
    found = _NAME.match(line)
    if found is None or not found["end"]:
        return ""
    if found["end"] in ":=":
        name = found[0]
        if len(name.split()) > MAX_NAME_WORDS:
            return ""
    else:
        # The last of them may end in the figure.
        words = line[: found.start("end")].rpartition(" ")[0].split()
        name = " ".join(words[:SENTENCE_WORDS])
        if len(words) < SENTENCE_WORDS or not line.startswith(name):
            return ""
    return name if MIN_PATTERN_CHARS <= len(name) <= MAX_NAME_CHARS else ""


def shape_of(line: str) -> str:
    """The line with its name, and question marks for everything else: ``x-session: ????-????``."""
    line, name = line.strip(), name_of(line)
    rest = re.sub(r"\w+", lambda found: "?" * min(4, len(found[0])), line[len(name) : 4 * MAX_SHAPE_CHARS])
    shape = "".join(char if char.isprintable() else " " for char in name + rest)
    return shape if len(shape) <= MAX_SHAPE_CHARS else shape[: MAX_SHAPE_CHARS - 3] + "..."


def pattern_of(line: str) -> str | None:
    """The pattern for a rule that matches the line and others of its name; None for one without a name."""
    name = name_of(line)
    return name + ANY if name else None
