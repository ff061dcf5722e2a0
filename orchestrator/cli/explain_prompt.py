"""How much of a turn's prompt was found in KV, and why not more. Pure."""

from __future__ import annotations

from orchestrator.cli.explain_facts import ExplainedTurn, Facts, Point
from orchestrator.cli.figures import count, plain, plural
from orchestrator.cli.prefix_view import PromptView, rule_for
from orchestrator.cli.rows import short_turn

#: Fewer tokens are evaluated in about a step: nothing is worth saying about them.
FEW_TOKENS = 64
#: What is known in bytes is known in tokens to about this part.
ABOUT = 0.2


def prompt_points(story: ExplainedTurn, facts: Facts) -> list[Point]:
    """What was found of the prompt, and what stood in the way."""
    whole, found = facts.prompt_tokens, facts.cached_tokens
    text = f"Its prompt has {plural(whole, 'token')}: {count(found)} were found in KV"
    text += f", {count(whole - found)} had to be evaluated." if whole > found else "."
    view = story.prompt
    if whole - found < FEW_TOKENS or view is None or not view.n_bytes:
        return [Point("prompt", text)]
    why, advice = _why(view, whole, found, story.agent)
    points = [Point("prompt", f"{text} {why}", advice)]
    if view.ruled_lines:
        were = "line was" if view.ruled_lines == 1 else "lines were"
        by = f"agents.{plain(story.agent)}.stable_prefix"
        text = f"{view.ruled_lines} of its instructions' {were} pinned or moved by {by}."
        points.append(Point("rules", text))
    return points


def _why(view: PromptView, whole: int, found: int, agent: str) -> tuple[str, str | None]:
    if view.like is None:
        return f"It is the first prompt of {plain(agent)} that this service has compared with others.", None
    like = short_turn(plain(view.like))
    same = whole * min(view.same_bytes, view.n_bytes) // view.n_bytes
    missing = same - found
    gone = ""
    if missing > max(FEW_TOKENS, ABOUT * same):
        gone = (
            f"About {count(same)} are the same as in an earlier prompt of {plain(agent)}, but their KV was "
            "not there any more (given up for other turns, or on another engine), or could not be used."
        )
    if view.lines:
        # Where the template puts the tools first, they were found all the same.
        lost = min(whole * view.lost_bytes // view.n_bytes, whole - found)
        places = " and ".join(line.place for line in view.lines)
        text = (
            f"It is like the prompt of {like}, but {places} changed: what comes after that cannot be found, "
            f"about {plural(lost, 'token')} that are the same."
        )
        rule = rule_for(view.lines)
        advice = (
            f"if that changes from turn to turn, set under agents.{plain(agent)}: {rule}" if rule else None
        )
        return f"{text} {gone}".rstrip(), advice
    if gone:
        return gone, "more engine_slots or a larger swap_budget keep KV for longer; swarm ps shows both"
    if view.tools_changed:
        return f"Its tools differ from those of {like}: what comes after them cannot be found.", None
    if same < FEW_TOKENS:
        return f"It has next to nothing in common with the earlier prompts of {plain(agent)}.", None
    return f"That is about what it begins with in common with an earlier prompt of {plain(agent)}.", None
