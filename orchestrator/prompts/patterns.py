"""A pattern for one line: plain text in which ``*`` stands for any text.

No regular expression: such a pattern takes time in proportion to the line, whatever both contain, and the
dots and brackets of a line that is pasted into it mean themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

ANY = "*"
#: Longer lines are no line that a program puts in front; they are left alone.
MAX_LINE_CHARS = 1000
#: So often a text is searched for a pattern's longest piece: a bound for texts that consist of it.
MAX_TRIES = 1000


class LinePattern:
    """A pattern as the configuration has it; blanks around a line do not count."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split(ANY)
        self._longest = max(self._pieces, key=len)

    def matches(self, line: str) -> bool:
        """Whether the pattern covers the line from its first character to its last."""
        line = line.strip()
        first, last = self._pieces[0], self._pieces[-1]
        if len(self._pieces) == 1:
            return line == first
        at, end = len(first), len(line) - len(last)
        if at > end or not line.startswith(first) or not line.endswith(last):
            return False
        for piece in self._pieces[1:-1]:
            found = line.find(piece, at, end)
            if found < 0:
                return False
            at = found + len(piece)
        return True

    def lines(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the text's lines are that match: start and end, without the line break."""
        at = 0
        for _ in range(MAX_TRIES):
            found = text.find(self._longest, at)
            if found < 0:
                return
            start, end = text.rfind("\n", 0, found) + 1, text.find("\n", found)
            end = len(text) if end < 0 else end
            if end - start <= MAX_LINE_CHARS and self.matches(text[start:end]):
                yield start, end
            at = end + 1
