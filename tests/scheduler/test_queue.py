"""ClassQueue and the effective priority against models too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.scheduler import Policy
from orchestrator.scheduler.queue import ClassQueue

PRIORITIES = st.integers(0, 3)
PICK = st.integers(0, 63)


@dataclass(frozen=True)
class Standing:
    """Where a turn stands."""

    priority: int
    seq: int


class QueueMachine(RuleBasedStateMachine):
    """Turns join, leave from anywhere, and come back at their old place or at another one."""

    @initialize()
    def begin(self) -> None:
        self.standing: dict[str, Standing] = {}
        self.left: dict[str, Standing] = {}
        self.queue = ClassQueue(self._wants_place)

    def _wants_place(self, turn: str, priority: int, seq: int) -> bool:
        return self.standing.get(turn) == Standing(priority, seq)

    @rule(priority=PRIORITIES, seq=st.integers(-5, 50))
    def join(self, priority: int, seq: int) -> None:
        turn = f"t{len(self.standing) + len(self.left)}"
        self.standing[turn] = Standing(priority, seq)
        self.queue.add(turn, priority, seq)

    @precondition(lambda self: self.standing)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        turn = sorted(self.standing)[pick % len(self.standing)]
        self.left[turn] = self.standing.pop(turn)

    @precondition(lambda self: self.left)
    @rule(pick=PICK)
    def come_back(self, pick: int) -> None:
        turn = sorted(self.left)[pick % len(self.left)]
        self.standing[turn] = standing = self.left.pop(turn)
        self.queue.add(turn, standing.priority, standing.seq)

    @precondition(lambda self: self.left)
    @rule(pick=PICK, priority=PRIORITIES, seq=st.integers(-5, 50))
    def come_back_elsewhere(self, pick: int, priority: int, seq: int) -> None:
        turn = sorted(self.left)[pick % len(self.left)]
        del self.left[turn]
        self.standing[turn] = Standing(priority, seq)
        self.queue.add(turn, priority, seq)

    @precondition(lambda self: self.standing)
    @rule(pick=PICK)
    def add_again(self, pick: int) -> None:
        turn = sorted(self.standing)[pick % len(self.standing)]
        standing = self.standing[turn]
        self.queue.add(turn, standing.priority, standing.seq)

    @invariant()
    def heads_are_the_oldest_of_each_priority(self) -> None:
        oldest: dict[int, tuple[int, str]] = {}
        for turn, standing in self.standing.items():
            head = (standing.seq, turn)
            oldest[standing.priority] = min(oldest.get(standing.priority, head), head)
        expected = [(priority, turn) for priority, (_, turn) in sorted(oldest.items(), reverse=True)]
        assert self.queue.heads() == expected
        assert self.queue.heads() == expected


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, print_blob=True)


def naive_effective(priorities: tuple[int, ...], aging_s: float, priority: int, waited_s: float) -> int:
    """One class up for each whole span waited, stopping below the highest."""
    if aging_s > 0:
        remaining = waited_s / aging_s
        while remaining >= 1:
            above = [level for level in priorities if level > priority and level != max(priorities)]
            if not above:
                break
            priority = min(above)
            remaining -= 1
    return priority


@given(
    priorities=st.lists(st.integers(0, 8), max_size=6).map(tuple),
    aging_s=st.sampled_from([0.0, 1.0, 2.0, 64.0]),
    priority=st.integers(-1, 10),
    waited_s=st.integers(-8, 512).map(float),
)
@example(priorities=(0, 50, 100, 100), aging_s=1.0, priority=0, waited_s=9.0)
@example(priorities=(100, 0, 50, 20), aging_s=1.0, priority=0, waited_s=2.0)
def test_effective_priority(
    priorities: tuple[int, ...], aging_s: float, priority: int, waited_s: float
) -> None:
    policy = Policy(1, 1, aging_s=aging_s, priorities=priorities)
    effective = policy.effective_priority(priority, waited_s)
    assert effective == naive_effective(priorities, aging_s, priority, waited_s)
    assert effective >= priority
    if priorities and priority < max(priorities):
        assert effective < max(priorities)
