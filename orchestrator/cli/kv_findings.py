"""What `swarm doctor` finds about a model's memory: its KV, what all of it takes, and the swap folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from backends.gguf import NotGguf, model_bytes, read_model
from backends.kv_shape import KvShape
from backends.managed import EngineSettings
from backends.managed.save_folder import SHM, SHM_MIN_FREE_BYTES
from backends.model_shape import KvUnknown, ModelShape
from orchestrator.cli.figures import count, plain, size
from orchestrator.cli.findings import Finding, broken, ok, warn
from orchestrator.config import Backend

#: What the engine takes besides the model and its KV: compute buffers, the program itself.
ENGINE_OVERHEAD_BYTES = 256 << 20
#: Less than this in the swap folder holds no turn worth swapping.
MIN_SWAP_BYTES = 256 << 20
#: What is configured and what the file says differ by more than rounding.
_DIFFERENT = 0.02
_IN_MEMORY = ("tmpfs", "ramfs")
#: Lengths of prompts whose files hold nothing but their KV: from 5 tokens on, a model with a window or a
#: state has checkpoints saved along (llama.cpp build 11549), which take as much again.
MEASURED_TOKENS = (1, 4)


def model_findings(backend: Backend, settings: EngineSettings, path: Path) -> Iterator[Finding]:
    """The model's file, its KV, and whether this machine has the memory for both."""
    try:
        model, file_bytes = read_model(path), model_bytes(path)
    except NotGguf as error:
        yield broken(f"{backend.name} model", f"{path.name} {error}", "set managed.model to a GGUF file")
        return
    except OSError as error:
        missing = error.filename or path
        text = f"{missing} cannot be read: {error.strerror}"
        yield broken(f"{backend.name} model", text, "make it readable")
        return
    known = plain(model.architecture or "unknown architecture")
    yield ok(f"{backend.name} model", f"{path.name}, {size(file_bytes)}, {known}")
    types = settings.cache_type_k, settings.cache_type_v
    try:
        kv, unknown = model.kv(*types), None
    except KvUnknown as error:
        kv, unknown = None, str(error)
    yield _kv(backend, kv, unknown, "/".join(dict.fromkeys(types)))
    if backend.kv_bytes_per_token is not None:
        kv = KvShape(backend.kv_bytes_per_token)
    if (resume := _resume(backend, model)) is not None:
        yield resume
    yield _memory(backend, settings, file_bytes, kv)


def _kv(backend: Backend, kv: KvShape | None, unknown: str | None, cache_types: str) -> Finding:
    what, given = f"{backend.name} KV", backend.kv_bytes_per_token
    if kv is None and given is None:
        assert unknown is not None
        return warn(what, f"bytes unknown: {unknown}", _MEASURE)
    if kv is None:
        assert given is not None
        return ok(what, f"{count(given)} B a token, as configured")
    if given is not None and abs(given - kv.token_bytes) > _DIFFERENT * kv.token_bytes:
        text = (
            f"{count(given)} B a token as configured, but {shape_text(kv)} by the model file ({cache_types})"
        )
        return warn(what, text, "leave backends[].kv_bytes_per_token out")
    return ok(what, f"{shape_text(kv)}, from the model file ({cache_types})")


_MEASURE = "set backends[].kv_bytes_per_token; swarm doctor --deep measures it"


def running_kv(backend: Backend) -> Finding:
    """KV of an engine that somebody else started, as far as it is known without asking it to work."""
    what = f"{backend.name} KV"
    if backend.kv_bytes_per_token is not None:
        return ok(what, f"{count(backend.kv_bytes_per_token)} B a token, as configured")
    if backend.save_path is not None:
        return ok(what, "bytes are measured by a save when the service starts")
    return warn(
        what, "bytes unknown: the engine does not tell, and without save_path none is saved", _MEASURE
    )


def measured_kv(backend: Backend, file_bytes: Sequence[int | None]) -> Finding:
    """KV by saved prompts of `MEASURED_TOKENS`; None where one was not saved."""
    what, (short, long), (few, more) = f"{backend.name} KV measured", file_bytes, MEASURED_TOKENS
    if short is None or long is None or long <= short:
        return warn(
            what, "a save of a short prompt failed: bytes unknown", "set backends[].kv_bytes_per_token"
        )
    per_token = (long - short) // (more - few)
    beside = short - few * per_token
    # A file's own head is no state.
    kv = KvShape(per_token, fixed_bytes=beside if beside > per_token else 0)
    text = f"{shape_text(kv)}, by a save"
    given = backend.kv_bytes_per_token
    if given is not None and abs(given - per_token) > _DIFFERENT * per_token:
        return warn(
            what, f"{text}, but {count(given)} B are configured", "correct backends[].kv_bytes_per_token"
        )
    return ok(what, text)


