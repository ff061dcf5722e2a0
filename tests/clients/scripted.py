"""A simulated engine that plays an agent's loop: a call, and, once its result is there, the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.simulated import ScriptedReply, SimulatedConfig, SimulatedEngine, serve_simulated_in_thread
from backends.simulated.app import build_app
from tests.clients.spec import Client

TEXT = "The quick brown fox jumps over the lazy dog. " * 10
ANSWER = "The notes are written now."
# A call comes in pieces, as from a real model.
_PIECE = 24


class ScriptedEngine(SimulatedEngine):
    """Answers a chat with tools by how many results it already holds, any other one with `plain`.

    `steps[n]` is played after n results, the last of them also after more. The engine claims to be a thinking
    model: the service then asks for plain chats too as chats, not as token ids, which have no script.
    """

    def __init__(self, config: SimulatedConfig, plain: ScriptedReply, steps: Sequence[ScriptedReply]) -> None:
        super().__init__(config)
        self.playing = False
        """Whether the first step has been asked for; without steps, a plain answer."""
        plain_app, *step_apps = (
            build_app(replace(self.config, scripts=(script,)), self._loop, self.faults, self.running)
            for script in (plain, *steps)
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["type"] == "http" else ""
            if path == "/props":
                await JSONResponse(await _thinking(plain_app, scope, receive))(scope, receive, send)
            elif path == "/v1/chat/completions":
                body, again = await _read(receive)
                chosen = plain_app
                if body.get("tools"):
                    chosen = step_apps[min(_results(body), len(step_apps) - 1)]
                first = step_apps[0] if step_apps else plain_app
                self.playing = self.playing or chosen is first
                await chosen(scope, again, send)
            else:
                await plain_app(scope, receive, send)

        self.app = app


@contextmanager
def scripted(client: Client, file: Path, config: SimulatedConfig) -> Iterator[tuple[ScriptedEngine, str]]:
    """An engine that plays the client's loop (the call writes `TEXT` into the file), and its address."""

    def filled(text: str) -> str:
        return text.replace("FILE", str(file)).replace("TEXT", TEXT).replace("ANSWER", ANSWER)

    calls = [
        call(one.tool, filled(one.arguments)) for one in (client.write, client.finish) if one is not None
    ]
    answer = say(filled(client.answer))
    engine = ScriptedEngine(config, answer, [*calls, answer] if calls else [])
    with serve_simulated_in_thread(engine) as url:
        yield engine, url


def say(text: str) -> ScriptedReply:
    """A reply of words."""
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1].rstrip()
    return ScriptedReply("", tuple({"content": word} for word in words))


def call(tool: str, arguments: str, first: str = "") -> ScriptedReply:
    """A reply that calls a tool, after `first`, with these arguments as JSON."""
    head = {"index": 0, "id": "call-1", "type": "function", "function": {"name": tool, "arguments": ""}}
    pieces = [arguments[at : at + _PIECE] for at in range(0, len(arguments), _PIECE)]
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in pieces]
    said = [{"content": first}] if first else []
    return ScriptedReply("", (*said, *({"tool_calls": [part]} for part in (head, *rest))), "tool_calls")


async def _thinking(app: ASGIApp, scope: Scope, receive: Receive) -> dict[str, Any]:
    """The engine's properties with a template that thinks."""
    raw = b""

    async def take(message: Message) -> None:
        nonlocal raw
        raw += message.get("body", b"")

    await app(scope, receive, take)
    properties: dict[str, Any] = orjson.loads(raw)
    return {**properties, "chat_template": "<think>" + properties["chat_template"]}


def _results(body: dict[str, Any]) -> int:
    return sum(message.get("role") == "tool" for message in body["messages"])


async def _read(receive: Receive) -> tuple[dict[str, Any], Receive]:
    """The request's JSON, and a `receive` that gives it again."""
    raw = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        raw += message.get("body", b"")
        if not message.get("more_body"):
            message = {"type": "http.request", "body": raw, "more_body": False}
            break
    first: list[Message] = [message]

    async def again() -> Message:
        return first.pop() if first else await receive()

    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = {}
    return body if isinstance(body, dict) else {}, again
