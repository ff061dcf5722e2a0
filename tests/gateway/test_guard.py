"""Who may talk to the service: hosts, web pages, the admin key, and how many at once."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import anyio
import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from orchestrator.broker import Broker, OutputReader
from orchestrator.config import Config, ConfigError, parse_config
from orchestrator.gateway import create_app
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.guard import Hosts, OpenRequests, Origins, host_name
from orchestrator.keys import hash_key
from tests.gateway.harness import (
    BOUND_S,
    PERMANENT_KEYS,
    FakeEngines,
    application,
    chat,
    read_stream,
    service,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
EVIL = "http://evil.example"
REFUSALS = {"unknown_host", "bad_host", "origin_not_allowed"}


def config(server: str = "", agents: str = "editor: {priority: foreground}", more: str = "") -> Config:
    """One backend, and what the test needs."""
    return parse_config(
        f'server: {{{server}}}\nbackends: [{{name: local, model: tiny, url: "http://127.0.0.1:1"}}]\n'
        f"agents: {{{agents}}}\n{more}"
    )


OPEN = config(more="default_agent: editor\n")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a reply in OpenAI's shape; one line."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


# Host ---------------------------------------------------------------------------------------------


def ours(name: str, server: str = "") -> bool:
    found = host_name(name.encode())
    return found is not None and Hosts(config(server).server).ours(found)


@pytest.mark.parametrize(
    ("server", "host", "answered"),
    [
        ("", "localhost", True),
        ("", "LocalHost:8700", True),
        ("", "localhost.:8700", True),
        ("", "127.0.0.1:8700", True),
        ("", "127.9.9.9", True),
        ("", "[::1]:8700", True),
        ("", "[0:0:0:0:0:0:0:1]", True),
        ("", "evil.example:8700", False),
        ("", "localhost.evil.example", False),
        ("", "127.0.0.1.evil.example", False),
        ("", "192.168.1.4:8700", False),
        ("", "0.0.0.0:8700", False),
        ("", "gpu-box", False),
        ("allowed_hosts: [GPU-Box.lan, 192.168.1.4]", "gpu-box.LAN:8700", True),
        ("allowed_hosts: [GPU-Box.lan, 192.168.1.4]", "192.168.1.4:8700", True),
        ("allowed_hosts: [gpu-box.lan]", "other.gpu-box.lan", False),
        ("host: gpu-box", "gpu-box:8700", True),
        ("host: gpu-box", "evil.example", False),
        ("host: 0.0.0.0", "192.168.1.4:8700", True),
        ("host: 0.0.0.0", "[fd00::1]", True),
        ("host: 0.0.0.0", "evil.example", False),
        ("host: '::'", "[fd00::1]:8700", True),
        ("", "", False),
        ("", "localhost evil", False),
        ("", "user@localhost", False),
        ("", "localhost/x", False),
        ("", "localhost:80:80", False),
        ("", "[localhost]", False),
        ("", "::1", False),
        ("", "[::1", False),
    ],
)
def test_hosts(server: str, host: str, answered: bool) -> None:
    assert ours(host, server) is answered


@given(st.binary(max_size=40) | st.text(alphabet="localhst127.:[]@/ ", max_size=20).map(str.encode))
def test_any_host_header_is_a_name_or_nothing(value: bytes) -> None:
    name = host_name(value)
    if name is None:
        return
    assert name == name.lower()
    assert all(character.isalnum() or character in "._-:" for character in name)
    assert host_name(f"[{name}]".encode() if ":" in name else name.encode()) in (name, name.removesuffix("."))


@given(st.ip_addresses())
def test_on_loopback_only_its_own_addresses_are_ours(address: Any) -> None:
    shown = f"[{address}]:8700" if address.version == 6 else f"{address}:8700"
    assert ours(shown) is ip_address(str(address)).is_loopback
    assert ours(shown, "host: 0.0.0.0")


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/swarm/state", "/nothing", CHAT])
async def test_a_rebound_page_gets_nothing(redis: Redis, path: str) -> None:
    async with application(redis, config=OPEN) as client:
        response = await client.get(path, headers={"host": "evil.example:8700"})
    assert (response.status_code, error_of(response)["code"]) == (421, "unknown_host")
    assert "server.allowed_hosts" in error_of(response)["message"]


RAW: list[tuple[bytes, int, str]] = [
    (b"GET /swarm/state HTTP/1.1\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.0\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.1\r\nhost:\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.1\r\nhost: a b\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.1\r\nhost: \xff\r\n\r\n", 400, "bad_host"),
    (b"GET /swarm/state HTTP/1.1\r\nHOST: Evil.example:8700\r\n\r\n", 421, "unknown_host"),
    (b"GET /healthz HTTP/1.1\r\nhost: evil.example\r\n\r\n", 421, "unknown_host"),
    # Other spellings of a path do not lead around the admin key.
    (b"GET /swarm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 401, "admin_key_required"),
    (b"GET /%73warm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 401, "admin_key_required"),
    (b"GET /swarm%2fstate HTTP/1.1\r\nhost: localhost\r\n\r\n", 401, "admin_key_required"),
    (b"GET http://localhost/swarm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 401, "admin_key_required"),
    (b"HEAD /swarm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 401, ""),
    (b"GET //swarm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "not_found"),
    (b"GET /v1/../swarm/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "not_found"),
    (b"GET /SWARM/state HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "not_found"),
    (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 404, "not_found"),
    (b"CONNECT evil.example:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "bad_http"),
]


async def test_hosts_and_paths_on_the_wire(redis: Redis, valkey_url: str) -> None:
    keyed = config(ADMIN_KEY, more="default_agent: editor\n")
    async with service(redis, valkey_url, config=keyed) as swarm:
        for request, status, code in RAW:
            async with await anyio.connect_tcp("127.0.0.1", swarm.port) as stream:
                await stream.send(request)
                with anyio.fail_after(BOUND_S):
                    reply = await stream.receive()
            assert reply.startswith(b"HTTP/1.1 %d " % status), (request, reply)
            assert b'"code":"%b"' % code.encode() in reply or not code, (request, reply)


async def test_errors_have_the_shape_of_the_api_that_was_asked(redis: Redis) -> None:
    async with application(redis, config=OPEN) as client:
        messages = await client.post("/v1/messages", json={}, headers={"origin": EVIL})
        ollama = await client.post("/api/chat", json={}, headers={"origin": EVIL})
    assert messages.status_code == ollama.status_code == 403
    assert messages.json()["type"] == "error"
    assert isinstance(ollama.json()["error"], str)


# Web pages ----------------------------------------------------------------------------------------


PAGES: list[dict[str, str]] = [
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://127.0.0.1:8700"},
    {"origin": "file://"},
    {"origin": "vscode-webview://1c2d"},
    {"origin": EVIL, "content-type": "text/plain"},
    {"origin": EVIL, "sec-fetch-site": "none"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "Cross-Site "},
    {"sec-fetch-site": "anything"},
]
PROGRAMS: list[dict[str, str]] = [
    {},
    # What Node's fetch sends.
    {"sec-fetch-mode": "cors", "content-type": "text/plain;charset=UTF-8"},
    # A user who types the address.
    {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    {"sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", PAGES)
async def test_a_web_page_cannot_drive_it(redis: Redis, headers: dict[str, str]) -> None:
    async with application(redis, config=OPEN) as client:
        replies = [
            await client.post(CHAT, content=orjson.dumps(chat()), headers=headers),
            await client.get("/swarm/state", headers=headers),
            await client.post("/swarm/turns/turn-1/cancel", headers=headers),
            await client.get("/v1/models", headers=headers),
        ]
    for response in replies:
        assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")
    assert [key async for key in redis.scan_iter("*")] == []


@pytest.mark.parametrize("headers", PROGRAMS)
async def test_programs_notice_nothing(redis: Redis, headers: dict[str, str]) -> None:
    async with application(redis, config=OPEN) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        # A body that is refused for what it is, not for who sent it.
        assert (await client.post(CHAT, content=b"{", headers=headers)).status_code == 400


async def test_cors_is_off_also_for_allowed_origins(redis: Redis) -> None:
    allowed = config(f"allowed_origins: ['{EVIL}']", more="default_agent: editor\n")
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for one, expected in ((OPEN, 403), (allowed, 405)):
        async with application(redis, config=one) as client:
            response = await client.options(CHAT, headers={"origin": EVIL, **preflight})
            reading = await client.get("/v1/models", headers={"origin": EVIL})
        assert response.status_code == expected
        assert reading.status_code == (403 if one is OPEN else 200)
        for reply in (response, reading):
            assert not [name for name in reply.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("allowed", "origin", "let_in"),
    [
        ("http://localhost:3000", "http://localhost:3000", True),
        ("http://localhost:3000", "HTTP://LocalHost:3000", True),
        ("http://localhost:3000", "http://localhost:3001", False),
        ("http://localhost:3000", "http://localhost", False),
        ("http://localhost:3000", "http://localhost:3000.evil.example", False),
        ("vscode-webview://*", "vscode-webview://1c2d-3e", True),
        ("vscode-webview://*", "http://vscode-webview", False),
        ("vscode-webview://*", "vscode-webview", False),
        ("app://obsidian.md", "app://obsidian.md", True),
        ("app://obsidian.md", "app://other", False),
        ("file://", "file://", True),
        ("file://", "null", False),
    ],
)
def test_allowed_origins(allowed: str, origin: str, let_in: bool) -> None:
    assert Origins(config(f"allowed_origins: ['{allowed}']").server.allowed_origins).allows(origin) is let_in


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        ("null", "any web page can send null"),
        ("Null", "any web page can send null"),
        ("*", "is not an origin such as"),
        ("http://*", "would let every web page in"),
        ("https://*", "would let every web page in"),
        ("http://", "is not an origin such as"),
        ("http://a/b", "is not an origin such as"),
        ("http://*.evil.example", "is not an origin such as"),
        ("localhost:3000", "is not an origin such as"),
        ("", "is not an origin such as"),
    ],
)
def test_origins_that_cannot_be_allowed(origin: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(f"allowed_origins: ['{origin}']")


WEB = st.sampled_from(["http", "https"])


@given(scheme=WEB | st.just("vscode-webview"), host=st.text(max_size=20), port=st.integers(0, 99_999))
def test_no_page_of_the_web_comes_in_by_a_scheme_of_apps(scheme: str, host: str, port: int) -> None:
    origins = Origins(("vscode-webview://*", "http://localhost:3000"))
    origin = f"{scheme}://{host}:{port}"
    assert origins.allows(origin) is (scheme == "vscode-webview" or origin.lower() == "http://localhost:3000")


@given(st.text(max_size=30) | st.from_regex(r"\A[a-z]{1,8}://[a-z*.]{0,9}(:[0-9]{1,5})?\Z"))
def test_what_the_config_allows_lets_itself_in_and_never_null(origin: str) -> None:
    try:
        text = orjson.dumps([origin]).decode()
        allowed = config(f"allowed_origins: {text}").server.allowed_origins
    except ConfigError:
        return
    assert Origins(allowed).allows(origin.replace("*", "any"))
    assert not Origins(allowed).allows("null")


# Keys ---------------------------------------------------------------------------------------------

AGENT, ADMIN = {"authorization": "Bearer agent"}, {"authorization": "Bearer op"}
KEYED = f"editor: {{priority: foreground, key: {hash_key('agent')}}}"
ADMIN_KEY = f"admin_key: {hash_key('op')}"
ADMIN_PATHS = [
    *(("GET", path) for path in ("/swarm/state", "/swarm/turns", "/swarm/turns/turn-1", "/swarm/nothing")),
    *(("POST", f"/swarm/turns/turn-1/{action}") for action in ("preempt", "resume", "cancel")),
]


@pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
async def test_the_admin_api_takes_the_admin_key_only(redis: Redis, method: str, path: str) -> None:
    async with application(redis, config=config(ADMIN_KEY, KEYED)) as client:

        async def ask(headers: dict[str, str]) -> tuple[int, str | None]:
            response = await client.request(method, path, headers=headers)
            code = response.json().get("error", {}).get("code")
            return response.status_code, code

        assert await ask({}) == (401, "admin_key_required")
        assert await ask({"authorization": "Bearer wrong"}) == (401, "admin_key_required")
        assert await ask({"x-swarm-agent": "editor"}) == (401, "admin_key_required")
        assert await ask(AGENT) == (403, "admin_only")
        assert await ask({"x-api-key": "agent"}) == (403, "admin_only")
        for opens in (ADMIN, {"x-api-key": "op"}, {**AGENT, "x-api-key": "op"}):
            assert (await ask(opens))[0] in (200, 404)


async def test_the_admin_key_is_no_agents(redis: Redis) -> None:
    async with application(redis, config=config(ADMIN_KEY, KEYED)) as client:
        response = await client.post(CHAT, json=chat(), headers=ADMIN)
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")


async def test_without_an_admin_key_the_admin_api_is_open_on_loopback(redis: Redis) -> None:
    async with application(redis, config=config(agents=KEYED)) as client:
        assert (await client.get("/swarm/state")).status_code == 200
        assert (await client.get("/swarm/state", headers=AGENT)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/api/tags", "/", "/v1/turns/turn-1/output"])
async def test_off_loopback_only_health_is_open(redis: Redis, path: str) -> None:
    exposed = config(f"host: 0.0.0.0, {ADMIN_KEY}", KEYED)
    async with application(redis, config=exposed) as client:
        assert (await client.get("/healthz")).status_code == 503
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"x-swarm-agent": "editor"})).status_code == 401
        assert (await client.get(path, headers=AGENT)).status_code in (200, 404)


def test_every_route_is_an_agents_an_admins_or_health() -> None:
    """A route elsewhere would be neither behind an agent's key nor behind the admin's."""
    redis = Redis()
    broker = Broker(redis)
    app = create_app(OPEN, broker, OutputReader(broker, redis, "g"), "g", FakeEngines())
    paths = [getattr(route, "path", "") for route in app.routes]
    assert "/v1/chat/completions" in paths
    known = ("/v1/", "/api/", "/swarm/")
    assert {path for path in paths if not path.startswith(known)} == {"/rerank", "/healthz", "/openapi.json"}


# How many -----------------------------------------------------------------------------------------


def test_open_requests_are_counted_in_total_and_by_agent() -> None:
    requests = OpenRequests(most=3, most_of_agent=2)
    requests.enter("a")
    requests.enter("a")
    with pytest.raises(ApiError, match="a has 2 requests open") as caught:
        requests.enter("a")
    assert (caught.value.status, caught.value.code) == (429, "too_many_requests")
    assert dict(caught.value.headers)[b"retry-after"].isdigit()
    requests.enter(None)
    with pytest.raises(ApiError, match="3 requests are open"):
        requests.enter("b")
    requests.leave("a")
    requests.enter("b")
    with pytest.raises(ApiError, match="3 requests are open"):
        requests.enter("a")


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_whoever_leaves_makes_room(agents: list[str | None], most: int, most_of_agent: int) -> None:
    requests = OpenRequests(most, most_of_agent)
    inside: list[str | None] = []
    for agent in agents:
        full = len(inside) >= most or (agent is not None and inside.count(agent) >= most_of_agent)
        try:
            requests.enter(agent)
        except ApiError:
            assert full
            if inside:
                requests.leave(inside.pop(0))
        else:
            assert not full
            inside.append(agent)
    for agent in inside:
        requests.leave(agent)
    for _ in range(min(most, most_of_agent)):
        requests.enter("a")


async def test_too_many_streams_are_429_and_a_place_comes_free(redis: Redis, valkey_url: str) -> None:
    limited = config(
        "max_requests: 3, max_requests_per_agent: 2, header_wait_s: 0",
        "editor: {priority: foreground}, indexer: {priority: background}",
        "default_agent: editor\n",
    )
    async with service(redis, valkey_url, config=limited) as swarm:
        post = swarm.client.post

        def stream(agent: str) -> Any:
            return swarm.client.stream("POST", CHAT, json=chat(stream=True), headers={"x-swarm-agent": agent})

        async with stream("editor") as first, stream("editor"):
            refused = await post(CHAT, json=chat())
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "2"
            assert error_of(refused)["message"] == "too busy: editor has 2 requests open"
            async with stream("indexer"):
                total = await post(CHAT, json=chat(), headers={"x-swarm-agent": "indexer"})
                assert error_of(total)["message"] == "too busy: 3 requests are open"
                # Whoever looks after the service still can.
                assert (await swarm.client.get("/swarm/state")).status_code == 200
                assert (await swarm.client.get("/healthz")).status_code in (200, 503)
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.finish()
            await read_stream(first)
            async with stream("editor") as again:
                assert again.status_code == 200
