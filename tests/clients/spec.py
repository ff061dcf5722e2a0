"""The ten clients as data: `clients.toml`, read and filled in for one run.

The file's lines are also what `docs/clients.md` tells a user to type. They hold the documentation's own
address, key and model, which a run replaces by its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INSTALLED = ROOT / ".clients"
"""Where `make clients` puts them."""

URL = "http://127.0.0.1:8700"
KEY = "sk-swarm-of-the-reviewer"
MODEL = "smollm2-135m"
PROMPT = "PROMPT"

Source = Literal["npm", "pypi", "package"]


@dataclass(frozen=True, slots=True)
class Place:
    """What the documentation's address, key, model and prompt stand for in one run."""

    url: str
    key: str
    model: str
    prompt: str

    def fill(self, text: str) -> str:
        """The text with this run's values."""
        for documented, given in ((URL, self.url), (KEY, self.key), (MODEL, self.model)):
            text = text.replace(documented, given)
        return text


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one of the client's own tools, which it carries out without asking.

    In the arguments, which are JSON, FILE and TEXT stand for a file and its text, ANSWER for the last words.
    """

    tool: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Client:
    """One client. `environment`, `files`, `setup` and `run` are the documented lines."""

    name: str
    package: str
    source: Source
    """`npm` and `pypi` programs are installed by `make clients`, a `package` beside the service's tests."""
    api: str
    """The path of its turns, without the query."""
    streams: bool
    tools: bool
    run: tuple[str, ...]
    setup: tuple[str, ...] = ()
    """A command that writes its configuration, once."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration, by its path below the home folder."""
    unattended: tuple[str, ...] = ()
    """Options for a run that nobody watches."""
    quiet: Mapping[str, str] = field(default_factory=dict)
    """What keeps it from looking for updates and from reporting: not needed to reach the service."""
    max_turn_tokens: int = 48
    """How long the replies of its agent may be where the small model rambles."""
    write: Call | None = None
    """Writes the file."""
    finish: Call | None = None
    """Says that the work is done, where a plain answer does not."""
    answer: str = "ANSWER"
    """The model's last words; those that write the file, where the client has no tools."""

    def commands(self, place: Place) -> list[list[str]]:
        """The command lines of one run, in their order."""
        run = (*self.run, *self.unattended)
        return [self._command(words, place) for words in (self.setup, run) if words]

    def _command(self, words: tuple[str, ...], place: Place) -> list[str]:
        program, *rest = (place.prompt if word == PROMPT else place.fill(word) for word in words)
        if self.source == "package":
            return [sys.executable, str(HERE / rest[0]), *rest[1:]]
        folder = "node_modules/.bin" if self.source == "npm" else "python/bin"
        return [str(INSTALLED / folder / program), *rest]

    def variables(self, place: Place) -> dict[str, str]:
        """The environment of one run, beyond what every client gets."""
        given = {**self.environment, **self.quiet}
        return {name: place.fill(value) for name, value in given.items()}

    def missing(self) -> str | None:
        """Why it cannot be run here, None if it can."""
        return None if self.installed_version() else f"{self.package} is not installed: make clients"

    def installed_version(self) -> str | None:
        """The version that runs here."""
        if self.source == "npm":
            return _npm_version(self.package)
        folder = INSTALLED / "python" if self.source == "pypi" else Path(sys.prefix)
        stem = self.package.replace("-", "_")
        found = sorted(folder.glob(f"lib/python*/site-packages/{stem}-*.dist-info"))
        return found[0].name.removeprefix(f"{stem}-").removesuffix(".dist-info") if found else None


def _npm_version(package: str) -> str | None:
    manifest = INSTALLED / "node_modules" / package / "package.json"
    return str(json.loads(manifest.read_text())["version"]) if manifest.is_file() else None


def read_clients() -> dict[str, Client]:
    """All clients by name, in the file's order."""
    entries = tomllib.loads((HERE / "clients.toml").read_text())
    return {name: _client(name, entry) for name, entry in entries.items()}


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Client]]:
    """The command line, and the clients that it names, or all. Exits where one is not known or installed."""
    clients = read_clients()
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(clients))
    given = parser.parse_args()
    unknown = set(given.clients) - set(clients)
    if unknown:
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(clients)}")
    chosen = [clients[name] for name in given.clients or clients]
    missing = [reason for client in chosen if (reason := client.missing())]
    if missing:
        parser.error("; ".join(missing))
    return given, chosen


def _client(name: str, entry: dict[str, Any]) -> Client:
    for key in ("run", "setup", "unattended"):
        entry[key] = tuple(entry.get(key, ()))
    for key in ("write", "finish"):
        entry[key] = Call(**entry[key]) if key in entry else None
    return Client(name=name, **entry)
