"""What the gateway asks of engines. The service injects it, so no adapter is imported here."""

from __future__ import annotations

from typing import Any, Protocol

from backends.protocol import EngineInfo


class Engines(Protocol):
    """The engines behind the pools."""

    def info(self, pool: str) -> EngineInfo | None:
        """What the pool's engines are, None while none of them has been described yet."""

    async def described(self, pool: str) -> EngineInfo | None:
        """As `info`, else as another service that serves the pool publishes it.

        Raises RedisError when it has to ask and the broker does not answer.
        """

    async def count_tokens(self, pool: str, api: str, body: dict[str, Any]) -> int:
        """The prompt's exact length in tokens.

        Raises `backends.protocol.EngineRefused` and `EngineUnavailable`.
        """
