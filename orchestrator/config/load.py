"""From a file to a `Config`, or to all of its mistakes."""

from difflib import get_close_matches
from pathlib import Path

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config import schema
from orchestrator.config.document import (
    MAX_BYTES,
    TOO_LARGE,
    Document,
    KeyPath,
    Problem,
    quote,
    read_document,
)
from orchestrator.config.rules import apply_rules
from orchestrator.config.schema import Config


class ConfigError(ValueError):
    """The configuration has mistakes; as text, one line for each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def load_config(path: Path | str) -> Config:
    """Read a file. Relative paths in it start at its own folder."""
    return parse_config(read_config(path), str(path))


def read_config(path: Path | str) -> str:
    """A file's text, as it is, except for a byte order mark. Raises ConfigError."""
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _failure(source, None, TOO_LARGE)
        # Notepad and others put a byte order mark first.
        return raw.decode("utf-8-sig")
    except ConfigError:
        raise
    except FileNotFoundError:
        raise _failure(source, None, "there is no such file") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _failure(source, line, f"not UTF-8 text: byte 0x{raw[error.start]:02x}") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _failure(source, None, f"cannot be read: {reason}") from None


def parse_config(text: str, source: str = "config.yaml") -> Config:
    """Check a text. `source` is the name for its errors, and relative paths start at that name's folder."""
    document = read_document(text, source)
    config = None
    if not document.problems or isinstance(document.data, dict):
        try:
            config = Config.model_validate(document.data, context={"folder": Path(source).parent})
        except ValidationError as error:
            for details in error.errors(include_url=False, include_input=False):
                _explain(document, details)
        apply_rules(document)
    if config is None or document.problems:
        raise ConfigError(tuple(sorted(dict.fromkeys(document.problems), key=lambda found: found.line or 0)))
    return config


def _failure(source: str, line: int | None, message: str) -> ConfigError:
    return ConfigError((Problem(source, line, "", message),))


_MODELS: dict[KeyPath, type[BaseModel]] = {
    (): schema.Config,
    ("server",): schema.Server,
    ("redis",): schema.Redis,
    ("backends", "*"): schema.Backend,
    ("backends", "*", "managed"): schema.ManagedEngine,
    ("backends", "*", "vram"): schema.Vram,
    ("policy",): schema.Policy,
    ("agents", "*"): schema.Agent,
    ("agents", "*", "stable_prefix"): schema.StablePrefix,
    ("agents", "*", "workload"): schema.Workload,
}


def _keys_at(path: KeyPath) -> list[str]:
    """The keys that the mapping at this place may have."""
    listed = path[:1] in (("backends",), ("agents",))
    shape = tuple("*" if listed and index == 1 else step for index, step in enumerate(path))
    model = _MODELS.get(shape)
    return list(model.model_fields) if model else []


def _explain(document: Document, error: ErrorDetails) -> None:
    """Pydantic's finding in this project's words: where, what was found, what is allowed."""
    is_key = error["loc"][-1:] == ("[key]",)
    path: KeyPath = error["loc"][:-1] if is_key else error["loc"]
    found = quote(str(path[-1])) if is_key else document.show(path)
    match error["type"]:
        case "not_allowed":
            document.report(path, f"{found} is not {error['msg']}")
        case "extra_forbidden":
            keys = _keys_at(path[:-1])
            close = get_close_matches(str(path[-1]), keys, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            document.report(path, f"unknown key; {hint}Allowed here: {', '.join(keys)}")
        case "default_factory_not_called":
            pass  # a default that follows from a value which is itself reported
        case "missing":
            document.report(path, "is missing, and has no default")
        case "model_type" | "dict_type" | "mapping_type":
            names = ", ".join(_keys_at(path))
            document.report(path, f"{found} is not a mapping" + (f" with keys of {names}" if names else ""))
        case "tuple_type":
            document.report(path, f"{found} is not a list (its items start with '- ')")
        case _:
            document.report(path, f"{found}: {error['msg']}")
