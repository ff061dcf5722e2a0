"""A server that promises keep-alive and closes all the same, as llama.cpp does after every stream."""

from __future__ import annotations

import orjson

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import Finished
from tests.backends.llamacpp.harness import Recorder, raw_server

EVENTS = (
    {"content": "a", "tokens": [1], "tokens_predicted": 1},
    {"content": "", "tokens": [], "tokens_predicted": 1, "stop": True, "stop_type": "eos"},
)
BODY = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in EVENTS)
REPLY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: keep-alive\r\n"
    b"Keep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
) % (len(BODY), BODY)


async def test_the_next_request_does_not_go_into_a_connection_that_closes() -> None:
    heads: list[bytes] = []

    def answer(head: bytes) -> bytes:
        heads.append(head)
        return REPLY

    async with raw_server(answer) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(piece_tokens=0))
        for _ in range(20):
            generation = backend.generation("completion", {"prompt": "p"}, 5)
            sink = Recorder(generation)
            assert isinstance(await generation.run(0, sink), Finished)
            assert sink.text == "a"
        await backend.aclose()
    assert len(heads) == 20, "each in a connection of its own, none sent twice"