def shape_text(kv: KvShape) -> str:
    """As `23,040 B a token`, with what a window and a state take beside."""
    parts = [f"{count(kv.token_bytes)} B a token"] if kv.token_bytes or not kv.fixed_bytes else []
    if kv.window_token_bytes:
        parts.append(f"{count(kv.window_token_bytes)} B a token of the last {count(kv.window_tokens)}")
    if kv.fixed_bytes:
        parts.append(f"{size(kv.fixed_bytes)} a turn")
    return " and ".join(parts)


def _resume(backend: Backend, model: ModelShape) -> Finding | None:
    what = f"{backend.name} resume"
    if model.recurrent:
        return warn(
            what,
            "recurrent layers cannot go back a token: a resume may evaluate the generated tokens again",
            "watch tokens_reevaluated in swarm ps; a model with attention in every layer resumes exactly",
        )
    if model.windowed:
        return warn(
            what,
            "sliding-window layers forget: a resume may evaluate the generated tokens again",
            "start your own llama-server with --swa-full (managed.command): exact, for full-size KV",
        )
    return None


def _memory(backend: Backend, settings: EngineSettings, file_bytes: int, kv: KvShape | None) -> Finding:
    what = f"{backend.name} memory"
    kv_bytes = 0 if kv is None else allocated(kv, settings)
    needed = file_bytes + kv_bytes + ENGINE_OVERHEAD_BYTES
    available = available_memory()
    known = "besides its KV" if kv is None else f"{size(kv_bytes)} of it KV"
    text = f"about {size(needed)} needed ({known})"
    if available is None:
        return ok(what, text)
    if needed <= available:
        return ok(what, f"{text}, {size(available)} available")
    level = warn if settings.gpu_layers or settings.command is not None else broken
    return level(
        what,
        f"{text}, but only {size(available)} available",
        "use a smaller model, lower managed.context, or set managed.cache_type_k and cache_type_v to q8_0",
    )


def allocated(kv: KvShape, settings: EngineSettings) -> int:
    """Bytes that the engine takes for KV at its start, whatever the layout: each slot with its share."""
    return settings.engine_slots * kv.bytes(-(-settings.context // settings.engine_slots))


def available_memory() -> int | None:
    """Bytes of memory that programs can still get; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# Swap ---------------------------------------------------------------------------------------------


def swap_finding(backend: Backend, state_dir: Path) -> Finding:
    """Whether paused turns can be written to files, and whether that is quick."""
    what = f"{backend.name} swap"
    if backend.swap_budget == 0:
        return ok(what, "off (swap_budget: 0): a paused turn that has to leave is computed again")
    folder = backend.save_path
    if folder is None and backend.managed is None:
        return ok(what, "off (no save_path): a paused turn that has to leave is computed again")
    private = folder is None
    if folder is None:
        folder = SHM if (free_bytes(SHM) or 0) >= SHM_MIN_FREE_BYTES else state_dir
    free, kind = free_bytes(folder), file_system(folder)
    where = f"{folder}{' (private folder in it)' if private else ''}"
    if free is None:
        return warn(
            what, f"{where} cannot be used", "make it a folder that can be written, or correct save_path"
        )
    text = f"{where}, {size(free)} free"
    if backend.swap_budget is not None and free < backend.swap_budget:
        return warn(what, f"{text}, less than the swap_budget", "make room, or lower backends[].swap_budget")
    if free < MIN_SWAP_BYTES:
        return warn(what, f"{text}: hardly a turn fits", "make room, or set backends[].save_path elsewhere")
    if kind is not None and kind not in _IN_MEMORY:
        stalls = "the running turns stand still for as long as each save takes"
        remedy = "set backends[].save_path to a folder on a memory file system, such as in /dev/shm"
        return warn(what, f"{text}, on a disk ({plain(kind)}): {stalls}", remedy)
    return ok(what, f"{text}{', in memory' if kind else ''}")


def free_bytes(folder: Path) -> int | None:
    """What can be written into the folder, or into the one it will be made in; None when nothing can."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return None
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Type of the file system that the folder is on, such as tmpfs; None where the system does not say."""
    found: tuple[int, str] | None = None
    with contextlib.suppress(OSError, ValueError):
        place = folder.resolve()
        for line in mounts.read_text(errors="replace").splitlines():
            _, point, kind, *_ = line.split()
            # Later mounts lie over earlier ones; blanks are written as \040.
            point = point.replace("\\040", " ")
            if place.is_relative_to(point) and (found is None or len(point) >= found[0]):
                found = len(point), kind
    return None if found is None else found[1]
