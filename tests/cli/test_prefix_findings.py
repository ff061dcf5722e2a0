"""What `swarm doctor` says of lines that keep changing, and that its remedy can be pasted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness import free_port
from orchestrator.config import parse_config
from tests.cli.conftest import FakeService, Swarm

BILLING = {
    "role": "system",
    "line": 1,
    "offset": 0,
    "shape": "x-billing: ????",
    "pattern": "x-billing:*",
    "rule": "pin",
    "seen": 9,
    "turns": 16,
    "lost_bytes": 47_104,
    "n_bytes": 49_152,
}
TIME = BILLING | {"line": 14, "shape": 'Time "now": ??', "pattern": 'Time "now":*', "rule": "move", "seen": 5}


def doctor(swarm: Swarm, folder: Path, port: int, **agent: Any) -> list[dict[str, Any]]:
    """What is found about prompts, by a configuration whose service is on the port."""
    path = folder / "swarm.yaml"
    document = {
        "server": {"port": port},
        "redis": {"url": "embedded", "state_dir": str(folder / "state")},
        "backends": [{"name": "mine", "url": "http://127.0.0.1:9"}],
        "agents": {"claude": agent},
    }
    path.write_text(yaml.safe_dump(document))
    found = json.loads(swarm("doctor", "-c", path, "--json").out)
    return [one for one in found if one["what"] in ("prefix caches", "claude prompts", "gone prompts")]


def port_of(service: FakeService) -> int:
    return int(service.url.rpartition(":")[2])


def test_lines_that_change(swarm: Swarm, service: FakeService, tmp_path: Path) -> None:
    listed = [{"pool": "default", "agent": "claude", "lines": [BILLING, TIME]}]
    service.reply("GET /swarm/prefixes", {"prefixes": listed})
    [found] = doctor(swarm, tmp_path, port_of(service))
    assert (found["level"], found["what"]) == ("warn", "claude prompts")
    assert found["text"] == (
        "line 1 of the system message (x-billing: ????), line 14 of the system message "
        '(Time "now": ??) changed in 9 of the last 16 turns: each time about 11,776 tokens were evaluated '
        "again although they were the same (46.0 KiB of 48.0 KiB)"
    )
    rule = found["remedy"].partition("agents.claude: ")[2]
    backend = {"name": "a", "url": "http://x:1"}
    config = parse_config(yaml.safe_dump({"backends": [backend], "agents": {"claude": yaml.safe_load(rule)}}))
    rules = config.agents["claude"].stable_prefix
    assert (rules.pin, rules.move) == (("x-billing:*",), ('Time "now":*',))


@pytest.mark.parametrize(
    ("lines", "rules", "remedy"),
    [
        ([BILLING], {"pin": ["x-billing:*"]}, "restart the service: the configuration has a rule for it"),
        ([BILLING, TIME], {"pin": ["x-billing:*"]}, 'stable_prefix: {move: ["Time \\"now\\":*"]}'),
        ([BILLING | {"pattern": None}], {}, 'stable_prefix: {move: ["BEGINNING OF THAT LINE*"]}'),
    ],
)
def test_remedies(
    swarm: Swarm,
    service: FakeService,
    tmp_path: Path,
    lines: list[dict[str, Any]],
    rules: dict[str, list[str]],
    remedy: str,
) -> None:
    listed = [{"pool": "default", "agent": "claude", "lines": lines}]
    service.reply("GET /swarm/prefixes", {"prefixes": listed})
    [found] = doctor(swarm, tmp_path, port_of(service), stable_prefix=rules)
    assert found["remedy"].endswith(remedy)


def test_an_agent_that_the_file_no_longer_has(swarm: Swarm, service: FakeService, tmp_path: Path) -> None:
    listed = [{"pool": "default", "agent": "gone", "lines": [BILLING]}]
    service.reply("GET /swarm/prefixes", {"prefixes": listed})
    [found] = doctor(swarm, tmp_path, port_of(service))
    assert found["what"] == "gone prompts"


def test_no_such_lines(swarm: Swarm, service: FakeService, tmp_path: Path) -> None:
    service.reply("GET /swarm/prefixes", {"prefixes": []})
    [found] = doctor(swarm, tmp_path, port_of(service))
    assert (found["level"], found["remedy"]) == ("ok", None)


@pytest.mark.parametrize(
    "reply", [b"", b"{}", b'{"prefixes": [{}]}', b"\xff", b'{"prefixes": [{"lines": 3}]}']
)
@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_service_that_does_not_tell(
    swarm: Swarm, service: FakeService, tmp_path: Path, reply: bytes, status: int
) -> None:
    service.reply("GET /swarm/prefixes", reply, status)
    [found] = doctor(swarm, tmp_path, port_of(service))
    assert (found["level"], found["what"]) == ("ok", "prefix caches")
    assert found["text"].startswith("not looked at: ")
    assert "\n" not in found["text"]


def test_no_service(swarm: Swarm, tmp_path: Path) -> None:
    [found] = doctor(swarm, tmp_path, free_port())
    assert found["level"] == "ok"
    assert "no service answers" in found["text"]
