"""Which pool a model name means, and by which names the pools' models are known to clients."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from typing import Any

from orchestrator.config import Config
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.errors import ApiError, quoted


class Models:
    """The pools of the config, in its order."""

    def __init__(self, config: Config, engines: Engines) -> None:
        self._engines = engines
        self._since = int(time.time())
        self._names: dict[str, list[str]] = {}
        self._aliases = [(backend.pool, alias) for backend in config.backends for alias in backend.aliases]
        for backend in config.backends:
            names = self._names.setdefault(backend.pool, [])
            if backend.model is not None and backend.model not in names:
                names.append(backend.model)
        self.default_pool = "default" if "default" in self._names else next(iter(self._names))

    @property
    def pools(self) -> list[str]:
        """The pools' names."""
        return list(self._names)

    def public_name(self, pool: str) -> str:
        """What the pool's model is called: the configured name, else the engine's, else the pool's."""
        return self._known(pool)[0]

    def resolve(self, requested: str | None) -> tuple[str, str]:
        """The pool that serves a request, and the model name of its reply. Raises ApiError (404).

        A name may end in ``:latest``, the tag that Ollama's clients add. The reply has the name that was
        asked for, also where that is an alias.
        """
        if requested is None:
            return self.default_pool, self.public_name(self.default_pool)
        for pool in self._names:
            known = self._known(pool)
            if requested in known or requested.removesuffix(":latest") in known:
                return pool, requested
        for pool, alias in self._aliases:
            if fnmatchcase(requested, alias.replace("[", "[[]").replace("?", "[?]")):
                return pool, requested
        available = ", ".join(self.public_name(pool) for pool in self._names)
        message = f"no model {quoted(requested)} here; available: {available}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def listing(self) -> dict[str, Any]:
        """The body of ``GET /v1/models``."""
        return {"object": "list", "data": [self._entry(pool, self.public_name(pool)) for pool in self._names]}

    def entry(self, requested: str) -> dict[str, Any]:
        """One model, by any of its names. Raises ApiError (404)."""
        return self._entry(*self.resolve(requested))

    def _entry(self, pool: str, name: str) -> dict[str, Any]:
        """`context_length` is what one turn may have, None if unknown."""
        info = self._engines.info(pool)
        context = info.slot_context if info is not None else None
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "swarm",
            "context_length": context,
            "meta": {"n_ctx": context, "pool": pool},
        }

    def _known(self, pool: str) -> list[str]:
        names = self._names[pool]
        info = self._engines.info(pool)
        # Engines name a model by its file; clients never see the folder.
        own = [info.model.replace("\\", "/").rsplit("/", 1)[-1]] if info is not None and info.model else []
        return [*names, *own, pool]
