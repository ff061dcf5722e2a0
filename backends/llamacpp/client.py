"""The HTTP calls that the adapter and its generations make of a llama.cpp server.

Connections are not kept: the server announces keep-alive but closes after every SSE reply, and a
reuse within two milliseconds fails without an answer.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import anyio
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from backends.llamacpp.options import LlamaCppOptions
from backends.llamacpp.wire import TRANSPORT_ERRORS, EngineUnreachable, error_of, read_json, unavailable
from backends.protocol import BackendError, EngineSlot, EngineUnavailable

CONNECT_S = 5.0
ASK_S = 60.0
HEALTH_S = 20.0
UNREACHABLE_S = 1.0
SERVER_BATCH = 2048


class LlamaCppClient:
    """One server, and what a generation must know of it.

    `native_park`: a processing slot can be parked. `piece_tokens`: prompts go in pieces of that many
    tokens, 0: whole. `batch_tokens`: how much of a prompt may be under way when a cut comes.
    `pieces_in_slot`: by slot, the prompt that was last brought in by pieces.
    """

    def __init__(self, url: str, options: LlamaCppOptions | None = None) -> None:
        """`url` is the server's base address."""
        self._options = options = options or LlamaCppOptions()
        self._client = httpx.AsyncClient(
            base_url=url,
            transport=AiohttpTransport(client=_session),
            timeout=httpx.Timeout(ASK_S, connect=CONNECT_S),
            trust_env=False,
        )
        self.native_park = False
        self.batch_tokens = options.batch_tokens or SERVER_BATCH
        self.piece_tokens = options.pieces()
        self.stop_bound_s = options.stop_bound_s
        self.silence_s = options.silence_s
        self.pieces_in_slot: dict[int, list[int]] = {}

    async def healthy(self) -> bool:
        """Whether the server answers at all."""
        try:
            response = await self._client.get("/health", timeout=HEALTH_S)
        except TRANSPORT_ERRORS:
            return False
        return response.status_code == 200

    async def slots(self) -> list[EngineSlot]:
        """All slots as the server reports them. Raises EngineUnavailable."""
        try:
            return [
                EngineSlot(
                    id=int(slot["id"]),
                    processing=bool(slot["is_processing"]),
                    parked=bool(slot.get("is_preempted")),
                    context=int(slot.get("n_ctx", 0)),
                    kv_tokens=None if (told := slot.get("n_prompt_tokens")) is None else int(told),
                )
                for slot in await self.ask("GET", "/slots")
            ]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise EngineUnavailable("the engine lists its slots in an unknown shape") from None

    async def erase(self, slot: int) -> None:
        """Free an idle slot's KV. Raises EngineUnavailable."""
        self.pieces_in_slot.pop(slot, None)
        await self.ask("POST", f"/slots/{slot}?action=erase", {})

    async def render(self, body: dict[str, Any]) -> str:
        """The prompt text of a chat request, by the server's template."""
        reply = await self.ask("POST", "/apply-template", body)
        return str(reply["prompt"])

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt; `special`: with a leading BOS and parsed control tokens."""
        body = {"content": text, "add_special": special, "parse_special": special}
        reply = await self.ask("POST", "/tokenize", body)
        return [int(token) for token in reply["tokens"]]

    async def open_stream(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Start a streaming request; returns once the engine sent its headers.

        Raises EngineRefused, EngineUnavailable. Nothing bounds the wait: a prefill may take minutes.
        """
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
                    failure = error_of(response.status_code, await response.aread())
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
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = ASK_S
    ) -> httpx.Response:
        """One JSON request and its answer, whatever its status. Raises EngineUnavailable."""
        content = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if content else None
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            return await self._client.request(method, path, content=content, headers=headers, timeout=timeout)
        except TRANSPORT_ERRORS as error:
            raise unavailable(error) from None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)
