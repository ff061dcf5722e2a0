"""Requests that no HTTP client would send: broken framing, broken JSON, odd methods and headers.

Each is a sound one with something done to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from tests.fuzz.bodies import SAMPLES
from tests.fuzz.stage import AGENTS, MAX_BODY_BYTES

GETS = (
    *("/v1/models", "/v1/models/sim", "/healthz", "/swarm/state", "/swarm/turns?limit=5", "/openapi.json"),
    *("/api/tags", "/api/version", "/v1/turns/turn-1/output", "/v1/responses/x", "/swarm/prefixes"),
)


@dataclass
class Request:
    """A request in the making. `framed`: its length is told by the headers that are added at the end."""

    method: bytes
    path: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    version: bytes = b"HTTP/1.1"
    framed: bool = True
    newline: bytes = b"\r\n"
    done: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """What it is counted as."""
        if "other_path" in self.done or "other_method" in self.done:
            return "elsewhere"
        return f"{self.method.decode()} {self.path.decode()}".partition("?")[0]

    def data(self) -> bytes:
        """The bytes to send."""
        headers = list(self.headers)
        if self.framed and self.body:
            headers.append((b"Content-Length", b"%d" % len(self.body)))
        lines = [b" ".join((self.method, self.path, self.version))]
        lines += [name + b": " + value for name, value in headers]
        return self.newline.join([*lines, b"", self.body])


Change = Callable[[random.Random, Request], None]


def sound(rng: random.Random) -> Request:
    """A request that there is nothing wrong with."""
    headers = [(b"Host", b"localhost"), (b"Connection", b"close")]
    if rng.random() < 0.3:
        return Request(b"GET", rng.choice(GETS).encode(), headers, b"")
    path = rng.choice(list(SAMPLES))
    headers += [(b"Content-Type", b"application/json"), (b"X-Swarm-Agent", rng.choice(AGENTS).encode())]
    return Request(b"POST", path.encode(), headers, orjson.dumps(rng.choice(SAMPLES[path])))


# Bodies ------------------------------------------------------------------------------------------------


def cut_body(rng: random.Random, request: Request) -> None:
    """JSON that breaks off."""
    request.body = request.body[: rng.randrange(len(request.body) + 1)]


def flip_bytes(rng: random.Random, request: Request) -> None:
    """Some bytes are others."""
    body = bytearray(request.body)
    for _ in range(rng.randint(1, 8)):
        if body:
            body[rng.randrange(len(body))] = rng.randrange(256)
    request.body = bytes(body)


def splice(rng: random.Random, request: Request) -> None:
    """Something strange in the middle."""
    strange = rng.choice(
        [
            *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"NaN", b"1e400", b"-0"),
            *(b"/*x*/", b"[" * rng.choice([300, 20_000]), b'{"a":' * 300, b"9" * 400, b"\r\n"),
            *(b'"' + b"x" * 50_000 + b'"', bytes(rng.randrange(256) for _ in range(20))),
        ]
    )
    at = rng.randrange(len(request.body) + 1)
    request.body = request.body[:at] + strange + request.body[at:]


def replace_value(rng: random.Random, request: Request) -> None:
    """A value is replaced by text that need not be JSON."""
    value = rng.choice(
        [
            *(b"null", b"[]", b"{}", b'""', b"0", b"-1", b"1e308", b"18446744073709551616", b"true", b"01"),
            *(b'"\\ud83d"', b'"\\u0000"', b"0.1", b"[[[]]]", b'{"a":{"b":{}}}'),
            b'"' + b"\xf0\x9f\x98\x80" * 50 + b'"',
        ]
    )
    places = [at for at, byte in enumerate(request.body) if byte == ord(":")]
    if places:
        at = rng.choice(places) + 1
        ends = [end for end in (request.body.find(mark, at) for mark in (b",", b"}", b"]")) if end > 0]
        request.body = request.body[:at] + value + request.body[min(ends, default=len(request.body)) :]


def duplicate_key(rng: random.Random, request: Request) -> None:
    """The first key comes twice."""
    name = rng.choice([b"messages", b"model", b"max_tokens", b"stream", b"input", b"prompt"])
    value = rng.choice([b"5", b"null", b'"x"', b"[{}]", b"true"])
    request.body = request.body.replace(b"{", b'{"%b":%b,' % (name, value), 1)


def recode(rng: random.Random, request: Request) -> None:
    """Another encoding than the one there is."""
    request.body = request.body.decode(errors="replace").encode(rng.choice(["utf-16", "utf-32", "utf-7"]))


def no_body(rng: random.Random, request: Request) -> None:
    """Nothing, or next to nothing."""
    request.body = rng.choice([b"", b" ", b"\n" * 100, b"null", b"[]", b'"a"', b"{}", b"0"])


def large_body(rng: random.Random, request: Request) -> None:
    """About as much as is allowed."""
    size = MAX_BODY_BYTES + rng.choice([-1000, -1, 0, 1, 100_000])
    request.body = request.body + b" " * (size - len(request.body))


# Headers -----------------------------------------------------------------------------------------------


def add_header(rng: random.Random, request: Request) -> None:
    """A header that means something, or should not."""
    request.headers.insert(
        rng.randrange(len(request.headers) + 1),
        rng.choice(
            [
                (
                    b"Content-Type",
                    rng.choice([b"text/plain", b"multipart/form-data", b"", b"\xff", b"a/b;c=\0"]),
                ),
                (b"Content-Encoding", rng.choice([b"gzip", b"br", b"x"])),
                (b"Expect", rng.choice([b"100-continue", b"200-ok"])),
                (b"Upgrade", rng.choice([b"websocket", b"h2c"])),
                (b"Host", rng.choice([b"localhost", b"evil.example", b"", b"a b", b"[::1]", b"\xff"])),
                (b"Origin", rng.choice([b"null", b"http://evil.example", b"\xff"])),
                (b"Sec-Fetch-Site", b"cross-site"),
                (b"Authorization", rng.choice([b"Bearer x", b"Basic x", b"Bearer", b"\xff\xfe", b""])),
                (b"x-api-key", rng.choice([b"", b"x" * 5000, b"\xff"])),
                (b"X-Swarm-Agent", rng.choice([b"", b"nobody", b"\xff", b"editor", b"x" * 5000])),
                (b"X-Swarm-Priority", rng.choice([b"batch", b"foreground", b"\xff", b"99"])),
                (b"X-Swarm-Detach", rng.choice([b"true", b"no", b"\xff", b"maybe"])),
                (b"Accept", b"text/event-stream"),
                (b"Range", b"bytes=0-1"),
                (b"x", b"y" * rng.choice([10, 10_000, 40_000])),
                (b"bad name", b"x"),
                (b"", b"x"),
                (b"x\0", b"\0"),
                (b"folded", b"a\r\n b"),
            ]
        ),
    )


def drop_header(rng: random.Random, request: Request) -> None:
    """One is missing."""
    if request.headers:
        request.headers.pop(rng.randrange(len(request.headers)))


def many_headers(rng: random.Random, request: Request) -> None:
    """More than anybody needs."""
    request.headers += [(b"x-%d" % number, b"y") for number in range(rng.choice([100, 200, 5000]))]


def break_length(rng: random.Random, request: Request) -> None:
    """A length that is not the body's."""
    request.framed = False
    length = len(request.body)
    told: list[bytes | int] = [0, length - 1, length + 1, length * 2, 1 << 70, b"-1", b"+5", b"0x10", b"a"]
    told += [b"", b"5, 5", b" 5 "]
    for value in rng.sample(told, rng.choice([1, 1, 2])):
        request.headers.append((b"Content-Length", value if isinstance(value, bytes) else b"%d" % value))


