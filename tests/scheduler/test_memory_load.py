"""More turns than the engine and the folder can hold, for long, on a virtual clock and a model engine.

Twelve background agents in three classes share a pool of KV that holds six of their turns and a folder that
holds three, while foreground turns keep arriving. Everything has to end, each tier has to be of use, and the
work of moving KV must not become the work.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.scheduler import (
    Claim,
    Claimed,
    Command,
    Ended,
    EngineReady,
    Erase,
    Erased,
    Event,
    Forget,
    MarkDropped,
    MarkSwapped,
    Pause,
    Paused,
    Policy,
    Prefilled,
    Prefix,
    Progressed,
    Restored,
    Resume,
    Save,
    Saved,
    Scheduler,
    Start,
    Started,
    Stepped,
    SwapPolicy,
    Tick,
    TurnQueued,
)
from orchestrator.turns import Tier

BACKGROUND, TOP = (0, 20, 50), 100
BLOCK, SYSTEM = 50, tuple(range(200))
#: Seconds of a step, and more for each lane, running token and, where the pool is shared, parked token.
STEP_S, LANE_S, RUNNING_S, PARKED_S = 0.012, 0.0008, 0.2e-6, 0.2e-6
#: Seconds for each token that is evaluated, saved or restored, and for an erase.
PREFILL_S, SAVE_S, RESTORE_S, ERASE_S = 0.5e-3, 9.5e-6, 4.5e-6, 0.5e-3
BATCH_TOKENS, TICK_S, REPORT_STEPS = 256, 0.25, 10
TURN_TOKENS = 1000
SWAP = SwapPolicy(0, token_bytes=84)


@dataclass(eq=False)
class LoadTurn:
    """A turn with all its tokens so far; `left`: prompt tokens to be evaluated, None before its segment."""

    id: str
    agent: str
    priority: int
    tokens: list[int]
    limit: int
    prefix: Prefix
    slot: int | None = None
    source: str | None = None
    left: int | None = None
    cached: int = 0
    pausing: bool = False
    claimed_at: float = 0.0
    saw_save: bool = False


@dataclass
class Figures:
    """What came of it."""

    commands: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    sources: int = 0
    """New turns that began with a file."""
    cached: int = 0
    evaluated: int = 0
    waits_s: list[float] = field(default_factory=list)
    """From a foreground turn's claim to its start."""
    saves_waited_for: int = 0
    stalls_s: float = 0.0
    generated: int = 0


