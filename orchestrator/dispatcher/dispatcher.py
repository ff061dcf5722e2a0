"""The dispatcher of one backend.

Theory of operation
-------------------
One dispatcher at a time owns a backend, by a lease with a fencing number. It turns the pool's events
into scheduler events, the scheduler's commands into engine calls, and every call's end into an event
again. The scheduler is called from the event loop only, so it needs no lock; nothing is decided here.

Each segment of a turn is one task. What the task learns goes two ways: to the scheduler at once, and
to Redis through the outbox (output) or the turn's books (state and timeline). The books of one turn
are written in order, under its lock, and never stand in the way of a slot that changes hands.

When the lease is lost everything here stops: streams are closed, and the next owner finds each turn's
output in its log and goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import orjson
import structlog
from redis.exceptions import RedisError

from backends.protocol import Backend, Cut, EngineInfo, EngineRefused, EngineUnavailable, Finished, KvLayout
from orchestrator.broker import (
    END,
    Broker,
    Deposed,
    Lease,
    LogAppend,
    PoolEvent,
    TurnRecord,
    end_entry,
    error_entry,
    timeline_entry,
)
from orchestrator.dispatcher.outbox import Outbox
from orchestrator.dispatcher.state import backend_state
from orchestrator.dispatcher.turn_run import TurnRun, replay
from orchestrator.scheduler import (
    Abort,
    CancelRequested,
    Claim,
    Claimed,
    ClaimLost,
    Command,
    Discard,
    Ended,
    EngineLost,
    EngineReady,
    Erase,
    Erased,
    Event,
    HoldRequested,
    MarkDropped,
    Pause,
    Paused,
    Policy,
    Progressed,
    Recovered,
    ReleaseRequested,
    Resume,
    Scheduler,
    Start,
    Started,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.turns import IllegalTransition, Tier, TurnState

LEASE_TTL_MS = 6_000
LEASE_RENEW_S = 2.0
EVENTS_BLOCK_MS = 5_000
HEALTH_EVERY_S = 2.0
STATE_EVERY_S = 0.2
TICK_S = 1.0
MAX_FAILURES = 5
STEP_SMOOTHING = 0.05

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """What the configuration says about one backend. `decode_slots` None: one fewer than the engine's
    slots, at least one."""

    pool: str
    name: str
    kind: str
    decode_slots: int | None
    preemption: bool
    min_run_s: float
    max_preemptions: int
    aging_s: float
    priorities: tuple[int, ...]


class Dispatcher:
    """Owns one backend while it runs."""

    def __init__(
        self,
        options: DispatcherOptions,
        backend: Backend,
        broker: Broker,
        blocking: Broker,
        owner: str,
    ) -> None:
        """`blocking` is a broker on a client without a socket timeout, for reads that wait."""
        self.options = options
        self._backend = backend
        self._broker = broker
        self._blocking = blocking
        self._owner = owner
        self.info: EngineInfo | None = None
        self.healthy = False
        self._step_s: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._runs: dict[str, TurnRun] = {}
        self._outbox = Outbox(self._append)
        self._changed = anyio.Event()

    # Life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the backend whenever it can be owned, until cancelled."""
        while True:
            lease = await self._retry(self._acquire)
            if lease is None:
                await anyio.sleep(LEASE_RENEW_S)
                continue
            try:
                await self._own(lease)
            except* Deposed as group:
                _log.warning("backend lost to another owner", backend=self.options.name, error=str(group))
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                    await self._broker.release(lease)

    async def _acquire(self) -> Lease | None:
        return await self._broker.acquire(self.options.pool, self.options.name, self._owner, LEASE_TTL_MS)

    async def _own(self, lease: Lease) -> None:
        self._lease = lease
        self._reset()
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._renew)
            self._tasks.start_soon(self._outbox.run)
            self.info = await self._describe()
            self._scheduler = Scheduler(self._policy(self.info))
            await self._recover()
            position, waiting = await self._retry(lambda: self._broker.snapshot(self.options.pool))
            for event in waiting:
                self._on_pool_event(event)
            self.healthy = True
            self._handle(EngineReady())
            _log.info("backend ready", backend=self.options.name, model=self.info.model)
            self._tasks.start_soon(self._read_events, position)
            self._tasks.start_soon(self._watch_engine)
            self._tasks.start_soon(self._publish)
            self._tasks.start_soon(self._tick)

    async def _describe(self) -> EngineInfo:
        told = False
        while True:
            try:
                return await self._backend.describe()
            except (EngineUnavailable, EngineRefused) as error:
                if not told:
                    _log.warning("engine not ready", backend=self.options.name, error=str(error))
                told = True
            await anyio.sleep(0.5)

    def _policy(self, info: EngineInfo) -> Policy:
        options = self.options
        decode_slots = min(options.decode_slots or max(1, info.engine_slots - 1), info.engine_slots)
        return Policy(
            decode_slots=decode_slots,
            engine_slots=info.engine_slots,
            kv_budget_tokens=info.kv_budget_tokens if info.kv_layout is KvLayout.UNIFIED else None,
            preemption=options.preemption,
            min_run_s=options.min_run_s,
            max_preemptions=options.max_preemptions,
            aging_s=options.aging_s,
            priorities=options.priorities,
        )

    async def _recover(self) -> None:
        """Take over what a former owner left: turns that ended only in their log, and unfinished ones."""
        pool, name = self.options.pool, self.options.name
        for record in await self._retry(lambda: self._broker.owned(pool, name)):
            run = self._new_run(record)
            log = await self._retry(lambda turn=run.id: self._broker.log(pool, turn))  # type: ignore[misc]
            told = replay(log)
            run.entries, run.flushed = list(log), len(log)
            run.n_tokens = told.so_far.n_tokens
            run.prompt_tokens = record.prompt_tokens
            run.preemptions, run.reevaluated = record.preemptions, record.tokens_reevaluated
            if told.ended is not None:
                state = TurnState.DONE if told.ended[0] == END else TurnState.FAILED
                await self._close_books(run, state, timeline_entry(state.value, recovered=True))
                continue
            run.generation = self._generation(record, told.so_far)
            if record.state is TurnState.RUNNING:
                entry = timeline_entry("interrupted", tokens=run.n_tokens)
                await self._advance(run, TurnState.PAUSED, entry, {"tier": Tier.DROPPED.value})
            request = record.request
            self._handle(
                Recovered(run.id, request.agent, request.priority, record.seq, request.size.kv_tokens)
            )

    # Loops -----------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(LEASE_RENEW_S)
            await self._retry(lambda: self._broker.renew(self._lease, LEASE_TTL_MS))

    async def _read_events(self, position: str) -> None:
        while True:
            after = position
            position, events = await self._retry(
                lambda: self._blocking.events(self.options.pool, after, EVENTS_BLOCK_MS)  # noqa: B023
            )
            for event in events:
                self._on_pool_event(event)

    async def _watch_engine(self) -> None:
        while True:
            await anyio.sleep(HEALTH_EVERY_S)
            if not await self._backend.healthy():
                await self._engine_lost()

    async def _publish(self) -> None:
        while True:
            state = orjson.dumps(
                backend_state(
                    self.options, self.info, self.healthy, self._scheduler.view(), self._runs, self._step_s
                )
            )
            try:
                await self._broker.publish_state(self.options.pool, self.options.name, state)
            except (RedisError, OSError):
                await anyio.sleep(STATE_EVERY_S)
            self._changed = anyio.Event()
            with anyio.move_on_after(1.0):
                await self._changed.wait()
            await anyio.sleep(STATE_EVERY_S)

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            self._handle(Tick())

    # Events in, commands out -----------------------------------------------------------------------

    def _on_pool_event(self, event: PoolEvent) -> None:
        match event.kind:
            case "queued":
                self._handle(TurnQueued(event.turn, event.agent, event.priority, event.seq, event.kv_tokens))
            case "withdrawn":
                self._handle(Withdrawn(event.turn))
            case "cancel":
                self._handle(CancelRequested(event.turn))
            case "hold":
                self._handle(HoldRequested(event.turn))
            case "release":
                self._handle(ReleaseRequested(event.turn))
            case _:
                _log.warning("unknown pool event", kind=event.kind)

    def _handle(self, event: Event) -> None:
        commands = self._scheduler.handle(event, time.monotonic())
        self._changed.set()
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Claim(turn):
                self._tasks.start_soon(self._claim, turn)
            case Start(turn, slot):
                self._tasks.start_soon(self._segment, self._runs[turn], slot, False)
            case Resume(turn, slot, resident):
                self._tasks.start_soon(self._segment, self._runs[turn], slot, resident)
            case Pause(turn, by):
                run = self._runs[turn]
                run.preempted_by = by
                if run.generation is not None:
                    run.generation.preempt()
            case Abort(turn):
                scope = self._runs[turn].scope
                if scope is not None:
                    scope.cancel()
            case Discard(turn):
                self._tasks.start_soon(self._discard, self._runs.pop(turn))
            case MarkDropped(turn):
                self._tasks.start_soon(self._drop, self._runs[turn])
            case Erase(slot):
                self._tasks.start_soon(self._erase, slot)

    # Commands --------------------------------------------------------------------------------------

    async def _claim(self, turn: str) -> None:
        record = await self._retry(lambda: self._broker.claim(self._lease, turn))
        if record is None:
            self._handle(ClaimLost(turn))
            return
        run = self._new_run(record)
        try:
            run.generation = self._generation(record, None)
        except Exception:
            _log.exception("a turn's body cannot be read", turn=turn)
        self._handle(Claimed(turn))

    async def _segment(self, run: TurnRun, slot: int, resident: bool) -> None:
        run.segments += 1
        run.slot = slot
        run.commanded_at = time.monotonic()
        generation = run.generation
        if generation is None:
            await self._fail(run, 400, "the request's body cannot be read", "invalid_request_error")
            return
        end: Finished | Cut | None = None
        try:
            with anyio.CancelScope() as run.scope:
                end = await generation.run(slot, run)
        except EngineRefused as error:
            await self._fail(run, error.status, str(error), error.kind)
            return
        except EngineUnavailable as error:
            await self._interrupted(run, error)
            return
        except Exception:
            _log.exception("a segment failed", turn=run.id)
            await self._fail(run, 500, "internal error; see the service's log", "internal_error")
            return
        finally:
            run.scope = None
        match end:
            case Finished():
                await self._finished(run, end)
            case Cut():
                await self._cut(run, end)
            case None:
                await self._aborted(run)

    async def _finished(self, run: TurnRun, end: Finished) -> None:
        del self._runs[run.id]
        self._handle(Ended(run.id, end.kv_tokens, resident=True))
        run.n_tokens = end.completion_tokens
        run.put(end_entry(end.finish_reason, run.prompt_tokens, end.completion_tokens, run.cached_tokens))
        entry = timeline_entry("done", finish_reason=end.finish_reason, tokens=end.completion_tokens)
        await self._close_books(run, TurnState.DONE, entry, {"finish_reason": end.finish_reason})

    async def _cut(self, run: TurnRun, end: Cut) -> None:
        was_running, run.running = run.running, False
        self._handle(Paused(run.id, end.kv_tokens, end.resident))
        if not was_running:
            return
        run.preemptions += 1
        run.status("paused")
        entry = timeline_entry(
            "paused",
            by=run.preempted_by,
            stop_s=round(end.stop_s, 6),
            tokens=run.n_tokens,
            kv_tokens=end.kv_tokens,
        )
        tier = Tier.RESIDENT if end.resident else Tier.DROPPED
        fields = {"preemptions": run.preemptions, "tokens_generated": run.n_tokens, "tier": tier.value}
        await self._advance(run, TurnState.PAUSED, entry, fields, {"preemptions": 1})

    async def _aborted(self, run: TurnRun) -> None:
        del self._runs[run.id]
        kv_tokens = run.prompt_tokens + run.n_tokens
        self._handle(Ended(run.id, kv_tokens, resident=run.prompt_tokens > 0))
        await self._cancelled(run)

    async def _discard(self, run: TurnRun) -> None:
        if run.generation is not None:
            await run.generation.discard()
        await self._cancelled(run)

    async def _cancelled(self, run: TurnRun) -> None:
        run.put(error_entry(499, "the turn was cancelled", "cancelled", "cancelled"))
        await self._close_books(run, TurnState.CANCELLED, timeline_entry("cancelled", tokens=run.n_tokens))

    async def _fail(self, run: TurnRun, status: int, message: str, kind: str) -> None:
        self._runs.pop(run.id, None)
        self._handle(Ended(run.id, 0, resident=False))
        code = "context_length_exceeded" if kind == "exceed_context_size_error" else None
        run.put(error_entry(status, message, kind, code))
        await self._close_books(
            run, TurnState.FAILED, timeline_entry("failed", error=message), {"error": message}
        )

    async def _interrupted(self, run: TurnRun, error: EngineUnavailable) -> None:
        """The engine broke the segment off: try the turn again, but not for ever."""
        run.failures += 1
        _log.warning("segment interrupted", turn=run.id, error=str(error), failures=run.failures)
        if run.failures >= MAX_FAILURES:
            await self._fail(run, 502, f"the engine failed {run.failures} times: {error}", "engine_error")
            return
        if not await self._backend.healthy():
            await self._engine_lost()
        was_running, run.running = run.running, False
        entry = timeline_entry("interrupted", error=str(error), tokens=run.n_tokens)
        if was_running:
            run.status("paused")
        self._handle(Paused(run.id, 0, resident=False))
        if was_running:
            await self._advance(run, TurnState.PAUSED, entry, {"tier": Tier.DROPPED.value})

    async def _drop(self, run: TurnRun) -> None:
        if run.generation is not None:
            await run.generation.discard()
        if not run.running:
            await self._advance(
                run, TurnState.PAUSED, timeline_entry("dropped"), {"tier": Tier.DROPPED.value}
            )

    async def _erase(self, slot: int) -> None:
        try:
            await self._backend.erase(slot)
        except (EngineUnavailable, EngineRefused) as error:
            _log.warning("a slot was not erased", backend=self.options.name, slot=slot, error=str(error))
        self._handle(Erased(slot))

    async def _engine_lost(self) -> None:
        """Stop placing turns until the engine answers again."""
        if not self.healthy:
            return
        self.healthy = False
        self._handle(EngineLost())
        _log.error("engine lost", backend=self.options.name)
        self._tasks.start_soon(self._await_engine)

    async def _await_engine(self) -> None:
        self.info = await self._describe()
        self.healthy = True
        self._handle(EngineReady())
        _log.info("engine is back", backend=self.options.name)

    # What runs report ------------------------------------------------------------------------------

    def _new_run(self, record: TurnRecord) -> TurnRun:
        run = TurnRun(
            record,
            record.request.gateway,
            on_output=self._on_output,
            on_started=self._on_started,
            on_step=self._on_step,
        )
        self._runs[run.id] = run
        return run

    def _generation(self, record: TurnRecord, so_far: Any) -> Any:
        request = record.request
        body = orjson.loads(request.body)
        return self._backend.generation(request.api, body, request.size.max_tokens, so_far)

    def _on_output(self, run: TurnRun) -> None:
        self._outbox.put(run)
        if run.running:
            self._handle(Progressed(run.id, run.prompt_tokens + run.n_tokens))

    def _on_started(self, run: TurnRun, prompt_tokens: int, cached_tokens: int) -> None:
        waited_s = time.monotonic() - run.commanded_at
        self._handle(Started(run.id, prompt_tokens))
        run.running = True
        run.failures = 0
        first = not run.prompt_tokens
        if first:
            run.prompt_tokens, run.cached_tokens = prompt_tokens, cached_tokens
            run.status("started")
            entry = timeline_entry(
                "started",
                slot=run.slot,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                engine_wait_s=round(waited_s, 6),
            )
            fields: dict[str, str | int | float] = {"prompt_tokens": prompt_tokens}
            counters = {}
        else:
            reevaluated = prompt_tokens - cached_tokens
            run.reevaluated += reevaluated
            run.resume_s += waited_s
            run.status("resumed")
            entry = timeline_entry(
                "resumed",
                slot=run.slot,
                cached_tokens=cached_tokens,
                tokens_reevaluated=reevaluated,
                engine_wait_s=round(waited_s, 6),
            )
            fields = {"tokens_reevaluated": run.reevaluated}
            counters = {"resumes": 1, "tokens_reevaluated": reevaluated}
        self._tasks.start_soon(self._advance, run, TurnState.RUNNING, entry, fields, counters)

    def _on_step(self, gap_s: float) -> None:
        if self._step_s is None or not math.isfinite(self._step_s):
            self._step_s = gap_s
        else:
            self._step_s += STEP_SMOOTHING * (gap_s - self._step_s)

    # Books -----------------------------------------------------------------------------------------

    async def _append(self, appends: list[LogAppend]) -> list[int]:
        return await self._retry(lambda: self._broker.append(self._lease, appends))

    async def _advance(
        self,
        run: TurnRun,
        state: TurnState,
        entry: bytes,
        fields: Mapping[str, str | int | float] | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> None:
        async with run.books:
            try:
                await self._retry(
                    lambda: self._broker.advance(
                        self._lease, run.id, state, entry, fields=fields, counters=counters
                    )
                )
            except IllegalTransition as error:
                _log.error("a turn's record disagrees", turn=run.id, error=str(error))

    async def _close_books(
        self,
        run: TurnRun,
        state: TurnState,
        entry: bytes,
        fields: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Let all output reach Redis first: a log without its end would look like a crash."""
        await self._outbox.settle(run)
        totals: dict[str, str | int | float] = {
            "tokens_generated": run.n_tokens,
            "tokens_reevaluated": run.reevaluated,
            "preemptions": run.preemptions,
        }
        await self._advance(run, state, entry, {**totals, **(fields or {})}, {f"turns_{state.value}": 1})

    async def _retry(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a broker call until Redis answers. Every script is safe to repeat."""
        pause_s = 0.05
        while True:
            try:
                return await call()
            except (RedisError, OSError) as error:
                _log.warning("broker unreachable; trying again", error=str(error), pause_s=pause_s)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
