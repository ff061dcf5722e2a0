"""What the README and the docs tell a user to type is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.config import parse_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.name, text) for page in PAGES for text in fence.findall(page.read_text())]


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_configuration_samples_are_valid(page: str, text: str) -> None:
    given = yaml.safe_load(text)
    whole = yaml.safe_load((ROOT / "config.yaml").read_text()) | given
    if "agents" in given and "default_agent" not in given:
        del whole["default_agent"]
    parse_config(yaml.safe_dump(whole), page)


def shell_lines() -> list[str]:
    lines = [line.strip() for _, text in blocks("(?:console|sh|bash)") for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines]


@pytest.mark.parametrize(
    "line",
    sorted({" ".join(line.split()[:3]) for line in shell_lines() if re.match(r"swarm (?!is )", line)}),
)
def test_swarm_commands_exist(line: str) -> None:
    words = [word for word in line.split()[1:] if re.fullmatch(r"[a-z]+", word)]
    if words and words[0] not in {"config", "bench"}:
        words = words[:1]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *words, "--help"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("line", sorted({line for line in shell_lines() if line.startswith("make ")}))
def test_make_targets_exist(line: str) -> None:
    done = subprocess.run(["make", "-n", *line.split()[1:2]], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_links_between_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
