"""What `swarm doctor` finds about engines: those to start, and those that run."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson

from agents.workload import filler
from backends.managed import EngineSettings, ManagedEngine, ManagedEngineError
from backends.managed.settings import (
    EngineSettingsError,
    embedded_command,
    llama_server_command,
    model_path,
)
from orchestrator.cli.figures import count, duration, plain
from orchestrator.cli.findings import ASK_S, Finding, broken, ok, warn
from orchestrator.cli.kv_findings import (
    MEASURED_TOKENS,
    measured_kv,
    model_findings,
    running_kv,
    swap_finding,
)
from orchestrator.config import Backend, Config
from orchestrator.config.schema import BOUNDED_BATCH_TOKENS
from orchestrator.service import engine_settings

SLOW_CANCEL_S = 0.25
_PREFILL_TOKENS = 3000
_INTO_PREFILL_S = 0.3
_IDLE_BOUND_S = 120.0
_IDLE_POLL_S = 0.005
_SMALL_BATCH = "start the server with -b 512 -ub 512 (or less)"


async def backend_findings(config: Config, backend: Backend, *, deep: bool) -> AsyncIterator[Finding]:
    """All checks of one backend. `deep` starts a managed engine and lets the engine work."""
    if backend.managed is None:
        assert backend.url is not None
        async for finding in _running(config, backend, backend.url, deep=deep):
            yield finding
        return
    settings = engine_settings(backend)
    usable, kv_known = True, False
    for finding in (*_to_start(backend, settings), swap_finding(backend, config.redis.state_dir)):
        usable = usable and finding.level != "fail"
        kv_known = kv_known or (finding.what == _label(backend, "KV") and finding.level == "ok")
        yield finding
    if not deep or not usable:
        return
    with tempfile.TemporaryDirectory(prefix="swarm-doctor-") as folder:
        began = time.monotonic()
        try:
            async with ManagedEngine(settings, Path(folder), name=backend.name) as engine:
                started_s = time.monotonic() - began
                yield ok(_label(backend, "start"), f"serves after {duration(started_s)}")
                async for finding in _running(config, backend, engine.url, deep=True, measure=not kv_known):
                    yield finding
        except ManagedEngineError as error:
            text = str(error).partition("; log: ")[0]
            yield broken(_label(backend, "start"), text, "correct backends[].managed as the message says")


def _label(backend: Backend, what: str) -> str:
    return f"{backend.name} {what}"


# Engines to start --------------------------------------------------------------------------------


def _to_start(backend: Backend, settings: EngineSettings) -> Iterator[Finding]:
    try:
        if settings.command is None:
            embedded_command(settings, 1, Path("."))
            yield ok(_label(backend, "engine"), "embedded llama.cpp (xllamacpp), started with the service")
        else:
            llama_server_command(settings, 1, Path("."))
            yield ok(_label(backend, "engine"), f"{settings.command[0]} is on the PATH")
    except EngineSettingsError as error:
        yield broken(_label(backend, "engine"), str(error), "install or name what is missing")
        return
    # A command line of the user's may name its model itself.
    with contextlib.suppress(EngineSettingsError):
        yield from model_findings(backend, settings, model_path(settings.model))
    yield from _slots(backend, settings.engine_slots)
    yield _batch(backend)


# What holds for both -----------------------------------------------------------------------------


def _slots(backend: Backend, engine_slots: int) -> Iterator[Finding]:
    what = _label(backend, "slots")
    decode = backend.decode_slots if backend.decode_slots is not None else max(1, engine_slots - 1)
    spare = engine_slots - decode
    more = "managed.engine_slots" if backend.managed is not None else "start the server with a larger -np"
    if spare < 0:
        yield broken(
            what,
            f"decode_slots is {decode}, but the engine has {count(engine_slots)}",
            f"raise {more}" if backend.managed is not None else f"{more}, or lower decode_slots",
        )
    elif spare == 0:
        yield warn(
            what,
            f"{engine_slots}, all decode slots: a foreground turn has to wait until its victim is out",
            f"raise {more} above {decode}"
            if backend.managed is not None
            else f"{more}, or set decode_slots to {max(1, engine_slots - 1)}",
        )
    else:
        yield ok(what, f"{engine_slots}, {decode} of them may decode at once, {spare} spare")


def _batch(backend: Backend) -> Finding:
    what, batch, pieces = _label(backend, "batch"), backend.batch_tokens, backend.piece_tokens
    if batch is not None and batch <= BOUNDED_BATCH_TOKENS:
        return ok(what, f"{batch} tokens: a turn in prefill can be preempted after each")
    known = "unknown" if batch is None else f"{count(batch)} tokens"
    managed = backend.managed is not None
    remedy = "lower managed.batch_tokens" if managed else f"{_SMALL_BATCH} and set backends[].batch_tokens"
    if pieces is None:
        text = f"{known}, and prompts are sent whole: a cancel in prefill takes effect after a batch only"
        return warn(what, text, f"{remedy}, or leave prefill_piece_tokens out")
    return warn(what, f"{known}: preemptible prompts are sent in pieces of {pieces} tokens", remedy)


# Running engines ---------------------------------------------------------------------------------


async def _running(
    config: Config, backend: Backend, url: str, *, deep: bool, measure: bool = True
) -> AsyncIterator[Finding]:
    """`measure`: nobody knows how many bytes a token of KV has, so that a deep check finds out."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=ASK_S) as client:
        try:
            reached = await _reachable(backend, url, client)
            if reached.level == "fail":
                yield reached
                return
            if backend.managed is None:
                yield reached
            slots = await _json(client, "/slots")
            if not isinstance(slots, list) or not slots or not isinstance(slots[0], dict):
                text = "GET /slots lists none: paused turns cannot be watched"
                yield broken(_label(backend, "slots"), text, "start the server with --slots")
                return
            for finding in _of_slots(config, backend, slots):
                yield finding
            if deep:
                async for finding in _deep(backend, client, slots, measure=measure):
                    yield finding
        except httpx.HTTPError as error:
            text = f"broke off: {' '.join(str(error).split()) or type(error).__name__}"
            yield broken(_label(backend, "engine"), text, "see the engine's log")


