"""HTTP: the APIs of coding agents, the admin API and SSE. It takes no scheduling decisions.

A turn goes through here in five steps, one module each:

1. `identity`: whose turn it is, and at which priority.
2. `body` and the API's dialect (`dialects`, by `validate`): the request's bytes, bounded, and what they ask
   for. Nothing is stored before this has passed.
3. `sizer`: how much KV the turn may need.
4. `generate`: the broker takes the turn; from then on only its output log is read (`follow`).
5. The dialect again: the log's entries as SSE, or put together (`collect`) as one JSON reply.
"""

from orchestrator.gateway.app import create_app
from orchestrator.gateway.engines import Engines
from orchestrator.gateway.server import serve

__all__ = ["Engines", "create_app", "serve"]
