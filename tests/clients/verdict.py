"""What a client's run says about the service, from the wire and from the turns' records.

Exit codes mislead: clients end with 0 on errors and try again behind one's back. A run is good when every
request was answered without an error, every stream came to its end in its API's own way, every turn is done,
and the client printed what the model said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.clients.runner import Ran
from tests.clients.spec import Client
from tests.clients.tap import Exchange

#: The last event of a whole stream, by path.
_LAST = {
    "/v1/chat/completions": "[DONE]",
    "/v1/messages": '"message_stop"',
    "/v1/responses": '"response.completed"',
}
#: How mini-swe-agent prints that it gave up; it then ends with exit code 0.
_GAVE_UP = re.compile(r"^Exit:\s*^(\w+(?:Error|Exceeded))\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run came to. `faults` says what is wrong, in sentences; none: all is well."""

    client: str
    version: str
    api: str
    streamed: bool
    tools: int
    """The most tools that a request offered."""
    prompt_tokens: int
    """Of the longest prompt."""
    turns: int
    preemptions: int
    finish_reasons: tuple[str, ...]
    seconds: float
    faults: tuple[str, ...]
    gave_up: str = ""
    """The error by which the client named its end, if it did: a small model's replies are reason enough."""


def judge(client: Client, ran: Ran, exchanges: Sequence[Exchange], turns: Sequence[dict[str, Any]]) -> Seen:
    """Look at a run."""
    asked = [one for one in exchanges if one.endpoint == client.api and one.method == "POST"]
    return Seen(
        client=client.name,
        version=client.installed_version() or "?",
        api=client.api,
        streamed=any(one.streamed for one in asked),
        tools=max((len(one.body.get("tools") or ()) for one in asked), default=0),
        prompt_tokens=max((int(turn["prompt_tokens"] or 0) for turn in turns), default=0),
        turns=len(turns),
        preemptions=sum(int(turn["preemptions"]) for turn in turns),
        finish_reasons=tuple(str(turn["finish_reason"]) for turn in turns),
        seconds=ran.seconds,
        faults=tuple(_faults(client, ran, exchanges, asked, turns)),
        gave_up=gave_up[1] if (gave_up := _GAVE_UP.search(ran.output)) else "",
    )


def _faults(
    client: Client,
    ran: Ran,
    exchanges: Sequence[Exchange],
    asked: Sequence[Exchange],
    turns: Sequence[dict[str, Any]],
) -> list[str]:
    faults = []
    if ran.exit_code != 0:
        how = "had to be ended" if ran.exit_code is None else f"ended with exit code {ran.exit_code}"
        faults.append(f"it {how}: {(ran.complaints or ran.output)[-400:].strip()}")
    if not asked:
        faults.append(f"it sent nothing to {client.api}")
    for one in exchanges:
        if one.status is None or one.status >= 400:
            faults.append(
                f"{one.method} {one.path} got {one.status}: {one.received[:300].decode(errors='replace')}"
            )
        elif not one.whole:
            faults.append(f"{one.method} {one.path} was not answered to the end")
    for one in asked:
        if one.streamed != (one.body.get("stream") is True):
            faults.append(
                f"a reply was {'a stream' if one.streamed else 'in one piece'}, unlike it was asked"
            )
        if one.streamed and not any(_LAST[client.api] in line for line in one.data[-1:]):
            faults.append(f"a stream ended with {one.data[-1:]}")
    if any(one.streamed for one in asked) != client.streams:
        faults.append(f"it asked for {'no' if client.streams else 'a'} stream")
    if client.tools and not any(one.body.get("tools") for one in asked):
        faults.append("no request offered tools")
    if not turns:
        faults.append("the service recorded no turn")
    faults += [
        f"turn {turn['id']} is {turn['state']}: {turn['error']}" for turn in turns if turn["state"] != "done"
    ]
    return faults
