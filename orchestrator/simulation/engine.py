"""A model of llama.cpp's server: slots, batches, and a clock that jumps.

Theory of operation
-------------------
Everything happens at step boundaries. At one:

1. What the step under way has made is counted; turns that have all their tokens leave.
2. Stops take effect. The client of a stopped turn left during the step, so the token of that step is lost:
   its KV stays, and the resume makes the token again.
3. Slot actions and new requests are taken in the order in which they came. A save or a restore takes time, in
   which nothing else happens.
4. If somebody was stopped, the flush passes.
5. The next batch is made: a token for each lane that decodes, then prompt tokens in the order of the slots,
   until the batch is full. A turn starts when the first token of its prompt finds room.

As long as nothing is asked of the engine and no lane changes what it does, one batch is like the next but for
the KV, which grows by the same number of tokens each time. Such a *row* of steps is an arithmetic series: its
end is computed, not stepped to, without any error but rounding. A request that comes in the middle of a row
shortens it to the step under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from orchestrator.simulation.engine_model import EngineModel, Steps, groups_of
from orchestrator.simulation.outcome import BackendFigures
from orchestrator.simulation.setup import SimulationError
from orchestrator.simulation.turn import NOBODY, Host, Turn


@dataclass(slots=True)
class _Held:
    """KV in a slot or a file: whose, and how many tokens."""

    owner: int = NOBODY
    tokens: int = 0


@dataclass(slots=True)
class _Row:
    """Steps with like batches, from `began` on; `count` of them, unless something comes up."""

    began: float
    steps: Steps
    count: int
    decoding: list[Turn]
    prefilling: list[tuple[Turn, int]]


class Engine:
    """One engine. Its calls return at once and take effect at the next boundary."""

    def __init__(
        self,
        model: EngineModel,
        slots: int,
        host: Host,
        *,
        slot_tokens: int | None = None,
        budget_tokens: int | None = None,
        stride: int | None = None,
    ) -> None:
        """`slot_tokens`, `budget_tokens`: an engine that had to hold more would fail; None: no bound."""
        self.model = model
        self.figures = BackendFigures()
        self._host = host
        self._slot_tokens = slot_tokens
        self._budget_tokens = budget_tokens
        self._stride = stride
        self._kv = [_Held() for _ in range(slots)]
        self._lanes: list[Turn | None] = [None] * slots
        self._files: dict[str, _Held] = {}
        self._calls: deque[Callable[[float], float]] = deque()
        self._stops: list[Turn] = []
        self._row: _Row | None = None
        self._acting = self._awaited = False
        self._flush_due = False
        self._after: Callable[[float], None] | None = None

    # What it is asked ------------------------------------------------------------------------------

    def run(self, turn: Turn, slot: int, source: str | None, now: float) -> None:
        """Begin or go on with a turn; `source`: the file to restore into the slot first."""
        turn.slot = slot
        turn.left = None
        turn.stopping = False
        turn.segment += 1
        self._call(partial(self._run, turn, turn.segment, source), now)

    def stop(self, turn: Turn, now: float) -> None:
        """Take a turn out of the batch; nothing happens if it has ended meanwhile."""
        if turn.slot == NOBODY:
            return
        turn.stopping = True
        self._stops.append(turn)
        self._shorten(now)

    def save(self, slot: int, key: str, now: float) -> None:
        """Copy a slot's KV to a file."""
        self._call(partial(self._save, slot, key), now)

    def erase(self, slot: int, now: float) -> None:
        """Free a slot's KV."""
        self._call(partial(self._erase, slot), now)

    def forget(self, key: str) -> None:
        """Remove a file."""
        self._files.pop(key, None)

    # What may be seen of it ------------------------------------------------------------------------

    def seated(self) -> list[Turn]:
        """The turns in its slots, started or not, in the order of the slots."""
        return [turn for turn in self._lanes if turn is not None]

    def files(self) -> list[int]:
        """The tokens in each saved file."""
        return [file.tokens for file in self._files.values()]

    def progress(self, now: float) -> tuple[int, float]:
        """Tokens that each decoding lane has made beyond those counted, and when the last of them came."""
        row = self._row
        if row is None:
            return 0, 0.0
        done = min(row.steps.done_at(now - row.began), row.count)
        return done, row.began + row.steps.take_s(done)

    # The clock -------------------------------------------------------------------------------------

    def act(self, now: float) -> None:
        """The moment that was asked for by `wake` has come."""
        self._acting, self._awaited = True, False
        row, self._row = self._row, None
        if row is not None:
            self._commit(row, now)
        self._finish_call(now)
        while not self._awaited:
            if self._stops:
                self._take_out(self._stops.pop(0), now)
            elif self._calls:
                self._pass(self._calls.popleft()(now), now)
            elif self._flush_due:
                self._flush_due = False
                self.figures.flushed_s += self.model.flush_s
                self._pass(self.model.flush_s, now)
            else:
                self._begin_row(now)
                break
        self._acting = False

    def _pass(self, seconds: float, now: float) -> None:
        """Let time go by in which the engine does one thing only; without any, its end is now."""
        if seconds > 0:
            self.figures.busy_s += seconds
            self._await(now + seconds)
        else:
            self._finish_call(now)

    def _finish_call(self, now: float) -> None:
        after, self._after = self._after, None
        if after is not None:
            after(now)

    def _await(self, at_s: float) -> None:
        self._awaited = True
        self._host.wake(at_s)

    def _call(self, call: Callable[[float], float], now: float) -> None:
        self._calls.append(call)
        self._shorten(now)

    def _shorten(self, now: float) -> None:
        """Something is to be done at the next boundary: at once when nothing is under way."""
        row = self._row
        if row is not None:
            count = row.steps.done_at(now - row.began) + 1
            if count < row.count:
                row.count = count
                self._host.wake(row.began + row.steps.take_s(count))
        elif not self._acting and not self._awaited:
            self._await(now)

    # Calls: each returns how long the engine is busy with it -------------------------------------------

    def _run(self, turn: Turn, segment: int, source: str | None, now: float) -> float:
        if turn.segment != segment:  # stopped before the engine looked at it
            return 0.0
        if source is None:
            self._seat(turn, now)
            return 0.0
        file = self._files[source]
        held = self._kv[turn.slot]
        held.owner, held.tokens = file.owner, file.tokens
        stall_s = self.model.restore_token_s * file.tokens
        self.figures.restores += 1
        self.figures.stalled_s += stall_s
        self._after = partial(self._restored, turn, file.tokens, stall_s)
        return stall_s

    def _restored(self, turn: Turn, tokens: int, stall_s: float, now: float) -> None:
        self._seat(turn, now)
        self._host.restored(turn, tokens, stall_s, now)

    def _save(self, slot: int, key: str, now: float) -> float:
        held = self._kv[slot]
        tokens = held.tokens if self._lanes[slot] is None else 0
        stall_s = self.model.save_token_s * tokens
        if tokens:
            self.figures.saves += 1
            self.figures.stalled_s += stall_s
            self._files[key] = _Held(held.owner, tokens)
        self._after = partial(self._host.saved, slot, key, tokens, stall_s)
        return stall_s

    def _erase(self, slot: int, now: float) -> float:
        held = self._kv[slot]
        held.owner, held.tokens = NOBODY, 0
        self.figures.erases += 1
        self._after = partial(self._host.erased, slot)
        return 0.0

    def _seat(self, turn: Turn, now: float) -> None:
        if self._lanes[turn.slot] is not None:
            raise SimulationError(f"{now:.3f} s: {turn.id} was sent to slot {turn.slot}, which is in use")
        self._lanes[turn.slot] = turn

    def _take_out(self, turn: Turn, now: float) -> None:
        """A stop takes effect."""
        if turn.slot == NOBODY:
            return  # it ended with the step under way
        slot, held = turn.slot, self._kv[turn.slot]
        self._flush_due = self._flush_due or turn.left is not None
        if self._lanes[slot] is turn:
            self._lanes[slot] = None
        turn.segment += 1
        turn.slot = NOBODY
        turn.left = None
        self._host.stopped(turn, held.tokens if held.owner == turn.number else 0, now)

    # Rows ------------------------------------------------------------------------------------------

    def _begin_row(self, now: float) -> None:
        decoding: list[Turn] = []
        waiting: list[Turn] = []
        for turn in self._lanes:
            if turn is not None:
                (decoding if turn.left == 0 else waiting).append(turn)
        room = self.model.batch_tokens - len(decoding)
        prefilling: list[tuple[Turn, int]] = []
        begun: list[tuple[Turn, int, int]] = []
        for turn in waiting:
            if room <= 0:
                break
            if turn.left is None:
                begun.append((turn, *self._begin(turn)))
            tokens = min(turn.left or 0, room)
            prefilling.append((turn, tokens))
            room -= tokens
        if not decoding and not prefilling:
            return
        prompts = sum(tokens for _, tokens in prefilling)
        running = sum(self._kv[turn.slot].tokens for turn in decoding)
        running += sum(self._kv[turn.slot].tokens for turn, _ in prefilling)
        parked = sum(held.tokens for held in self._kv) - running
        model = self.model
        new = len(decoding) + prompts
        groups = groups_of([*(turn.slot for turn in decoding), *(turn.slot for turn, _ in prefilling)])
        first_s = model.step_s(len(decoding), running, parked, prompts, groups)
        steps = Steps(first_s, model.running_token_s * new)
        count = min(
            [turn.output - turn.generated for turn in decoding]
            + [(turn.left or 0) // tokens for turn, tokens in prefilling]
        )
        if self._stride is not None:
            count = min(count, self._stride)
        self._row = _Row(now, steps, count, decoding, prefilling)
        figures = self.figures
        figures.most_lanes = max(figures.most_lanes, len(decoding) + len(prefilling))
        figures.most_batch_tokens = max(figures.most_batch_tokens, new)
        self._host.wake(now + steps.take_s(count))
        for turn, prompt, cached in begun:
            self._host.started(turn, prompt, cached, now)

    def _begin(self, turn: Turn) -> tuple[int, int]:
        """A turn's first look at its slot: its prompt, and how much of that is there."""
        held = self._kv[turn.slot]
        prompt = turn.prompt + turn.generated
        same = prompt if held.owner == turn.number else turn.common.get(held.owner, 0)
        cached = min(same, held.tokens, prompt - 1)  # the last token is always evaluated: for its outcome
        held.owner, held.tokens = turn.number, cached
        turn.left = prompt - cached
        self.figures.cached += cached
        return prompt, cached

    def _commit(self, row: _Row, now: float) -> None:
        count, took_s = row.count, row.steps.take_s(row.count)
        figures = self.figures
        figures.steps += count
        figures.busy_s += took_s
        figures.lane_s += took_s * len(row.decoding)
        finished: list[tuple[Turn, int]] = []
        first: list[Turn] = []
        for turn in row.decoding:
            self._kv[turn.slot].tokens += count
            self._make(turn, count, now, finished)
        for turn, tokens in row.prefilling:
            self._kv[turn.slot].tokens += count * tokens
            turn.left = (turn.left or 0) - count * tokens
            figures.evaluated += count * tokens
            if not turn.left:
                if not turn.stopping:
                    first.append(turn)
                self._make(turn, 1, now, finished)
        self._check(now)
        for turn in first:
            self._host.first_token(turn, now)
        for turn, kv_tokens in finished:
            self._host.finished(turn, kv_tokens, now)

    def _make(self, turn: Turn, tokens: int, now: float, finished: list[tuple[Turn, int]]) -> None:
        """Count tokens, of which nobody sees the last when the turn is being stopped."""
        self.figures.generated += tokens
        if turn.stopping:
            turn.lost += 1
            turn.generated += tokens - 1
            return
        turn.generated += tokens
        turn.last_s = now
        if turn.generated >= turn.output:
            finished.append((turn, self._kv[turn.slot].tokens))
            self._lanes[turn.slot] = None
            turn.slot = NOBODY

    def _check(self, now: float) -> None:
        """An engine whose KV runs out fails every running turn: the scheduler must never let it."""
        total = sum(held.tokens for held in self._kv)
        self.figures.most_kv_tokens = max(self.figures.most_kv_tokens, total)
        if self._budget_tokens is not None and total > self._budget_tokens:
            raise SimulationError(f"{now:.3f} s: {total} tokens of KV in a pool of {self._budget_tokens}")
        if self._slot_tokens is not None:
            longest = max(held.tokens for held in self._kv)
            if longest > self._slot_tokens:
                raise SimulationError(f"{now:.3f} s: {longest} tokens in a slot of {self._slot_tokens}")