async def _reachable(backend: Backend, url: str, client: httpx.AsyncClient) -> Finding:
    what = _label(backend, "engine")
    start = "start it (llama-server -m MODEL.gguf -np 12 -b 256 -ub 256 ...), or correct backends[].url"
    try:
        health = await client.get("/health")
    except httpx.TimeoutException:
        return broken(
            what, f"{url} gave no answer within {ASK_S:g} s", "see whether it is overloaded or hangs"
        )
    except httpx.HTTPError as error:
        return broken(what, f"{url} does not answer: {' '.join(str(error).split())}", start)
    if health.status_code == 503:
        return broken(what, f"{url} is still loading its model", "wait, and run this again")
    props = await _json(client, "/props")
    if health.status_code != 200 or not isinstance(props, dict):
        text = f"{url} answers, but not as llama.cpp's server does (no /health or /props)"
        return broken(what, text, "let backends[].url be the address of a llama-server")
    model = Path(str(props.get("model_alias") or props.get("model_path") or "unknown model")).name
    build = f", build {plain(props['build_info'])}" if props.get("build_info") else ""
    return ok(what, f"{url} serves {plain(model)}{build}")


async def _json(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    try:
        return orjson.loads(response.content) if response.status_code == 200 else None
    except orjson.JSONDecodeError:
        return None


def _of_slots(config: Config, backend: Backend, slots: list[dict[str, Any]]) -> Iterator[Finding]:
    if backend.managed is None:
        yield from _slots(backend, len(slots))
        yield _batch(backend)
        yield running_kv(backend)
        yield swap_finding(backend, config.redis.state_dir)
    yield _layout(backend)
    context = slots[0].get("n_ctx")
    if isinstance(context, int):
        yield _context(config, backend, context)
    if "is_preempted" in slots[0]:
        yield ok(_label(backend, "preemption"), "the engine parks and unparks slots by itself: exact")
    else:
        yield ok(_label(backend, "preemption"), "by closing the stream, and resuming on the slot's KV")


def _layout(backend: Backend) -> Finding:
    what = _label(backend, "KV layout")
    if backend.kv_layout is None:
        return warn(
            what,
            "unknown, taken as split: the engine does not tell",
            "set backends[].kv_layout to split (--no-kv-unified) or unified (--kv-unified)",
        )
    if backend.kv_layout == "unified" and backend.managed is None:
        return warn(
            what,
            "unified: parked KV slows the running turns, and idle slots may be cleared",
            "start the server with --no-kv-unified, at least with --no-cache-idle-slots",
        )
    return ok(what, backend.kv_layout)


def _context(config: Config, backend: Backend, context: int) -> Finding:
    what = _label(backend, "context")
    longest = max(agent.max_turn_tokens for agent in config.agents.values())
    text = f"{count(context)} tokens for a turn's prompt and reply"
    if longest >= context:
        return warn(
            what,
            f"{text}, but an agent's reply alone may have {count(longest)}",
            "raise the engine's context (-c), or lower agents.NAME.max_turn_tokens",
        )
    return ok(what, text)


# Deep --------------------------------------------------------------------------------------------


async def _deep(
    backend: Backend, client: httpx.AsyncClient, slots: list[dict[str, Any]], *, measure: bool
) -> AsyncIterator[Finding]:
    free = next((slot for slot in slots if not slot.get("is_processing")), None)
    if free is None or not isinstance(free.get("id"), int):
        text = "every slot is busy: cancel and save were not tried"
        yield warn(_label(backend, "deep"), text, "run this again when the engine is idle")
        return
    context = free.get("n_ctx")
    tokens = min(_PREFILL_TOKENS, int(context * 0.7) if isinstance(context, int) else _PREFILL_TOKENS)
    yield await _cancel(backend, client, free["id"], tokens)
    for finding in await _save(backend, client, free["id"], measure=measure):
        yield finding


async def _cancel(backend: Backend, client: httpx.AsyncClient, slot: int, tokens: int) -> Finding:
    """Close a stream in the middle of its prefill, and see how long the slot goes on."""
    what = _label(backend, "cancel in prefill")
    body = {
        "prompt": filler(tokens, "doctor"),
        "n_predict": 1,
        "stream": True,
        "id_slot": slot,
        "return_progress": True,
    }

    async def prefill() -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/completion", json=body, timeout=None) as response:
                await response.aread()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill)
        await anyio.sleep(_INTO_PREFILL_S)
        busy = await _is_busy(client, slot)
        tasks.cancel_scope.cancel()
    began = time.monotonic()
    stop_s = math.inf
    with anyio.move_on_after(_IDLE_BOUND_S):
        # No event tells: the engine says it only when asked.
        while await _is_busy(client, slot):  # noqa: ASYNC110
            await anyio.sleep(_IDLE_POLL_S)
        stop_s = time.monotonic() - began
    if not busy:
        return ok(what, f"a prompt of {count(tokens)} tokens was over too soon to be cancelled")
    if math.isinf(stop_s):
        text = f"the slot was still busy after {_IDLE_BOUND_S:g} s"
        return broken(what, text, "the engine does not notice closed streams: use llama-server")
    if stop_s > SLOW_CANCEL_S:
        text = f"took {duration(stop_s)}: so long a foreground turn may wait for its slot"
        if backend.batch_tokens is not None and backend.batch_tokens <= BOUNDED_BATCH_TOKENS:
            return warn(what, text, "lower the batch further, or keep other programs off the engine's cores")
        return warn(what, text, f"{_SMALL_BATCH} and set backends[].batch_tokens")
    return ok(what, f"took {duration(stop_s)}")


