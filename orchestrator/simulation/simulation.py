"""One clock for a pool of backends and those who use it.

`simulate` is the whole of it: a heap of what happens when, in the order of time and, within one moment, of
when it was asked for; the events told within one moment are handled first come, first served. With one seed
everything is the same to the last bit, on whatever machine.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from orchestrator.scheduler import Event, Prefix
from orchestrator.simulation.backend import Backend, EventLog
from orchestrator.simulation.outcome import ClassFigures, Outcome, RowSink, TurnRow
from orchestrator.simulation.setup import Setup, SimulationError
from orchestrator.simulation.turn import Turn
from orchestrator.simulation.workload import Arrival, Source
from orchestrator.turns import Tier

#: How many of an agent's earlier turns are told apart in what a slot holds.
ANCESTORS = 8
#: With turns waiting and nothing to be done for so long, nothing will ever be.
STUCK_AFTER_S = 3600.0
_PROGRESS_EVERY_S = 60.0
_PREFIX_BITS = 20


def simulate(
    setup: Setup,
    *,
    seed: int,
    until_s: float | None = None,
    until_turns: int | None = None,
    warmup_s: float = 0.0,
    sink: RowSink | None = None,
    log: EventLog | None = None,
    on_time: Callable[[float, int], None] | None = None,
) -> Outcome:
    """Run until no more turns arrive and all have ended.

    Turns arrive until `until_s` (seconds), or until so many have; one of both is needed. Figures are of turns
    that arrived after `warmup_s`, when all began at once; rows are of all turns, in the order of their ends.
    `on_time` is told the time and how many turns have ended, once for each simulated minute. Raises
    SimulationError.
    """
    if until_s is None and until_turns is None:
        raise SimulationError("a simulation needs an end: a time or a number of turns")
    if until_s is not None and until_s <= warmup_s:
        raise SimulationError(f"nothing is measured: {until_s:g} s end before the warm-up of {warmup_s:g} s")
    return _Run(setup, seed, until_s, until_turns, warmup_s, sink, log, on_time).run()


class _Run:
    def __init__(
        self,
        setup: Setup,
        seed: int,
        until_s: float | None,
        until_turns: int | None,
        warmup_s: float,
        sink: RowSink | None,
        log: EventLog | None,
        on_time: Callable[[float, int], None] | None,
    ) -> None:
        self._setup = setup
        self._seed = seed
        self._until_s = math.inf if until_s is None else until_s
        self._until_turns = math.inf if until_turns is None else until_turns
        self._warmup_s = warmup_s
        self._sink = sink
        self._on_time = on_time
        self._backends = [Backend(setup, backend, self, log) for backend in setup.backends]
        # Who hears of a turn first: in a real pool that is chance.
        self._race = random.Random(f"race/{seed}")
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._asked = 0
        self._told: deque[tuple[Backend, Event]] = deque()
        self._telling = False
        self._waiting: dict[str, Turn] = {}
        self._alive: dict[int, tuple[Turn, Source]] = {}
        self._last_of: dict[str, Turn] = {}
        self._arrivals_due = 0
        self._arrived = self._ended = self._refused = 0
        self._last_arrival_s = self._last_event_s = self._end_s = 0.0
        self._classes = {name: ClassFigures() for name in setup.classes}
        self._made = dict.fromkeys(setup.classes, 0)
        self._made_at_warmup: dict[str, int] = {}
        self._made_at_end: dict[str, int] = {}

    # The clock -------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        for backend in self._backends:
            backend.begin(0.0)
            self._every(self._setup.report_s, backend.report)
            self._every(self._setup.tick_s, backend.tick)
        if self._on_time is not None:
            self._every(_PROGRESS_EVERY_S, lambda now: self._on_time and self._on_time(now, self._ended))
        self._made_at_warmup = dict(self._made)
        if self._warmup_s > 0:
            self._push(self._warmup_s, self._note_warmup)
        if self._until_s < math.inf:
            self._push(self._until_s, self._note_end)
        for source in self._setup.workload.sources(self._seed):
            self._next_of(source, 0.0)
        heap = self._heap
        while self._alive or self._arrivals_due:
            now, _, call = heappop(heap)
            call(now)
            if now - self._last_event_s > STUCK_AFTER_S and not self._arrivals_due:
                raise SimulationError(self._stuck(now))
        return self._outcome()

    def at(self, at_s: float, call: Callable[[float], None]) -> None:
        self._last_event_s = max(self._last_event_s, at_s)
        self._push(at_s, call)

    def _every(self, seconds: float, call: Callable[[float], object]) -> None:
        """Now and then for ever; such a call keeps nothing going by itself."""

        def again(count: int, now: float) -> None:
            call(now)
            self._push((count + 1) * seconds, partial(again, count + 1))

        self._push(seconds, partial(again, 1))

    def _push(self, at_s: float, call: Callable[[float], None]) -> None:
        self._asked += 1
        heappush(self._heap, (at_s, self._asked, call))

    def tell(self, backend: Backend, event: Event, now: float) -> None:
        """Events are handled in the order in which they were told, also those that others lead to."""
        self._told.append((backend, event))
        self._hand_over(now)

    def _hand_over(self, now: float) -> None:
        if self._telling:
            return
        self._telling = True
        told = self._told
        try:
            while told:
                to, what = told.popleft()
                to.handle(what, now)
        finally:
            self._telling = False

    # Turns -----------------------------------------------------------------------------------------

    def _next_of(self, source: Source, now: float) -> None:
        arrival = source.next(now)
        if arrival is None or arrival.at_s > self._until_s or self._arrived >= self._until_turns:
            return
        if arrival.at_s < now:
            raise SimulationError(
                f"a turn of {arrival.agent} at {arrival.at_s:g} s comes after one at {now:g} s; "
                "arrivals have to be ordered by time"
            )
        self._arrivals_due += 1
        self.at(arrival.at_s, partial(self._arrive, source, arrival))

    def _arrive(self, source: Source, arrival: Arrival, now: float) -> None:
        self._arrivals_due -= 1
        if self._arrived >= self._until_turns:
            return
        self._arrived += 1
        self._last_arrival_s = now
        turn = self._turn_of(arrival)
        self._alive[turn.number] = (turn, source)
        if not source.closed:
            self._next_of(source, now)
        kv_tokens = turn.prompt + turn.limit
        fitting = [backend for backend in self._backends if backend.setup.fits(kv_tokens)]
        if not fitting or len(self._waiting) >= self._setup.max_waiting:
            self._refused += 1
            self._close(turn, None, now)
            return
        self._waiting[turn.id] = turn
        first = self._race.randrange(len(fitting)) if len(fitting) > 1 else 0
        hearing: dict[float, list[Backend]] = {}
        for backend in fitting[first:] + fitting[:first]:
            hearing.setdefault(backend.queue_delay_s(), []).append(backend)
        for delay_s, backends in hearing.items():
            if delay_s > 0:
                self.at(now + delay_s, partial(self._queue, backends, turn))
            else:
                self._queue(backends, turn, now)

    def _queue(self, backends: list[Backend], turn: Turn, now: float) -> None:
        """All of them hear of a turn before any of them has it: several may try to claim it."""
        if turn.id in self._waiting:
            self._told.extend((backend, backend.queued(turn)) for backend in backends)
            self._hand_over(now)

    def claim(self, backend: Backend, turn: str, now: float) -> Turn | None:
        claimed = self._waiting.pop(turn, None)
        if claimed is not None:
            for other in self._backends:
                if other is not backend:
                    other.withdrawn(claimed, now)
        return claimed

    def over(self, backend: Backend, turn: Turn, now: float) -> None:
        self._made[turn.priority_class] += turn.generated
        self._close(turn, backend, now)

    def _close(self, turn: Turn, backend: Backend | None, now: float) -> None:
        _, source = self._alive.pop(turn.number)
        self._ended += 1
        self._end_s = now
        row = TurnRow(
            number=turn.number,
            agent=turn.agent,
            priority_class=turn.priority_class,
            backend=backend.name if backend is not None else None,
            arrival_s=turn.arrival_s,
            wait_s=turn.wait_s,
            first_token_s=turn.first_token_s,
            end_s=now,
            prompt_tokens=turn.prompt,
            output_tokens=turn.output,
            generated_tokens=turn.generated,
            cached_tokens=turn.cached,
            evaluated_again=turn.evaluated_again,
            lost_tokens=turn.lost,
            preemptions=turn.preemptions,
            resident_resumes=turn.resumes.get(Tier.RESIDENT, 0),
            swapped_resumes=turn.resumes.get(Tier.SWAPPED, 0),
            dropped_resumes=turn.resumes.get(Tier.DROPPED, 0),
            refused=backend is None,
        )
        if turn.arrival_s >= self._warmup_s:
            self._classes[turn.priority_class].add(row)
        if self._sink is not None:
            self._sink(row)
        if source.closed:
            self._next_of(source, now)

    def _turn_of(self, arrival: Arrival) -> Turn:
        setup = self._setup
        priority = setup.classes.get(arrival.priority_class)
        if priority is None:
            raise SimulationError(
                f"a turn of {arrival.agent} has the class {arrival.priority_class!r}, "
                f"which is not among {', '.join(setup.classes)}"
            )
        number = self._arrived
        common, prefix = self._ancestry(arrival, number)
        turn = Turn(
            number=number,
            id=f"t{number}",
            agent=arrival.agent,
            priority_class=arrival.priority_class,
            priority=priority,
            arrival_s=arrival.at_s,
            prompt=arrival.prompt_tokens,
            output=arrival.output_tokens,
            limit=max(arrival.output_tokens, (setup.limits or {}).get(arrival.agent, 0)),
            prefix=prefix,
            common=common,
        )
        self._last_of[arrival.agent] = turn
        return turn

    def _ancestry(self, arrival: Arrival, number: int) -> tuple[dict[int, int], Prefix]:
        """What the prompt has in common with earlier ones: for the engine in tokens, for the scheduler in
        checksums of blocks, as the dispatcher makes them."""
        size = self._setup.block_tokens
        blocks = min(arrival.prompt_tokens // size, (1 << _PREFIX_BITS) - 1)
        shared, last = arrival.shared_tokens, self._last_of.get(arrival.agent)
        common: dict[int, int] = {}
        begins: Prefix = ()
        if shared and last is not None:
            # What it has in common with the one before that is at most what that one had.
            common = {other: min(tokens, shared) for other, tokens in last.common.items()}
            common[last.number] = shared
            while len(common) > ANCESTORS:
                del common[next(iter(common))]
            begins = last.prefix[: min(shared, last.prompt) // size]
        base = number << _PREFIX_BITS
        return common, begins + tuple(range(base + len(begins), base + blocks))

    # Figures ---------------------------------------------------------------------------------------

    def _made_by(self, now: float) -> dict[str, int]:
        made = dict(self._made)
        done = {id(backend): backend.engine.progress(now)[0] for backend in self._backends}
        for turn, _ in self._alive.values():
            made[turn.priority_class] += turn.generated
        for backend in self._backends:
            for turn in backend.engine.seated():
                if turn.decodes:
                    made[turn.priority_class] += done[id(backend)]
        return made

    def _note_warmup(self, now: float) -> None:
        self._made_at_warmup = self._made_by(now)

    def _note_end(self, now: float) -> None:
        self._made_at_end = self._made_by(now)

    def _outcome(self) -> Outcome:
        measured_to = self._until_s if self._until_s < math.inf else self._end_s
        made = self._made_at_end or self._made
        for name, figures in self._classes.items():
            figures.measured_tokens = made[name] - self._made_at_warmup[name]
        for backend in self._backends:
            swap = backend.scheduler.view(self._end_s).swap
            backend.figures.stalls = swap.stalls
        return Outcome(
            seed=self._seed,
            measured_s=max(0.0, measured_to - self._warmup_s),
            end_s=self._end_s,
            arrived=self._arrived,
            ended=self._ended,
            refused=self._refused,
            events=sum(backend.events for backend in self._backends),
            classes=self._classes,
            backends={backend.name: backend.figures for backend in self._backends},
        )

    def _stuck(self, now: float) -> str:
        turn, _ = next(iter(self._alive.values()))
        return (
            f"{now:.0f} s: {len(self._alive)} turns wait for ever, the first of them {turn.id} "
            f"of {turn.agent} with {turn.prompt} + {turn.limit} tokens"
        )
