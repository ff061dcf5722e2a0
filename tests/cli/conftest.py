"""A service with canned replies, and the command line as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from anyio.from_thread import BlockingPortal
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from orchestrator.cli.main import app
from orchestrator.gateway.server import serve
from tests.cli import samples


def error(status: int, message: str) -> tuple[int, bytes]:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "x"}}
    return status, orjson.dumps(body)


@dataclass
class FakeService:
    """Replies by method and path; whatever is not among them is a 404 as the service writes it."""

    url: str = ""
    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def reply(self, request: str, value: Any, status: int = 200) -> None:
        self.replies[request] = (status, value if isinstance(value, bytes) else orjson.dumps(value))

    async def answer(self, request: Request) -> Response:
        asked = f"{request.method} {request.url.path}"
        self.asked.append(asked)
        self.keys.append(request.headers.get("authorization"))
        status, body = self.replies.get(asked, error(404, "there is no such endpoint"))
        return Response(body, status, media_type="application/json")


@pytest.fixture
def service(portal: BlockingPortal) -> Iterator[FakeService]:
    fake = FakeService()
    fake.reply("GET /swarm/state", samples.busy_state())
    fake.reply("GET /swarm/turns", {"turns": [samples.summary(number, "running") for number in (1, 2)]})
    fake.reply(f"GET /swarm/turns/{samples.turn_id(3)}", samples.story())
    routes = [Route("/{path:path}", fake.answer, methods=["GET", "POST"])]
    future, port = portal.start_task(serve, Starlette(routes=routes), "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{port}"
    yield fake
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(10)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Swarm = Callable[..., Outcome]


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Swarm:
    """Run the command line with these words; an exception that escapes it is the test's."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")

    def run(*words: object) -> Outcome:
        result = CliRunner().invoke(app, [str(word) for word in words], prog_name="swarm")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run
