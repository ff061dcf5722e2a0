"""`run_calibration`: which engine is measured, and that a known one's figures come out."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal
from hypothesis import given
from hypothesis import strategies as st

from backends.protocol import EngineInfo, KvLayout
from benchmarks.calibrate import DEFAULT_BATCH_TOKENS, choose, engine_of, run_calibration
from benchmarks.calibration import Effort, apart
from benchmarks.harness import BenchError, free_port, simulated_engine
from orchestrator.config import parse_config
from orchestrator.simulation.calibrate import read_model
from orchestrator.simulation.engine_model import groups_of

TWO = """
backends: [{name: one, url: "http://127.0.0.1:9"}, {name: two, url: "http://127.0.0.1:10"}]
agents: {editor: {}}
"""
SMALL = Effort(long_tokens=128, steps=10, mixed_tokens=100, copies=1, flushes=4)


def info(slots: int, layout: KvLayout = KvLayout.SPLIT, batch: int | None = None) -> EngineInfo:
    return EngineInfo("m", slots, 4096, layout, 4096, None, batch, False, False, False)


def test_the_backend_must_be_clear() -> None:
    config = parse_config(TWO)
    assert choose(config, "two").name == "two"
    with pytest.raises(BenchError, match="which backend"):
        choose(config, None)
    with pytest.raises(BenchError, match="no backend 'three'"):
        choose(config, "three")


def test_as_many_lanes_as_the_service_would_use() -> None:
    config = choose(parse_config(TWO), "one")
    engine = engine_of("http://x", info(6), config)
    assert (engine.lanes, engine.slots, engine.slot_context) == (5, 6, 4096)
    assert engine.batch_tokens == DEFAULT_BATCH_TOKENS
    assert engine_of("http://x", info(1, batch=64), config).lanes == 1
    shared = engine_of("http://x", info(8, KvLayout.UNIFIED), config)
    assert shared.slot_context * (shared.lanes + 1) <= 4096, "all lanes at once fit the pool"


def test_an_engine_that_is_not_there_is_one_line() -> None:
    with pytest.raises(BenchError, match="does not answer"):
        run_calibration(f"http://127.0.0.1:{free_port()}", shown=False)


@pytest.mark.slow
def test_a_known_engine_is_found_out(portal: BlockingPortal, tmp_path: Path) -> None:
    """Its steps take 17.6 ms, 0.8 ms a lane and 1 ms a prompt token; a busy machine makes them longer."""
    path = tmp_path / "new" / "engine.json"
    with portal.wrap_async_context_manager(simulated_engine(5, slot_context=512)) as url:
        found = run_calibration(url, path=path, effort=SMALL, shown=False)
    model = read_model(path)
    assert model == found.model
    for lanes in (1, 4):
        assert 0.9 < model.step_s(lanes, 64 * lanes, 0, 0) / (0.0176 + 0.0008 * lanes) < 1.5
    assert 0.0005 < model.prefill_token_s < 0.002
    assert model.flush_s < 0.01
    assert model.control_s == model.call_s
    assert found.how["decode_slots"] == 4
    assert found.how["batch_tokens_assumed"]


@pytest.mark.parametrize(
    ("lanes", "slots", "found"),
    [
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 9, [0, 1, 2, 3, 5, 6, 7, 8]),
        (8, 11, [0, 1, 3, 4, 6, 7, 9, 10]),
        (3, 5, [0, 2, 4]),
        (1, 4, [0]),
    ],
)
def test_lanes_apart(lanes: int, slots: int, found: list[int]) -> None:
    assert apart(lanes, slots) == found


@given(st.integers(1, 40), st.integers(0, 40))
def test_lanes_apart_are_as_many_groups_as_there_can_be(lanes: int, spare: int) -> None:
    slots = apart(lanes, lanes + spare)
    assert len(set(slots)) == lanes and max(slots) < lanes + spare
    assert groups_of(slots) == min(lanes, spare + 1)
