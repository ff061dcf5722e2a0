"""The running service as the commands ask it: every failure is one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import orjson
import typer
from pydantic import BaseModel, ValidationError

from orchestrator.cli.common import load
from orchestrator.config import Config

DEFAULT_CONFIG = Path("config.yaml")
DEFAULT_URL = "http://127.0.0.1:8700"
# No option: others on the machine see a command line, but not an environment.
ADMIN_KEY_VARIABLE = "SWARM_ADMIN_KEY"
CONNECT_S = 3.0
# The gateway answers within milliseconds, unless its broker is in trouble.
REPLY_S = 15.0

ServiceConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration with the service's address; config.yaml if present."),
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help=f"The service's address; default {DEFAULT_URL}.", metavar="URL")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the service's reply as JSON.")]

_Reply = TypeVar("_Reply", bound=BaseModel)


class ServiceProblem(Exception):
    """The service did not do what was asked; the message is one line."""


def admin_headers() -> dict[str, str]:
    """The headers that open `/swarm/`, from the environment. Raises ServiceProblem for what is no key."""
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ServiceProblem(f"{ADMIN_KEY_VARIABLE} is not a key: keys are printable ASCII without blanks")
    return {"Authorization": f"Bearer {key}"}


def settings_for(config: Path | None, url: str | None) -> Config | None:
    """The configuration to take the address from: none where a URL was given and no file named."""
    if config is not None:
        return load(config)
    return load(DEFAULT_CONFIG) if url is None and DEFAULT_CONFIG.is_file() else None


def service_url(config: Config | None, url: str | None) -> str:
    """Where the service is. Raises ServiceProblem when that is no address."""
    if url is not None:
        return _checked(url)
    if config is None:
        return DEFAULT_URL
    host, port = config.server.host, config.server.port
    if port == 0:
        raise ServiceProblem("server.port is 0, any free port: give the service's address with --url")
    # A service on all addresses is on this machine's own as well.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _checked(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        # Reading the port is what checks it.
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable or any(character.isspace() for character in text):
        raise ServiceProblem(f"--url: {url!r} is not an address such as {DEFAULT_URL}")
    return text.rstrip("/")


class ServiceClient:
    """A connection to one service, for commands that ask and print."""

    def __init__(self, url: str, *, config: Path | None = None) -> None:
        """`config` is the file to name when the service must be started first. Raises ServiceProblem."""
        self.url = url
        self._start_hint = f"swarm up -c {config or DEFAULT_CONFIG}"
        self._client = httpx.Client(
            base_url=url,
            headers=admin_headers(),
            trust_env=False,
            timeout=httpx.Timeout(REPLY_S, connect=CONNECT_S),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, params: Mapping[str, int] | None = None) -> bytes:
        """A JSON reply as the service wrote it. Raises ServiceProblem."""
        return self._ask("GET", path, params)

    def post(self, path: str) -> bytes:
        """As `get`, for an action."""
        return self._ask("POST", path, None)

    def _ask(self, method: str, path: str, params: Mapping[str, int] | None) -> bytes:
        try:
            response = self._client.request(method, path, params=params)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol):
            raise ServiceProblem(
                f"no service answers at {self.url}; start it with: {self._start_hint}"
            ) from None
        except httpx.TimeoutException:
            raise ServiceProblem(f"{self.url} gave no answer within {REPLY_S:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ServiceProblem(f"{self.url} does not answer as a service would: {reason}") from None
        if response.status_code == 200:
            return response.content
        message = _error_message(response.content)
        if message is None:
            raise self.stranger(f"it says HTTP {response.status_code} to {method} {path}")
        raise ServiceProblem(message)

    def stranger(self, what: str) -> ServiceProblem:
        """Somebody answers there, but not this service."""
        return ServiceProblem(f"{self.url} is not a swarm's service: {what}")

    def read(self, shape: type[_Reply], raw: bytes) -> _Reply:
        """A reply in its shape. Raises ServiceProblem."""
        try:
            return shape.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "its reply"
            raise self.stranger(f"{where}: {first['msg']}") from None


def turn_path(turn: str, action: str = "") -> str:
    """The path of a turn, whatever the user typed as its id."""
    return f"/swarm/turns/{quote(turn, safe='', errors='replace')}" + (f"/{action}" if action else "")


def _error_message(raw: bytes) -> str | None:
    """The message of an error in the service's shape."""
    try:
        message = orjson.loads(raw)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return " ".join(message.split()) if isinstance(message, str) else None
