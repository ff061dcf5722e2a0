"""What a request's prompt is known by: the chain of checksums of its blocks (`scheduler/prefix.py`).

The chain is made of the request's own bytes, in the order in which chat templates put them: tools, then
messages. So it needs no engine, and an agent's next turn, which repeats the last one's messages, has the
last one's chain as its beginning.

A bulk turn goes on from nothing. Its chain says so: one entry that no other prompt's begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import orjson

from backends.protocol import BULK_APIS
from orchestrator.scheduler import Prefix

BLOCK_BYTES = 256
MAX_BLOCKS = 8192


def prompt_prefix(api: str, body: Mapping[str, Any]) -> Prefix:
    """The chain of a request body; only whole blocks count."""
    if api in BULK_APIS:
        return (crc32(orjson.dumps(body)),)
    if api == "chat":
        tools = body.get("tools") or body.get("functions")
        parts = [] if not tools else [orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)]
        parts += [orjson.dumps(message, option=orjson.OPT_SORT_KEYS) for message in body.get("messages", ())]
        text = b"\n".join(parts)
    else:
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        text = prompt.encode(errors="replace") if isinstance(prompt, str) else orjson.dumps(prompt)
    view = memoryview(text)
    chain = []
    value = 0
    for end in range(BLOCK_BYTES, min(len(text), BLOCK_BYTES * MAX_BLOCKS) + 1, BLOCK_BYTES):
        value = crc32(view[end - BLOCK_BYTES : end], value)
        chain.append(value)
    return tuple(chain)
