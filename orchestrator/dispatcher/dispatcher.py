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
output in its log and goes on from there. What its owner was told of a turn is in its record as well, so
that a cancel that came while nobody owned the backend is not lost.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import anyio
import orjson
import structlog
from redis.exceptions import RedisError

from backends.protocol import (
    Backend,
    Cut,
    EngineInfo,
    EngineRefused,
    EngineUnavailable,
    Finished,
    ReplySoFar,
)
from orchestrator.broker import (
    END,
    Broker,
    Deposed,
    Lease,
    PoolEvent,
    TurnRecord,
    end_entry,
    error_entry,
    timeline_entry,
)
from orchestrator.dispatcher.books import Books, persistently
from orchestrator.dispatcher.meter import StepMeter
from orchestrator.dispatcher.options import DispatcherOptions
from orchestrator.dispatcher.prefix import prompt_prefix
from orchestrator.dispatcher.sizing import make_policy, swap_budget, within_budget
from orchestrator.dispatcher.state import backend_state, published_engine
from orchestrator.dispatcher.swapper import Swapper
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
    Forget,
    HoldRequested,
    MarkDropped,
    MarkSwapped,
    Pause,
    Paused,
    Policy,
    Prefilled,
    Prefix,
    Progressed,
    Recovered,
    Refuse,
    ReleaseRequested,
    Resume,
    Save,
    Scheduler,
    Start,
    Started,
    Stepped,
    Tick,
    TurnQueued,
    Withdrawn,
)
from orchestrator.turns import Tier, TurnState

LEASE_TTL_MS = 6_000
LEASE_RENEW_S = 2.0
EVENTS_BLOCK_MS = 5_000
HEALTH_EVERY_S = 2.0
STATE_EVERY_S = 0.25
TICK_S = 1.0
MAX_FAILURES = 5

