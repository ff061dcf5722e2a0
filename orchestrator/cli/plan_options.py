"""What `swarm plan` was asked: its options, understood or refused in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType

from backends.gguf import NotGguf, model_bytes, read_model
from backends.kv_shape import KvShape
from backends.managed.settings import EngineSettingsError, model_path
from backends.model_shape import CACHE_BLOCKS, KvUnknown, LayerShape, ModelShape
from orchestrator.cli.figures import count, plain
from orchestrator.config.checks import parse_size
from orchestrator.config.schema import MAX_TOKENS
from orchestrator.planner.advice import Advice, advise
from orchestrator.planner.plan import Load, Memory, Plan

#: One byte for each element: what is meant by q8 where blocks and their scales are left out.
IDEAL_Q8 = "q8"
GIVEN = "given"
_DEFAULT_TYPES = ("f16", "q8_0")
_MAX_TYPES = 4

#: Options that stand for a whole machine.
PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "rx9070xt": {
            "layers": "40",
            "kv_heads": "8",
            "head_dim": "128",
            "vram": "16GiB",
            "usable": "15.5GiB",
            "weights": "5.2GiB",
            "buffers": "0.8GiB",
            "slots": "8",
            "context": "6k",
            "long": "16k",
        }
    }
)
_PRESET_NAMES = {"rx9070xt": "Radeon RX 9070 XT, 16 GB"}
_PRESET_TYPES = ("f16", IDEAL_Q8, "q8_0")
_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {"usable": "97%", "buffers": "0.8GiB", "slots": "8", "context": "6k", "long": "16k"}
)


@dataclass(frozen=True)
class Given:
    """The options as they were written; None is what was not."""

    model: str | None
    preset: str | None
    cache_types: tuple[str, ...]
    values: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What is to be planned, from options that were all understood."""

    name: str
    model: Path | None
    shape: ModelShape | None
    given_kv: KvShape | None
    memory: Memory
    load: Load
    cache_types: tuple[str, ...]

    def plans(self) -> tuple[Plan, ...]:
        return tuple(self._plan(cache_type) for cache_type in self.cache_types)

    def advice(self) -> Advice | None:
        """By cache types that an engine has."""
        real = dict.fromkeys("q8_0" if each == IDEAL_Q8 else each for each in self.cache_types)
        context = None if self.shape is None else self.shape.training_context
        return advise([self._plan(cache_type) for cache_type in real], context)

    def _plan(self, cache_type: str) -> Plan:
        kv = self.given_kv
        if kv is None:
            assert self.shape is not None
            kv = _ideal_q8(self.shape) if cache_type == IDEAL_Q8 else _kv(self.shape, cache_type)
        return Plan(cache_type, kv, self.memory, self.load)


class PlanError(Exception):
    """An option cannot be used; the message is one line that names it."""


def _kv(shape: ModelShape, cache_type: str) -> KvShape:
    try:
        return shape.kv(cache_type, cache_type)
    except KvUnknown as unknown:
        raise PlanError(f"{unknown}; give --kv-bytes-per-token (swarm doctor --deep measures it)") from None


