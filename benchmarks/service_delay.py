"""What the service adds to the engine: to a wait, and to a step where both share cores.

For the simulator's engine model; see `orchestrator/simulation/calibrate.py`. All lanes are busy with
background turns, and foreground turns come one at a time, at evenly spread moments of a step. What is left of
a step is then half of one on average, without luck, and what a wait has beyond that is the service, the call
to the engine and the flush.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from agents.client import TurnResult, stream_chat
from benchmarks.calibration import Effort, Words, boundaries, phases
from benchmarks.harness import BenchError, ask, json_client
from orchestrator.simulation.calibrate import StepSample

_TURN_BOUND_S = 300.0
_TOKEN_BOUND_S = 60.0
_RECORD_BOUND_S = 30.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """What a service adds: see `Calibration.behind_service`."""

    controls_s: tuple[float, ...]
    calls_s: tuple[float, ...]
    step: StepSample


async def measure_service(
    url: str,
    words: Words,
    *,
    lanes: int,
    slot_context: int,
    effort: Effort,
    background: Mapping[str, str],
    foreground: Mapping[str, str],
) -> ServiceFigures:
    """Waits of foreground turns that come at evenly spread moments of a step while all lanes are busy.

    `background` and `foreground` are request headers. What of a wait is the call to the engine, a turn's own
    timeline says. Raises BenchError.
    """
    short = effort.short_tokens
    results = [TurnResult() for _ in range(lanes)]
    news = anyio.Event()

    def progressed(result: TurnResult) -> None:
        news.set()

    async def pieces(result: TurnResult, wanted: int) -> None:
        nonlocal news
        with anyio.move_on_after(_TOKEN_BOUND_S):
            while result.pieces < wanted and result.error is None and result.ended is None:
                news = anyio.Event()
                await news.wait()
            if result.pieces >= wanted:
                return
        raise BenchError(f"a turn of the calibration stopped: {result.error or 'no more tokens'}")

    def newest() -> TurnResult:
        """A stream that was not paused of late."""
        return max(results, key=lambda result: result.last_token or 0.0)

    controls: list[float] = []
    calls: list[float] = []
    async with json_client(url) as admin, anyio.create_task_group() as tasks:
        for result in results:
            body = served(words.prompt(short), slot_context - short - 8)
            call = (url, body, background)
            tasks.start_soon(_serve, call, result, progressed)
        for result in results:
            await pieces(result, 3)
        # Not before all of them decode: until then prompts make the steps longer.
        settled = anyio.current_time()
        await pieces(results[0], results[0].pieces + effort.steps)
        found = boundaries([result.times for result in results], settled, anyio.current_time())
        if len(found) < 3:
            raise BenchError("the service's turns did not decode side by side")
        step_s = (found[-1] - found[0]) / (len(found) - 1)
        running = sum(short + result.pieces - effort.steps / 2 for result in results)
        for phase in phases(effort.controls):
            witness = newest()
            await pieces(witness, witness.pieces + 1)
            await anyio.sleep(phase * step_s)
            left_s = (1 - phase) * step_s
            turn = TurnResult()
            await _serve((url, served(words.prompt(short), 2), foreground), turn, progressed)
            if turn.error is not None or turn.wait_s is None:
                raise BenchError(f"a turn of the calibration failed: {turn.error or 'it never started'}")
            controls.append(turn.wait_s - left_s)
            calls.append(await engine_wait(admin, turn) - left_s)
            # The turn that gave its slot back has to run again before the next one comes.
            paused = min(results, key=lambda result: result.last_token or 0.0)
            await pieces(paused, paused.pieces + 2)
        tasks.cancel_scope.cancel()
    step = StepSample(f"behind the service, {lanes} lanes", step_s, lanes, running, steps=effort.steps)
    return ServiceFigures(tuple(controls), tuple(calls), step)


async def engine_wait(admin: httpx.AsyncClient, turn: TurnResult) -> float:
    """From the scheduler's command until the engine had the turn. The timeline is written after the reply."""
    with anyio.move_on_after(_RECORD_BOUND_S):
        while True:
            story = await ask(admin, "GET", f"/swarm/turns/{turn.turn_id}")
            for entry in story["timeline"]:
                if entry["event"] == "started":
                    return float(entry["engine_wait_s"])
            await anyio.sleep(_POLL_S)
    raise BenchError(f"turn {turn.turn_id} has no start in its timeline")


def served(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request to the service for exactly so many tokens after this prompt."""
    return {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _serve(
    call: tuple[str, Mapping[str, Any], Mapping[str, str]],
    into: TurnResult,
    on_progress: Callable[[TurnResult], None],
) -> None:
    url, body, headers = call
    await stream_chat(
        url,
        body,
        headers,
        path="/v1/completions",
        into=into,
        on_progress=on_progress,
        timeout_s=_TURN_BOUND_S,
    )
