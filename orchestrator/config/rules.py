"""What one value demands of another.

The rules read the plain data, not the checked settings: they apply although other parts of the file are
wrong, so a user sees all mistakes at once. A value of the wrong type is the schema's business and is passed
over here.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from orchestrator.config.checks import parse_size
from orchestrator.config.document import Document, KeyPath, quote
from orchestrator.config.schema import DEFAULT_PRIORITIES, Agent, ManagedEngine, default_engine_slots

Finding = tuple[KeyPath, str]

#: The engine rounds a slot's context up to this; a share below it holds no useful turn.
MIN_SLOT_CONTEXT = 256

_MANAGED_ALSO_SAYS = ("decode_slots", "kv_layout", "batch_tokens")


def apply_rules(document: Document) -> None:
    """Add what breaks a rule to the document's problems."""
    if not isinstance(document.data, dict):
        return
    data: dict[str, Any] = document.data
    for path, message in (*_backends(document, data.get("backends")), *_agents(document, data)):
        document.report(path, message)


def _backends(document: Document, backends: Any) -> Iterator[Finding]:
    if backends == []:
        yield ("backends",), "at least one backend is needed"
    if not isinstance(backends, list):
        return
    yield from _unique(document, [(("backends", i, "name"), _get(b, "name")) for i, b in enumerate(backends)])
    yield from _unique(document, [(("backends", i, "url"), _address(b)) for i, b in enumerate(backends)])
    yield from _one_model_per_pool(backends)
    for index, backend in enumerate(backends):
        if isinstance(backend, dict):
            yield from _backend(("backends", index), backend)


def _backend(path: KeyPath, backend: dict[str, Any]) -> Iterator[Finding]:
    url, managed = backend.get("url"), backend.get("managed")
    if url is not None and managed is not None:
        yield path, "has both url and managed: keep url for a running engine, managed for one to start"
    elif url is None and managed is None and not ("managed" in backend or "url" in backend):
        yield path, "needs url (the address of a running engine) or managed (an engine to start)"
    elif url is None and managed is None:
        yield path, "needs a value for url or managed (managed: {} starts the bundled engine)"
    yield from _memory(path, backend)
    if not isinstance(managed, dict):
        return
    yield from _managed((*path, "managed"), managed)
    for key in _MANAGED_ALSO_SAYS:
        said, meant = backend.get(key), managed.get(key, ManagedEngine.model_fields[key].default)
        if said is not None and meant is not None and said != meant:
            yield (*path, key), f"differs from managed.{key}: give it there only"


def _memory(path: KeyPath, backend: dict[str, Any]) -> Iterator[Finding]:
    vram, swap = backend.get("vram"), backend.get("swap_budget")
    if backend.get("kv_budget") is not None and vram is not None:
        yield (*path, "vram"), "says the same as kv_budget: keep one of them"
    if isinstance(vram, dict):
        buffers = vram.get("buffers")
        sizes = [parse_size(vram.get(key)) for key in ("usable", "weights")]
        usable, weights, other = (*sizes, parse_size(0 if buffers is None else buffers))
        if usable and weights is not None and other is not None and usable <= weights + other:
            taken = f"{weights + other:,} of {usable:,} usable bytes"
            yield (*path, "vram"), f"leaves nothing for KV: weights and buffers take {taken}"
    external = backend.get("url") is not None and backend.get("managed") is None
    if external and parse_size(swap) and backend.get("save_path") is None:
        yield (
            (*path, "swap_budget"),
            "needs save_path: the folder that the engine was started with as --slot-save-path",
        )


