"""The demo's swarm: agents of the configuration played by clients, against one run of the service.

A phase is one run of the service with preemption off or on. Each phase replays the same turns: what a client
asks in its N-th turn follows from the seed alone. A foreground turn that still waits when the time is over
counts with the time it has waited, so the longest waits are not lost. Before the phase's time begins, the
background alone fills the engine: a foreground turn that meets a dozen turns in their first prefill says
nothing about a swarm at work.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from agents.client import TurnResult, stream_chat
from agents.workload import Lengths, TurnPlan, Workload, chat_body, client_turns
from orchestrator.config import Agent, Config, Redis
from orchestrator.service import run_service

START_BOUND_S = 120.0
HOST = "127.0.0.1"
# As long as a dozen short prompts take on a small CPU.
_FILL_S = 4.0
_HEALTH_POLL_S = 0.1
_ERROR_PAUSE_S = 0.5


class DemoError(Exception):
    """The demo cannot go on; the message is one line."""


@dataclass(frozen=True)
class Cast:
    """The agents that play, by name; `foreground` are those of the highest priority."""

    foreground: tuple[str, ...]
    background: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> Cast:
        """Raises DemoError when no agent has a workload."""
        playing = [name for name, agent in config.agents.items() if agent.workload is not None]
        if not playing:
            raise DemoError("no agent has a workload: give agents.NAME.workload to those that shall play")
        top = max(map(config.agent_priority, playing))
        first = tuple(name for name in playing if config.agent_priority(name) == top)
        return cls(first, tuple(name for name in playing if name not in first))


@dataclass
class Phase:
    """One run of the service and what the clients saw of it. Times are of the event loop's clock."""

    preemption: bool
    seconds: float
    seed: int
    foreground: list[TurnResult] = field(default_factory=list)
    background: list[TurnResult] = field(default_factory=list)
    began: float | None = None
    ended: float | None = None
    url: str = ""
    _tokens_before: int = 0

    @property
    def label(self) -> str:
        return f"preemption {'on' if self.preemption else 'off'}"

    def elapsed(self, now: float) -> float:
        """Seconds of the phase's time, until now or the end."""
        if self.began is None:
            return 0.0
        return (now if self.ended is None else self.ended) - self.began

    def waits(self, now: float) -> list[float]:
        """Each foreground turn's wait for its slot so far, in the order they were sent."""
        found = (_wait(result, now if self.ended is None else self.ended) for result in self.foreground)
        return [wait for wait in found if wait is not None]

    def waiting_s(self, now: float) -> float | None:
        """How long the foreground turn that waits now has done so."""
        open_ = [result.sent for result in self.foreground if result.sent is not None and _is_waiting(result)]
        return now - min(open_) if open_ and self.ended is None else None

    @property
    def first_tokens(self) -> list[float]:
        """Each foreground turn's time to its first token, of those that got one."""
        return [result.ttft_s for result in self.foreground if result.ttft_s is not None]

    @property
    def foreground_done(self) -> int:
        return sum(1 for result in self.foreground if result.finish_reason is not None)

    def background_rate(self, now: float) -> float:
        """Background tokens per second of the phase's time."""
        elapsed_s = self.elapsed(now)
        return (self._tokens() - self._tokens_before) / elapsed_s if elapsed_s > 0 else 0.0

    def _tokens(self) -> int:
        return sum(max(result.tokens, result.pieces) for result in self.background)

    @property
    def errors(self) -> list[str]:
        """What went wrong; turns that the end of the phase cut off are no errors."""
        return [result.error for result in (*self.foreground, *self.background) if _failed(result)]  # type: ignore[misc]

    def open(self, now: float) -> None:
        """The phase's time begins."""
        self.began = now
        self._tokens_before = self._tokens()

    def close(self, now: float) -> None:
        """The time is over: what is under way is cut off by this side."""
        self.ended = now
        for result in (*self.foreground, *self.background):
            if result.ended is None:
                result.aborted = True


