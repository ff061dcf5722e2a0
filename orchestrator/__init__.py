"""Swarm orchestrator: token-boundary preemption for coding agents on local LLM engines."""

__version__ = "0.1.0"
