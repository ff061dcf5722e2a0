"""An adapter on a simulated engine, a sink that cuts at tokens, and a server that answers badly."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import anyio
import anyio.abc

from backends.llamacpp import LlamaCppBackend, LlamaCppOptions
from backends.protocol import Cut, Finished, Generation, ReplySoFar
from backends.simulated import SimulatedConfig, SimulatedEngine, TimingProfile, serve_simulated

BOUND_S = 10.0
STEP = TimingProfile(base_step_s=0.001)

# The ways of preempting: closing the stream, on an engine that rolls KV back and on one that cannot; parking.
WAYS: dict[str, dict[str, Any]] = {
    "closing": {},
    "closing-without-rollback": {"resume_reprefills": True},
    "parking": {"native_park": True},
}


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A greedy chat request."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


@dataclass
class Recorder:
    """What a generation told. `cut_at`: preempt when that many tokens are there, each position once."""

    generation: Generation | None = None
    cut_at: list[int] = field(default_factory=list)
    on_started: Callable[[], None] | None = None
    on_delta: Callable[[], None] | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.starts.append((prompt_tokens, cached_tokens))
        if self.on_started is not None:
            self.on_started()

    def delta(self, part: dict[str, Any], n_tokens: int, tokens: list[int]) -> None:
        self.parts.append(part)
        self.counts.append(n_tokens)
        self.ids.append(tokens)
        if self.cut_at and self.n_tokens >= self.cut_at[0]:
            while self.cut_at and self.n_tokens >= self.cut_at[0]:
                self.cut_at.pop(0)
            assert self.generation is not None
            self.generation.preempt()
        if self.on_delta is not None:
            self.on_delta()

    @property
    def n_tokens(self) -> int:
        return sum(self.counts)

    def joined(self, name: str) -> str:
        """One kind of text, all of it."""
        return "".join(part.get(name) or "" for part in self.parts)

    @property
    def text(self) -> str:
        return self.joined("content") + self.joined("text")

    def so_far(self, count: int, *, known: bool) -> ReplySoFar:
        """The first `count` deltas, as another process would find them in the log."""
        flat = [token for tokens in self.ids[:count] for token in tokens]
        complete = all(len(i) == n for i, n in zip(self.ids[:count], self.counts[:count], strict=True))
        return ReplySoFar(self.parts[:count], flat if known and complete else None, sum(self.counts[:count]))


class Rig:
    """One engine and its adapter."""

    def __init__(self, engine: SimulatedEngine, backend: LlamaCppBackend, url: str) -> None:
        self.engine = engine
        self.backend = backend
        self.url = url

    def generation(
        self,
        body: dict[str, Any],
        max_tokens: int = 500,
        so_far: ReplySoFar | None = None,
        api: str = "chat",
        **recorder: Any,
    ) -> tuple[Generation, Recorder]:
        """A turn and a sink for it."""
        generation = self.backend.generation(api, body, max_tokens, so_far)
        return generation, Recorder(generation, **recorder)

    async def whole(
        self, body: dict[str, Any], max_tokens: int = 500, api: str = "chat"
    ) -> tuple[Finished, Recorder]:
        """The uninterrupted turn."""
        generation, sink = self.generation(body, max_tokens, api=api)
        with anyio.fail_after(BOUND_S):
            end = await generation.run(0, sink)
        assert isinstance(end, Finished)
        return end, sink

    async def until_idle(self) -> None:
        """Return once the engine says that no slot decodes."""
        with anyio.fail_after(BOUND_S):
            while True:
                if not any(slot.processing for slot in await self.backend.slots()):
                    return
                await anyio.sleep(0.002)


async def finish(
    generation: Generation, sink: Recorder, slots: Iterable[int] = repeat(0)
) -> tuple[Finished, list[Cut]]:
    """Run until the end, in the given slots one after the other."""
    cuts: list[Cut] = []
    with anyio.fail_after(BOUND_S):
        for slot in slots:
            end = await generation.run(slot, sink)
            if isinstance(end, Finished):
                return end, cuts
            cuts.append(end)
    raise AssertionError("too few slots given")


def lose_the_last_word(generation: Any) -> None:
    """The stream breaks off before its last event, once; the text in it, if any, came before."""
    read = generation._read

    def lose(event: dict[str, Any], sink: Recorder) -> Finished | None:
        if event.get("stop"):
            generation._read = read
        read({**event, "stop": False}, sink)
        return None

    generation._read = lose


async def cut_at_engine_tokens(r: Rig, generation: Generation, sink: Recorder, at: int) -> Finished | Cut:
    """Preempt once the engine has made `at` tokens of this segment, whether they were forwarded or not."""
    before = r.engine.stats().tokens_generated
    ends: list[Finished | Cut] = []

    async def watch() -> None:
        while r.engine.stats().tokens_generated - before < at:  # noqa: ASYNC110
            await anyio.sleep(0.0002)
        generation.preempt()

    with anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            ends.append(await generation.run(0, sink))
            tasks.cancel_scope.cancel()
    return ends[0]


def calls_of(sink: Recorder) -> dict[int, dict[str, Any]]:
    """The calls as a client puts them together."""
    calls: dict[int, dict[str, Any]] = {}
    for part in sink.parts:
        for piece in part.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"ids": [], "name": "", "arguments": ""})
            call["ids"] += [piece["id"]] if piece.get("id") else []
            call["name"] += piece["function"].get("name") or ""
            call["arguments"] += piece["function"].get("arguments") or ""
    return calls


@asynccontextmanager
async def rig(config: SimulatedConfig | None = None, **options: Any) -> AsyncIterator[Rig]:
    """Serve an engine for the block. No pieces unless `piece_tokens` says so."""
    engine = SimulatedEngine(config)
    async with serve_simulated(engine) as url:
        backend = LlamaCppBackend(url, LlamaCppOptions(**{"piece_tokens": 0, "batch_tokens": 64, **options}))
        try:
            await backend.describe()
            yield Rig(engine, backend, url)
        finally:
            with anyio.CancelScope(shield=True):
                await backend.aclose()


KEEP_OPEN = b"<keep open>"


@asynccontextmanager
async def raw_server(answer: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """Serve bytes: `answer` gets a request's head and says what to send before closing.

    With KEEP_OPEN at its end the connection stays until the client leaves.
    """
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                reply = answer(await stream.receive())
                if reply:
                    await stream.send(reply.removesuffix(KEEP_OPEN))
                while reply.endswith(KEEP_OPEN):
                    await stream.receive()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()
