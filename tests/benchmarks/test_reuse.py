"""The reuse bench's turns and its goals."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from agents.client import TurnResult
from benchmarks.harness import BenchError, EngineShape
from benchmarks.reuse import Column, ReuseSettings, check_same_prompts, report, turns

SETTINGS = ReuseSettings(agents=3, turns=4)


def told(prompt: int, cached: int) -> TurnResult:
    return TurnResult(sent=1.0, first_token=1.5, prompt_tokens=prompt, cached_tokens=cached)


def test_every_turn_goes_on_from_the_agents_last() -> None:
    seen: dict[int, list[dict[str, str]]] = {}
    order = []
    for agent, body in turns(SETTINGS):
        messages = body["messages"]
        before = seen.get(agent, messages[:1])
        assert messages[: len(before)] == before
        assert [message["role"] for message in messages[-2:]] in (["system", "user"], ["assistant", "user"])
        seen[agent] = messages
        order.append(agent)
    assert Counter(order) == {0: 4, 1: 4, 2: 4}
    assert len({messages[0]["content"] for messages in seen.values()}) == 1
    assert len({messages[1]["content"] for messages in seen.values()}) == 3
    assert all(len(messages) == 2 * 4 for messages in seen.values())


def test_turns_replay_and_seeds_differ() -> None:
    assert list(turns(SETTINGS)) == list(turns(SETTINGS))
    assert list(turns(SETTINGS)) != list(turns(ReuseSettings(agents=3, turns=4, seed=2)))


def test_the_engines_own_account_goes_before_usage() -> None:
    column = Column()
    column.add(0, told(100, 60))
    bare = told(1, 0)
    bare.timings = {"cache_n": 70, "prompt_n": 30}
    column.add(1, bare)
    column.add(2, TurnResult(error="HTTP 500: oh"))
    column.add(2, TurnResult())
    assert (column.prompt_tokens, column.cached_tokens) == ([100, 100], [60, 70])
    assert column.share == pytest.approx(0.65)
    assert column.first_token_s == [0.5, 0.5]
    assert len(column.errors) == 2
    assert math.isnan(Column().share)


def test_the_goal_compares_with_both_engines() -> None:
    settings = ReuseSettings(slots=(4,))
    found = {}
    for name, cached in (("stock", 50), ("bare", 25), ("service", 75)):
        found[4, name] = Column()
        found[4, name].add(0, told(100, cached))
    made = report(settings, found)
    assert [note.partition("finds ")[2][:6] for note in made.notes] == ["150.0%", "300.0%"]
    assert made.data["4"]["service"]["cached_share"] == 0.75
    check_same_prompts(found)
    found[4, "bare"].prompt_tokens[0] = 99
    with pytest.raises(BenchError, match="different numbers of prompt tokens"):
        check_same_prompts(found)


def test_a_stock_engine_keeps_llama_servers_cache() -> None:
    shape = EngineShape(engine_slots=4, decode_slots=2)
    assert shape.settings().command is None
    stock = shape.settings(stock_cache_mib=8192)
    assert stock.command is not None
    assert stock.command[-3:] == ("--cache-ram", "8192", "--cache-idle-slots")
    assert stock.threads is not None
    longest = ReuseSettings().shape(8)
    assert longest.slot_context * 8 == longest.context(8)
