"""The configuration: what is accepted, what it becomes, and that every mistake is named with its line."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.config import (
    DEFAULT_PRIORITIES,
    Agent,
    Backend,
    Config,
    ConfigError,
    ManagedEngine,
    load_config,
    parse_config,
)
from orchestrator.keys import hash_key

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = (ROOT / "config.yaml").read_text()

MINIMAL = """\
backends:
  - name: local
    url: http://127.0.0.1:8080
agents:
  editor: {priority: foreground}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert str(caught.value).split("\n") == [str(problem) for problem in caught.value.problems]
    return str(caught.value).split("\n")


def with_backend(lines: str) -> str:
    """A configuration whose only backend has these keys; the first of them is on line 3."""
    indented = "\n".join(f"    {line}" for line in lines.splitlines())
    return f"backends:\n  - name: b\n{indented}\nagents: {{a: {{}}}}\n"


class TestAccepted:
    def test_example_is_the_demo_swarm(self) -> None:
        config = load_config(ROOT / "config.yaml")
        (backend,) = config.backends
        assert backend.managed is not None
        assert config.redis.embedded
        assert config.redis.state_dir == ROOT / ".state"
        assert config.default_agent == "editor"
        assert config.agent_priority("editor") == config.top_priority == 100
        clients = {name: agent.workload.clients for name, agent in config.agents.items() if agent.workload}
        assert clients["editor"] == 1
        assert sum(clients.values()) - 1 == 12 > backend.managed.decode_slots == 8
        per_slot = backend.managed.context // backend.managed.engine_slots
        assert all(agent.max_turn_tokens < per_slot for agent in config.agents.values())

    def test_commented_lines_of_the_example_are_valid(self) -> None:
        start = EXAMPLE.index("  # - name: mine")
        end = EXAMPLE.index("# Higher goes first")
        external = re.sub(r"^  # ?", "  ", EXAMPLE[start:end], flags=re.MULTILINE)
        config = parse_config(f"backends:\n{external}\nagents: {{a: }}\n")
        assert config.backends[0].url == "http://127.0.0.1:8080"

    def test_defaults(self) -> None:
        config = parse_config(MINIMAL)
        assert config.priorities == DEFAULT_PRIORITIES
        assert (config.server.host, config.server.port) == ("127.0.0.1", 8700)
        assert config.redis.url == "embedded"
        assert config.policy.preemption is True
        assert config.default_agent is None
        assert config.agents["editor"] == Agent(priority="foreground")

    def test_null_and_empty_mean_the_default(self) -> None:
        text = (
            MINIMAL + "server:\npolicy: {preemption: , min_run_s: ~}\npriorities: null\ndefault_agent: null\n"
        )
        assert parse_config(text) == parse_config(MINIMAL)

    def test_agent_without_settings(self) -> None:
        assert parse_config(MINIMAL + "  other:\n").agents["other"] == Agent()

    def test_own_priorities(self) -> None:
        config = parse_config(MINIMAL + "priorities: {foreground: 7, idle: 0}\n")
        assert (config.top_priority, config.agent_priority("editor")) == (7, 7)
        with pytest.raises(KeyError):
            config.agent_priority("nobody")

    @pytest.mark.parametrize(
        ("word", "value"),
        [("true", True), ("on", True), ("Yes", True), ("false", False), ("off", False), ("no", False)],
    )
    def test_switch_words(self, word: str, value: bool) -> None:
        assert parse_config(MINIMAL + f"policy: {{preemption: {word}}}").policy.preemption is value

    def test_words_that_other_yaml_readers_take_for_booleans_are_names(self) -> None:
        config = parse_config(MINIMAL + "  on: {}\n  no: {}\n  007: {}\ndefault_agent: on\n")
        assert list(config.agents) == ["editor", "on", "no", "007"]
        assert config.default_agent == "on"

    def test_anchors(self) -> None:
        text = MINIMAL + "  a: &same {priority: batch, max_turn_tokens: 8_000}\n  b: *same\n"
        config = parse_config(text)
        assert config.agents["a"] == config.agents["b"] == Agent(priority="batch", max_turn_tokens=8000)

    @pytest.mark.parametrize(
        "url",
        ["embedded", "redis://h:6379/0", "rediss://u:p@h", "unix:///run/r.sock?db=1", "redis://[::1]:6379"],
    )
    def test_redis_urls(self, url: str) -> None:
        redis = parse_config(MINIMAL + f"redis: {{url: '{url}'}}").redis
        assert redis.url == url
        assert redis.embedded == (url == "embedded")

    def test_secrets_stay_out_of_the_text_form(self) -> None:
        agent, admin = hash_key("a"), hash_key("o")
        text = (
            f"{MINIMAL}  x: {{key: {agent}}}\nredis: {{url: 'redis://:geheim@h'}}\n"
            f"server: {{admin_key: {admin}}}\n"
        ).replace("url: http://127.0.0.1:8080", "managed: {command: llama-server --api-key geheim}")
        config = parse_config(text)
        for shown in (repr(config), str(config)):
            assert not any(secret in shown for secret in ("geheim", agent, admin))

    def test_hosts_and_origins_are_kept_in_lower_case(self) -> None:
        server = parse_config(
            MINIMAL
            + "server: {allowed_hosts: [GPU-Box, '::1'], allowed_origins: ['APP://Any.md', 'file://']}"
        ).server
        assert server.allowed_hosts == ("gpu-box", "::1")
        assert server.allowed_origins == ("app://any.md", "file://")

    def test_frozen(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            parse_config(MINIMAL).server.port = 1

    def test_byte_order_mark_and_windows_lines(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
        assert load_config(file) == parse_config(MINIMAL, str(file))


class TestBackends:
    def backend(self, lines: str, source: str = "config.yaml") -> Backend:
        return parse_config(with_backend(lines), source).backends[0]

    def test_managed_values_are_the_backends_values(self) -> None:
        backend = self.backend(
            "managed: {model: models/Qwen3-4B.gguf, decode_slots: 4, kv_layout: unified, batch_tokens: 128}"
        )
        assert backend.managed is not None
        assert backend.model == backend.managed.model_name == "Qwen3-4B"
        assert (backend.decode_slots, backend.kv_layout, backend.batch_tokens) == (4, "unified", 128)
        assert backend.managed.engine_slots == 6

    def test_managed_with_defaults_alone(self) -> None:
        backend = self.backend("managed: {}")
        assert backend.managed == ManagedEngine()
        assert (backend.model, backend.decode_slots, backend.batch_tokens) == ("smollm2-135m", 8, 64)

    def test_what_an_external_engine_must_be_asked_is_none(self) -> None:
        backend = self.backend("url: http://h:1/prefix/")
        assert backend.url == "http://h:1/prefix"
        assert (backend.model, backend.decode_slots, backend.kv_layout, backend.batch_tokens) == (None,) * 4

    @pytest.mark.parametrize(
        ("keys", "pieces"),
        [
            ("", 512),
            ("batch_tokens: 512", None),
            ("batch_tokens: 2048", 512),
            ("prefill_piece_tokens: 0", None),
            ("batch_tokens: 64\nprefill_piece_tokens: 256", 256),
        ],
    )
    def test_prompts_go_in_pieces_unless_the_batch_is_bounded(self, keys: str, pieces: int | None) -> None:
        assert self.backend(f"url: http://h\n{keys}").piece_tokens == pieces

    def test_one_decode_slot_still_has_a_spare_engine_slot(self) -> None:
        managed = self.backend("managed: {decode_slots: 1}").managed
        assert managed is not None
        assert managed.engine_slots == 2

    def test_command_is_split_like_a_shell_does(self) -> None:
        for command in ("llama-server --alias 'my model'", "[llama-server, --alias, my model]"):
            managed = self.backend(f"managed: {{command: {command}}}").managed
            assert managed is not None
            assert managed.command == ("llama-server", "--alias", "my model")

    def test_relative_paths_start_at_the_configuration(self) -> None:
        backend = self.backend("managed: {model: m/a.GGUF}\nsave_path: kv", "/etc/swarm/c.yaml")
        assert backend.managed is not None
        assert backend.managed.model == "/etc/swarm/m/a.GGUF"
        assert backend.save_path == Path("/etc/swarm/kv")
        absolute = self.backend("url: http://h\nsave_path: /kv", "/etc/swarm/c.yaml")
        assert absolute.save_path == Path("/kv")

    def test_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/u")
        assert self.backend("url: http://h\nsave_path: ~/kv", "/x/c.yaml").save_path == Path("/home/u/kv")


SERVER_KEYS = (
    "host, port, keepalive_s, max_body_bytes, header_wait_s, max_requests, max_requests_per_agent, "
    "admin_key, allowed_hosts, allowed_origins"
)
KEY_WORDS = "the hash of a key; swarm key new NAME --write makes a key and puts its hash here"
ORIGIN_WORDS = "an origin such as http://localhost:3000 or vscode-webview://*"
HASH = hash_key("k")
TOP_KEYS = "server, redis, backends, priorities, policy, agents, default_agent"
REDIS_URLS = "embedded, redis://host:port/db, rediss://host:port/db or unix:///path/to/socket"
NAME_WORDS = "a name of lower-case letters, digits, _ and -, starting with a letter or digit"

#: What is added to MINIMAL, whose own lines are 1 to 5, and the one line it must give.
ADDED = {
    "  x: {priority: forground}": (
        "6: agents.x.priority: 'forground' is not one of foreground, normal, background, batch"
    ),
    "priorities: {low: 1}": "5: agents.editor.priority: 'foreground' is not one of low",
    "  x:\npriorities: {foreground: 9}": "6: agents.x.priority: is needed: one of foreground",
    "  x: {priority: 70}": (
        "6: agents.x.priority: 70 is not the name of a priority (put it in quotes to make it text)"
    ),
    "  X y: {}": f"6: agents.'X y': 'X y' is not {NAME_WORDS}",
    "  x: [1]": (
        "6: agents.x: a list is not a mapping with keys of "
        "priority, key, max_turn_tokens, stable_prefix, workload"
    ),
    "  x: {key: 1234}": f"6: agents.x.key: this key is not {KEY_WORDS}",
    "  x: {key: my-own-secret}": f"6: agents.x.key: this key is not {KEY_WORDS}",
    "server: {admin_key: my-own-secret}": f"6: server.admin_key: this key is not {KEY_WORDS}",
    f"  x: {{key: {HASH}}}\n  y:\n    key: {HASH}": "8: agents.y.key: this key is already used on line 6",
    f"  x: {{key: {HASH}}}\nserver: {{admin_key: {HASH}}}": (
        "7: server.admin_key: this key is already used on line 6"
    ),
    "server: {allowed_hosts: ['a:1']}": (
        "6: server.allowed_hosts[0]: 'a:1' is not a host name or address, without a port"
    ),
    "server: {allowed_hosts: a}": "6: server.allowed_hosts: 'a' is not a list (its items start with '- ')",
    "server: {allowed_origins: ['*']}": f"6: server.allowed_origins[0]: '*' is not {ORIGIN_WORDS}",
    "server: {allowed_origins: ['null']}": (
        f"6: server.allowed_origins[0]: 'null' is not {ORIGIN_WORDS} (any web page can send null)"
    ),
    "server: {allowed_origins: ['https://*']}": (
        f"6: server.allowed_origins[0]: 'https://*' is not {ORIGIN_WORDS} (* would let every web page in)"
    ),
    "  x: {max_turn_tokens: 8.0}": (
        "6: agents.x.max_turn_tokens: 8.0 is not a whole number from 1 to 100000000"
    ),
    "  x: {max_turn_tokens: -1}": (
        "6: agents.x.max_turn_tokens: -1 is not a whole number from 1 to 100000000"
    ),
    "  x: {workload: {tail: fat}}": "6: agents.x.workload.tail: 'fat' is not one of heavy, none",
    "  x: {workload: {client: 1}}": (
        "6: agents.x.workload.client: unknown key; did you mean clients? "
        "Allowed here: clients, mean_tokens, tail, think_s, prompt"
    ),
    "  x: {workload: {prompt: ''}}": (
        "6: agents.x.workload.prompt: '' is not a prompt of 1 to 100,000 characters"
    ),
    "default_agent: editr": (
        "6: default_agent: 'editr' is not one of the agents editor (did you mean editor?)"
    ),
    "  editor: {}": "6: agents.editor: given twice, first on line 5",
    "server: {prot: 1}": f"6: server.prot: unknown key; did you mean port? Allowed here: {SERVER_KEYS}",
    "zzz: 1": f"6: zzz: unknown key; Allowed here: {TOP_KEYS}",
    "zzz:": f"6: zzz: unknown key; Allowed here: {TOP_KEYS}",
    '"a\\nb": 1': f"6: 'a\\nb': unknown key; Allowed here: {TOP_KEYS}",
    "server:\n  port: 70000": "7: server.port: 70000 is not a whole number from 0 to 65535",
    "server: {port: true}": "6: server.port: true is not a whole number from 0 to 65535",
    "server: {port: '8700'}": "6: server.port: '8700' is not a whole number from 0 to 65535",
    "server: {port: 1:30}": "6: server.port: '1:30' is not a whole number from 0 to 65535",
    "server: {port: [1]}": "6: server.port: a list is not a whole number from 0 to 65535",
    "server: {host: 'http://x'}": "6: server.host: 'http://x' is not a host name or address",
    "server: 3": f"6: server: 3 is not a mapping with keys of {SERVER_KEYS}",
    "server: {keepalive_s: .inf}": "6: server.keepalive_s: .inf is not a number from 0.05 to 600",
    "server: {keepalive_s: .nan}": "6: server.keepalive_s: .nan is not a number from 0.05 to 600",
    "server: {header_wait_s: true}": "6: server.header_wait_s: true is not a number from 0 to 60",
    "policy: {preemption: maybe}": "6: policy.preemption: 'maybe' is not true or false",
    "policy: {preemption: 1}": "6: policy.preemption: 1 is not true or false",
    "policy: {min_run_s: -0.5}": "6: policy.min_run_s: -0.5 is not a number from 0 to 3600",
    "policy: {max_waiting: 1e3}": "6: policy.max_waiting: 1e3 is not a whole number from 1 to 10000000",
    "policy: {turn_ttl_s: " + "9" * 99 + "}": (
        f"6: policy.turn_ttl_s: {'9' * 60} is not a usable whole number"
    ),
    "redis: {url: 'http://:geheim@h'}": f"6: redis.url: 'http://***@h' is not {REDIS_URLS}",
    "redis: {url: 'redis://h/x'}": f"6: redis.url: 'redis://h/x' is not {REDIS_URLS}",
    "redis: {url: 'unix://host/p'}": f"6: redis.url: 'unix://host/p' is not {REDIS_URLS}",
    "redis: {url: 'redis://h:x'}": (
        f"6: redis.url: 'redis://h:x' is not {REDIS_URLS} (its host or port is malformed)"
    ),
    "redis: {url: true}": f"6: redis.url: true is not {REDIS_URLS}",
    "redis: {state_dir: ''}": "6: redis.state_dir: '' is not a path",
    "redis: {state_dir: ~nobody-here/x}": (
        "6: redis.state_dir: '~nobody-here/x' is not a path (this ~ has no home folder)"
    ),
    "priorities: {}": (
        "6: priorities: at least one priority is needed (leave the key out for the default ones)"
    ),
    "priorities: [1]": "6: priorities: a list is not a mapping",
    "priorities: {foreground: 1001}": "6: priorities.foreground: 1001 is not a whole number from 0 to 1000",
    "priorities: {foreground: }": "6: priorities.foreground: nothing is not a whole number from 0 to 1000",
    "priorities: {foreground: 1, A: 1}": f"6: priorities.A: 'A' is not {NAME_WORDS}",
    "server: !!python/name:os.system x": (
        "6: server: x is not a usable value for the YAML tag 'tag:yaml.org,2002:python/name:os.system'"
    ),
    "server: !!set {a: }": "6: server: the YAML tag 'tag:yaml.org,2002:set' is not allowed here",
    "server: {port: !!int x}": "6: server.port: x is not a usable whole number",
    "server: {<<: {port: 1}}": "6: server: merge keys (<<) are not supported: write the keys out",
    "? [a]\n: b": "6: a key must be a plain word",
    'default_agent: "\\uD800"': "6: default_agent: '\\ud800' holds half a character",
    '"\\uD800": 1': "6: the key '\\ud800' is half a character",
}

BACKEND_KEYS = (
    "name, kind, pool, url, managed, model, aliases, decode_slots, kv_layout, batch_tokens, "
    "prefill_piece_tokens, kv_bytes_per_token, kv_budget, vram, save_path, swap_budget"
)
COMMAND = "a command line: text, or a list of texts, with the program first"

#: Keys of the one backend, the first on line 3, and the one line they must give.
BACKEND = {
    "": "2: backends[0]: needs url (the address of a running engine) or managed (an engine to start)",
    "managed:": ("2: backends[0]: needs a value for url or managed (managed: {} starts the bundled engine)"),
    "url: http://h\nmanaged: {}": (
        "2: backends[0]: has both url and managed: keep url for a running engine, managed for one to start"
    ),
    "url: http://h\nkind: simulated": "4: backends[0].kind: 'simulated' is not llama.cpp",
    "url: ftp://h": "3: backends[0].url: 'ftp://h' is not an address such as http://127.0.0.1:8080",
    "url: 127.0.0.1:8080": (
        "3: backends[0].url: '127.0.0.1:8080' is not an address such as http://127.0.0.1:8080"
    ),
    "url: http://h?x=1": "3: backends[0].url: 'http://h?x=1' is not an address such as http://127.0.0.1:8080",
    "url: http://h:99999": (
        "3: backends[0].url: 'http://h:99999' is not an address such as http://127.0.0.1:8080 "
        "(its host or port is malformed)"
    ),
    "url: http://h\nurl_: 1": (
        f"4: backends[0].url_: unknown key; did you mean url? Allowed here: {BACKEND_KEYS}"
    ),
    "url: http://h\nmodel: 12": (
        "4: backends[0].model: 12 is not a model name without blanks (put it in quotes to make it text)"
    ),
    "url: http://h\nkv_layout: both": "4: backends[0].kv_layout: 'both' is not one of split, unified",
    "url: http://h\ndecode_slots: 0": "4: backends[0].decode_slots: 0 is not a whole number from 1 to 1024",
    "url: http://h\nsave_path: [a]": "4: backends[0].save_path: a list is not a path",
    "managed: {decode_slots: 4}\ndecode_slots: 8": (
        "4: backends[0].decode_slots: differs from managed.decode_slots: give it there only"
    ),
    "managed: {}\nkv_layout: unified": (
        "4: backends[0].kv_layout: differs from managed.kv_layout: give it there only"
    ),
    "managed:\n  decode_slots: 9\n  engine_slots: 6": (
        "4: backends[0].managed.decode_slots: "
        "decode_slots (9) exceeds engine_slots (6): spare ones are needed"
    ),
    "managed:\n  engine_slots: 6": (
        "4: backends[0].managed.engine_slots: "
        "decode_slots (8) exceeds engine_slots (6): spare ones are needed"
    ),
    "managed: {context: 1024}": (
        "3: backends[0].managed.context: 1024 tokens over 12 engine slots is too little: "
        "context must be at least 3072"
    ),
    "managed: {batch_tokens: 4}": (
        "3: backends[0].managed.batch_tokens: batch_tokens (4) is less than decode_slots (8): "
        "a step must hold every turn"
    ),
    "managed: {model: llama3}": (
        "3: backends[0].managed.model: 'llama3' is not smollm2-135m or the path of a .gguf file"
    ),
    "managed: {model: 3}": "3: backends[0].managed.model: 3 is not smollm2-135m or the path of a .gguf file",
    "managed: {nice: -1}": "3: backends[0].managed.nice: -1 is not a whole number from 0 to 19",
    "managed: {command: 'a \"b'}": (
        f"3: backends[0].managed.command: 'a \"b' is not {COMMAND} (a quote in it is not closed)"
    ),
    "managed: {command: ''}": f"3: backends[0].managed.command: '' is not {COMMAND}",
    "managed: {command: [llama-server, 3]}": f"3: backends[0].managed.command: a list is not {COMMAND}",
    "managed: {command: 3}": f"3: backends[0].managed.command: 3 is not {COMMAND}",
    "managed: true": (
        "3: backends[0].managed: true is not a mapping with keys of model, command, decode_slots, "
        "engine_slots, context, kv_layout, batch_tokens, threads, nice, gpu_layers, "
        "cache_type_k, cache_type_v"
    ),
}

#: Whole texts.
WHOLE = {
    "": "c.yaml: is empty: backends and agents are needed",
    "# nothing": "c.yaml: is empty: backends and agents are needed",
    "3": f"c.yaml:1: 3 is not a mapping with keys of {TOP_KEYS}",
    "\n- a": f"c.yaml:2: a list is not a mapping with keys of {TOP_KEYS}",
    "a: [": (
        "c.yaml:1: not valid YAML: while parsing a flow node, "
        "expected the node content, but found '<stream end>'"
    ),
    "a:\n\tb: 1": (
        "c.yaml:2: not valid YAML: while scanning for the next token, found character '\\t' "
        "that cannot start any token (indent with spaces, not tabs)"
    ),
    "a: 1\nb: \x00": "c.yaml:2: not valid YAML: the character '\\x00' is not allowed",
    "a: 1\n---\nb: 1": (
        "c.yaml:2: not valid YAML: expected a single document in the stream, but found another document"
    ),
    "a: *b": "c.yaml:1: not valid YAML: found undefined alias 'b'",
    "a: &a [*a]": "c.yaml:1: a[0][0]: nested deeper than 24 levels",
    "[" * 5000: "c.yaml: nested deeper than 24 levels",
    "a: 1\n" * 60_000: "c.yaml: is larger than 256 KiB, too large for a configuration",
    "[" + ",".join(["1"] * 30_000) + "]": "c.yaml:1: [19999]: holds more than 20000 values",
}


class TestRefused:
    @pytest.mark.parametrize(("added", "expected"), ADDED.items())
    def test_one_mistake(self, added: str, expected: str) -> None:
        assert problems(f"{MINIMAL}{added}\n") == [f"c.yaml:{expected}"]

    @pytest.mark.parametrize(("keys", "expected"), BACKEND.items())
    def test_one_mistake_of_a_backend(self, keys: str, expected: str) -> None:
        assert problems(with_backend(keys)) == [f"c.yaml:{expected}"]

    @pytest.mark.parametrize(("text", "expected"), WHOLE.items(), ids=range(len(WHOLE)))
    def test_whole_text(self, text: str, expected: str) -> None:
        assert problems(text) == [expected]

    def test_escape_beyond_unicode(self) -> None:
        (line,) = problems('a: "\\UFFFFFFFF"')
        assert line.startswith("c.yaml: not valid YAML: ")

    def test_alias_bomb(self) -> None:
        bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        for level in range(1, 9):
            bomb += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
        (line,) = problems(bomb)
        assert line.endswith("holds more than 20000 values")

    def test_missing_sections(self) -> None:
        assert problems("server: {}\nagents:\n") == [
            "c.yaml:1: backends: is missing, and has no default",
            "c.yaml:2: agents: is missing, and has no default",
        ]
        assert problems("backends: []\nagents: {}\n") == [
            "c.yaml:1: backends: at least one backend is needed",
            "c.yaml:2: agents: at least one agent is needed",
        ]
        assert problems("backends: {}\nagents: {a: }\n") == [
            "c.yaml:1: backends: a mapping is not a list (its items start with '- ')",
        ]

    def test_backends_that_disagree(self) -> None:
        text = """\
backends:
  - {name: a, url: "http://h:1", model: m}
  - {name: a, url: "http://h:1/", pool: p}
  - name: c
    managed: {model: other.gguf}
  - 7
agents: {x: {}}
"""
        assert problems(text) == [
            "c.yaml:3: backends[1].name: 'a' is already used on line 2",
            "c.yaml:3: backends[1].url: 'http://h:1/' is already used on line 2",
            "c.yaml:4: backends[2]: serves 'other.gguf', but pool 'default' serves 'm' (backends[0]): "
            "give it another pool",
            f"c.yaml:6: backends[3]: 7 is not a mapping with keys of {BACKEND_KEYS}",
        ]

    def test_all_mistakes_at_once_in_the_order_of_the_file(self) -> None:
        text = """\
server: {port: -1, prt: 2}
backends:
  - name: B
    managed: {decode_slots: 9, engine_slots: 6, threads: true}
policy:
  aging_s: 0
  aging_s: 4
agents:
  a: {priority: forground}
default_agent: b
"""
        found = problems(text)
        assert [re.match(r"c\.yaml:(\d+): ([^:]*)", line).groups() for line in found] == [  # type: ignore[union-attr]
            ("1", "server.port"),
            ("1", "server.prt"),
            ("3", "backends[0].name"),
            ("4", "backends[0].managed.threads"),
            ("4", "backends[0].managed.decode_slots"),
            ("6", "policy.aging_s"),
            ("7", "policy.aging_s"),
            ("9", "agents.a.priority"),
            ("10", "default_agent"),
        ]

    def test_long_values_and_names_are_shortened(self) -> None:
        (line,) = problems(f"{MINIMAL}default_agent: {'x' * 500}\n")
        assert len(line) < 200
        (line,) = problems(MINIMAL + "".join(f"  a{i}: {{}}\n" for i in range(50)) + "default_agent: zz\n")
        assert line.endswith("a10, ...")


class TestFiles:
    def failure(self, path: Path | str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        (problem,) = caught.value.problems
        return str(problem).removeprefix(str(path))

    def test_absent(self, tmp_path: Path) -> None:
        assert self.failure(tmp_path / "none.yaml") == ": there is no such file"

    def test_folder(self, tmp_path: Path) -> None:
        assert self.failure(tmp_path).startswith(": cannot be read: ")

    def test_impossible_name(self) -> None:
        assert ": cannot be read: " in self.failure("a\0b")

    def test_not_utf8(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_bytes(b"a: 1\nb: \xe9\n")
        assert self.failure(file) == ":2: not UTF-8 text: byte 0xe9"

    def test_size_counts_bytes(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(MINIMAL + "# " + "é" * 200_000, encoding="utf-8")
        assert self.failure(file) == ": is larger than 256 KiB, too large for a configuration"

    def test_endless(self) -> None:
        assert "larger than 256 KiB" in self.failure("/dev/zero")


FRAGMENTS = st.sampled_from(
    [
        *EXAMPLE.splitlines(keepends=True),
        *"{}[]:,-?&*!|>'\"%@`#~<\t\n ",
        *("&a ", "*a", "<<: ", "!!int ", "- ", "---\n", "...\n", "null", "\ufeff", "\x85"),
        *("\\uD800", "\\UFFFFFFFF", ".inf", ".nan", "1e999", "9" * 5000, "~", "~x/y", "{a: b}"),
        *("url: ", "managed: ", "agents: ", "priorities: ", "'http://[::1'", "redis://["),
    ]
)


class TestNothingElseIsRaised:
    @given(st.lists(FRAGMENTS, max_size=40).map("".join))
    @example('backends: [{name: a, url: "http://[::1"}]\nagents: {a: {}}')
    @example("backends: [{name: !!null x, managed: {}}]\nagents: {a: {key: !!str }}")
    @settings(max_examples=80, deadline=None)
    def test_fragments(self, text: str) -> None:
        self.check(text)

    @given(st.text(max_size=60))
    @settings(max_examples=80, deadline=None)
    def test_any_text(self, text: str) -> None:
        self.check(text)

    @given(st.data())
    @settings(max_examples=80, deadline=None)
    def test_one_value_of_the_example_replaced(self, data: st.DataObject) -> None:
        lines = [line for line in EXAMPLE.splitlines() if line.strip() and not line.strip().startswith("#")]
        index = data.draw(st.integers(0, len(lines) - 1))
        key, _, _ = lines[index].partition(":")
        value = data.draw(st.one_of(FRAGMENTS, st.text(max_size=10), st.integers().map(str)))
        lines[index] = f"{key}: {value}"
        self.check("\n".join(lines))

    def check(self, text: str) -> None:
        try:
            config = parse_config(text, "c.yaml")
        except ConfigError as error:
            assert error.problems
            for problem in error.problems:
                assert str(problem).isprintable()
                assert str(problem).isascii()
        else:
            assert isinstance(config, Config)
            assert all(config.agent_priority(name) <= config.top_priority for name in config.agents)
