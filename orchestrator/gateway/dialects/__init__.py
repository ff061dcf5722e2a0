"""The wire APIs that turns are asked for in, one module each."""

from orchestrator.gateway.dialects.anthropic import Messages
from orchestrator.gateway.dialects.base import KEEP_ALIVE, Chunks, Dialect, Head
from orchestrator.gateway.dialects.bulk import Embeddings, Rerank
from orchestrator.gateway.dialects.ollama import OllamaChat
from orchestrator.gateway.dialects.openai import ChatCompletions, Completions
from orchestrator.gateway.dialects.responses import Responses

__all__ = [
    "KEEP_ALIVE",
    "ChatCompletions",
    "Chunks",
    "Completions",
    "Dialect",
    "Embeddings",
    "Head",
    "Messages",
    "OllamaChat",
    "Rerank",
    "Responses",
]
