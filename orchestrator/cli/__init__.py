"""The `swarm` command: one file a verb group."""

from orchestrator.cli.main import main

__all__ = ["main"]
