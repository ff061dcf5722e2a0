"""Who may talk to the service at all, found out before anything of a request is read.

1. The ``Host`` must be one of ours. A web page can have its own name resolve to this machine (DNS rebinding)
   and then counts as the service's own page; but the browser still sends the page's name.
2. What a browser sends for a page is refused, unless the page's origin is configured: it has an ``Origin``,
   or a ``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/) that is neither ``none``, the user's own
   doing, nor ``same-origin``. The programs that agents are send neither. No reply has CORS headers.
3. ``/swarm/`` takes the admin key, if there is one. Off loopback everything but ``/healthz`` takes a key.
4. An agent, and all of them together, may have so many requests open and no more.

Every route is behind this, also those that are added later.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.config import Config, Server, is_loopback
from orchestrator.gateway.errors import ApiError, ClientGone, ErrorShape, quoted
from orchestrator.gateway.identity import Headers, Identities
from orchestrator.gateway.reply import Reply

HEALTH_PATH = "/healthz"
ADMIN_PREFIX = "/swarm/"
TOO_MANY_RETRY_AFTER_S = 2

_LABEL = rb"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|((?:%b\.){0,30}%b\.?))(?::[0-9]{0,5})?" % (_LABEL, _LABEL))
_BROWSER_SITES = (b"", b"none", b"same-origin")


class Guard:
    """ASGI middleware. `errors` says how the API at a path writes an error."""

    def __init__(
        self, app: ASGIApp, config: Config, identities: Identities, errors: Callable[[str], ErrorShape]
    ) -> None:
        self._app = app
        self._identities = identities
        self._errors = errors
        self._hosts = Hosts(config.server)
        self._origins = Origins(config.server.allowed_origins)
        self._exposed = not is_loopback(config.server.host)
        self._open = OpenRequests(config.server.max_requests, config.server.max_requests_per_agent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        try:
            self._hosts.check(scope["headers"])
            headers = dict(scope["headers"])
            self._origins.check(headers)
            agent = self._admit(path, headers)
            counted = path != HEALTH_PATH and not path.startswith(ADMIN_PREFIX)
            if counted:
                self._open.enter(agent)
        except ApiError as error:
            with suppress(ClientGone):
                await Reply(send, self._errors(path)).fail(error)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if counted:
                self._open.leave(agent)

    def _admit(self, path: str, headers: Headers) -> str | None:
        """The agent that asks, None where that does not matter or is not known. Raises ApiError (401, 403).

        The endpoints find out for themselves who asks, and refuse who they do not know.
        """
        if path == HEALTH_PATH:
            return None
        if path.startswith(ADMIN_PREFIX):
            self._identities.check_admin(headers)
            return None
        try:
            return self._identities.agent(headers)
        except ApiError:
            if self._exposed:
                raise
            return None


class Hosts:
    """The names that the service answers to, whatever the port."""

    def __init__(self, server: Server) -> None:
        self._names = {"localhost", *(canonical_host(name) for name in (server.host, *server.allowed_hosts))}
        self._loopback = is_loopback(server.host)

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises ApiError: 400 without one well-formed Host, 421 for a name that is not ours."""
        sent = [value for name, value in headers if name == b"host"]
        name = host_name(sent[0]) if len(sent) == 1 else None
        if name is None:
            raise ApiError(400, "a request needs one Host header: a host and perhaps a port", code="bad_host")
        if not self.ours(name):
            raise ApiError(
                421,
                f"this service does not go by the name {quoted(name)}; if it should: server.allowed_hosts",
                code="unknown_host",
            )

    def ours(self, name: str) -> bool:
        """Whether a canonical name is ours.

        No name resolves to an address that the browser then shows as the Host, so off loopback every address
        is fine. On loopback only loopback's: another one means that somebody forwards a port, and who comes
        that way may be anybody.
        """
        if name in self._names:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback


def host_name(value: bytes) -> str | None:
    """The canonical name in a Host header (RFC 9110, section 7.2), without its port; None for none."""
    found = _HOST.fullmatch(value.strip())
    if found is None:
        return None
    name = canonical_host((found[1] or found[2]).decode("ascii"))
    return None if found[1] is not None and ":" not in name else name


def canonical_host(name: str) -> str:
    """One spelling of a host's name or address."""
    name = name.lower().removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return name


class Origins:
    """The pages that may send requests."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(allowed)
        self._schemes = frozenset(origin.removesuffix("*") for origin in allowed if origin.endswith("://*"))

    def check(self, headers: Headers) -> None:
        """Raises ApiError (403) for what a page sent that is not configured."""
        origin = headers.get(b"origin")
        if origin is not None:
            name = origin.decode("latin-1").strip()
            if not self.allows(name):
                raise ApiError(
                    403,
                    f"requests of web pages are refused, also of {quoted(name)}; see server.allowed_origins",
                    code="origin_not_allowed",
                )
        elif headers.get(b"sec-fetch-site", b"").strip().lower() not in _BROWSER_SITES:
            message = "requests of web pages are refused; see server.allowed_origins"
            raise ApiError(403, message, code="origin_not_allowed")

    def allows(self, origin: str) -> bool:
        """Whether an Origin header's value (RFC 6454, section 7) is configured."""
        origin = origin.lower()
        scheme, found, _ = origin.partition("://")
        return origin in self._allowed or (bool(found) and f"{scheme}://" in self._schemes)


class OpenRequests:
    """How many requests are being answered, in total and by agent. None is an agent that is not known."""

    def __init__(self, most: int, most_of_agent: int) -> None:
        self._most = most
        self._most_of_agent = most_of_agent
        self._of: Counter[str | None] = Counter()
        self._total = 0

    def enter(self, agent: str | None) -> None:
        """One more. Raises ApiError (429) instead when there are too many."""
        if self._total >= self._most:
            raise _too_many(f"{self._most:,} requests are open")
        if agent is not None and self._of[agent] >= self._most_of_agent:
            raise _too_many(f"{agent} has {self._most_of_agent:,} requests open")
        self._of[agent] += 1
        self._total += 1

    def leave(self, agent: str | None) -> None:
        """One less."""
        self._of[agent] -= 1
        self._total -= 1


def _too_many(what: str) -> ApiError:
    retry = (b"retry-after", b"%d" % TOO_MANY_RETRY_AFTER_S)
    return ApiError(429, f"too busy: {what}", "rate_limit_error", code="too_many_requests", headers=(retry,))
