"""Two prompts by their fingerprints: what a prefix cache finds, and what it would without a few lines."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.prompts.fingerprint import Fingerprint

#: A changed place has at most so many lines, in either prompt, and none of them more bytes than this.
MAX_LINES = 8
MAX_LINE_BYTES = 1000
#: More changed places than these make another prompt.
MAX_PLACES = 4
#: So much has to be the same after a changed place; blank lines are always alike.
MIN_RUN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Likeness:
    """How much of a prompt is in an earlier one. Bytes.

    `same_bytes`: from the beginning. `later_bytes`: in the same order after the `changes`, each the first and
    the last-but-one piece of changed lines in the new prompt; the two are equal where lines were left out.
    """

    same_bytes: int
    later_bytes: int
    changes: tuple[tuple[int, int], ...]

    @property
    def n_bytes(self) -> int:
        """What a prefix cache would find if the changed lines were the same."""
        return self.same_bytes + self.later_bytes


def compare(new: Fingerprint, old: Fingerprint) -> Likeness:
    """How much of `new` is in `old`. Takes time in proportion to their pieces."""
    at = other = run(new.hashes, 0, old.hashes, 0)
    same_bytes = sum(new.sizes[:at])
    later_bytes = 0
    changes: list[tuple[int, int]] = []
    while at < len(new.hashes) and other < len(old.hashes) and len(changes) < MAX_PLACES:
        found = _meet_again(new, at, old, other)
        if found is None:
            break
        start, other, length = found
        changes.append((at, start))
        later_bytes += sum(new.sizes[start : start + length])
        at, other = start + length, other + length
    return Likeness(same_bytes, later_bytes, tuple(changes))


def run(left: list[int], at: int, right: list[int], other: int) -> int:
    """How many pieces are the same from these places on, in steps that grow with what was the same."""
    most = min(len(left) - at, len(right) - other)
    length, step, grows = 0, 1, True
    while step:
        end = min(length + step, most)
        if length < end and left[at + length : at + end] == right[other + length : other + end]:
            length = end
            step *= 2 if grows else 1
        else:
            grows, step = False, step // 2
    return length


def _meet_again(new: Fingerprint, at: int, old: Fingerprint, other: int) -> tuple[int, int, int] | None:
    """Where the two go on alike after the fewest changed lines, and for how many pieces."""
    most_new, most_old = _short_lines(new, at), _short_lines(old, other)
    for skipped in range(1, most_new + most_old + 1):
        for skipped_old in range(max(0, skipped - most_new), min(skipped, most_old) + 1):
            start, start_old = at + skipped - skipped_old, other + skipped_old
            length = run(new.hashes, start, old.hashes, start_old)
            if sum(new.sizes[start : start + length]) >= MIN_RUN_BYTES:
                return start, start_old, length
    return None


def _short_lines(prompt: Fingerprint, at: int) -> int:
    """How many short lines of instructions come here, at most `MAX_LINES`."""
    for number in range(MAX_LINES):
        place = at + number
        if place >= len(prompt.lines) or not prompt.lines[place] or prompt.sizes[place] > MAX_LINE_BYTES:
            return number
    return MAX_LINES
