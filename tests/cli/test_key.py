"""`swarm key new`: keys that are shown once, and a configuration that has their hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.config import load_config
from orchestrator.keys import hash_key
from tests.cli.conftest import Outcome, Swarm

CONFIG = """\
# My swarm.
backends: [{name: mine, url: "http://127.0.0.1:9"}]
agents:
  editor:             # the one a person waits for
    priority: foreground
  tester: {priority: background}   # slow
"""
SHOWN = re.compile(r"^key of ([a-z ]+): (sk-swarm-[\w-]{43})$", re.MULTILINE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "swarm.yaml"
    path.write_text(CONFIG)
    return path


def keys(result: Outcome) -> dict[str, str]:
    """The keys that were shown, by whose they are."""
    assert (result.code, result.err) == (0, "")
    return dict(SHOWN.findall(result.out))


def test_without_write_the_line_is_shown_and_the_file_stays(swarm: Swarm, path: Path) -> None:
    result = swarm("key", "new", "editor", "-c", path)
    key = keys(result)["editor"]
    assert f"under agents.editor: key: {hash_key(key)}" in result.out
    assert path.read_text() == CONFIG


def test_write_keeps_the_comments(swarm: Swarm, path: Path) -> None:
    path.chmod(0o640)
    found = keys(swarm("key", "new", "editor", "tester", "--admin", "--write", "-c", path))
    assert list(found) == ["editor", "tester", "the admin"]
    text = path.read_text()
    assert not any(key in text for key in found.values())
    assert [line for line in text.splitlines() if "key" not in line] == [
        line for line in CONFIG.splitlines() if "tester" not in line
    ]
    assert "# slow" in text
    config = load_config(path)
    assert config.agents["editor"].key == hash_key(found["editor"])
    assert config.agents["tester"].key == hash_key(found["tester"])
    assert config.server.admin_key == hash_key(found["the admin"])
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_new_key_replaces_the_old_one(swarm: Swarm, path: Path) -> None:
    first = keys(swarm("key", "new", "editor", "-w", "-c", path))["editor"]
    second = keys(swarm("key", "new", "editor", "-w", "-c", path))["editor"]
    assert first != second
    assert load_config(path).agents["editor"].key == hash_key(second)


def test_a_plain_key_of_old_is_replaced(swarm: Swarm, path: Path) -> None:
    path.write_text(CONFIG.replace("priority: foreground", "key: my-own-secret\n    priority: foreground"))
    found = keys(swarm("key", "new", "--all", "-w", "-c", path))
    assert list(found) == ["editor", "tester", "the admin"]
    assert "my-own-secret" not in path.read_text()
    assert load_config(path).agents["editor"].key == hash_key(found["editor"])


def test_all_leaves_those_that_have_one(swarm: Swarm, path: Path) -> None:
    tester = keys(swarm("key", "new", "tester", "-w", "-c", path))["tester"]
    assert list(keys(swarm("key", "new", "--all", "-w", "-c", path))) == ["editor", "the admin"]
    assert load_config(path).agents["tester"].key == hash_key(tester)
    before = path.read_text()
    result = swarm("key", "new", "--all", "-w", "-c", path)
    assert (result.code, result.out) == (0, f"{path}: every agent and the admin has a key\n")
    assert path.read_text() == before


def test_it_is_what_makes_a_service_start_off_loopback(swarm: Swarm, path: Path) -> None:
    path.write_text(f"server: {{host: 0.0.0.0}}\n{CONFIG}")
    assert swarm("config", "check", "-c", path).code == 2
    keys(swarm("key", "new", "--all", "--write", "-c", path))
    assert swarm("config", "check", "-c", path).code == 0


def test_a_link_stays_a_link(swarm: Swarm, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    keys(swarm("key", "new", "editor", "-w", "-c", link))
    assert link.is_symlink()
    assert load_config(path).agents["editor"].key is not None


@pytest.mark.parametrize(
    ("words", "text", "why"),
    [
        ([], CONFIG, "whose key?"),
        (["--all", "editor"], CONFIG, "exclude each other"),
        (["nobody"], CONFIG, "there is no agent 'nobody'; there are: editor, tester"),
        (["editor"], "agents: [", "not valid YAML"),
        (["editor"], "[1]", "is not a mapping"),
        (["editor"], "", "is empty"),
        (["editor"], "agents: 3", "there is no agent 'editor'; there are: none"),
        (["a", "--write"], "agents:\n  a: &x {priority: batch}\n  b: *x\n", "put the hashes there yourself"),
    ],
)
def test_what_goes_wrong_is_one_line_and_shows_no_key(
    swarm: Swarm, path: Path, words: list[str], text: str, why: str
) -> None:
    path.write_text(text)
    result = swarm("key", "new", *words, "-c", path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert why in result.err
    assert path.read_text() == text


def test_missing_file(swarm: Swarm, tmp_path: Path) -> None:
    result = swarm("key", "new", "a", "-c", tmp_path / "none.yaml")
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_a_file_that_cannot_be_written_shows_no_key(
    swarm: Swarm, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("orchestrator.cli.key.os.replace", refuse)
    result = swarm("key", "new", "editor", "-w", "-c", path)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"{path} cannot be written: Permission denied\n"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
