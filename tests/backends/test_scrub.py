"""URLs and folders are taken out of text, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.scrub import scrub


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot reach http://10.0.0.7:8080/v1?key=x.", "cannot reach (address)"),
        ("redis://:geheim@host:6379/0 does not answer", "(address) does not answer"),
        ("failed to open '/models/mine/qwen.gguf'", "failed to open '.../qwen.gguf'"),
        ("no such file: /models/qwen.gguf", "no such file: .../qwen.gguf"),
        ("unix socket: /run/user/1000/v.sock.", "unix socket: .../v.sock."),
        ('File "/home/me/swarm/x.py", line 3', 'File ".../x.py", line 3'),
        ("~/models/q.gguf is missing", ".../q.gguf is missing"),
        (r"C:\Users\me\q.gguf is missing", ".../q.gguf is missing"),
        ("in (/srv/a/b)", "in (.../b)"),
    ],
)
def test_places_are_taken_out(text: str, clean: str) -> None:
    assert scrub(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "context shift is disabled",
        "and/or, 3/4, a / b",
        "unresolved $ref #/definitions/item/x",
        "unexpected </tool_call> at 12:30",
        "messages[0].content: must be text",
        "see server.allowed_hosts",
    ],
)
def test_what_is_no_place_stays(text: str) -> None:
    assert scrub(text) == text


@given(st.text())
def test_any_text_is_scrubbed_once(text: str) -> None:
    once = scrub(text)
    assert "://" not in once or "://" in text
    assert scrub(once) == once
