"""The adapter for llama.cpp's server, and for engines that speak its HTTP interface."""

from backends.llamacpp.adapter import LlamaCppBackend
from backends.llamacpp.options import LlamaCppOptions

__all__ = ["LlamaCppBackend", "LlamaCppOptions"]
