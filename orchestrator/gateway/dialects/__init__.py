"""The wire APIs that turns are asked for in, one module each."""

from orchestrator.gateway.dialects.base import KEEP_ALIVE, Chunks, Dialect, Head
from orchestrator.gateway.dialects.openai import ChatCompletions, Completions

__all__ = ["KEEP_ALIVE", "ChatCompletions", "Chunks", "Completions", "Dialect", "Head"]
