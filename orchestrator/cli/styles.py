"""Colours and widths that the screens share."""

from __future__ import annotations

from rich.text import Text

NARROW = 100
WIDE = 130
#: From here on a table has room for what each tier would cost.
EXTRA_WIDE = 170

FOREGROUND = "bold cyan"
PAUSED = "yellow"
SWAPPED = "magenta"
FAINT = "bright_black"
GOOD = "green"
WARNING = "bold yellow"
BAD = "bold red"

#: Where a paused turn's KV is; dropped looks like resident, and reads otherwise.
TIER_STYLES = {"swapped": SWAPPED}


def one_line(text: str = "", style: str = "") -> Text:
    """A line that is cut at the terminal's edge, never wrapped."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")
