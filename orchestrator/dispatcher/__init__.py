"""One dispatcher a backend: turns commands into engine calls, and their ends into events."""

from orchestrator.dispatcher.dispatcher import Dispatcher
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.state import published_engine

__all__ = ["Dispatcher", "DispatcherOptions", "published_engine"]