def _managed(path: KeyPath, managed: dict[str, Any]) -> Iterator[Finding]:
    decode = _number(managed, "decode_slots")
    engine = _number(managed, "engine_slots", default_engine_slots(decode) if decode else None)
    context = _number(managed, "context")
    batch = _number(managed, "batch_tokens")
    if decode and engine and decode > engine:
        # The key that the user wrote is the one to point at.
        key = "decode_slots" if "decode_slots" in managed else "engine_slots"
        yield (
            (*path, key),
            f"decode_slots ({decode}) exceeds engine_slots ({engine}): spare ones are needed",
        )
    split = managed.get("kv_layout") != "unified"
    if context and engine and split and context >= MIN_SLOT_CONTEXT > context // engine:
        least = engine * MIN_SLOT_CONTEXT
        yield (
            (*path, "context" if "context" in managed else "engine_slots"),
            f"{context} tokens over {engine} engine slots is too little: context must be at least {least}",
        )
    if batch and decode and batch < decode:
        yield (
            (*path, "batch_tokens" if "batch_tokens" in managed else "decode_slots"),
            f"batch_tokens ({batch}) is less than decode_slots ({decode}): a step must hold every turn",
        )


def _one_model_per_pool(backends: list[Any]) -> Iterator[Finding]:
    first: dict[str, tuple[str, int]] = {}
    for index, backend in enumerate(backends):
        managed = _mapping(_get(backend, "managed"))
        model = _get(backend, "model") or managed.get("model")
        pool = _get(backend, "pool") or "default"
        if not isinstance(model, str) or not isinstance(pool, str):
            continue
        other, owner = first.setdefault(pool, (model, index))
        if other != model:
            yield (
                ("backends", index),
                f"serves {quote(model)}, but pool {quote(pool)} serves {quote(other)} (backends[{owner}]): "
                "give it another pool",
            )


def _agents(document: Document, data: dict[str, Any]) -> Iterator[Finding]:
    agents = data.get("agents")
    if agents == {}:
        yield ("agents",), "at least one agent is needed"
    priorities = data.get("priorities")
    if priorities == {}:
        yield ("priorities",), "at least one priority is needed (leave the key out for the default ones)"
    names = list(DEFAULT_PRIORITIES if priorities is None else _mapping(priorities))
    if not isinstance(agents, dict):
        return
    for name, agent in agents.items():
        path: KeyPath = ("agents", name, "priority")
        if agent is not None and not isinstance(agent, dict):
            continue
        wanted = _get(agent, "priority")
        if names and wanted is None and Agent.model_fields["priority"].default not in names:
            yield path, f"is needed: one of {', '.join(names)}"
        elif names and isinstance(wanted, str) and wanted and wanted not in names:
            yield path, f"{quote(wanted)} is not one of {', '.join(names)}"
    keys: list[tuple[KeyPath, Any]] = [(("server", "admin_key"), _get(data.get("server"), "admin_key"))]
    keys += [(("agents", name, "key"), _get(agent, "key")) for name, agent in agents.items()]
    yield from _unique(document, sorted(keys, key=lambda found: document.lines.get(found[0], 0)))
    default = data.get("default_agent")
    if isinstance(default, str) and default and agents and default not in agents:
        close = get_close_matches(default, agents, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        shown = ", ".join(list(agents)[:12]) + (", ..." if len(agents) > 12 else "")
        yield ("default_agent",), f"{quote(default)} is not one of the agents {shown}{hint}"


def _unique(document: Document, values: list[tuple[KeyPath, Any]]) -> Iterator[Finding]:
    seen: dict[str, KeyPath] = {}
    for path, value in values:
        if isinstance(value, str):
            first = seen.setdefault(value, path)
            if first != path:
                yield path, f"{document.show(path)} is already used on line {document.lines[first]}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _get(value: Any, key: str) -> Any:
    return _mapping(value).get(key)


def _address(backend: Any) -> Any:
    url = _get(backend, "url")
    return url.rstrip("/") if isinstance(url, str) else None


def _number(managed: dict[str, Any], key: str, default: int | None = None) -> int | None:
    """The value that will count, or None where the schema already refuses what is written."""
    value = managed.get(key)
    if value is None:
        value = default if default is not None else ManagedEngine.model_fields[key].default
    return value if type(value) is int and value > 0 else None