class Load:
    """Engine, folder and dispatcher; what takes time takes it on one clock."""

    def __init__(
        self,
        seed: int,
        *,
        unified: bool = True,
        hybrid: bool = False,
        files: int = 3,
        foreground: int = 60,
        every_s: float = 0.8,
    ) -> None:
        self.dice = random.Random(seed)
        self.hybrid = hybrid
        self.policy = Policy(
            4,
            8 if unified else 6,
            kv_budget_tokens=6 * TURN_TOKENS if unified else None,
            swap=SwapPolicy(files * SWAP.file_bytes(TURN_TOKENS), token_bytes=SWAP.token_bytes)
            if files
            else None,
        )
        self.scheduler = Scheduler(self.policy)
        self.now = self.ticked = 0.0
        self.seq = 0
        self.turns: dict[str, LoadTurn] = {}
        self.kv: list[list[int]] = [[] for _ in range(self.policy.engine_slots)]
        self.files: dict[str, list[int]] = {}
        self.calls: deque[Save | Erase] = deque()
        self.told: deque[Event] = deque()
        self.history: dict[str, list[int]] = {}
        self.next_token = 1_000_000
        self.steps: list[float] = []
        self.figures = Figures()
        self.arrivals: list[tuple[float, str, int, int, int]] = [
            (4.0 * at + 0.1 * number, f"w{number}-{at}", priority, *self.sizes(200, 500, 250, 300))
            for at, priority in enumerate(BACKGROUND)
            for number in range(4)
        ]
        at_s = 5.0
        for _ in range(foreground):
            self.arrivals.append((at_s, f"f{self.dice.randint(0, 2)}", TOP, *self.sizes(30, 150, 10, 60)))
            at_s += self.dice.expovariate(1 / every_s)
        self.arrivals.sort()

    def sizes(self, *bounds: int) -> tuple[int, int]:
        return self.dice.randint(*bounds[:2]), self.dice.randint(*bounds[2:])

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    # The clock -------------------------------------------------------------------------------------

    def run(self, most_s: float = 900.0) -> Figures:
        """Until all have ended; AssertionError when that takes too long."""
        self.tell(EngineReady())
        while self.arrivals or self.turns:
            assert self.now < most_s, f"not at rest: {self.scheduler.view(self.now)}"
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.arrive(*self.arrivals.pop(0)[1:])
            if self.now - self.ticked >= TICK_S:
                self.ticked = self.now
                self.tell(Tick())
            if self.calls:
                self.call(self.calls.popleft())
            else:
                self.step()
        while self.calls:
            self.call(self.calls.popleft())
        return self.figures

    def arrive(self, agent: str, priority: int, question: int, answer: int) -> None:
        """The agent's next question, upon its history; it asks nothing while it waits for an answer."""
        if any(turn.agent == agent for turn in self.turns.values()):
            self.arrivals.append((self.now + 0.3, agent, priority, question, answer))
            self.arrivals.sort()
            return
        before = self.history.get(agent, [*SYSTEM])
        if len(before) + question + answer > TURN_TOKENS:
            before = [*SYSTEM]
        tokens = before + self.fresh(question)
        prefix = tuple(hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK))
        self.seq += 1
        turn = LoadTurn(f"{agent}.{self.seq}", agent, priority, tokens, len(tokens) + answer, prefix)
        self.turns[turn.id] = turn
        self.tell(TurnQueued(turn.id, agent, priority, self.seq, turn.limit))

    def call(self, call: Save | Erase) -> None:
        """A slot action, for which everything else stands still."""
        if isinstance(call, Erase):
            self.now += ERASE_S
            self.kv[call.slot] = []
            self.tell(Erased(call.slot))
            return
        held = len(self.kv[call.slot])
        self.stall(SAVE_S * held)
        self.files[call.key] = list(self.kv[call.slot])
        self.tell(Saved(call.slot, call.key, held, SWAP.file_bytes(held), SAVE_S * held))

    def stall(self, seconds: float) -> None:
        self.now += seconds
        self.figures.stalls_s += seconds

    def step(self) -> None:
        """One batch: a token for each turn that decodes, and a part of one prompt."""
        on = [turn for turn in self.turns.values() if turn.slot is not None]
        for turn in on:
            if turn.left is None:
                self.begin(turn)
        prompt = next((turn for turn in on if turn.left), None)
        decoding = [turn for turn in on if not turn.left]
        chunk = min(BATCH_TOKENS, prompt.left or 0) if prompt is not None else 0
        running = sum(len(self.kv[turn.slot or 0]) for turn in on)
        tax_s = PARKED_S if self.policy.kv_budget_tokens is not None else 0.0
        step_s = STEP_S + LANE_S * len(decoding) + RUNNING_S * running
        step_s += tax_s * (sum(map(len, self.kv)) - running)
        self.now += step_s + PREFILL_S * chunk
        for turn in decoding:
            turn.tokens += self.fresh(1)
            self.hold(turn, len(turn.tokens))
        self.figures.generated += len(decoding)
        if prompt is not None:
            prompt.left = (prompt.left or 0) - chunk
            self.figures.evaluated += chunk
            self.hold(prompt, len(prompt.tokens) - prompt.left)
        self.report(decoding, prompt, step_s, chunk)
        for turn in on:
            if len(turn.tokens) >= turn.limit:
                self.leave(turn)
                del self.turns[turn.id]
                self.history[turn.agent] = turn.tokens
                self.tell(Ended(turn.id, turn.limit, resident=True))
            elif turn.pausing:
                held = len(self.kv[turn.slot or 0])
                self.leave(turn)
                self.tell(Paused(turn.id, held, resident=held > 0))

    def report(self, decoding: list[LoadTurn], prompt: LoadTurn | None, step_s: float, chunk: int) -> None:
        if prompt is not None:
            self.steps.clear()
            if not prompt.left:
                self.tell(Prefilled(chunk, PREFILL_S * chunk))
                self.tell(Started(prompt.id, len(prompt.tokens), prompt.cached))
            return
        self.steps.append(step_s)
        if len(self.steps) == REPORT_STEPS and decoding:
            for turn in decoding:
                self.tell(Progressed(turn.id, len(turn.tokens)))
            self.tell(Stepped(sum(self.steps) / len(self.steps)))
            self.steps.clear()

    def begin(self, turn: LoadTurn) -> None:
        """Restore, and find out how much of the prompt is there."""
        slot = turn.slot or 0
        if turn.source is not None:
            held = self.files[turn.source]
            self.kv[slot] = list(held)
            turn.source = None
            self.stall(RESTORE_S * len(held))
            self.tell(Restored(turn.id, len(held), RESTORE_S * len(held)))
        same = 0
        for mine, held_token in zip(turn.tokens[:-1], self.kv[slot], strict=False):
            if mine != held_token:
                break
            same += 1
        turn.cached = 0 if self.hybrid else same
        turn.left = len(turn.tokens) - turn.cached
        self.figures.cached += turn.cached
        self.hold(turn, turn.cached)

    def hold(self, turn: LoadTurn, tokens: int) -> None:
        self.kv[turn.slot or 0] = turn.tokens[:tokens]
        budget = self.policy.kv_budget_tokens
        assert budget is None or sum(map(len, self.kv)) <= budget, "the engine fails every running turn"

    @staticmethod
    def leave(turn: LoadTurn) -> None:
        turn.slot, turn.left, turn.pausing = None, None, False

    # Commands --------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Hand over an event, and what the commands lead to at once after it."""
        self.told.append(event)
        if len(self.told) > 1:
            return  # whoever tells the first sees to it
        while self.told:
            for command in self.scheduler.handle(self.told[0], self.now):
                self.figures.commands[type(command).__name__] += 1
                self.obey(command)
            self.told.popleft()
            self.look()

    def obey(self, command: Command) -> None:
        match command:
            case Claim(turn_id):
                self.turns[turn_id].claimed_at = self.now
                self.told.append(Claimed(turn_id, self.turns[turn_id].prefix))
            case Start(turn_id, slot, source):
                self.figures.sources += source is not None
                self.place(self.turns[turn_id], slot, source)
            case Resume(turn_id, slot, tier, source):
                self.figures.resumes[tier] += 1
                self.place(self.turns[turn_id], slot, source)
            case Pause(turn_id, _):
                self.turns[turn_id].pausing = True
            case Save() | Erase():
                self.calls.append(command)
            case Forget(key):
                del self.files[key]
            case MarkDropped(turn_id) | MarkSwapped(turn_id):
                assert self.turns[turn_id].priority < TOP, "a foreground turn's KV is given up"
            case _:
                raise AssertionError(command)

    def place(self, turn: LoadTurn, slot: int, source: str | None) -> None:
        assert all(other.slot != slot for other in self.turns.values())
        turn.slot, turn.source = slot, source
        if turn.priority == TOP:
            self.figures.waits_s.append(self.now - turn.claimed_at)
            self.figures.saves_waited_for += turn.saw_save

    def look(self) -> None:
        """Who waits while there is a save under way, and whether the folder keeps to its budget."""
        view = self.scheduler.view(self.now)
        saving = any(slot.saving for slot in view.slots)
        for turn in view.owned:
            if turn.phase == "placed" and saving:
                self.turns[turn.id].saw_save = True
        assert view.swap.used_bytes <= view.swap.budget_bytes
        if self.policy.swap is not None:
            held = sum(SWAP.file_bytes(len(file)) for file in self.files.values())
            assert held <= self.policy.swap.budget_bytes, "more is on the disk than may be"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "load",
    [
        pytest.param({}, id="shared pool"),
        pytest.param({"unified": False}, id="a pool for each slot"),
        pytest.param({"files": 1}, id="one file"),
        pytest.param({"files": 0}, id="no folder"),
        pytest.param({"hybrid": True}, id="an engine that keeps nothing"),
        pytest.param({"foreground": 300, "every_s": 0.1}, id="a foreground that never rests"),
    ],
)
def test_everything_ends_and_nothing_is_left(load: dict[str, Any], seed: int) -> None:
    run = Load(seed, **load)
    figures = run.run()
    view = run.scheduler.view(run.now)
    assert (view.owned, view.waiting, view.decoding) == ((), 0, 0)
    assert view.swap.turns == 0, "files of turns that are over"
    assert view.swap.files == len(run.files)
    assert not any(slot.saving for slot in view.slots)
    assert view.kv_owners["paused"] == view.kv_owners["running"] == view.kv_owners["reserved"] == 0
    assert max(figures.waits_s) < 0.5, "a foreground turn waits for a batch, not for a turn"


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_each_tier_is_of_use_and_moving_kv_is_not_the_work(seed: int, unified: bool) -> None:
    run = Load(seed, unified=unified, foreground=120)
    figures = run.run()
    assert all(figures.resumes[tier] for tier in Tier), figures.resumes
    assert figures.resumes[Tier.SWAPPED] <= figures.commands["MarkSwapped"]
    assert figures.commands["Save"] <= 0.5 * figures.commands["Start"]
    assert figures.stalls_s < 0.01 * run.now
    assert figures.saves_waited_for <= 0.05 * len(figures.waits_s)


@pytest.mark.parametrize("seed", range(3))
def test_a_folder_saves_the_engine_work(seed: int) -> None:
    with_folder, without = Load(seed).run(), Load(seed, files=0).run()
    assert with_folder.generated == without.generated
    assert with_folder.evaluated < without.evaluated
    assert with_folder.commands["MarkDropped"] < without.commands["MarkDropped"]


def test_the_same_load_leads_to_the_same_commands() -> None:
    once, twice = Load(7), Load(7)
    assert once.run() == twice.run()
    assert list(once.scheduler.journal) == list(twice.scheduler.journal)
