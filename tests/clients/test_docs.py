"""docs/clients.md, `clients.toml`, the lock files and the installed clients agree."""

from __future__ import annotations

import json
import re

import pytest

from tests.clients.check import HEAD
from tests.clients.lines import blocks
from tests.clients.spec import HERE, ROOT, Client, read_clients

CLIENTS = read_clients()
PAGE = (ROOT / "docs" / "clients.md").read_text()


def pinned(client: Client) -> str:
    """The version that the project's files name."""
    if client.source == "npm":
        return str(json.loads((HERE / "package.json").read_text())["dependencies"][client.package])
    file = HERE / "requirements.txt" if client.source == "pypi" else ROOT / "constraints.txt"
    found = re.search(rf"^{re.escape(client.package)}==(.+)$", file.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def rows() -> dict[str, list[str]]:
    """The page's table by client."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert tuple(lines[0]) == HEAD
    return {cells[0]: cells for cells in lines[2:]}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_has_the_lines_that_the_tests_run(name: str) -> None:
    client = CLIENTS[name]
    for block in blocks(client):
        assert block in PAGE
    if client.unattended:
        assert f"`{' '.join(client.unattended)}`" in PAGE


def test_the_table_is_about_the_pinned_versions() -> None:
    table = rows()
    assert list(table) == list(CLIENTS)
    for name, client in CLIENTS.items():
        cells = dict(zip(HEAD, table[name], strict=True))
        assert cells["version"] == pinned(client)
        assert cells["API"] == f"`{client.api}`"
        assert cells["streaming"].startswith("yes") == client.streams
        assert cells["tools"].startswith("yes") == client.tools
        assert cells["preempted while running"].startswith("yes")
        assert cells["no errors"] == "yes"


@pytest.mark.parametrize("name", CLIENTS)
def test_what_is_installed_is_what_is_pinned(name: str) -> None:
    client = CLIENTS[name]
    if reason := client.missing():
        pytest.skip(reason)
    assert client.installed_version() == pinned(client)


def test_the_lock_files_name_no_registry() -> None:
    lock = json.loads((HERE / "package-lock.json").read_text())
    assert all("resolved" not in package for package in lock["packages"].values())
    lines = (HERE / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line) for line in lines)
