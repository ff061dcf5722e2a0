"""The terminal as a screen: drawn in place on the alternate screen, keys read without echo."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.live import Live

_QUIT_KEYS = b"qQ\x03\x04"


class Screen:
    """A page of the terminal that is drawn over in place, so that it does not flicker."""

    def __init__(self, live: Live) -> None:
        self._live = live

    @property
    def width(self) -> int:
        return self._live.console.width

    @property
    def height(self) -> int:
        return self._live.console.height

    def draw(self, page: RenderableType) -> None:
        """Show this page now."""
        self._live.update(page, refresh=True)


@contextlib.contextmanager
def screen_of(console: Console) -> Iterator[Screen]:
    """The alternate screen; the terminal is as before when the context ends, whatever ended it."""
    with quiet_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        yield Screen(live)


@contextlib.contextmanager
def quiet_keys() -> Iterator[None]:
    """Keys come one at a time and are not echoed over the page; Ctrl-C stays a signal."""
    fd = _keyboard()
    if fd is None:
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def wait_for_quit(seconds: float) -> bool:
    """Wait so long, or until q is pressed: whether it was."""
    fd = _keyboard()
    if not select.select([] if fd is None else [fd], [], [], seconds)[0]:
        return False
    assert fd is not None
    pressed = os.read(fd, 1024)
    # Nothing to read although it is readable: the terminal is gone.
    return not pressed or any(key in _QUIT_KEYS for key in pressed)


def _keyboard() -> int | None:
    """Standard input, if it is a terminal."""
    try:
        fd = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return fd if os.isatty(fd) else None
