"""``X-Swarm-Detach``: a turn that goes on when its client has left."""

from __future__ import annotations

from orchestrator.gateway.errors import ApiError, quoted
from orchestrator.gateway.identity import Headers

HEADER = "X-Swarm-Detach"
_WORDS = {
    **dict.fromkeys((b"true", b"yes", b"on", b"1"), True),
    **dict.fromkeys((b"", b"false", b"no", b"off", b"0"), False),
}


def wants_detach(headers: Headers) -> bool:
    """Whether the request asks for it. Raises ApiError (400) for a word that is neither yes nor no."""
    word = headers.get(HEADER.lower().encode(), b"").strip()
    wanted = _WORDS.get(word.lower())
    if wanted is None:
        message = f"{HEADER} {quoted(word.decode('latin-1'))} is neither true nor false"
        raise ApiError(400, message, param=HEADER, code="invalid_value")
    return wanted
