"""JSON shapes of the llama.cpp server's own endpoints, and what every endpoint's renderer does."""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from backends.simulated.events import Failed, Finished, Progress, Timings, TokenOut


class Renderer(Protocol):
    """Turns what the engine emits for one request into the endpoint's JSON."""

    end: bytes
    """Payload of a last SSE event after the reply, empty for none."""

    def chunks(self, event: Progress | TokenOut | Finished) -> list[bytes]:
        """Payloads of the SSE events for one engine event."""

    def whole(self, finished: Finished) -> bytes:
        """The body of an answer without streaming."""


class CompletionRenderer:
    """`POST /completion`."""

    end = b""

    def __init__(self, model: str, n_prompt: int, *, return_tokens: bool) -> None:
        self._model = model
        self._n_prompt = n_prompt
        self._return_tokens = return_tokens

    def chunks(self, event: Progress | TokenOut | Finished) -> list[bytes]:
        if isinstance(event, Finished):
            return [orjson.dumps(self._final(event, content="", tokens=()))]
        chunk: dict[str, Any] = {
            "index": 0,
            "content": "",
            "tokens": [0],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": self._n_prompt,
        }
        if isinstance(event, TokenOut):
            chunk |= {
                "content": event.content,
                "tokens": [event.token],
                "tokens_predicted": event.n_decoded,
                **token_timings_json(event),
            }
        else:
            chunk["prompt_progress"] = progress_json(event)
        return [orjson.dumps(chunk)]

    def whole(self, finished: Finished) -> bytes:
        tokens = finished.tokens if self._return_tokens else ()
        return orjson.dumps(self._final(finished, content=finished.text, tokens=tokens))

    def _final(self, finished: Finished, *, content: str, tokens: tuple[int, ...]) -> dict[str, Any]:
        timings = finished.timings
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "id_slot": finished.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": timings.predicted_n,
            "tokens_evaluated": finished.n_prompt,
            "truncated": finished.truncated,
            "stop_type": finished.stop_type,
            "stopping_word": finished.stopping_word,
            "tokens_cached": finished.n_prompt + max(0, timings.predicted_n - 1),
            "timings": timings_json(timings),
        }


def progress_json(progress: Progress) -> dict[str, int]:
    """The `prompt_progress` object."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def token_timings_json(event: TokenOut) -> dict[str, Any]:
    """The `timings` that a chunk has if the request asked for `timings_per_token`."""
    return {} if event.timings is None else {"timings": timings_json(event.timings)}


def timings_json(timings: Timings) -> dict[str, float]:
    """The `timings` object. The first generated token counts as part of the prompt's time, so per-token
    figures of the prediction divide by one less; rates of an instant engine are 0."""
    prompt_ms, predicted_ms = timings.prompt_s * 1000, timings.predicted_s * 1000
    intervals = max(0, timings.predicted_n - 1)
    return {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, timings.prompt_n),
        "prompt_per_second": _ratio(timings.prompt_n, timings.prompt_s),
        "predicted_n": timings.predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, intervals),
        "predicted_per_second": _ratio(intervals, timings.predicted_s),
    }


def error_json(failed: Failed) -> bytes:
    """The error object, as a body or as an event of a stream."""
    error: Mapping[str, Any] = {
        "code": failed.status,
        "message": failed.message,
        "type": failed.error_type,
        **(failed.details or {}),
    }
    return orjson.dumps({"error": error})


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0
