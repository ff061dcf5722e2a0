"""A run that went wrong is seen to have gone wrong, whatever its exit code says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tests.clients.check import row
from tests.clients.runner import Ran
from tests.clients.spec import Client, read_clients
from tests.clients.tap import Exchange
from tests.clients.verdict import judge

CLIENT: Client = read_clients()["pi"]
GOOD = Ran(0, "Hello.", "", 1.0)


def exchange(**changes: Any) -> Exchange:
    sent = {"stream": True, "tools": [{"type": "function"}]}
    good = Exchange(
        method="POST",
        path=CLIENT.api,
        sent=orjson.dumps(sent),
        status=200,
        headers={"content-type": "text/event-stream"},
        received=b"data: {}\n\ndata: [DONE]\n\n",
        whole=True,
    )
    return replace(good, **changes)


def turn(**changes: Any) -> dict[str, Any]:
    good = {
        "id": "turn-1",
        "state": "done",
        "error": None,
        "finish_reason": "stop",
        "preemptions": 2,
        "prompt_tokens": 1437,
    }
    return {**good, **changes}


def test_a_good_run_has_no_faults() -> None:
    seen = judge(CLIENT, GOOD, [exchange(), exchange()], [turn(), turn(preemptions=0)])
    assert seen.faults == ()
    assert (seen.streamed, seen.tools, seen.prompt_tokens) == (True, 1, 1437)
    assert (seen.turns, seen.preemptions, seen.finish_reasons) == (2, 2, ("stop", "stop"))


def test_a_client_that_names_an_error_at_its_end_gave_up() -> None:
    ended = "\nUser:\nno call\n\nExit:\nRepeatedFormatError\nSaved trajectory to 'Exit:'\n"
    seen = judge(CLIENT, replace(GOOD, output=ended), [exchange()], [turn()])
    assert (seen.faults, seen.gave_up) == ((), "RepeatedFormatError")
    assert row(seen)[7] == "1: stop; then RepeatedFormatError"
    for output in ("\nExit:\nThe Error is mended.\n", "Exit:\n", "Hello."):
        seen = judge(CLIENT, replace(GOOD, output=output), [exchange()], [turn()])
        assert (seen.gave_up, row(seen)[7]) == ("", "1: stop")


Run = tuple[Ran, list[Exchange], list[dict[str, Any]]]

BAD: dict[str, tuple[Callable[[], Run], str]] = {
    "exit code": (lambda: (replace(GOOD, exit_code=1), [exchange()], [turn()]), "exit code 1"),
    "endless": (lambda: (replace(GOOD, exit_code=None), [exchange()], [turn()]), "had to be ended"),
    "silent": (lambda: (GOOD, [], [turn()]), "sent nothing"),
    "elsewhere": (lambda: (GOOD, [exchange(path="/v1/completions")], [turn()]), "sent nothing"),
    "refused": (lambda: (GOOD, [exchange(), exchange(status=404)], [turn()]), "got 404"),
    "unanswered": (lambda: (GOOD, [exchange(), exchange(status=None)], [turn()]), "got None"),
    "broken off": (lambda: (GOOD, [exchange(whole=False)], [turn()]), "not answered to the end"),
    "no end": (lambda: (GOOD, [exchange(received=b"data: {}\n\n")], [turn()]), "a stream ended with"),
    "in one piece": (lambda: (GOOD, [exchange(headers={})], [turn()]), "unlike it was asked"),
    "no tools": (lambda: (GOOD, [exchange(sent=b'{"stream":true}')], [turn()]), "no request offered tools"),
    "no turn": (lambda: (GOOD, [exchange()], []), "recorded no turn"),
    "failed": (lambda: (GOOD, [exchange()], [turn(state="failed", error="lost")]), "failed: lost"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_named(name: str) -> None:
    run, said = BAD[name]
    faults = judge(CLIENT, *run()).faults
    assert any(said in fault for fault in faults), faults
