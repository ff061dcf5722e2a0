"""`swarm key`: make the keys that agents and the operator send."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.common import ConfigOption, fail
from orchestrator.cli.service_client import ADMIN_KEY_VARIABLE
from orchestrator.config import ConfigError, read_config
from orchestrator.config.document import read_document
from orchestrator.config.edit import CannotEdit, set_value
from orchestrator.keys import hash_key, is_hash, new_key

ADMIN_PATH = ("server", "admin_key")


@dataclass(frozen=True)
class _Made:
    """A new key, whose it is, and where its hash belongs."""

    whose: str
    path: tuple[str, ...]
    key: str

    @property
    def line(self) -> str:
        return f"{self.path[-1]}: {hash_key(self.key)}"


def _made(names: Sequence[str], *, admin: bool) -> list[_Made]:
    made = [_Made(name, ("agents", name, "key"), new_key()) for name in names]
    return [*made, _Made("the admin", ADMIN_PATH, new_key())] if admin else made


def _show(made: Sequence[_Made], config: Path, *, written: bool) -> None:
    """Print the keys: the only time that they can be seen."""
    for one in made:
        typer.echo(f"key of {one.whose}: {one.key}")
        if one.path == ADMIN_PATH:
            typer.echo(f"  for the swarm command: export {ADMIN_KEY_VARIABLE}={one.key}")
        if not written:
            typer.echo(f"  into {config}, under {'.'.join(one.path[:-1])}: {one.line}")
    kept = f"{config} has the hashes" if written else "The hash is all that is to be kept"
    typer.echo(f"{kept}; the keys are not shown again. A running service has to be started anew.")


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, with the mode and, where this is allowed, the owner of the old one.

    Raises OSError.
    """
    path = path.resolve()
    old = path.stat()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        shutil.copymode(path, name)
        with contextlib.suppress(PermissionError):
            os.chown(name, old.st_uid, old.st_gid)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _wanted(data: dict[str, Any], config: Path, names: list[str], *, everybody: bool) -> list[str]:
    """The agents that get a key: those named, or all without one."""
    agents = data.get("agents")
    known = agents if isinstance(agents, dict) else {}
    for name in names:
        if name not in known:
            fail(f"{config}: there is no agent {name!r}; there are: {', '.join(known) or 'none'}")
    if not everybody:
        return list(dict.fromkeys(names))
    return [
        name for name, agent in known.items() if not (isinstance(agent, dict) and is_hash(agent.get("key")))
    ]


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    group = typer.Typer(no_args_is_help=True, help="Make keys.")
    app.add_typer(group, name="key")

    @group.callback()
    def _group() -> None:
        """Make keys."""

    @group.command()
    def new(
        agents: Annotated[list[str] | None, typer.Argument(metavar="[AGENT]...", help="Whose keys.")] = None,
        config: ConfigOption = Path("config.yaml"),
        admin: Annotated[bool, typer.Option("--admin", help="A key for /swarm/ as well.")] = False,
        everybody: Annotated[
            bool, typer.Option("--all", help="For the admin and every agent that has none yet.")
        ] = False,
        write: Annotated[
            bool, typer.Option("--write", "-w", help="Put the hashes into the configuration file.")
        ] = False,
    ) -> None:
        """Make random keys, show them once, and show or write the hashes that the configuration keeps.

        An agent that has a key gets a new one, and the old one is no longer valid.
        """
        names = agents or []
        if everybody and names:
            fail("--all and the names of agents exclude each other")
        if not (names or admin or everybody):
            fail("whose key? Give the names of agents, --admin, or --all")
        try:
            text = read_config(config)
        except ConfigError as error:
            fail(str(error))
        document = read_document(text, str(config))
        if document.problems or not isinstance(document.data, dict):
            fail("\n".join(map(str, document.problems)) or f"{config}: is not a mapping")
        wanted = _wanted(document.data, config, names, everybody=everybody)
        server = document.data.get("server")
        admin_has = isinstance(server, dict) and is_hash(server.get("admin_key"))
        made = _made(wanted, admin=admin or (everybody and not admin_has))
        if not made:
            typer.echo(f"{config}: every agent and the admin has a key")
            return
        if write:
            try:
                for one in made:
                    text = set_value(text, one.path, hash_key(one.key))
                _replace(config, text)
            except CannotEdit as error:
                fail(f"{config}: {error}: put the hashes there yourself (without --write)")
            except OSError as error:
                fail(f"{config} cannot be written: {error.strerror or error}")
        _show(made, config, written=write)
