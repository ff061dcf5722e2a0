"""One dispatcher a backend: turns commands into engine calls, and their ends into events."""

from orchestrator.dispatcher.dispatcher import Dispatcher
from orchestrator.dispatcher.options import DispatcherOptions

__all__ = ["Dispatcher", "DispatcherOptions"]
