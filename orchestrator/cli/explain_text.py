"""A turn explained: each point one paragraph, with what would help where something would. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.cli.explain_facts import (
    AT_ONCE_S,
    ExplainedTurn,
    Facts,
    Neighbour,
    Pause,
    Point,
    by_class,
    last_detail,
)
from orchestrator.cli.explain_prompt import prompt_points
from orchestrator.cli.figures import count, duration, plain, plural
from orchestrator.cli.view import TurnSummary

#: A resume that evaluates fewer tokens again went on from KV.
FEW_TOKENS = 64
MAX_NAMED = 4

_FROM = {
    "resident": "from its slot",
    "swapped": "from a file",
    "dropped": "without its KV",
}


def explain(
    story: ExplainedTurn,
    facts: Facts,
    beside: Sequence[Neighbour] | None,
    takers_known: Mapping[str, TurnSummary],
    now: float,
) -> list[Point]:
    """What can be said of a turn, in the order in which it happened.

    `beside`: the turns that ran while it waited, None where nobody looked; `takers_known`: those that took
    its slot, as far as they are still known.
    """
    points = [_wait(story, facts, beside, now)]
    if facts.started:
        points += prompt_points(story, facts)
    if facts.pauses:
        points.append(_pauses(story, facts, takers_known, now))
    if facts.resumes:
        points.append(_resumes(story, facts))
    if facts.started or facts.ended_at is not None:
        points.append(_end(story, facts, now))
    return points


# Waiting -------------------------------------------------------------------------------------------


def _wait(story: ExplainedTurn, facts: Facts, beside: Sequence[Neighbour] | None, now: float) -> Point:
    where = f"a decode slot of {plain(story.backend)}" if story.backend else "a decode slot"
    waited_s, late = facts.waited_s, ""
    if facts.engine_wait_s >= AT_ONCE_S:
        late = f" The engine began with it {duration(facts.engine_wait_s)} after that."
    if waited_s is not None and waited_s < AT_ONCE_S:
        return Point("wait", f"It had {where} at once, {duration(waited_s)} after it was asked for.{late}")
    if waited_s is not None:
        text = f"It waited {duration(waited_s)} for {where}."
    elif facts.ended_at is not None:
        text = f"It never had a decode slot: it ended after {duration(facts.ended_at - facts.queued_at)}."
    else:
        text = f"It has waited {duration(max(0.0, now - facts.queued_at))} for {where}."
    if beside is None:
        return Point("wait", text + late)
    if not beside:
        return Point("wait", f"{text} Of the turns that ran meanwhile none is known any more.{late}")
    text += f" Meanwhile {_counted(beside)} ran."
    went_first = [one for one in beside if one.went_first]
    if went_first:
        higher = sum(one.priority > story.priority for one in went_first)
        text += f" {len(went_first)} of them got a slot in that time, "
        text += f"{higher or 'none'} of these of a higher class."
    advice = None
    if all(one.priority >= story.priority for one in beside):
        text += f" None was of a lower class than {_class(story)}, and only such a turn gives its slot up."
        advice = (
            "more decode_slots let more turns run at once, each a little slower; a higher class, if there is "
            f"one (agents.{plain(story.agent)}.priority), takes slots from the others"
        )
    return Point("wait", text + late, advice)


def _counted(turns: Sequence[Neighbour]) -> str:
    """As `8 other turns (foreground: editor; background: 4 reviewer, 3 tester)`."""
    parts = []
    for name, agents in by_class(turns).items():
        shown = [
            f"{number} {plain(agent)}" if number > 1 else plain(agent) for agent, number in agents.items()
        ]
        more = [f"{len(shown) - MAX_NAMED} more agents"] if len(shown) > MAX_NAMED else []
        parts.append(f"{plain(name)}: {', '.join(shown[:MAX_NAMED] + more)}")
    return f"{plural(len(turns), 'other turn')} ({'; '.join(parts)})"


def _class(turn: TurnSummary) -> str:
    return plain(turn.priority_class or turn.priority)


# Pauses --------------------------------------------------------------------------------------------


def _pauses(story: ExplainedTurn, facts: Facts, takers_known: Mapping[str, TurnSummary], now: float) -> Point:
    taken = [pause for pause in facts.pauses if not pause.broke_off]
    broke_off = len(facts.pauses) - len(taken)
    sentences = []
    if taken:
        sentences.append(f"It gave its slot up {_times(len(taken))}{_for_whom(taken, takers_known)}.")
    if broke_off:
        reason = last_detail(story, "interrupted", "error")
        why = f", last with: {plain(reason)}" if reason else ""
        sentences.append(f"The engine broke it off {_times(broke_off)}{why}.")
    whole = duration(facts.paused_s(now))
    waits = facts.ended_at is None and facts.pauses[-1].away_s is None
    if waits:
        tier = f"; its KV is {plain(story.tier)}" if story.tier else ""
        sentences.append(f"It is paused now, and was for {whole} in all{tier}.")
    else:
        sentences.append(f"That took {whole} in all.")
    advice = None
    if len(taken) > MAX_NAMED:
        advice = (
            "policy.max_preemptions and policy.min_run_s make a turn that yielded often yield after others"
        )
    return Point("pauses", " ".join(sentences), advice)


def _for_whom(taken: Sequence[Pause], known: Mapping[str, TurnSummary]) -> str:
    """Who took the slot, by agent and class."""
    names: dict[str, int] = {}
    for pause in taken:
        if pause.by is None:
            name = "by hand"
        elif (turn := known.get(pause.by)) is not None:
            name = f"for {plain(turn.agent)} ({_class(turn)})"
        else:
            name = "for turns that are not known any more"
        names[name] = names.get(name, 0) + 1
    if len(names) == 1:
        return f" {next(iter(names))}"
    parts = [f"{_times(number)} {name}" for name, number in names.items()]
    if len(parts) > MAX_NAMED:
        parts = [*parts[:MAX_NAMED], f"{len(parts) - MAX_NAMED} more"]
    return f": {', '.join(parts)}"


def _resumes(story: ExplainedTurn, facts: Facts) -> Point:
    parts = []
    for tier in dict.fromkeys(one.tier for one in facts.resumes):
        again = [one.tokens_reevaluated for one in facts.resumes if one.tier == tier]
        how = _FROM.get(tier, f"from {plain(tier) or 'where it was'}")
        parts.append(f"{_times(len(again))} {how} ({plural(sum(again), 'token')} evaluated again)")
    text = f"It went on {_listed(parts)}."
    advice = None
    if sum(one.tokens_reevaluated for one in facts.resumes if one.tier == "dropped") > FEW_TOKENS:
        reason = last_detail(story, "swap_failed", "error")
        if reason:
            text += f" Its KV could not be saved: {plain(reason)}."
        advice = "swap_budget with a save_path in memory keeps KV that has to leave; swarm doctor checks both"
    elif any(one.tier != "dropped" and one.tokens_reevaluated > FEW_TOKENS for one in facts.resumes):
        text += " The engine could not go back to where the KV ended."
        advice = "see what swarm doctor says of this model's resume"
    return Point("resumes", text, advice)


# The end -------------------------------------------------------------------------------------------


def _end(story: ExplainedTurn, facts: Facts, now: float) -> Point:
    tokens = plural(story.tokens_generated, "token")
    whole_s = (facts.ended_at or now) - facts.queued_at
    waited_s = facts.waited_s if facts.waited_s is not None else whole_s
    paused_s = facts.paused_s(now)
    parts = [f"{duration(waited_s)} waiting"]
    if facts.pauses:
        parts.append(f"{duration(paused_s)} paused")
    if facts.started:
        parts.append(f"{duration(max(0.0, whole_s - waited_s - paused_s))} with a slot")
    spent = f"{duration(max(0.0, whole_s))} after it was asked for: {', '.join(parts)}"
    advice = None
    if story.state == "done":
        text = f"It ended ({plain(story.finish_reason)}) with {tokens}, {spent}."
        if story.finish_reason == "length" and story.tokens_generated >= story.max_tokens:
            text += f" {count(story.max_tokens)} was its limit."
            advice = (
                f"the limit is the request's, or agents.{plain(story.agent)}.max_turn_tokens if that is less"
            )
    elif story.state == "failed":
        text = f"It failed with {tokens}, {spent}. The reason: {plain(story.error or 'not known')}."
    elif story.state == "cancelled":
        text = f"It was cancelled with {tokens}, {spent}: its client left, or somebody cancelled it."
    else:
        text = f"It is {plain(story.state)}, with {tokens} of at most {count(story.max_tokens)}, {spent}."
    return Point("end" if facts.ended_at is not None else "now", text, advice)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{count(number)} times")


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def lines(points: Sequence[Point]) -> Iterator[str]:
    """One line a point, for grep."""
    for point in points:
        yield f"{point.about}: {point.text}" + (f"; help: {point.help}" if point.help else "")
