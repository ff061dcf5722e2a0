"""The log: what this program and its libraries write, and what is kept out of it.

Nothing that an agent or an engine sent is logged, nor where engines and files are, nor a key. No call site
has to think of that:

1. Fields that hold such things by name are masked (`PRIVATE`).
2. An error is logged by its first clause, which is what a program says; what follows a colon or a quote is
   what it found, which may be a prompt or a reply. The same is true of a library's message.
3. An exception is logged by its type and its places in the code, without its text and its variables.
4. URLs, the folders of paths, bearer tokens and keys are masked wherever they are.

`verbose` is asked for: then 2 and 3 give the whole text, still without what 4 masks.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from backends.scrub import scrub
from orchestrator.keys import KEY_PREFIX

MASK = "***"
PRIVATE = frozenset(
    {
        *("prompt", "messages", "input", "body", "raw", "request", "headers", "arguments", "tools"),
        *("text", "content", "reasoning_content", "delta", "output", "completion"),
        *("key", "api_key", "admin_key", "authorization", "x-api-key", "password", "token", "url"),
    }
)
# The path of a request is no file's.
PLAIN = frozenset({"path", "timestamp", "level"})
ERRORS = frozenset({"error", "reason"})
# Of one exception, its causes and what it wraps.
MAX_ERRORS = 8

_TOKEN = re.compile(rf"(?i)\bbearer +\S+|{re.escape(KEY_PREFIX)}\S+")
_CLAUSE_ENDS = re.compile(r"[\"'`:<>\[{(\n]")
# Set on what came through the standard library's logging: others wrote its message.
_FOREIGN = "_foreign"


@contextlib.contextmanager
def logging_to(file: TextIO, *, verbose: bool = False) -> Iterator[None]:
    """Log to a file until the block ends: readable on a terminal, JSON lines elsewhere."""
    terminal = file.isatty()
    # The renderer for terminals must not add the exception's text to what `_Places` made of it.
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not terminal),
    ]
    masking: list[Processor] = [
        structlog.processors.ExceptionRenderer(_Places(verbose=verbose)),
        Masking(verbose=verbose),
    ]
    structlog.configure(
        processors=[*shared, *masking, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _foreign],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *masking, renderer],
        )
    )
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        structlog.reset_defaults()


def _foreign(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    event[_FOREIGN] = True
    return event


class Masking:
    """The processor that takes out of an event what must not be logged."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        """The event without it."""
        foreign = event.pop(_FOREIGN, False)
        return {key: self._field(key, value, foreign and key == "event") for key, value in event.items()}

    def _field(self, key: str, value: Any, foreign: bool = False) -> Any:
        if key.lower() in PRIVATE:
            return MASK
        if value is None or isinstance(value, bool | int | float) or key in PLAIN:
            return value
        if isinstance(value, Mapping):
            return {str(name): self._field(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._field(key, inner) for inner in value]
        text = str(value)
        if (foreign or key in ERRORS) and not self._verbose:
            text = _CLAUSE_ENDS.split(text, maxsplit=1)[0].rstrip()
        return scrub(_TOKEN.sub(MASK, text))


class _Places:
    """Renders an exception as its type and the places in the code that it went through."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose

    def __call__(self, exc_info: ExcInfo) -> str:
        lines: list[str] = []
        waiting = [exc_info[1]]
        for _ in range(MAX_ERRORS):
            if not waiting:
                break
            error = waiting.pop(0)
            said = f": {error}" if self._verbose and str(error) else ""
            lines.append(f"{type(error).__name__}{said}")
            lines += [place.rstrip() for place in traceback.format_tb(error.__traceback__)]
            # Those that it wraps, and the one that it followed.
            if isinstance(error, BaseExceptionGroup):
                waiting += error.exceptions
            before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            if before is not None:
                waiting.append(before)
        return "\n".join(lines)
