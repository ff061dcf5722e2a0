"""The settings and their defaults. Frozen; a key left out or set to null has its default.

Made by `load_config` and `parse_config`, which also apply the rules between values (`rules.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.config.checks import (
    BUNDLED_MODELS,
    CACHE_TYPES,
    NAME,
    NAME_WORDS,
    anchored_path,
    command_words,
    empty_when_null,
    engine_url,
    host_name,
    key_hash,
    model_file,
    number,
    one_of,
    origin,
    redis_url,
    size,
    switch,
    text,
    whole,
)

DAY_S = 86_400.0
MAX_SLOTS = 1024
MAX_TOKENS = 100_000_000

#: Above this many tokens per batch a cancel waits too long for its token boundary.
BOUNDED_BATCH_TOKENS = 512

DEFAULT_PRIORITIES: Mapping[str, int] = MappingProxyType(
    {"foreground": 100, "normal": 50, "background": 20, "batch": 0}
)
DEFAULT_DECODE_SLOTS = 8

Name = Annotated[str, text(NAME_WORDS, NAME)]
Layout = Literal["split", "unified"]
layout_check = one_of("split", "unified")
CacheType = Annotated[
    Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"], one_of(*CACHE_TYPES)
]

MODEL_NAME = r"[^\s\x00-\x1f]{1,200}"
MAX_LINE_PATTERNS = 16
LinePattern = Annotated[
    str,
    text(
        "the text of a line with * for what changes, such as 'Current time:*' (at most 200 characters, "
        "of which 4 are neither * nor blank)",
        # Fewer would match lines that mean something.
        r"(?! )(?=(?:[* ]*[^* ]){4})[^\x00-\x1f\x7f]{4,200}(?<! )",
    ),
]


def default_engine_slots(decode_slots: int) -> int:
    """Half as many spare places for paused turns, and at least the one a foreground turn starts in."""
    return max(decode_slots + 1, decode_slots * 3 // 2)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class Server(Settings):
    """The HTTP side. Port 0 takes any free port.

    A host that other machines can reach needs keys: see `exposure_problem`.
    """

    host: Annotated[str, text("a host name or address", r"[A-Za-z0-9_.:%-]+")] = "127.0.0.1"
    port: Annotated[int, whole(0, 65_535)] = 8700
    #: Longest silence on an open stream whose turn waits or is paused.
    keepalive_s: Annotated[float, number(0.05, 600)] = 10.0
    max_body_bytes: Annotated[int, whole(1024, 1 << 30)] = 8 * 1024 * 1024
    #: How long a streaming reply's headers are held back, so that an early failure still has its own status.
    header_wait_s: Annotated[float, number(0, 60)] = 1.0
    #: Requests that are open at once, all together and of one agent: more are refused.
    max_requests: Annotated[int, whole(1, 1_000_000)] = 4096
    max_requests_per_agent: Annotated[int, whole(1, 1_000_000)] = 2048
    #: Hash of the key of `/swarm/`; None: open, and then only this machine may reach it.
    admin_key: Annotated[str, key_hash] | None = Field(default=None, repr=False)
    #: Names that clients may call the service by, beside its addresses, localhost and `host`.
    allowed_hosts: tuple[Annotated[str, host_name], ...] = ()
    #: Origins of the browsers and webviews that may send requests; `scheme://*` is any host of a scheme.
    allowed_origins: tuple[Annotated[str, origin], ...] = ()


class Redis(Settings):
    """`embedded` starts Valkey with its files in `state_dir`; otherwise only `url` counts."""

    url: Annotated[str, redis_url] = Field(default="embedded", repr=False)
    state_dir: Annotated[Path, anchored_path] = Path(".state")

    @property
    def embedded(self) -> bool:
        return self.url == "embedded"


class ManagedEngine(Settings):
    """An engine that the service starts and stops. The defaults suit the bundled model on a small CPU."""

    #: A name from `BUNDLED_MODELS` or the path of a GGUF file.
    model: Annotated[str, model_file] = "smollm2-135m"
    #: The user's llama-server, to which host, port and the options below are appended; None: the bundled one.
    #: It may hold an API key.
    command: Annotated[tuple[str, ...], command_words] | None = Field(default=None, repr=False)
    decode_slots: Annotated[int, whole(1, MAX_SLOTS)] = DEFAULT_DECODE_SLOTS
    engine_slots: Annotated[int, whole(1, MAX_SLOTS)] = Field(
        default_factory=lambda data: default_engine_slots(data.get("decode_slots", DEFAULT_DECODE_SLOTS))
    )
    #: Tokens of all engine slots together; `split` gives each slot the same share of it.
    context: Annotated[int, whole(256, MAX_TOKENS)] = 24_576
    kv_layout: Annotated[Layout, layout_check] = "split"
    #: Both -b and -ub: a cancel during prefill takes effect after at most this many tokens.
    batch_tokens: Annotated[int, whole(1, 65_536)] = 64
    #: None: all cores but one, which is left to the service.
    threads: Annotated[int, whole(1, 1024)] | None = None
    #: Niceness of the engine's process: above 0 the service's own work goes first.
    nice: Annotated[int, whole(0, 19)] = 5
    gpu_layers: Annotated[int, whole(0, 10_000)] | None = None
    #: What keys and values are kept in: fewer bits hold more tokens, and change what the model says a little.
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"

    @property
    def model_name(self) -> str:
        """The name of the model file without its folder and ending."""
        return self.model if self.model in BUNDLED_MODELS else Path(self.model).stem


class Vram(Settings):
    """What a GPU has and what of it is not for KV, in bytes; the rest is the KV budget."""

    #: What the engine may take: the card's memory less what the desktop and others use.
    usable: Annotated[int, size(1)]
    weights: Annotated[int, size()]
    #: The engine's compute buffers.
    buffers: Annotated[int, size()] = 0


def _of_managed(key: str) -> Any:
    def value(data: dict[str, Any]) -> Any:
        managed = data.get("managed")
        return getattr(managed, key) if isinstance(managed, ManagedEngine) else None

    return value


class Backend(Settings):
    """One engine, reached at `url` or started as `managed`: exactly one of the two is set.

    What `managed` already says (decode slots, KV layout, batch) is also here, so a reader needs no case
    distinction; for an external engine None means that the user did not say and the engine must be asked.
    """

    name: Name
    kind: Annotated[Literal["llama.cpp"], one_of("llama.cpp")] = "llama.cpp"
    pool: Name = "default"
    url: Annotated[str, engine_url] | None = Field(default=None, repr=False)
    managed: ManagedEngine | None = None
    #: The public model name; None: the engine's own.
    model: Annotated[str, text("a model name without blanks", MODEL_NAME)] | None = Field(
        default_factory=_of_managed("model_name")
    )
    #: Further names that clients may ask for it by; `*` in one stands for any text.
    aliases: tuple[Annotated[str, text("a model name without blanks, * for any text", MODEL_NAME)], ...] = ()
    #: None, for an external engine: one less than its slots, at least 1.
    decode_slots: Annotated[int, whole(1, MAX_SLOTS)] | None = Field(
        default_factory=_of_managed("decode_slots")
    )
    kv_layout: Annotated[Layout, layout_check] | None = Field(default_factory=_of_managed("kv_layout"))
    batch_tokens: Annotated[int, whole(1, 65_536)] | None = Field(default_factory=_of_managed("batch_tokens"))
    #: As written: 0 is never, None is automatic. `piece_tokens` is the answer.
    prefill_piece_tokens: Annotated[int, whole(0, 65_536)] | None = None
    kv_bytes_per_token: Annotated[int, whole(1, 1 << 32)] | None = None
    #: The most bytes of KV that the engine may hold, as written; `kv_budget_bytes` is the answer.
    kv_budget: Annotated[int, size(1)] | None = None
    #: Another way to say `kv_budget`.
    vram: Vram | None = None
    #: The folder for swapped KV, as the engine is told it; None, for a managed engine: one in memory.
    save_path: Annotated[Path, anchored_path] | None = None
    #: The most bytes of files in `save_path`. 0: no swap; None: half of what is free there, at most 8 GiB.
    swap_budget: Annotated[int, size()] | None = None

    @property
    def kv_budget_bytes(self) -> int | None:
        """The most bytes of KV that the engine may hold; None: as much as its context has."""
        if self.vram is not None:
            return self.vram.usable - self.vram.weights - self.vram.buffers
        return self.kv_budget

    @property
    def piece_tokens(self) -> int | None:
        """Size of the pieces that a preemptible prompt is sent in; None: whole.

        A prompt needs no pieces when the engine's own batch is already a short way to the next boundary.
        """
        if self.prefill_piece_tokens is not None:
            return self.prefill_piece_tokens or None
        bounded = self.batch_tokens is not None and self.batch_tokens <= BOUNDED_BATCH_TOKENS
        return None if bounded else BOUNDED_BATCH_TOKENS


class Policy(Settings):
    """How turns are preempted, kept and bounded."""

    preemption: Annotated[bool, switch] = True
    #: Of several turns that could yield, one that ran less than this since its start or resume does so last.
    min_run_s: Annotated[float, number(0, 3600)] = 0.0
    #: Of several turns that could yield, one that was preempted this often already does so last.
    max_preemptions: Annotated[int, whole(0, 1_000_000)] = 50
    #: Waiting this long lifts a turn by one class, so that every turn gets its slot.
    aging_s: Annotated[float, number(0.1, DAY_S)] = 60.0
    #: More waiting turns than this are refused.
    max_waiting: Annotated[int, whole(1, 10_000_000)] = 10_000
    #: Records and output of a finished turn are kept this long.
    turn_ttl_s: Annotated[float, number(1, 30 * DAY_S)] = 600.0


class Workload(Settings):
    """What `swarm demo` lets an agent do: each client asks, thinks, and asks again."""

    clients: Annotated[int, whole(1, 10_000)] = 1
    mean_tokens: Annotated[float, number(1, 1_000_000)] = 48.0
    #: `heavy`: lengths with a heavy tail around the mean; `none`: each turn has the mean length.
    tail: Annotated[Literal["heavy", "none"], one_of("heavy", "none")] = "none"
    think_s: Annotated[float, number(0, 3600)] = 0.0
    prompt: Annotated[str, text("a prompt of 1 to 100,000 characters", r"(?s:.{1,100000})")] = (
        "Explain what this function does and suggest one improvement."
    )


class StablePrefix(Settings):
    """Lines of an agent's instructions that change from turn to turn, by patterns with * for any text.

    A system or developer message's line that `pin` matches reads as it did at first; one that `move` matches
    goes to the end of the prompt.
    """

    pin: Annotated[tuple[LinePattern, ...], Field(max_length=MAX_LINE_PATTERNS)] = ()
    move: Annotated[tuple[LinePattern, ...], Field(max_length=MAX_LINE_PATTERNS)] = ()


class Agent(Settings):
    """An identity that turns come from."""

    priority: Annotated[str, text("the name of a priority")] = "normal"
    #: Hash of the key that the agent sends as bearer token or x-api-key (`orchestrator.keys`).
    key: Annotated[str, key_hash] | None = Field(default=None, repr=False)
    #: A turn of this agent generates at most so much, whatever it asks for.
    max_turn_tokens: Annotated[int, whole(1, MAX_TOKENS)] = 2048
    #: What keeps this agent's prompts from being found in KV, and what to do about it.
    stable_prefix: StablePrefix = StablePrefix()
    workload: Workload | None = None


class Config(Settings):
    """The whole file."""

    server: Server = Server()
    redis: Redis = Redis()
    backends: tuple[Backend, ...]
    priorities: Mapping[Name, Annotated[int, whole(0, 1000)]] = Field(
        default_factory=lambda: dict(DEFAULT_PRIORITIES)
    )
    policy: Policy = Policy()
    agents: Mapping[Name, Annotated[Agent, empty_when_null]]
    #: Whose turns the anonymous ones are; None: a request must say who it is from.
    default_agent: Annotated[str, text("the name of an agent")] | None = None

    def agent_priority(self, name: str) -> int:
        """The priority of an agent's turns; a KeyError for an undeclared agent."""
        return self.priorities[self.agents[name].priority]

    @property
    def top_priority(self) -> int:
        """The highest declared priority, whether or not an agent has it."""
        return max(self.priorities.values())
