"""What a turn's timeline tells: when it had a decode slot, what it waited for, what its pauses cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.cli.prefix_view import PromptView
from orchestrator.cli.view import TimelineEntry, TurnStory

#: A turn that waited less has waited for nothing but its way through the service.
AT_ONCE_S = 0.25

_LEAVES = ("paused", "interrupted", "done", "failed", "cancelled")


class ExplainedTurn(TurnStory):
    """A turn's story with its pool, and with what was observed of its prompt."""

    pool: str = ""
    prompt: PromptView | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to say of a turn, and what would help, if something would."""

    about: str
    text: str
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without a slot. `by` took it, None where nobody did: a hand, or the engine that broke off.

    `away_s` until the turn had a slot again, None while it has none.
    """

    by: str | None
    broke_off: bool
    at: float
    away_s: float | None


@dataclass(frozen=True, slots=True)
class Resume:
    """A return: from which tier, and how many tokens were evaluated that had been before."""

    tier: str
    tokens_reevaluated: int


@dataclass(frozen=True, slots=True)
class Facts:
    """One turn's story in figures. Times are seconds, of the epoch where they are points in time."""

    queued_at: float
    slot_at: float | None
    engine_wait_s: float
    started: bool
    prompt_tokens: int
    cached_tokens: int
    pauses: tuple[Pause, ...]
    resumes: tuple[Resume, ...]
    ended_at: float | None

    @property
    def waited_s(self) -> float | None:
        """For its first slot, None where it has had none."""
        return None if self.slot_at is None else max(0.0, self.slot_at - self.queued_at)

    def paused_s(self, now: float) -> float:
        """Without a slot since its first one."""
        until = self.ended_at or now
        return sum(max(0.0, until - one.at) if one.away_s is None else one.away_s for one in self.pauses)


def facts_of(story: TurnStory) -> Facts:
    """Read a story; what a newer or older service does not tell counts as nothing."""
    queued_at = story.timeline[0].t if story.timeline else story.created
    slot_at = ended_at = None
    engine_wait_s = 0.0
    prompt_tokens = cached_tokens = 0
    started = False
    pauses: list[Pause] = []
    resumes: list[Resume] = []
    for entry in story.timeline:
        if entry.event == "started":
            started = True
            engine_wait_s = _number(entry, "engine_wait_s")
            slot_at = entry.t - engine_wait_s
            prompt_tokens = int(_number(entry, "prompt_tokens"))
            cached_tokens = int(_number(entry, "cached_tokens"))
        elif entry.event in ("paused", "interrupted"):
            by = entry.details.get("by")
            broke_off = entry.event == "interrupted"
            pauses.append(Pause(by if isinstance(by, str) else None, broke_off, entry.t, None))
        elif entry.event == "resumed":
            tier = entry.details.get("tier")
            again = int(_number(entry, "tokens_reevaluated"))
            resumes.append(Resume(tier if isinstance(tier, str) else "", again))
            if pauses and pauses[-1].away_s is None:
                last = pauses[-1]
                pauses[-1] = Pause(last.by, last.broke_off, last.at, max(0.0, entry.t - last.at))
        elif entry.event in ("done", "failed", "cancelled"):
            ended_at = entry.t
    return Facts(
        queued_at,
        slot_at,
        engine_wait_s,
        started,
        prompt_tokens,
        cached_tokens,
        tuple(pauses),
        tuple(resumes),
        ended_at,
    )


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A turn that had a slot for some of the time that another waited; `went_first`: it got it then."""

    agent: str
    priority_class: str
    priority: int
    went_first: bool


def neighbours(
    story: TurnStory, others: Iterable[TurnStory], since: float, until: float
) -> Iterator[Neighbour]:
    """The turns that had a slot of the same backend between two points in time."""
    for other in others:
        if other.id == story.id or (story.backend and other.backend != story.backend):
            continue
        spans = list(slot_spans(other))
        if any(start < until and (end is None or end > since) for start, end in spans):
            went_first = any(since < start < until for start, _ in spans)
            yield Neighbour(other.agent, other.priority_class, other.priority, went_first)


def slot_spans(story: TurnStory) -> Iterator[tuple[float, float | None]]:
    """From when to when a turn had a decode slot; None: it still has it."""
    since: float | None = None
    for entry in story.timeline:
        if entry.event in ("started", "resumed"):
            since = entry.t - _number(entry, "engine_wait_s")
        elif entry.event in _LEAVES and since is not None:
            yield since, entry.t
            since = None
    if since is not None:
        yield since, None


def takers(facts: Facts) -> list[str]:
    """The turns that took the slot, each once, in the order in which they did."""
    return list(dict.fromkeys(pause.by for pause in facts.pauses if pause.by is not None))


def last_detail(story: TurnStory, event: str, key: str) -> str | None:
    """A detail of the last such event, as text."""
    found = [entry.details.get(key) for entry in story.timeline if entry.event == event]
    return str(found[-1]) if found and found[-1] is not None else None


def by_class(turns: Iterable[Neighbour]) -> Mapping[str, Mapping[str, int]]:
    """How many there are of each class, the highest first, and in it of each agent."""
    found: dict[str, dict[str, int]] = {}
    for turn in sorted(turns, key=lambda one: -one.priority):
        agents = found.setdefault(turn.priority_class or str(turn.priority), {})
        agents[turn.agent] = agents.get(turn.agent, 0) + 1
    return found


def _number(entry: TimelineEntry, key: str) -> float:
    value = entry.details.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
