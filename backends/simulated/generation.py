"""One generation request inside the engine: its parameters, its progress, and what it emits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.simulated.events import Failed, Finished, Outbox, Progress, StopType, Timings, TokenOut
from backends.simulated.sampler import Sampler, ScriptPlayer
from backends.simulated.text import TextAssembler
from backends.simulated.tokenizer import EOS, token_bytes


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The part of a request that the engine itself looks at."""

    prompt: tuple[int, ...]
    n_predict: int = -1
    """Most tokens to generate, -1 for no limit; 0 still gives one."""
    id_slot: int = -1
    """The slot to run in, -1 for any."""
    cache_prompt: bool = True
    stop: tuple[str, ...] = ()
    return_progress: bool = False
    timings_per_token: bool = False
    hang_after_tokens: int | None = None
    """A fault: no progress once that many tokens are out."""
    ignore_disconnect: bool = False
    """A fault: the client's leaving does not end the request."""
    evaluate_only: bool = False
    """The prompt is evaluated, in one batch, and nothing is generated: an input to embed or to rank."""


class Generation:
    """The mutable state of one request. Only the step loop changes it, save for `cancelled`."""

    def __init__(self, params: GenerationParams, sampler: Sampler) -> None:
        self.params = params
        self.outbox = Outbox()
        self.cancelled = False
        self.parked = False
        self.id_slot = -1
        self.crowded = False
        """Whether it was evaluated together with others, each in KV of its own."""
        self.cached = 0
        self.processed = 0
        """Prompt tokens whose KV is in the slot, the reused ones included."""
        self.n_decoded = 0
        self.last_token = EOS
        """Sampled, and not yet in the slot's KV."""
        self.prompt_s = 0.0
        self.predicted_s = 0.0
        self._sampler = sampler
        self._text = TextAssembler(params.stop)
        self._tokens: list[int] = []
        self._deltas: list[Mapping[str, Any]] = []

    @property
    def n_prompt(self) -> int:
        return len(self.params.prompt)

    @property
    def prefilling(self) -> bool:
        return self.processed < self.n_prompt

    @property
    def hung(self) -> bool:
        after = self.params.hang_after_tokens
        return after is not None and self.n_decoded >= after

    @property
    def n_remaining(self) -> int:
        """Tokens left of the limit, -1 without one."""
        return self.params.n_predict if self.params.n_predict < 0 else self.params.n_predict - self.n_decoded

    def report_progress(self) -> None:
        """Emits the prefill's state if the request asked for it."""
        if self.params.return_progress:
            self.outbox.put(Progress(self.n_prompt, self.cached, self.processed, round(self.prompt_s * 1000)))

    def sample(self, *, context_full: bool) -> bool:
        """Samples one token and emits its chunk. Returns whether the reply is complete (and then emitted the
        end). `context_full` ends it at this token for lack of room."""
        token = self._sampler.next_token()
        is_eos = token == EOS
        self.last_token = token
        self.n_decoded += 1
        self._tokens.append(token)
        if isinstance(self._sampler, ScriptPlayer):
            self._emit_scripted(self._sampler, token)
        else:
            content = self._text.push(b"" if is_eos else token_bytes(token), is_eos=is_eos)
            if content is not None:
                self._emit(content, token)

        stop_type: StopType
        if self._text.stopping_word is not None:
            stop_type = "word"
        elif is_eos:
            stop_type = "eos"
        elif context_full or 0 <= self.params.n_predict <= self.n_decoded:
            stop_type = "limit"
        else:
            return False
        self.finish(stop_type, truncated=stop_type == "limit" and context_full)
        return True

    def finish(self, stop_type: StopType, *, truncated: bool = False) -> None:
        """Emits the end of the reply."""
        finish_reason = "length" if stop_type == "limit" else "stop"
        text = self._text.text
        if isinstance(self._sampler, ScriptPlayer):
            text = "".join(delta.get("content") or "" for delta in self._deltas)
            if stop_type == "eos":
                finish_reason = self._sampler.finish_reason
        self.outbox.put(
            Finished(
                id_slot=self.id_slot,
                text=text,
                tokens=tuple(self._tokens),
                deltas=tuple(self._deltas),
                stop_type=stop_type,
                stopping_word=self._text.stopping_word or "",
                truncated=truncated,
                finish_reason=finish_reason,
                n_prompt=self.n_prompt,
                timings=self._timings(),
            )
        )

    def fail(self, failure: Failed) -> None:
        """Ends the request with an error."""
        self.outbox.put(failure)

    def _emit_scripted(self, player: ScriptPlayer, token: int) -> None:
        delta = player.due_delta
        if delta is not None:
            self._deltas.append(delta)
        content = "" if delta is None else delta.get("content") or ""
        self._emit(content, token, delta)

    def _emit(self, content: str, token: int, delta: Mapping[str, Any] | None = None) -> None:
        timings = self._timings() if self.params.timings_per_token else None
        self.outbox.put(TokenOut(content, token, self.n_decoded, delta, timings))

    def _timings(self) -> Timings:
        return Timings(
            cache_n=self.cached,
            prompt_n=self.n_prompt - self.cached,
            prompt_s=self.prompt_s,
            predicted_n=self.n_decoded,
            predicted_s=self.predicted_s,
        )
