"""Becomes the engine process, and leaves behind a watcher that ends the engine when the service dies.

Started as ``python launch.py ORDER`` with standard input a pipe whose other end only the service holds.
ORDER is JSON: ``argv`` of the engine, ``nice`` to add, and ``remove``, a folder to delete with the engine
when the service is gone (or null).

Why a process of its own and not a thread in the engine: while xllamacpp loads a model it holds Python's
lock, for minutes with a large one, and a ``llama-server`` of the user's knows nothing of us. Why not
Linux's parent-death signal: it follows the parent's *thread*, and macOS has none. The watcher sleeps on two
pipes: the one from the service, whose end means that the service is dead, and one that only the engine
and its children hold, whose end means that the engine is.

Imports nothing of ours and runs isolated: it is on the way to every engine start.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys

_TERM_BOUND_S = 3.0
_KILL_BOUND_S = 5.0


def main() -> None:
    """Replace this process by the engine; exits 127 with one line on stderr if that is impossible."""
    order = json.loads(sys.argv[1])
    argv: list[str] = order["argv"]
    engine_ends, engine_lives = os.pipe()
    engine_pid = os.getpid()
    helper = os.fork()
    if helper == 0:
        # Twice: the watcher must not be a child of the engine, which would never reap it.
        if os.fork() == 0:
            os.close(engine_lives)
            try:
                watch(engine_pid, engine_ends, order["remove"])
            finally:
                os._exit(0)
        os._exit(0)
    os.waitpid(helper, 0)
    os.close(engine_ends)
    os.set_inheritable(engine_lives, True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if order["nice"]:
        os.nice(order["nice"])
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"error: cannot run {argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def watch(engine_pid: int, engine_ends: int, remove: str | None) -> None:
    """Sleep until the engine or the service is dead; then leave neither the engine nor its folder behind."""
    # Out of the engine's process group, which is what gets the signals.
    os.setsid()
    service = 0
    while True:
        ready, _, _ = select.select([service, engine_ends], [], [])
        if engine_ends in ready:
            return
        if not os.read(service, 4096):
            break
    # The pipe says that the engine still lives, so its process id has not been given to anyone else.
    for number, bound_s in ((signal.SIGTERM, _TERM_BOUND_S), (signal.SIGKILL, _KILL_BOUND_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine_pid, number)
        if select.select([engine_ends], [], [], bound_s)[0]:
            break
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)


if __name__ == "__main__":
    main()
