"""From sampled tokens to the text of stream chunks, as the llama.cpp server does it.

- A token that leaves a character incomplete produces no chunk at all.
- While the text ends in the beginning of a stop string, chunks go out with empty content; the text is held
  back until the next tokens disprove the match. What is still held at the end of a stream is never sent.
- At a complete stop string the text before it goes out, the stop string does not.
"""

from collections.abc import Sequence


class TextAssembler:
    """The text of one reply, fed token by token."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stopping_word: str | None = None
        """The stop string that ended the text, None so far."""
        self._stops = tuple(stop for stop in stops if stop)
        self._incomplete = b""
        self._held = ""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All complete text so far, held text included."""
        return "".join(self._parts) + self._held

    def push(self, piece: bytes, *, is_eos: bool = False) -> str | None:
        """Adds a token's bytes. Returns the content of its chunk, None if no chunk is sent for it."""
        raw = self._incomplete + piece
        complete = _complete_length(raw)
        self._incomplete = raw[complete:]
        if self._incomplete and not is_eos:
            self._held += raw[:complete].decode(errors="replace")
            return None
        self._held += raw[:complete].decode(errors="replace")
        if self._stops and self._held:
            if self._match_stop():
                return self._release()
            if not is_eos and self._may_become_stop():
                return ""
        return self._release()

    def _release(self) -> str:
        content, self._held = self._held, ""
        self._parts.append(content)
        return content

    def _match_stop(self) -> bool:
        at, word = min(((self._held.find(stop), stop) for stop in self._stops), key=_found_first)
        if at < 0:
            return False
        self.stopping_word = word
        self._held = self._held[:at]
        return True

    def _may_become_stop(self) -> bool:
        return any(
            self._held.endswith(stop[:length])
            for stop in self._stops
            for length in range(1, min(len(stop) - 1, len(self._held)) + 1)
        )


def _found_first(match: tuple[int, str]) -> tuple[bool, int]:
    return match[0] < 0, match[0]


def _complete_length(raw: bytes) -> int:
    """Bytes up to the last complete character."""
    for back in range(1, min(3, len(raw)) + 1):
        byte = raw[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) - back if needed > back else len(raw)
    return len(raw)
