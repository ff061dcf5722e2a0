"""The HTTP calls that the adapter and its generations make of a llama.cpp server.

Connections are not kept: the server announces keep-alive but closes after every SSE reply, and a
reuse within two milliseconds fails without an answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from backends.llamacpp import told
from backends.llamacpp.options import LlamaCppOptions
from backends.llamacpp.wire import (
    TRANSPORT_ERRORS,
    EngineUnreachable,
    error_of,
    read_answer,
    read_json,
    unavailable,
)
from backends.protocol import BackendError, EngineRefused, EngineSlot, EngineUnavailable, KvLayout

CONNECT_S = 5.0
ASK_S = 60.0
HEALTH_S = 20.0
UNREACHABLE_S = 1.0
SERVER_BATCH = 2048
JSON_TYPE = "application/json"
# Nothing is unpacked: a few bytes may become as many as there is memory.
UNPACKED = {"Accept-Encoding": "identity"}


class LlamaCppClient:
    """One server, and what a generation must know of it.

    `native_park`: a processing slot can be parked. `piece_tokens`: prompts go in pieces of that many
    tokens, 0: whole. `batch_tokens`: how much of a prompt may be under way when a cut comes.
    `pieces_in_slot`: by slot, the prompt that was last brought in by pieces. `slot_context`: the most tokens
    that a slot can hold. `generates`: whether there has
    been a turn that generates, and so leaves KV that somebody goes on from. `shared_kv`: all slots draw on
    one pool. `one_input`: held by the bulk turn whose input is evaluated by itself.
    """

    def __init__(self, url: str, options: LlamaCppOptions | None = None) -> None:
        """`url` is the server's base address."""
        self._options = options = options or LlamaCppOptions()
        self._client = httpx.AsyncClient(
            base_url=url,
            transport=AiohttpTransport(client=_session),
            headers=UNPACKED,
            timeout=httpx.Timeout(ASK_S, connect=CONNECT_S),
            trust_env=False,
        )
        self.native_park = False
        self.batch_tokens = options.batch_tokens or SERVER_BATCH
        self.piece_tokens = options.pieces()
        self.stop_bound_s = options.stop_bound_s
        self.silence_s = options.silence_s
        self.pieces_in_slot: dict[int, list[int]] = {}
        self.slot_context = told.MOST_TOKENS
        self.generates = False
        self.shared_kv = options.kv_layout is KvLayout.UNIFIED
        self.one_input = anyio.Lock()
        self._spread = 0
        self._spread_over = anyio.Event()

    async def healthy(self) -> bool:
        """Whether the server answers at all."""
        try:
            response = await self.request("GET", "/health", timeout_s=HEALTH_S)
        except EngineUnavailable:
            return False
        return response.status_code == 200

    async def slots(self) -> list[EngineSlot]:
        """All slots as the server reports them. Raises EngineUnavailable."""
        listed = told.objs(await self.ask("GET", "/slots"))
        if any(slot.get("id") != place or "is_processing" not in slot for place, slot in enumerate(listed)):
            raise EngineUnavailable("the engine lists its slots in an unknown shape")
        return [
            EngineSlot(
                id=place,
                processing=bool(slot["is_processing"]),
                parked=bool(slot.get("is_preempted")),
                context=told.count(slot.get("n_ctx", 0)),
                kv_tokens=None if (held := slot.get("n_prompt_tokens")) is None else told.count(held),
            )
            for place, slot in enumerate(listed)
        ]

    async def erase(self, slot: int) -> None:
        """Free an idle slot's KV. Raises EngineUnavailable."""
        self.pieces_in_slot.pop(slot, None)
        await self.ask("POST", f"/slots/{slot}?action=erase", {})

    async def render(self, body: dict[str, Any]) -> str:
        """The prompt text of a chat request, by the server's template.

        A 500 is the request's fault here: the server says so of images that it cannot read, and of messages
        and tools that its template does not take. Raises EngineRefused, EngineUnavailable.
        """
        response = await self.request("POST", "/apply-template", body)
        if response.status_code == 500 and response.headers.get("content-type", "").startswith(JSON_TYPE):
            raise EngineRefused(400, str(error_of(500, response.content)))
        if response.status_code != 200:
            raise error_of(response.status_code, response.content)
        return told.text(told.obj(read_json(response.content)).get("prompt"))

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt; `special`: with a leading BOS and parsed control tokens."""
        body = {"content": text, "add_special": special, "parse_special": special}
        reply = told.obj(await self.ask("POST", "/tokenize", body))
        if reply.get("tokens") is None:
            raise told.strange()
        return told.ids(reply["tokens"])

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids, control tokens by their names. Raises EngineRefused, EngineUnavailable."""
        return told.text(told.obj(await self.ask("POST", "/detokenize", {"tokens": tokens})).get("content"))

    @asynccontextmanager
    async def spread(self) -> AsyncIterator[None]:
        """For the block the engine may use any of its slots: nobody's turn is sent to one of them."""
        if not self._spread:
            self._spread_over = anyio.Event()
        self._spread += 1
        try:
            yield
        finally:
            self._spread -= 1
            if not self._spread:
                self._spread_over.set()

    async def open_stream(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Start a streaming request; returns once the engine sent its headers.

        Raises EngineRefused, EngineUnavailable. Nothing bounds the wait: a prefill may take minutes.
        """
        while self._spread:
            await self._spread_over.wait()
        request = self._client.build_request(
            "POST",
            path,
            content=orjson.dumps(body),
            headers={"Content-Type": "application/json"},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        try:
            response = await self._client.send(request, stream=True)
            if response.status_code == 200:
                return response
            try:
                with anyio.fail_after(ASK_S):
                    failure = error_of(response.status_code, await read_answer(response))
            finally:
                await response.aclose()
        except TRANSPORT_ERRORS as error:
            raise unavailable(error) from None
        raise failure

    async def wait_idle(self, slot: int, bound_s: float) -> EngineSlot | None:
        """Wait until the engine says that the slot does not decode: what it says then, None past the bound.

        Raises EngineUnavailable once nobody has been listening there for a second: then no slot decodes.
        """
        with anyio.CancelScope(shield=True), anyio.move_on_after(bound_s):
            pause = 0.0
            unreachable_since: float | None = None
            while True:
                try:
                    state = (await self.slots())[slot]
                    if not state.processing and not state.parked:
                        return state
                    unreachable_since = None
                except EngineUnreachable:
                    now = anyio.current_time()
                    unreachable_since = unreachable_since or now
                    if now - unreachable_since >= UNREACHABLE_S:
                        raise
                except (BackendError, IndexError):
                    unreachable_since = None
                await anyio.sleep(pause)
                pause = min(pause + 0.005, 0.1)
        return None

    async def slot_report(self, slot: int) -> dict[str, Any] | None:
        """All that the engine says of a slot; None when it does not answer."""
        try:
            report = (await self.ask("GET", "/slots"))[slot]
        except (BackendError, IndexError, KeyError, TypeError):
            return None
        return report if isinstance(report, dict) else None

    async def park(self, slot: int) -> bool:
        """Park a processing slot natively; False when the engine did not."""
        try:
            reply = await self.ask("POST", f"/slots/{slot}?action=park", {})
        except BackendError:
            return False
        return isinstance(reply, dict) and bool(reply.get("is_preempted", True))

    async def unpark(self, slot: int) -> None:
        """Let a parked slot go on."""
        await self.ask("POST", f"/slots/{slot}?action=unpark", {})

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One JSON request and its answer. Raises EngineRefused, EngineUnavailable."""
        response = await self.request(method, path, body)
        if response.status_code != 200:
            raise error_of(response.status_code, response.content)
        return read_json(response.content)

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = ASK_S
    ) -> httpx.Response:
        """One JSON request and its whole answer, whatever its status; without a timeout the caller bounds it.

        Raises EngineUnavailable.
        """
        content = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if content else None
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        request = self._client.build_request(method, path, content=content, headers=headers, timeout=timeout)
        try:
            # Of all of it: an answer that comes byte by byte is never late for the next.
            with anyio.fail_after(timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    answer = await read_answer(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None
        except TRANSPORT_ERRORS as error:
            raise unavailable(error) from None
        is_json = response.headers.get("content-type", "").startswith(JSON_TYPE)
        headers = {"Content-Type": JSON_TYPE} if is_json else None
        return httpx.Response(response.status_code, headers=headers, content=answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)