def chunk(rng: random.Random, request: Request) -> None:
    """A body in chunks, which may be broken, or stop."""
    request.framed = False
    request.headers.append(
        (b"Transfer-Encoding", rng.choice([b"chunked"] * 6 + [b"gzip, chunked", b"x", b"Chunked"]))
    )
    if rng.random() < 0.1:
        request.headers.append((b"Content-Length", b"%d" % len(request.body)))
    size = rng.choice([1, 7, 100, 10_000])
    pieces = [request.body[at : at + size] for at in range(0, len(request.body), size)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"
    chunked += rng.choice([b"\r\n"] * 6 + [b"", b"x: y\r\n\r\n", b"x: " + b"y" * 40_000 + b"\r\n\r\n"])
    strange = [b"zz\r\n", b"-1\r\n", b"f" * 20 + b"\r\n", b"5;x=y\r\nabcde\r\n", b"5\nabcde\n", b""]
    if rng.random() < 0.3:
        at = rng.randrange(len(chunked))
        chunked = chunked[:at] + rng.choice(strange) + (chunked[at:] if rng.random() < 0.5 else b"")
    request.body = chunked


# The first line, and all of it -------------------------------------------------------------------------


def other_method(rng: random.Random, request: Request) -> None:
    """Another method, or none."""
    request.method = rng.choice(
        [
            *(
                b"HEAD",
                b"OPTIONS",
                b"PUT",
                b"PATCH",
                b"DELETE",
                b"GET",
                b"POST",
                b"TRACE",
                b"CONNECT",
                b"get",
            ),
            *(b"X" * 99, b"", b"\xff", b"PRI", b"PROPFIND"),
        ]
    )


def other_path(rng: random.Random, request: Request) -> None:
    """Another path, or none."""
    request.path = rng.choice(
        [
            *(b"/", b"*", b"", b"//", b"/v1/../v1/models", b"/%00", b"/%ff", b"/v1/models/%2e%2e%2f"),
            *(b"/\xff\xfe", b"http://localhost/healthz", b"http://evil.example/healthz", b"localhost"),
            *(b"/" + b"a" * 40_000, b"/a b", request.path + b"/", request.path + b"#x", b"/v1/models/\0"),
            *(request.path + b"?" + b"a=b&" * 2000, b"/v1/models/%F0%9F", b"/swarm/turns/%0d%0a/cancel"),
            *(b"/swarm/turns?limit=%ff", b"/v1//models"),
        ]
    )


def other_version(rng: random.Random, request: Request) -> None:
    """Another HTTP."""
    request.version = rng.choice(
        [b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"", b"HTP/1.1", b"HTTP/1.1 x"]
    )


def bare_newlines(rng: random.Random, request: Request) -> None:
    """Lines that end otherwise."""
    request.newline = rng.choice([b"\n", b"\r", b"\r\n ", b"\n\n"])


CHANGES: tuple[Change, ...] = (
    *(cut_body, flip_bytes, splice, replace_value, duplicate_key, recode, no_body, large_body),
    *(add_header, add_header, drop_header, many_headers, break_length, chunk, chunk),
    *(other_method, other_path, other_version, bare_newlines),
)


def make(rng: random.Random) -> Request:
    """A sound request with one to three things done to it."""
    request = sound(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        change = rng.choice(CHANGES)
        request.done.append(change.__name__)
        change(rng, request)
    return request