# What a read of the events may take beyond the wait it asks for, before its connection counts as dead.
EVENTS_GRACE_S = 5.0
CLOSE_BOUND_S = 5.0

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class _EngineChanged(Exception):
    """The engine came back as another one: the scheduler's picture of it is wrong."""


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
        self._reset()

    def _reset(self) -> None:
        self._runs: dict[str, TurnRun] = {}
        self._changed = anyio.Event()
        self._steps = StepMeter()
        self._engine_epoch = 0
        self.healthy = False

    # Life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the backend whenever it can be owned, until cancelled."""
        while True:
            lease = await persistently(self._acquire)
            if lease is None:
                await anyio.sleep(LEASE_RENEW_S)
                continue
            try:
                await self._own(lease)
            except* Deposed as group:
                _log.warning("backend lost to another owner", backend=self.options.name, error=str(group))
            except* _EngineChanged:
                _log.warning("the engine is another one now; starting anew", backend=self.options.name)
            finally:
                await self._let_go(lease)

    async def _let_go(self, lease: Lease) -> None:
        """Close what no task holds open, the streams of parked turns, then free the backend."""
        self.healthy = False
        with anyio.move_on_after(CLOSE_BOUND_S, shield=True):
            for run in self._runs.values():
                if run.generation is not None:
                    await run.generation.discard()
        with anyio.move_on_after(2, shield=True):
            try:
                await self._broker.release(lease)
            except (RedisError, OSError) as error:
                _log.warning("lease not given back; it expires", backend=self.options.name, error=str(error))

    async def _acquire(self) -> Lease | None:
        return await self._broker.acquire(self.options.pool, self.options.name, self._owner, LEASE_TTL_MS)

    async def _own(self, lease: Lease) -> None:
        self._lease = lease
        self._books = Books(self._broker, lease)
        self._reset()
        async with anyio.create_task_group() as self._tasks:
            self._swapper = Swapper(self._backend, self._books, self._tasks, self._handle)
            self._tasks.start_soon(self._renew)
            self._tasks.start_soon(self._books.run)
            self.info = await self._describe()
            orphans = await self._backend.clear_swap()
            if orphans:
                _log.info("swap files of an earlier owner removed", backend=self.options.name, files=orphans)
            # Decided once: what is free changes with every file.
            self._swap_bytes = swap_budget(self.options, self.info, self._backend.swap_space())
            self._scheduler = Scheduler(self._policy(self.info))
            # Before the records are read: what is asked of a turn after that comes as an event.
            position, waiting = await persistently(lambda: self._broker.snapshot(self.options.pool))
            await self._recover()
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
                return within_budget(await self._backend.describe(), self.options)
            except (EngineUnavailable, EngineRefused) as error:
                if not told:
                    _log.warning("engine not ready", backend=self.options.name, error=str(error))
                told = True
            await anyio.sleep(0.5)

    def _policy(self, info: EngineInfo) -> Policy:
        fence = self._lease.value.partition(":")[0]
        return make_policy(self.options, info, self._swap_bytes, tag=f"s{fence}")

    async def _recover(self) -> None:
        """Take over what a former owner left: turns that ended only in their log, and unfinished ones."""
        pool, name = self.options.pool, self.options.name
        for record in await persistently(lambda: self._broker.owned(pool, name)):
            run = self._new_run(record)
            log = await persistently(lambda turn=run.id: self._broker.log(pool, turn))  # type: ignore[misc]
            told = replay(log)
            run.entries, run.flushed = list(log), len(log)
            run.n_tokens = told.so_far.n_tokens
            run.prompt_tokens = told.prompt_tokens or record.prompt_tokens
            run.cached_tokens = told.cached_tokens
            run.preemptions, run.reevaluated = record.preemptions, record.tokens_reevaluated
            run.evaluated = run.prompt_tokens + run.n_tokens if run.n_tokens else 0
            if told.ended is not None:
                await self._close_recovered(run, told.ended)
                continue
            request = record.request
            budget = self._scheduler.policy.kv_budget_tokens
            if budget is not None and request.size.kv_tokens > budget:
                await self._fail_outsized(run, 502, request.size.kv_tokens, budget)
                continue
            prefix = self._prepare(run, told.so_far)
            if record.state is TurnState.RUNNING:
                entry = timeline_entry("interrupted", tokens=run.n_tokens)
                await self._books.advance(run, TurnState.PAUSED, entry, {"tier": Tier.DROPPED.value})
            self._handle(
                Recovered(run.id, request.agent, request.priority, record.seq, request.size.kv_tokens, prefix)
            )
            if record.held:
                self._handle(HoldRequested(run.id))
            if record.cancelling:
                self._handle(CancelRequested(run.id))

    async def _close_recovered(self, run: TurnRun, ended: list[Any]) -> None:
        """Write what a log's last entry says into the turn's record."""
        del self._runs[run.id]
        fields = {}
        if ended[0] == END:
            state, fields = TurnState.DONE, {"finish_reason": ended[1]}
            run.n_tokens = ended[2]["completion_tokens"]
        elif ended[2].get("code") == "cancelled":
            state = TurnState.CANCELLED
        else:
            state, fields = TurnState.FAILED, {"error": ended[2]["message"]}
        await self._books.close(run, state, timeline_entry(state.value, recovered=True), fields)

    # Loops -----------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(LEASE_RENEW_S)
            await persistently(self._renew_once)

    async def _renew_once(self) -> None:
        """On a connection that no other command stands in line for: many turns must not cost the lease.

        Raises Deposed, TimeoutError.
        """
        with anyio.fail_after(LEASE_RENEW_S):
            await self._blocking.renew(self._lease, LEASE_TTL_MS)

    async def _read_events(self, position: str) -> None:
        while True:
            after = position
            position, events = await persistently(lambda: self._events(after))  # noqa: B023
            for event in events:
                self._on_pool_event(event)

    async def _events(self, after: str) -> tuple[str, list[PoolEvent]]:
        """The next events. Bounded here, as its client has no timeout of its own; raises TimeoutError."""
        with anyio.fail_after(EVENTS_BLOCK_MS / 1000 + EVENTS_GRACE_S):
            return await self._blocking.events(self.options.pool, after, EVENTS_BLOCK_MS)

    async def _watch_engine(self) -> None:
        while True:
            await anyio.sleep(HEALTH_EVERY_S)
            if not await self._backend.healthy():
                await self._engine_lost()

    async def _publish(self) -> None:
        while True:
            running = self._report_progress()
            state = orjson.dumps(
                backend_state(
                    self.options,
                    self.info,
                    self.healthy,
                    self._scheduler.view(now := time.monotonic()),
                    self._runs,
                    now,
                )
            )
            try:
                await self._broker.publish_state(self.options.pool, self.options.name, state)
            except (RedisError, OSError):
                await anyio.sleep(STATE_EVERY_S)
            self._changed = anyio.Event()
            if not running:
                with anyio.move_on_after(1.0):
                    await self._changed.wait()
            await anyio.sleep(STATE_EVERY_S)

    def _report_progress(self) -> bool:
        """Tell the scheduler how far the running turns are; not with each token, which decides nothing."""
        running = [run for run in self._runs.values() if run.running]
        for run in running:
            self._handle(Progressed(run.id, run.kv_tokens))
        prefilling = any(run.scope is not None and not run.last_delta for run in self._runs.values())
        step_s = self._steps.take(prefilling)
        if step_s is not None:
            self._handle(Stepped(step_s))
        return bool(running)

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
            case Refuse(turn, need, budget):
                self._tasks.start_soon(self._refuse, turn, need, budget)
            case Start(turn, slot, source):
                run = self._runs[turn]
                run.tier = None
                self._tasks.start_soon(self._segment, run, slot, source)
            case Resume(turn, slot, tier, source):
                run = self._runs[turn]
                run.tier = tier
                self._tasks.start_soon(self._segment, run, slot, source)
            case Pause(turn, by):
                run = self._runs[turn]
                run.preempted_by = by
                if run.generation is not None:
                    run.generation.preempt()
            case Abort(turn):
                run = self._runs[turn]
                run.aborted = True
                if run.scope is not None:
                    run.scope.cancel()
            case Discard(turn):
                self._tasks.start_soon(self._discard, self._runs.pop(turn))
            case MarkSwapped(turn, key):
                self._tasks.start_soon(self._swapper.swapped, self._runs[turn], key)
            case MarkDropped(turn):
                self._tasks.start_soon(self._swapper.dropped, self._runs[turn])
            case Save(slot, key, of):
                self._tasks.start_soon(self._swapper.save, slot, key, self._runs.get(of or ""))
            case Forget(key):
                self._tasks.start_soon(self._swapper.forget, key)
            case Erase(slot):
                self._tasks.start_soon(self._erase, slot)

    # Commands --------------------------------------------------------------------------------------

    async def _claim(self, turn: str) -> None:
        record = await persistently(lambda: self._broker.claim(self._lease, turn))
        if record is None:
            self._handle(ClaimLost(turn))
            return
        prefix = self._prepare(self._new_run(record), None)
        self._handle(Claimed(turn, prefix, record.request.size.max_tokens))

    async def _refuse(self, turn: str, need: int, budget: int) -> None:
        """Fail a turn that waits, unless another backend of the pool has the room for it."""
        pool = self.options.pool
        for other in self.options.others:
            state = await persistently(lambda other=other: self._broker.backend_state(pool, other))  # type: ignore[misc]
            engine = published_engine(state or {})
            if engine is not None and engine.kv_budget_tokens >= need:
                return
        record = await persistently(lambda: self._broker.claim(self._lease, turn))
        self._handle(Withdrawn(turn))
        if record is not None:
            await self._fail_outsized(self._new_run(record), 400, need, budget)

    async def _fail_outsized(self, run: TurnRun, status: int, need: int, budget: int) -> None:
        del self._runs[run.id]
        message = f"the turn may need {need:,} tokens of KV; the engine has {budget:,}"
        code = "context_length_exceeded" if status == 400 else None
        run.put(error_entry(status, message, "invalid_request_error" if code else "engine_error", code))
        entry = timeline_entry("failed", error=message)
        await self._books.close(run, TurnState.FAILED, entry, {"error": message})

    async def _segment(self, run: TurnRun, slot: int, source: str | None) -> None:
        run.slot = slot
        run.last_delta = 0.0
        run.commanded_at = run.asked_at = time.monotonic()
        generation = run.generation
        epoch = self._engine_epoch
        if run.aborted:  # between the command and this task's first step
            await self._aborted(run)
            return
        if generation is None:
            await self._fail(run, 400, "the request's body cannot be read", "invalid_request_error")
            return
        end: Finished | Cut | None = None
        try:
            with anyio.CancelScope() as run.scope:
                if source is not None:
                    await self._swapper.restore(run, source, slot)
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
                await self._finished(run, end, epoch == self._engine_epoch)
            case Cut():
                await self._cut(run, end, end.resident and epoch == self._engine_epoch)
            case None:
                await self._aborted(run)

    async def _finished(self, run: TurnRun, end: Finished, resident: bool) -> None:
        del self._runs[run.id]
        self._handle(Ended(run.id, end.kv_tokens, resident))
        run.n_tokens = end.completion_tokens
        counts = run.prompt_tokens, end.completion_tokens, run.cached_tokens
        run.put(end_entry(end.finish_reason, *counts, end.stop_sequence))
        entry = timeline_entry("done", finish_reason=end.finish_reason, tokens=end.completion_tokens)
        await self._books.close(run, TurnState.DONE, entry, {"finish_reason": end.finish_reason})

    async def _cut(self, run: TurnRun, end: Cut, resident: bool) -> None:
        was_running, run.running = run.running, False
        run.held = end.held_tokens or run.held
        run.evaluated = max(run.evaluated, end.kv_tokens)
        self._handle(Paused(run.id, end.kv_tokens, resident))
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
        tier = Tier.RESIDENT if resident else Tier.DROPPED
        fields = {"preemptions": run.preemptions, "tokens_generated": run.n_tokens, "tier": tier.value}
        await self._books.advance(run, TurnState.PAUSED, entry, fields, {"preemptions": 1})

    async def _aborted(self, run: TurnRun) -> None:
        del self._runs[run.id]
        self._handle(Ended(run.id, run.kv_tokens, resident=run.running))
        await self._cancelled(run)

    async def _discard(self, run: TurnRun) -> None:
        if run.generation is not None:
            await run.generation.discard()
        await self._cancelled(run)

    async def _cancelled(self, run: TurnRun) -> None:
        run.put(error_entry(499, "the turn was cancelled", "cancelled", "cancelled"))
        await self._books.close(run, TurnState.CANCELLED, timeline_entry("cancelled", tokens=run.n_tokens))

    async def _fail(self, run: TurnRun, status: int, message: str, kind: str) -> None:
        self._runs.pop(run.id, None)
        self._handle(Ended(run.id, 0, resident=False))
        code = "context_length_exceeded" if kind == "exceed_context_size_error" else None
        run.put(error_entry(status, message, kind, code))
        await self._books.close(
            run, TurnState.FAILED, timeline_entry("failed", error=message), {"error": message}
        )

    async def _interrupted(self, run: TurnRun, error: EngineUnavailable) -> None:
        """The engine broke the segment off: try the turn again, but not for ever without progress."""
        run.evaluated = max(run.evaluated, run.kv_tokens)
        run.failures = 1 if run.progress > run.progress_at_failure else run.failures + 1
        run.progress_at_failure = run.progress
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
            await self._books.advance(run, TurnState.PAUSED, entry, {"tier": Tier.DROPPED.value})

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
        info = await self._describe()
        if self._policy(info) != self._scheduler.policy:
            raise _EngineChanged
        self.info = info
        self.healthy = True
        self._engine_epoch += 1
        self._handle(EngineReady())
        _log.info("engine is back", backend=self.options.name)

    # What runs report ------------------------------------------------------------------------------

    def _new_run(self, record: TurnRecord) -> TurnRun:
        run = TurnRun(
            record,
            record.request.gateway,
            on_output=self._books.put,
            on_started=self._on_started,
            on_step=self._steps.add,
            on_first_delta=self._on_first_delta,
        )
        self._runs[run.id] = run
        return run

    def _prepare(self, run: TurnRun, so_far: ReplySoFar | None) -> Prefix:
        """Give the turn its generation, and say what its prompt is known by.

        Without a generation its first segment fails it.
        """
        request = run.record.request
        try:
            body = orjson.loads(request.body)
            run.generation = self._backend.generation(request.api, body, request.size.max_tokens, so_far)
            return prompt_prefix(request.api, body)
        except Exception:
            _log.exception("a turn's body cannot be read", turn=run.id)
            return ()

    def _on_started(self, run: TurnRun, prompt_tokens: int, cached_tokens: int) -> None:
        waited_s = time.monotonic() - run.commanded_at
        self._handle(Started(run.id, prompt_tokens, cached_tokens))
        run.running = True
        first = not run.prompt_tokens
        if first:
            run.prompt_tokens, run.cached_tokens = prompt_tokens - run.n_tokens, cached_tokens
            run.status("started", prompt_tokens=run.prompt_tokens, cached_tokens=cached_tokens)
            entry = timeline_entry(
                "started",
                slot=run.slot,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                engine_wait_s=round(waited_s, 6),
            )
            fields: dict[str, str | int | float] = {"prompt_tokens": run.prompt_tokens}
            counters = {}
        else:
            reevaluated = max(0, min(prompt_tokens, run.evaluated) - cached_tokens)
            if run.held:
                reevaluated += max(0, run.prompt_tokens + run.n_tokens + run.held - prompt_tokens)
                run.held = 0
            run.reevaluated += reevaluated
            run.status("resumed")
            entry = timeline_entry(
                "resumed",
                slot=run.slot,
                tier=run.tier.value if run.tier is not None else None,
                cached_tokens=cached_tokens,
                tokens_reevaluated=reevaluated,
                engine_wait_s=round(waited_s, 6),
            )
            fields = {"tokens_reevaluated": run.reevaluated}
            counters = {"resumes": 1, "tokens_reevaluated": reevaluated}
        self._tasks.start_soon(self._books.advance, run, TurnState.RUNNING, entry, fields, counters)

    def _on_first_delta(self, run: TurnRun) -> None:
        now = time.monotonic()
        step_s = self._steps.smoothed or 0.0
        self._handle(Prefilled(run.evaluating, max(0.0, now - run.asked_at - step_s), run.id))
        if run.tier is not None:
            run.resume_cost_s += now - run.commanded_at
