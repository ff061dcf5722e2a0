"""`swarm ps --watch` on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import FakeService

ROOT = Path(__file__).resolve().parents[2]
# A terminal is that of a session, which the program must lead for Ctrl-C to reach it.
LEAD = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A program on a terminal of 80 x 24."""

    def __init__(self, argv: list[str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAD, *argv],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        self._slave = slave
        self.output = b""

    def read_until(self, wanted: bytes, bound_s: float = 30.0) -> None:
        deadline = time.monotonic() + bound_s
        while wanted not in self.output:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{wanted!r} is not in {self.output[-2000:]!r}"
            if select.select([self._master], [], [], left_s)[0]:
                self.output += os.read(self._master, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def modes(self) -> list[object]:
        return list(termios.tcgetattr(self._slave))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def watching(service: FakeService) -> Iterator[Terminal]:
    argv = [sys.executable, "-m", "orchestrator.cli", "ps", "--watch", "--url", service.url]
    terminal = Terminal(argv)
    try:
        terminal.read_until(ENTER)
        terminal.read_until(b"q quits")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize("how", ["q", "Ctrl-C", "SIGINT"])
def test_watch_ends_cleanly(service: FakeService, how: str) -> None:
    with watching(service) as terminal:
        terminal.read_until(b"paused")
        if how == "SIGINT":
            terminal.process.send_signal(signal.SIGINT)
        else:
            terminal.press(b"q" if how == "q" else b"\x03")
        terminal.read_until(LEAVE)
        assert terminal.process.wait(10) == 0
        assert terminal.modes() == terminal.before
        assert b"Traceback" not in terminal.output


def test_watch_outlives_the_service(service: FakeService) -> None:
    with watching(service) as terminal:
        for reply in (b"", b"garbage"):
            service.reply("GET /swarm/state", reply, 500)
        terminal.read_until(b"stale: ")
        terminal.press(b"q")
        assert terminal.process.wait(10) == 0


def test_keys_are_not_echoed(service: FakeService) -> None:
    with watching(service) as terminal:
        terminal.press(b"zzz")
        asked = len(service.asked)
        while len(service.asked) < asked + 3:
            time.sleep(0.02)
        terminal.press(b"q")
        terminal.read_until(LEAVE)
        assert b"zzz" not in terminal.output
