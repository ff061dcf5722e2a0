"""One dispatcher a backend: turns commands into engine calls, and their ends into events."""

from orchestrator.dispatcher.dispatcher import Dispatcher, DispatcherOptions

__all__ = ["Dispatcher", "DispatcherOptions"]