def _is_waiting(result: TurnResult) -> bool:
    return result.started is None and result.first_token is None and result.ended is None


def _failed(result: TurnResult) -> bool:
    return result.error is not None and not result.aborted


def _wait(result: TurnResult, now: float) -> float | None:
    if result.sent is None or _failed(result):
        return None
    # Text without word of the start can only be later than the start.
    began = result.started if result.started is not None else result.first_token
    return max(0.0, (now if began is None else began) - result.sent)


def phase_config(config: Config, folder: Path, *, preemption: bool) -> Config:
    """The configuration with a broker of its own in `folder`, on any free port of this machine.

    Without keys: the configuration has their hashes only, and here agents are known by their names.
    """
    return config.model_copy(
        update={
            "server": config.server.model_copy(update={"host": HOST, "port": 0, "admin_key": None}),
            "agents": {name: agent.model_copy(update={"key": None}) for name, agent in config.agents.items()},
            "redis": Redis(url="embedded").model_copy(update={"state_dir": folder}),
            "policy": config.policy.model_copy(update={"preemption": preemption}),
        }
    )


async def run_phase(
    config: Config, phase: Phase, cast: Cast, watch: Callable[[Phase], Coroutine[Any, Any, None]]
) -> None:
    """Start the service, let the clients play for the phase's time, stop everything.

    `watch` runs beside the clients until the time is over. Raises DemoError, and what `run_service` raises.
    """
    async with anyio.create_task_group() as tasks:
        port = await tasks.start(run_service, config)
        phase.url = f"http://{HOST}:{port}"
        await _until_healthy(phase.url, config)
        async with anyio.create_task_group() as clients:

            def play(names: tuple[str, ...], into: list[TurnResult]) -> None:
                for name in names:
                    agent = config.agents[name]
                    for turns in _turns(name, agent, phase.seed):
                        clients.start_soon(_client, phase.url, {"X-Swarm-Agent": name}, turns, into)

            clients.start_soon(watch, phase)
            play(cast.background, phase.background)
            await anyio.sleep(min(_FILL_S, phase.seconds / 4))
            phase.open(anyio.current_time())
            play(cast.foreground, phase.foreground)
            await anyio.sleep(phase.seconds)
            phase.close(anyio.current_time())
            clients.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


async def _until_healthy(url: str, config: Config) -> None:
    """Wait until a turn would be served: an engine that is configured by URL may come later."""
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        with anyio.move_on_after(START_BOUND_S):
            while True:
                if (await client.get(f"{url}/healthz")).status_code == 200:
                    return
                await anyio.sleep(_HEALTH_POLL_S)
    external = [backend.url for backend in config.backends if backend.url is not None]
    which = f" at {', '.join(external)}" if external else ""
    raise DemoError(f"no engine{which} was ready within {START_BOUND_S:g} s; see: swarm doctor")


def _turns(name: str, agent: Agent, seed: int) -> Iterator[Iterator[TurnPlan]]:
    """The turns of each of the agent's clients, none longer than the agent may ask for."""
    declared = agent.workload
    assert declared is not None
    lengths = Lengths.heavy if declared.tail == "heavy" else Lengths.fixed
    workload = Workload(lengths(declared.mean_tokens), declared.think_s, declared.prompt)
    for client in range(declared.clients):
        turns = client_turns(workload, seed, f"{name}-{client}")
        yield (
            TurnPlan(plan.prompt, min(plan.max_tokens, agent.max_turn_tokens), plan.think_s) for plan in turns
        )


async def _client(
    url: str, headers: dict[str, str], turns: Iterator[TurnPlan], into: list[TurnResult]
) -> None:
    """A closed loop: ask, read the reply to its end, think."""
    for plan in turns:
        result = TurnResult()
        into.append(result)
        await stream_chat(url, chat_body(plan, exact_length=True), headers, into=result)
        if result.error is not None:
            await anyio.sleep(_ERROR_PAUSE_S)
        await anyio.sleep(plan.think_s)
