"""Health, state, models, and the admin's hands on turns."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import Broker
from orchestrator.config import parse_config
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.models import Models
from orchestrator.keys import hash_key
from orchestrator.turns import TurnState
from tests.gateway.harness import (
    PERMANENT_KEYS,
    FakeEngines,
    Service,
    application,
    chat,
    make_config,
    make_info,
    service,
)

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT_KEYS)

CHAT = "/v1/chat/completions"
PUBLISHED: dict[str, Any] = {
    "name": "local",
    "kind": "llama.cpp",
    "healthy": True,
    "decode_slots": 2,
    "engine_slots": 3,
    "kv": {
        "layout": "unified",
        "bytes_per_token": 5,
        "budget_tokens": 200,
        "budget_bytes": 1000,
        "used_tokens": 2,
        "used_bytes": 10,
        "charged_tokens": 30,
        "charged_bytes": 150,
        "owners": {"running": 2, "paused": 0, "idle": 0, "reserved": 28},
    },
    "swap": {
        "enabled": True,
        "budget_bytes": 10_000,
        "used_bytes": 7,
        "files": 1,
        "turns": 1,
        "saves": 1,
        "restores": 0,
        "failures": 0,
        "stalls": 0,
        "paused_until_s": None,
    },
    "costs": {
        "prefill_tokens_per_s": 230.0,
        "save_s_per_1k_tokens": 0.0098,
        "restore_s_per_1k_tokens": None,
        "resident_s_per_1k_tokens": None,
        "resident_reevaluated": None,
        "swapped_reevaluated": None,
    },
    "slots": [
        {
            "id": 0,
            "state": "running",
            "turn": "t",
            "agent": "a",
            "priority": 20,
            "kv_tokens": 2,
            "kv_bytes": 10,
        }
    ],
    "step_s": 0.025,
    "paused": [{"turn": "turn-p", "agent": "a", "tier": "resident", "kv_bytes": 7}],
}


async def publish(redis: Redis, **changes: Any) -> None:
    await Broker(redis).publish_state("default", "local", orjson.dumps({**PUBLISHED, **changes}))


async def test_healthz(redis: Redis) -> None:
    async with application(redis) as client:
        silent = await client.get("/healthz")
        await publish(redis, healthy=False)
        ill = await client.get("/healthz")
        await publish(redis)
        well = await client.get("/healthz")
    assert (silent.status_code, ill.status_code, well.status_code) == (503, 503, 200)
    assert silent.json() == {"status": "unavailable", "reason": "no backend is healthy"}
    assert well.json() == {"status": "ok"}


async def test_models(redis: Redis) -> None:
    engines = FakeEngines({"large": make_info(8192)})
    async with application(redis, engines=engines) as client:
        listing = (await client.get("/v1/models")).json()
        resolved = [
            (await client.post(CHAT, json={"model": name, "messages": []})).status_code
            for name in ("tiny", "default", "large", "engine-model.gguf")
        ]
    assert listing["object"] == "list"
    # The engine names its model by its file; the folder stays private.
    assert [(model["id"], model["context_length"]) for model in listing["data"]] == [
        ("tiny", None),
        ("engine-model.gguf", 8192),
    ]
    assert listing["data"][1]["meta"] == {"n_ctx": 8192, "pool": "large"}
    # Known models: what is refused is the missing messages.
    assert resolved == [400] * 4


async def test_a_model_has_further_names(redis: Redis) -> None:
    config = parse_config(
        "backends:\n"
        '  - {name: a, url: "http://127.0.0.1:1", model: tiny, aliases: ["claude-*", "gpt[5]?"]}\n'
        '  - {name: b, url: "http://127.0.0.1:2", pool: other, model: claude-own}\n'
        "agents: {x: {}}\n"
    )
    models = Models(config, FakeEngines({}))
    assert models.resolve("claude-sonnet-4-5@20250929") == ("default", "claude-sonnet-4-5@20250929")
    assert models.resolve("claude-own") == ("other", "claude-own"), "a model's own name comes first"
    assert models.resolve("gpt[5]?") == ("default", "gpt[5]?")
    for unknown in ("gpt5x", "claud", "CLAUDE-1"):
        with pytest.raises(ApiError, match="no model"):
            models.resolve(unknown)


async def test_models_refuse_a_wrong_key(redis: Redis) -> None:
    config = parse_config(
        'backends: [{name: local, url: "http://127.0.0.1:1"}]\n'
        f"agents: {{a: {{key: {hash_key('secret')}}}}}\n"
    )
    async with application(redis, config=config) as client:
        wrong = await client.get("/v1/models", headers={"authorization": "Bearer nope"})
        right = await client.get("/v1/models", headers={"authorization": "Bearer secret"})
        without = await client.get("/v1/models")
    assert (wrong.status_code, right.status_code, without.status_code) == (401, 200, 200)


async def test_state_of_a_service_that_nobody_serves(redis: Redis) -> None:
    async with application(redis) as client:
        state = (await client.get("/swarm/state")).json()
    assert [(backend["name"], backend["healthy"], backend["slots"]) for backend in state["backends"]] == [
        ("local", False, []),
        ("big", False, []),
    ]
    assert state["queue"] == {
        "waiting": 0,
        "by_class": {"foreground": 0, "normal": 0, "background": 0, "batch": 0},
    }
    assert state["paused"] == []
    assert state["counters"] == dict.fromkeys(
        (
            *("preemptions", "resumes", "tokens_reevaluated"),
            *("turns_done", "turns_failed", "turns_cancelled"),
        ),
        0,
    )


@pytest.mark.parametrize(
    ("keys", "tokens", "n_bytes", "layout"),
    [
        ('url: "http://h"', None, None, None),
        ('url: "http://h", kv_budget: 1000', None, 1000, None),
        ('url: "http://h", kv_budget: 1000, kv_bytes_per_token: 3, kv_layout: unified', 333, 999, "unified"),
        ("managed: {context: 4096}", 4096, None, "split"),
        ("managed: {context: 4096}, kv_bytes_per_token: 2", 4096, 8192, "split"),
        ("managed: {context: 4096}, kv_bytes_per_token: 2, kv_budget: 1KiB", 512, 1024, "split"),
        ("managed: {context: 4096}, kv_bytes_per_token: 2, kv_budget: 1MiB", 4096, 8192, "split"),
        ("managed: {context: 4096}, vram: {usable: 9, weights: 4}", None, 5, "split"),
    ],
)
async def test_the_budget_of_a_silent_backend_is_the_configured_one(
    redis: Redis, keys: str, tokens: int | None, n_bytes: int | None, layout: str | None
) -> None:
    config = parse_config(f"backends: [{{name: b, {keys}, swap_budget: 0}}]\nagents: {{a: {{}}}}\n")
    async with application(redis, config=config) as client:
        (backend,) = (await client.get("/swarm/state")).json()["backends"]
    kv = backend["kv"]
    assert (kv["budget_tokens"], kv["budget_bytes"], kv["layout"]) == (tokens, n_bytes, layout)
    assert (kv["used_tokens"], kv["charged_tokens"], sum(kv["owners"].values())) == (0, 0, 0)
    assert (backend["swap"]["enabled"], backend["swap"]["budget_bytes"]) == (False, 0)


async def test_state(redis: Redis, valkey_url: str) -> None:
    engines = FakeEngines({"default": make_info(), "large": make_info()})
    async with service(redis, valkey_url, config=make_config(header_wait_s=0), engines=engines) as swarm:
        await publish(redis)
        streams = [
            swarm.client.stream("POST", CHAT, json=chat(stream=True, model=model), headers=headers)
            for model, headers in (("tiny", {}), ("large", {}), ("tiny", {"x-swarm-agent": "indexer"}))
        ]
        async with streams[0], streams[1], streams[2]:
            turn = await swarm.dispatcher.take()
            await turn.start()
            await turn.pause()
            await turn.resume()
            await turn.finish()
            state = (await swarm.client.get("/swarm/state")).json()
    local = dict(PUBLISHED, pool="default")
    paused = local.pop("paused")
    assert state["backends"][0] == local
    silent = state["backends"][1]
    assert set(silent) == set(local)
    for part in ("kv", "swap", "costs"):
        assert set(silent[part]) == set(local[part]), part
    assert set(silent["kv"]["owners"]) == set(local["kv"]["owners"])
    assert state["paused"] == paused
    assert state["queue"]["waiting"] == 2
    assert state["queue"]["by_class"] == {"foreground": 1, "normal": 0, "background": 1, "batch": 0}
    counters = state["counters"]
    assert (counters["preemptions"], counters["resumes"], counters["turns_done"]) == (1, 1, 1)


async def test_classes_of_one_priority_are_counted_once(redis: Redis, valkey_url: str) -> None:
    config = parse_config(
        "server: {header_wait_s: 0}\n"
        'backends: [{name: local, url: "http://127.0.0.1:1"}]\n'
        "priorities: {high: 7, also: 7}\nagents: {a: {priority: high}}\ndefault_agent: a\n"
    )
    async with (
        service(redis, valkey_url, config=config) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)),
    ):
        queue = (await swarm.client.get("/swarm/state")).json()["queue"]
    assert queue["waiting"] == 1


async def test_turns_and_their_story(redis: Redis, valkey_url: str) -> None:
    async with (
        service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as ended,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as running,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as waiting,
    ):
        ids = [response.headers["x-swarm-turn"] for response in (running, waiting, ended)]
        first = await swarm.dispatcher.take()
        await first.start()
        await first.pause()
        await first.resume()
        await first.finish()
        second = await swarm.dispatcher.take()
        await second.start()
        turns = (await swarm.client.get("/swarm/turns?limit=5")).json()["turns"]
        assert [(turn["id"], turn["state"]) for turn in turns] == list(
            zip(ids, ["running", "queued", "done"], strict=True)
        )
        assert len((await swarm.client.get("/swarm/turns?limit=1")).json()["turns"]) == 3
        response = await swarm.client.get(f"/swarm/turns/{first.id}")
        assert response.headers["x-swarm-turn"] == first.id
        story = response.json()
        assert (story["agent"], story["priority_class"], story["preemptions"]) == ("editor", "foreground", 0)
        events = [line["event"] for line in story["timeline"]]
        assert events == ["queued", "claimed", "running", "paused", "running", "done"]
        assert "hello" not in response.text
        await second.finish()


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1001", "", "9" * 50])
async def test_a_bad_limit(redis: Redis, limit: str) -> None:
    async with application(redis) as client:
        response = await client.get("/swarm/turns", params={"limit": limit})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("turn", ["turn-x", "x:log", "%00", "a" * 200, "{default}:seq", "é"])
@pytest.mark.parametrize("action", ["", "/preempt", "/resume", "/cancel"])
async def test_an_unknown_turn(redis: Redis, turn: str, action: str) -> None:
    async with application(redis) as client:
        url = f"/swarm/turns/{turn}{action}"
        response = await (client.post(url) if action else client.get(url))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "turn_not_found")


async def _act(swarm: Service, turn: str, action: str) -> int:
    response = await swarm.client.post(f"/swarm/turns/{turn}/{action}")
    assert response.headers["x-swarm-turn"] == turn
    if response.status_code == 409:
        assert turn in response.json()["error"]["message"]
    return response.status_code


async def test_the_admins_hands(redis: Redis, valkey_url: str) -> None:
    async with (
        service(redis, valkey_url, config=make_config(header_wait_s=0)) as swarm,
        swarm.client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        id_ = response.headers["x-swarm-turn"]
        # Queued: it has no owner to tell.
        assert [await _act(swarm, id_, action) for action in ("preempt", "resume")] == [409, 409]
        turn = await swarm.dispatcher.take()
        await turn.start()
        assert await _act(swarm, id_, "resume") == 409
        assert await _act(swarm, id_, "preempt") == 200
        assert (await swarm.dispatcher.event("hold")).turn == id_
        await turn.pause()
        assert await _act(swarm, id_, "resume") == 200
        assert await _act(swarm, id_, "cancel") == 200
        assert (await swarm.dispatcher.event("cancel")).turn == id_
        await turn.become(TurnState.CANCELLED)
        assert [await _act(swarm, id_, action) for action in ("preempt", "resume", "cancel")] == [409] * 3
