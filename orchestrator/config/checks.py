"""Checks of single values. Each says in words what is allowed, so an error reads `X is not <these words>`."""

import re
import shlex
from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from orchestrator.keys import is_hash

#: Names that mean the GGUF of an installed package; anything else is a path.
BUNDLED_MODELS = ("smollm2-135m",)

#: What llama.cpp can keep K and V in.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

MAX_SIZE = 1 << 50
_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}

_ORIGIN = (
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,40})://"
    r"(?P<host>\*|(?:[a-z0-9_.-]{0,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?)"
)

NAME = r"[a-z0-9][a-z0-9_-]*"
NAME_WORDS = "a name of lower-case letters, digits, _ and -, starting with a letter or digit"


def refuse(allowed: str) -> PydanticCustomError:
    """The value is not `allowed`."""
    return PydanticCustomError("not_allowed", "{allowed}", {"allowed": allowed})


def whole(low: int, high: int) -> BeforeValidator:
    """An integer in a range. `true`, `8.0` and `"8"` are none."""

    def check(value: object) -> object:
        if type(value) is not int or not low <= value <= high:
            raise refuse(f"a whole number from {low} to {high}")
        return value

    return BeforeValidator(check)


def number(low: float, high: float) -> BeforeValidator:
    """A finite number in a range, with or without a fraction."""

    def check(value: object) -> object:
        if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
            raise refuse(f"a number from {low:g} to {high:g}")
        return value

    return BeforeValidator(check)


def parse_size(value: object) -> int | None:
    """Bytes of a size as written: `9.5GiB`, `512 MB`, `1048576`; None when it is none.

    MB are 1000 * 1000 bytes and MiB 1024 * 1024, in any case. A fraction of a byte is left out.
    """
    if type(value) is int:
        return value if 0 <= value <= MAX_SIZE else None
    if not isinstance(value, str):
        return None
    found = re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,16})?) ?([a-z]+)", value.lower())
    if found is None or found[2] not in _UNITS:
        return None
    n_bytes = int(Decimal(found[1]) * _UNITS[found[2]])
    return n_bytes if n_bytes <= MAX_SIZE else None


def size(least: int = 0) -> BeforeValidator:
    """Bytes, at least so many, written as `parse_size` reads them."""

    def check(value: object) -> object:
        n_bytes = parse_size(value)
        if n_bytes is None:
            raise refuse("a size such as 9.5GiB, 512MiB, 1500MB or a whole number of bytes (at most 1024TiB)")
        if n_bytes < least:
            raise refuse("a size above zero")
        return n_bytes

    return BeforeValidator(check)


def text(allowed: str, pattern: str = r"(?s:.+)") -> BeforeValidator:
    """Text that matches a pattern in full. A bare `1234` in YAML is a number: the error says to quote it."""

    def check(value: object) -> object:
        if isinstance(value, bool | int | float):
            raise refuse(f"{allowed} (put it in quotes to make it text)")
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise refuse(allowed)
        return value

    return BeforeValidator(check)


def one_of(*words: str) -> BeforeValidator:
    """One of a few words."""

    def check(value: object) -> object:
        if not isinstance(value, str) or value not in words:
            raise refuse(f"one of {', '.join(words)}" if len(words) > 1 else words[0])
        return value

    return BeforeValidator(check)


def _switch(value: object) -> object:
    words = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    found = value if isinstance(value, bool) else words.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise refuse("true or false")
    return found


def _words(value: object) -> tuple[str, ...]:
    allowed = "a command line: text, or a list of texts, with the program first"
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:
        raise refuse(f"{allowed} (a quote in it is not closed)") from None
    if not isinstance(words, list | tuple) or not words:
        raise refuse(allowed)
    if not all(isinstance(word, str) and word and "\0" not in word for word in words):
        raise refuse(allowed)
    return tuple(words)


def _split_url(value: object, schemes: tuple[str, ...], allowed: str) -> SplitResult:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
        raise refuse(allowed)
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise refuse(f"{allowed} (its host or port is malformed)") from None
    if parts.scheme not in schemes or parts.fragment or port == 0:
        raise refuse(allowed)
    return parts


def _redis_url(value: object) -> object:
    if value == "embedded":
        return value
    allowed = "embedded, redis://host:port/db, rediss://host:port/db or unix:///path/to/socket"
    parts = _split_url(value, ("redis", "rediss", "unix"), allowed)
    if parts.scheme == "unix":
        usable = not parts.hostname and len(parts.path) > 1
    else:
        usable = bool(parts.hostname) and re.fullmatch(r"(?:/\d{0,4})?", parts.path) is not None
    if not usable:
        raise refuse(allowed)
    return value


def _engine_url(value: object) -> object:
    allowed = "an address such as http://127.0.0.1:8080"
    parts = _split_url(value, ("http", "https"), allowed)
    if not parts.hostname or parts.query:
        raise refuse(allowed)
    return str(value).rstrip("/")


def _host_name(value: object) -> object:
    allowed = "a host name or address, without a port"
    if not isinstance(value, str):
        raise refuse(allowed)
    try:
        return str(ip_address(value))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", value):
            raise refuse(allowed) from None
    return value.lower()


def _origin(value: object) -> object:
    """`scheme://host:port`, or `scheme://*` where no web page can have the scheme."""
    allowed = "an origin such as http://localhost:3000 or vscode-webview://*"
    origin = value.lower() if isinstance(value, str) else ""
    if origin == "null":
        raise refuse(f"{allowed} (any web page can send null)")
    found = re.fullmatch(_ORIGIN, origin)
    if found is None or (not found["host"] and found["scheme"] != "file"):
        raise refuse(allowed)
    if found["host"] == "*" and found["scheme"] in ("http", "https"):
        raise refuse(f"{allowed} (* would let every web page in)")
    return origin


def _key_hash(value: object) -> object:
    if not is_hash(value):
        # Its text is not repeated: it may be the key itself.
        raise refuse("the hash of a key; swarm key new NAME --write makes a key and puts its hash here")
    return value


def _anchored(value: object, info: ValidationInfo) -> object:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise refuse("a path")
    return _beside_config(value, info)


def _model(value: object, info: ValidationInfo) -> object:
    allowed = f"{', '.join(BUNDLED_MODELS)} or the path of a .gguf file"
    if not isinstance(value, str) or "\0" in value:
        raise refuse(allowed)
    if value in BUNDLED_MODELS:
        return value
    if not value.lower().endswith(".gguf"):
        raise refuse(allowed)
    return str(_beside_config(value, info))


def _beside_config(value: str, info: ValidationInfo) -> Path:
    """Relative paths start at the folder of the configuration file, whatever the working directory is."""
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise refuse("a path (this ~ has no home folder)") from None
    folder = info.context.get("folder") if isinstance(info.context, dict) else None
    return folder / path if isinstance(folder, Path) else path


switch = BeforeValidator(_switch)
command_words = BeforeValidator(_words)
redis_url = BeforeValidator(_redis_url)
engine_url = BeforeValidator(_engine_url)
host_name = BeforeValidator(_host_name)
origin = BeforeValidator(_origin)
key_hash = BeforeValidator(_key_hash)
anchored_path = BeforeValidator(_anchored)
model_file = BeforeValidator(_model)
empty_when_null = BeforeValidator(lambda value: {} if value is None else value)