async def _is_busy(client: httpx.AsyncClient, slot: int) -> bool:
    found = await client.get("/slots", timeout=_IDLE_BOUND_S)
    listed = found.json() if found.status_code == 200 else []
    return any(bool(entry.get("is_processing")) for entry in listed if entry.get("id") == slot)


async def _save(backend: Backend, client: httpx.AsyncClient, slot: int, *, measure: bool) -> list[Finding]:
    """Save the slot's KV, and see how large it is where nobody knows; the slot is empty afterwards."""
    what, name = _label(backend, "save path"), "swarm-doctor.bin"
    try:
        if await _saved_bytes(client, slot, name) is None:
            text = "KV cannot be saved: what has to leave its slot is computed again"
            return [warn(what, text, "start the server with --slot-save-path, on a memory file system")]
        found = [ok(what, "KV can be saved")]
        if measure:
            found.append(
                measured_kv(backend, [await _prompt_bytes(client, slot, name, n) for n in MEASURED_TOKENS])
            )
        return found
    finally:
        await client.post(f"/slots/{slot}?action=erase", json={}, timeout=60.0)
        if backend.save_path is not None:
            with contextlib.suppress(OSError):
                (backend.save_path / name).unlink()


async def _prompt_bytes(client: httpx.AsyncClient, slot: int, name: str, tokens: int) -> int | None:
    """Bytes of a saved prompt of so many tokens; None when it is not saved as that."""
    await client.post(f"/slots/{slot}?action=erase", json={}, timeout=60.0)
    body = {"prompt": [100 + index for index in range(tokens)], "n_predict": 0, "id_slot": slot}
    await client.post("/completion", json=body, timeout=60.0)
    return await _saved_bytes(client, slot, name, tokens)


async def _saved_bytes(
    client: httpx.AsyncClient, slot: int, name: str, tokens: int | None = None
) -> int | None:
    response = await client.post(f"/slots/{slot}?action=save", json={"filename": name}, timeout=60.0)
    try:
        report = orjson.loads(response.content)
        matches = response.status_code == 200 and tokens in (None, int(report["n_saved"]))
        return int(report["n_written"]) if matches else None
    except (KeyError, TypeError, ValueError):
        return None
