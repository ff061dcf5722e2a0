"""A value is put into a configuration's text, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import load_config, parse_config
from orchestrator.config.edit import CannotEdit, set_value
from orchestrator.keys import hash_key

ROOT = Path(__file__).resolve().parents[2]
KEY = ("agents", "editor", "key")
ADMIN = ("server", "admin_key")

CASES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "agents:\n  editor:   # the one\n    priority: x  # high\n",
        KEY,
        "agents:\n  editor:   # the one\n    key: V\n    priority: x  # high\n",
    ),
    ("agents:\n  editor: {priority: x}  # c\n", KEY, "agents:\n  editor: {key: V, priority: x}  # c\n"),
    ("agents:\n  editor:  # c\n  b: {}\n", KEY, "agents:\n  editor: {key: V}  # c\n  b: {}\n"),
    ("agents:\n  editor: ~  # c\n", KEY, "agents:\n  editor: {key: V}  # c\n"),
    ("agents:\n  editor: {}\n", KEY, "agents:\n  editor: {key: V}\n"),
    ("agents: {editor: }\n", KEY, "agents: {editor: {key: V} }\n"),
    ("agents: {editor: {key: 'plain one', a: b}}\n", KEY, "agents: {editor: {key: V, a: b}}\n"),
    (
        "agents:\n  editor:\n    key: old  # c\n    a: 1\n",
        KEY,
        "agents:\n  editor:\n    key: V  # c\n    a: 1\n",
    ),
    ("agents:\n  editor:\n    key:\n    a: 1\n", KEY, "agents:\n  editor:\n    key: V\n    a: 1\n"),
    ("# top\nagents: {a: }\n", ADMIN, "# top\nserver: {admin_key: V}\nagents: {a: }\n"),
    ("server: # c\n  host: h\n", ADMIN, "server: # c\n  admin_key: V\n  host: h\n"),
    ("server:\nagents: {a: }\n", ADMIN, "server: {admin_key: V}\nagents: {a: }\n"),
    ("a: b\r\nserver:\r\n  x: 1\r\n", ADMIN, "a: b\r\nserver:\r\n  admin_key: V\r\n  x: 1\r\n"),
]


@pytest.mark.parametrize(("text", "path", "edited"), CASES)
def test_everything_else_stays(text: str, path: tuple[str, ...], edited: str) -> None:
    assert set_value(text, path, "V") == edited


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("agents:\n  editor: &x {p: 1}\n  b: *x\n", "cannot be set without changing something else"),
        ("agents:\n  b: &x {p: 1}\n  editor: *x\n", "cannot be set without changing something else"),
        ("", "is empty"),
        ("[1]", "not a mapping"),
        ("text", "not a mapping"),
        ("{}", "not a mapping"),
        ("a: [", "not valid YAML"),
        ("a: 1\na: 2\n", "given twice"),
    ],
)
def test_what_cannot_be_done_is_not_done(text: str, why: str) -> None:
    with pytest.raises(CannotEdit, match=why) as caught:
        set_value(text, KEY, "V")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.yaml", "docker/config.yaml"])
def test_our_own_files(name: str) -> None:
    text = (ROOT / name).read_text()
    config = load_config(ROOT / name)
    for agent in config.agents:
        text = set_value(text, ("agents", agent, "key"), hash_key(agent))
    text = set_value(text, ADMIN, hash_key("op"))
    edited = parse_config(text, str(ROOT / name))
    assert {agent.key for agent in edited.agents.values()} == set(map(hash_key, config.agents))
    assert edited.server.admin_key == hash_key("op")
    for line in (ROOT / name).read_text().splitlines():
        assert line.partition("#")[2] in text


NAMES = st.sampled_from(["agents", "editor", "key", "server", "a"])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@given(
    data=st.dictionaries(NAMES, DATA, min_size=1, max_size=4),
    flow=st.sampled_from([True, False, None]),
    indent=st.sampled_from([2, 4]),
    path=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
)
def test_any_text_is_edited_right_or_not_at_all(
    data: dict[str, Any], flow: bool | None, indent: int, path: tuple[str, ...]
) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, indent=indent, width=1000)
    try:
        edited = set_value(text, path, "V")
    except CannotEdit:
        return
    found = yaml.safe_load(edited)
    for name in path:
        found = found[name]
    assert found == "V"
