"""Slots, queue, cancels and memory of the step loop."""

import anyio
import pytest

from backends.simulated import PROFILES, SimulatedConfig, TimingProfile
from backends.simulated.slots import common_prefix
from backends.simulated.tokenizer import encode
from tests.backends.simulated.harness import connect

ENDLESS = {"ignore_eos": True, "n_predict": -1}
STEP_10_MS = TimingProfile(base_step_s=0.01)


async def test_requests_wait_for_a_free_slot_in_order() -> None:
    config = SimulatedConfig(n_slots=1, profile=STEP_10_MS)
    order: list[int] = []
    async with connect(config) as client, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            await client.stream({"prompt": f"{number} [len=2]"})
            order.append(number)

        for number in range(5):
            tasks.start_soon(ask, number)
            await client.until(lambda stats, n=number: stats.requests > n)  # type: ignore[misc]
    assert order == [0, 1, 2, 3, 4]
    assert client.stats.max_concurrent_decode == 1


async def test_a_request_for_a_busy_slot_waits_for_it_and_holds_up_nobody() -> None:
    config = SimulatedConfig(n_slots=2, profile=PROFILES["fast"])
    async with connect(config) as client, anyio.create_task_group() as tasks:
        first = client.open(tasks, {**ENDLESS, "prompt": "a", "id_slot": 0})
        await first.first_chunk.wait()
        second = client.open(tasks, {"prompt": "b [len=3]", "id_slot": 0})
        await client.stream({"prompt": "c [len=3]"})
        assert not second.chunks
        assert client.stats.queued == 1
        tasks.cancel_scope.cancel()


async def test_a_client_that_leaves_frees_the_slot_within_a_step_and_its_kv_stays() -> None:
    async with connect(SimulatedConfig(n_slots=1, n_ctx=4096, profile=STEP_10_MS)) as client:
        cut = await client.stream({**ENDLESS, "prompt": "hello there"}, until=5)
        left = anyio.current_time()
        await client.until_idle()
        assert anyio.current_time() - left < 0.5
        assert client.stats.disconnects == 1
        assert len(encode("hello there")) + 4 <= client.stats.resident_kv_tokens < 100
        assert cut.last["tokens_predicted"] == 5


async def test_a_cancel_during_prefill_waits_for_the_batch_and_keeps_its_part() -> None:
    profile = TimingProfile(prefill_tokens_per_s=1000, n_batch=50)
    async with connect(SimulatedConfig(n_slots=1, profile=profile)) as client:
        prompt = encode("word " * 500)
        reply = await client.stream({"prompt": prompt, "return_progress": True}, until=3)
        await client.until_idle()
        kept = client.stats.resident_kv_tokens
        assert kept % 50 == 0
        assert 100 <= kept < len(prompt)
        assert reply.last["prompt_progress"]["processed"] == 100
        again = await client.stream({"prompt": prompt, "return_progress": True}, until=1)
        assert again.last["prompt_progress"]["cache"] == kept


async def test_the_first_progress_chunk_comes_before_the_first_batch_is_done() -> None:
    profile = TimingProfile(prefill_tokens_per_s=1000)
    async with connect(SimulatedConfig(n_slots=1, profile=profile)) as client:
        began = anyio.current_time()
        await client.stream({"prompt": "word " * 300, "return_progress": True}, until=1)
        assert anyio.current_time() - began < 0.5


async def test_a_waiting_request_whose_client_left_never_runs() -> None:
    async with connect(SimulatedConfig(n_slots=1, profile=STEP_10_MS)) as client:
        async with anyio.create_task_group() as tasks:
            first = client.open(tasks, {**ENDLESS, "prompt": "a"})
            await first.first_chunk.wait()
            client.open(tasks, {"prompt": "b" * 400})
            await client.until(lambda stats: stats.queued == 1)
            tasks.cancel_scope.cancel()
        await client.until_idle()
        assert client.stats.tokens_prefilled == 1
        assert client.stats.disconnects == 2


async def test_a_request_goes_where_most_of_its_prompt_is() -> None:
    async with connect(SimulatedConfig(n_slots=3)) as client:
        for slot, word in enumerate(("one", "two", "six")):
            await client.json("/completion", {"prompt": f"{word} " * 50, "id_slot": slot, "n_predict": 1})
        again = await client.json("/completion", {"prompt": "two " * 60, "n_predict": 1})
        assert again["id_slot"] == 1
        assert again["timings"]["cache_n"] >= 49
        unknown = await client.json("/completion", {"prompt": "new", "n_predict": 1})
        assert unknown["id_slot"] == 0
        forgetful = {"prompt": "two " * 60, "n_predict": 1, "cache_prompt": False}
        assert (await client.json("/completion", forgetful))["timings"]["cache_n"] == 0


