"""The log says what happened, and nothing of what was asked, answered, or where things are."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.keys import new_key
from orchestrator.logs import MASK, PRIVATE, Masking, logging_to

SECRET = "geheim"


def logged(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def failing(secret: str) -> BaseException:
    """An error that carries a secret in its text, its variables, its cause and its companions."""
    prompt = {"content": secret}
    try:
        try:
            raise KeyError(prompt["content"])
        except KeyError as error:
            raise ExceptionGroup(
                secret, [ValueError(secret), ExceptionGroup("g", [OSError(secret)])]
            ) from error
    except ExceptionGroup as error:
        return error


def write(*, verbose: bool) -> str:
    """Everything that the log can be given, by this program and by a library."""
    file = io.StringIO()
    with logging_to(file, verbose=verbose):
        log = structlog.get_logger("x")
        for name in sorted(PRIVATE):
            log.info("a field", **{name: SECRET, name.upper(): SECRET, "inner": {name: [SECRET]}})
        log.warning("a failure", turn="turn-1", error=f"the engine said: {SECRET}", path="/v1/models")
        log.error("a crash", exc_info=failing(SECRET))
        try:
            raise ValueError(SECRET)
        except ValueError:
            log.exception("another crash")
            logging.getLogger("asyncio").exception("Task exception was never retrieved\nfuture: <%s>", SECRET)
    return file.getvalue()


def test_nothing_private_is_written() -> None:
    text = write(verbose=False)
    assert SECRET not in text
    entries = logged(text)
    assert len(entries) == len(PRIVATE) + 4
    failure = next(entry for entry in entries if entry["event"] == "a failure")
    assert (failure["error"], failure["turn"], failure["path"]) == ("the engine said", "turn-1", "/v1/models")
    crash = next(entry for entry in entries if entry["event"] == "a crash")
    assert [line for line in crash["exception"].splitlines() if not line.startswith(" ")] == [
        *("ExceptionGroup", "ValueError", "ExceptionGroup", "KeyError", "OSError")
    ]
    assert 'File ".../test_logs.py"' in crash["exception"]
    library = entries[-1]
    assert library["event"] == "Task exception was never retrieved"
    assert library["level"] == "error"
    assert library["exception"].startswith("ValueError\n")


def test_verbose_is_how_the_text_of_errors_is_asked_for() -> None:
    entries = logged(write(verbose=True))
    failure = next(entry for entry in entries if entry["event"] == "a failure")
    assert failure["error"] == f"the engine said: {SECRET}"
    assert f"ValueError: {SECRET}" in next(e for e in entries if e["event"] == "another crash")["exception"]
    fields = [entry for entry in entries if entry["event"] == "a field"]
    assert SECRET not in json.dumps(fields)


@pytest.mark.parametrize("verbose", [False, True])
def test_places_and_keys_are_never_written(verbose: bool) -> None:
    key = new_key()
    file = io.StringIO()
    with logging_to(file, verbose=verbose):
        log = structlog.get_logger()
        log.info(f"redis://:geheim@h:1/0 and {key}", model="/models/geheim/m.gguf", ids=[f"Bearer {key}", 3])
        log.info("an object", thing=OSError("/geheim/x"), number=1.5, none=None, files=("/geheim/a", "b"))
        logging.getLogger("lib").error("POST http://geheim:1/x with %s", key)
    text = file.getvalue()
    assert "geheim" not in text
    assert key not in text
    first, second, _ = logged(text)
    assert first["model"] == ".../m.gguf"
    assert first["ids"] == [MASK, 3]
    assert (second["number"], second["none"], second["files"]) == (1.5, None, [".../a", "b"])


def test_it_ends_with_the_block() -> None:
    file = io.StringIO()
    before = list(logging.getLogger().handlers)
    with logging_to(file):
        pass
    assert logging.getLogger().handlers == before
    assert not structlog.is_configured()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_readable() -> None:
    file = Terminal()
    with logging_to(file):
        structlog.get_logger().error("a crash", exc_info=failing(SECRET))
    assert SECRET not in file.getvalue()
    assert "ExceptionGroup" in file.getvalue()
    assert "\\n" not in file.getvalue()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "error", "prompt", "path", "event"]), JSON))
def test_any_field_can_be_written(fields: dict[str, Any]) -> None:
    masked = Masking()(None, "info", dict(fields))
    assert masked.keys() == fields.keys()
    assert all(masked[name] == MASK for name in fields if name == "prompt")
    json.dumps(masked)