def _ideal_q8(shape: ModelShape) -> KvShape:
    half = _kv(shape, "f16")
    return KvShape(half.token_bytes // 2, half.window_token_bytes // 2, half.window_tokens, half.fixed_bytes)


# Options ------------------------------------------------------------------------------------------


def understand(given: Given) -> Question:
    """Raises PlanError."""
    if given.preset is not None and given.preset not in PRESETS:
        raise PlanError(f"--preset: {plain(given.preset)!r} is not among {', '.join(PRESETS)}")
    preset = dict(PRESETS.get(given.preset or "", {}))
    own_model = given.model is not None or any(
        given.values.get(name) is not None
        for name in ("layers", "kv_heads", "head_dim", "kv_bytes_per_token")
    )
    if own_model:
        # The preset's machine, with another model on it.
        for name in ("layers", "kv_heads", "head_dim"):
            preset.pop(name, None)
        if given.model is not None:
            preset.pop("weights", None)
    if given.values.get("vram") is not None:
        preset.pop("usable", None)
    values = {
        **_DEFAULTS,
        **preset,
        **{name: text for name, text in given.values.items() if text is not None},
    }

    path, shape, given_kv = _model(given.model, values)
    weights = values.get("weights")
    if weights is None and path is None:
        raise PlanError("--weights is needed where no model file is given: their size, such as 5.2GiB")
    memory = Memory(
        usable=_usable(values),
        weights=_size("weights", weights) if weights is not None else _file_size(path),
        buffers=_size("buffers", values["buffers"]),
    )
    load = Load(
        running=_whole("slots", values["slots"], 1, 512),
        context=_tokens("context", values["context"]),
        long_context=_tokens("long", values["long"]),
    )
    preset_alone = given.preset is not None and not own_model
    types = given.cache_types or (_PRESET_TYPES if preset_alone else _DEFAULT_TYPES)
    if given_kv is not None:
        if given.cache_types:
            raise PlanError("--cache-type: the bytes of --kv-bytes-per-token are those of one type already")
        types = (GIVEN,)
    return Question(
        name=_name(given, values, path, shape),
        model=path,
        shape=shape,
        given_kv=given_kv,
        memory=memory,
        load=load,
        cache_types=_cache_types(types),
    )


def _name(given: Given, values: Mapping[str, str], path: Path | None, shape: ModelShape | None) -> str:
    parts = [_PRESET_NAMES[given.preset]] if given.preset is not None else []
    if path is not None and shape is not None:
        parts.append(f"{plain(path.name)} ({plain(shape.architecture)})")
    elif shape is not None:
        parts.append("{layers} layers, {kv_heads} KV heads of {head_dim}".format(**values))
    return "; ".join(parts) or "a model of which the bytes per token are given"


def _model(
    name: str | None, values: Mapping[str, str]
) -> tuple[Path | None, ModelShape | None, KvShape | None]:
    numbers = [option for option in ("layers", "kv_heads", "head_dim") if option in values]
    ways = [name is not None, bool(numbers), "kv_bytes_per_token" in values]
    if sum(ways) > 1:
        raise PlanError(
            "a model file, --layers with --kv-heads and --head-dim, and --kv-bytes-per-token: one of them"
        )
    if name is not None:
        path, shape = _read(name)
        return path, shape, None
    if "kv_bytes_per_token" in values:
        return None, None, KvShape(_whole("kv-bytes-per-token", values["kv_bytes_per_token"], 1, 1 << 32))
    if len(numbers) < 3:
        raise PlanError(
            "a model is needed: a GGUF file, or --layers, --kv-heads and --head-dim, or --kv-bytes-per-token"
        )
    layers = _whole("layers", values["layers"], 1, 512)
    head = _whole("head-dim", values["head_dim"], 1, 1 << 16)
    kv = _whole("kv-heads", values["kv_heads"], 1, 1 << 12) * head
    return None, ModelShape(None, None, (LayerShape(kv, kv, head, head),) * layers), None


def _read(name: str) -> tuple[Path, ModelShape]:
    try:
        path = model_path(name)
        return path, read_model(path)
    except NotGguf as error:
        raise PlanError(f"{plain(name)} {error}") from None
    except EngineSettingsError as error:
        raise PlanError(plain(error)) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"{plain(name)} cannot be read: {plain(getattr(error, 'strerror', None) or error)}"
        ) from None


def _file_size(path: Path | None) -> int:
    assert path is not None
    try:
        return model_bytes(path)
    except OSError as error:
        missing = plain(Path(error.filename).name if error.filename else path.name)
        raise PlanError(f"--weights: {missing} cannot be read: {plain(error.strerror)}") from None


def _usable(values: Mapping[str, str]) -> int:
    vram, usable = values.get("vram"), values["usable"]
    percent = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", usable)
    if percent is None:
        n_bytes = _size("usable", usable)
        if vram is not None and n_bytes > _size("vram", vram):
            raise PlanError(f"--usable: {plain(usable)} is more than --vram {plain(vram)}")
        return n_bytes
    if vram is None:
        raise PlanError("--vram is needed: the card's memory, such as 16GiB")
    if not 0 < Decimal(percent[1]) <= 100:
        raise PlanError(f"--usable: {usable} is not a size, nor above 0% and at most 100%")
    return int(_size("vram", vram) * Decimal(percent[1]) / 100)


def _size(option: str, text: str) -> int:
    n_bytes = parse_size(text.strip())
    if n_bytes is None or (n_bytes == 0 and option in ("vram", "usable")):
        raise PlanError(f"--{option}: {plain(text)!r} is not a size such as 9.5GiB, 512MiB or 1500MB")
    return n_bytes


def _tokens(option: str, text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(k?)", text.strip().lower())
    tokens = int(Decimal(found[1]) * (1024 if found[2] else 1)) if found is not None else 0
    if not 0 < tokens <= MAX_TOKENS:
        raise PlanError(
            f"--{option}: {plain(text)!r} is not a number of tokens such as 6000 or 6k (k = 1,024)"
        )
    return tokens


def _whole(option: str, text: str, least: int, most: int) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,12}", text.strip()) else -1
    if not least <= number <= most:
        raise PlanError(f"--{option}: {plain(text)!r} is not a whole number from {least} to {count(most)}")
    return number


def _cache_types(types: tuple[str, ...]) -> tuple[str, ...]:
    known = (*CACHE_BLOCKS, IDEAL_Q8, GIVEN)
    for cache_type in types:
        if cache_type not in known:
            raise PlanError(f"--cache-type: {plain(cache_type)!r} is not among {', '.join(known[:-1])}")
    different = tuple(dict.fromkeys(types))
    if len(different) > _MAX_TYPES:
        raise PlanError(f"--cache-type: at most {_MAX_TYPES} of them in one plan")
    return different