async def test_a_cache_that_cannot_roll_back_is_reused_whole_or_not_at_all() -> None:
    async with connect(SimulatedConfig(n_slots=1, resume_reprefills=True)) as client:
        body = {"prompt": encode("word " * 50), "n_predict": 4, "return_tokens": True}
        first = await client.json("/completion", body)
        assert (await client.json("/completion", body))["timings"]["cache_n"] == 0
        appended = body | {"prompt": [*body["prompt"], *first["tokens"]]}  # type: ignore[misc]
        assert (await client.json("/completion", appended))["timings"]["cache_n"] > 50


async def test_an_exhausted_pool_fails_every_running_request() -> None:
    config = SimulatedConfig(n_slots=3, n_ctx=300, kv_unified=True, profile=PROFILES["fast"])
    async with connect(config) as client:
        async with anyio.create_task_group() as tasks:
            replies = [client.open(tasks, {**ENDLESS, "prompt": "a " * 20}) for _ in range(3)]
        for reply in replies:
            assert reply.status == 200
            assert reply.last["error"] == {
                "code": 500,
                "message": "Context size has been exceeded.",
                "type": "server_error",
            }
        assert client.stats.pool_exhaustions == 1
        assert client.stats.resident_kv_tokens == 0
        assert (await client.json("/completion", {"prompt": "[len=2]"}))["stop_type"] == "eos"


async def test_a_full_pool_gives_up_idle_slots_first() -> None:
    config = SimulatedConfig(n_slots=2, n_ctx=300, kv_unified=True)
    async with connect(config) as client:
        await client.json("/completion", {"prompt": "a " * 100, "id_slot": 0, "n_predict": 1})
        reply = await client.json("/completion", {**ENDLESS, "prompt": "b " * 20, "id_slot": 1})
        assert (reply["stop_type"], reply["truncated"]) == ("limit", True)
        slots = (await client.http.get("/slots")).json()
        assert [slot["n_ctx"] for slot in slots] == [300, 300]
        assert client.stats.resident_kv_tokens < 300


async def test_the_pool_failure_is_a_status_if_nothing_was_sent() -> None:
    config = SimulatedConfig(n_slots=2, n_ctx=100, kv_unified=True, profile=PROFILES["fast"])
    async with connect(config) as client, anyio.create_task_group() as tasks:
        statuses: list[int] = []

        async def ask() -> None:
            response = await client.post("/completion", {"prompt": "word " * 30})
            statuses.append(response.status_code)

        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert statuses == [500, 500]


async def test_parked_kv_slows_a_step_only_under_a_unified_pool() -> None:
    profile = TimingProfile(base_step_s=0.001, per_kv_token_s=1e-5)
    for unified, expected_ms in ((True, 3.5), (False, 1.0)):
        config = SimulatedConfig(n_slots=2, n_ctx=4096, kv_unified=unified, profile=profile)
        async with connect(config) as client:
            await client.json("/completion", {"prompt": "a " * 250, "id_slot": 0, "n_predict": 1})
            body = {**ENDLESS, "prompt": "b", "id_slot": 1, "n_predict": 3}
            timings = (await client.json("/completion", body))["timings"]
            assert timings["predicted_per_token_ms"] == pytest.approx(expected_ms, abs=0.2)


async def test_steps_take_the_time_of_the_profile() -> None:
    async with connect(SimulatedConfig(profile=STEP_10_MS, time_scale=0.5)) as client:
        began = anyio.current_time()
        await client.stream({**ENDLESS, "prompt": "a", "n_predict": 41})
        assert 0.19 < anyio.current_time() - began < 1


async def test_slots_show_the_state_of_a_running_request() -> None:
    async with connect(SimulatedConfig(n_slots=1, profile=PROFILES["fast"])) as client:
        async with anyio.create_task_group() as tasks:
            body = {**ENDLESS, "prompt": "word " * 10, "n_predict": 900}
            reply = client.open(tasks, body)
            await reply.first_chunk.wait()
            slot = (await client.http.get("/slots")).json()[0]
            tasks.cancel_scope.cancel()
        assert slot["is_processing"] is True
        assert slot["n_prompt_tokens_processed"] == len(encode("word " * 10))
        assert slot["n_prompt_tokens"] > slot["n_prompt_tokens_processed"], "it counts what is in the slot"
        assert slot["n_prompt_tokens_cache"] == 0
        assert slot["next_token"][0]["n_decoded"] + slot["next_token"][0]["n_remain"] == 900
        assert "is_preempted" not in slot


def test_the_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    for length in range(1, 20):
        for at in range(length):
            left, right = list(range(length)), list(range(length))
            right[at] = -1
            assert common_prefix(left, right) == at
