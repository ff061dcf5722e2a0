"""How many bytes of KV a sequence takes, by its length.

Three kinds of layers, summed over all of them: those that keep every token, those that keep only the last
`window_tokens`, and recurrent ones, whose state has one size whatever the length. So the bytes grow along a
line that bends once, at the window, and a count of tokens and a count of bytes say the same about a sequence
but not about two of them: `bytes(a) + bytes(b)` is not `bytes(a + b)`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: More tokens than any sequence has: what fits when a longer sequence takes no more bytes. Exact as a double.
UNBOUNDED_TOKENS = 1 << 53


@dataclass(frozen=True, slots=True)
class KvShape:
    """Bytes of KV that one sequence takes, as a function of its tokens. Raises ValueError on negative parts.

    A sequence without a token takes nothing: an empty slot is free, although the engine has its state
    allocated already.
    """

    token_bytes: int
    """Of the layers that keep every token, per token."""
    window_token_bytes: int = 0
    """Of the sliding-window layers, per token within the window."""
    window_tokens: int = 0
    fixed_bytes: int = 0
    """Recurrent state of one sequence, whatever its length."""

    def __post_init__(self) -> None:
        for name in ("token_bytes", "window_token_bytes", "window_tokens", "fixed_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")

    def bytes(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens`; 0 for an empty one."""
        if tokens <= 0:
            return 0
        in_window = min(tokens, self.window_tokens)
        return self.fixed_bytes + tokens * self.token_bytes + in_window * self.window_token_bytes

    def tokens(self, n_bytes: int) -> int:
        """The longest sequence that takes at most `n_bytes`; 0 when none does.

        `UNBOUNDED_TOKENS` where length has no price: layers with a window or a state only.
        """
        room = n_bytes - self.fixed_bytes
        if room < 0:
            return 0
        beyond = room - self.window_tokens * self.window_token_bytes
        per_token = self.token_bytes
        if beyond >= self.window_tokens * per_token:
            return min(beyond // per_token, UNBOUNDED_TOKENS) if per_token else UNBOUNDED_TOKENS
        # The window is not full: beyond < window * per_token leaves room < window * (both prices).
        return room // (per_token + self.window_token_bytes)
