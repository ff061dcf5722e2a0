"""Turns on token ids, cut in every way and place, against the same turn uninterrupted."""

from __future__ import annotations

import random
from itertools import cycle, repeat
from typing import Any

import anyio
import pytest

from backends.kv_shape import KvShape
from backends.protocol import Cut, EngineInfo, EngineRefused, EngineUnavailable, Finished, ReplySoFar
from backends.simulated import SimulatedConfig, TimingProfile
from tests.backends.llamacpp.harness import (
    STEP,
    WAYS,
    Recorder,
    chat,
    cut_at_engine_tokens,
    finish,
    lose_the_last_word,
    rig,
)

LENGTH = 60
BODY = chat(f"Tell me about cuts [len={LENGTH}]")
MULTIBYTE = 0.3

ways = pytest.mark.parametrize("way", WAYS)


def config(way: str = "closing", **more: Any) -> SimulatedConfig:
    return SimulatedConfig(
        **{"profile": STEP, "multibyte_rate": MULTIBYTE, "n_ctx": 16_384, **WAYS[way], **more}
    )


def check(end: Finished, sink: Recorder, whole: tuple[Finished, Recorder]) -> None:
    """The turn is the uninterrupted one, to the last token."""
    assert sink.text == whole[1].text
    assert end.finish_reason == whole[0].finish_reason
    assert end.completion_tokens == whole[0].completion_tokens
    assert sink.n_tokens == whole[1].n_tokens


def check_resident(sink: Recorder, most: int = 2) -> None:
    """Each resume found its KV: `most` tokens were evaluated again."""
    assert all(prompt - cached <= most for prompt, cached in sink.starts[1:]), sink.starts


@ways
async def test_a_cut_at_any_token_changes_nothing(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY)
        assert whole[0].finish_reason == "stop"
        assert whole[1].n_tokens == LENGTH
        assert any(ord(char) > 127 for char in whole[1].text)
        for at in range(1, LENGTH + 1):
            generation, sink = r.generation(BODY, cut_at=[at])
            end, _ = await finish(generation, sink)
            check(end, sink, whole)
        if way != "closing-without-rollback":
            check_resident(sink)
        await r.until_idle()


@ways
async def test_a_cut_at_every_token_changes_nothing(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=list(range(1, LENGTH)))
        end, cuts = await finish(generation, sink)
        check(end, sink, whole)
        assert len(cuts) >= 10, "cuts on neighbouring tokens merge, but not most of them"
        assert all(cut.resident for cut in cuts)
        if way != "closing-without-rollback":
            check_resident(sink)
        if way == "parking":
            assert r.engine.stats().parks >= len(cuts) - 1
        await r.until_idle()


@ways
async def test_many_turns_cut_at_random_and_moved_between_slots(way: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    async with rig(config(way, n_slots=8, n_ctx=8192)) as r:
        bodies = [chat(f"Turn {number} [len={chance.randint(20, 80)}]") for number in range(8)]
        wholes = [await r.whole(body) for body in bodies]

        async def one(number: int) -> None:
            cut_at = sorted(chance.sample(range(1, 80), 12))
            generation, sink = r.generation(bodies[number], cut_at=cut_at)
            end, _ = await finish(generation, sink, repeat(number))
            check(end, sink, wholes[number])

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
        await r.until_idle()


@ways
@pytest.mark.parametrize("limit", [1, 2, 37, LENGTH - 1, LENGTH, LENGTH + 1])
async def test_the_limit_counts_over_all_segments(way: str, limit: int) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY, limit)
        assert whole[0].completion_tokens == limit
        generation, sink = r.generation(BODY, limit, cut_at=list(range(1, LENGTH, 3)))
        end, _ = await finish(generation, sink)
        check(end, sink, whole)


@ways
async def test_a_stop_string_is_found_wherever_the_cut_falls(way: str) -> None:
    async with rig(config(way)) as r:
        _, told = await r.whole(BODY)
        for stop in (told.text[90:104], told.text[60:65]):
            body = {**BODY, "stop": stop}
            whole = await r.whole(body)
            assert whole[0].finish_reason == "stop"
            assert whole[0].stop_sequence == stop
            assert whole[1].text == told.text[: told.text.index(stop)]
            generation, sink = r.generation(body, cut_at=list(range(1, LENGTH)))
            end, _ = await finish(generation, sink)
            check(end, sink, whole)
            assert end.stop_sequence == stop
        unstopped, _ = await r.whole({**BODY, "stop": ["###", "%%%"]})
        assert (unstopped.finish_reason, unstopped.stop_sequence) == ("stop", None)


@ways
@pytest.mark.parametrize("crash", [False, True])
async def test_an_end_between_the_stop_string_and_the_word_of_it_is_found(way: str, crash: bool) -> None:
    async with rig(config(way, multibyte_rate=0)) as r:
        _, told = await r.whole(BODY)
        for stop in (told.text[90:104], told.text[61:63], told.text[63:90]):
            body = {**BODY, "stop": ["never said", stop]}
            whole = await r.whole(body)
            generation, sink = r.generation(body)
            lose_the_last_word(generation)
            with pytest.raises(EngineUnavailable):
                await generation.run(0, sink)
            assert sink.text == whole[1].text
            if crash:  # another process finds the log
                so_far = sink.so_far(len(sink.parts), known=True)
                assert so_far.tokens is not None
                generation = r.backend.generation("chat", body, 500, so_far)
            end, _ = await finish(generation, sink)
            check(end, sink, whole)
            assert end.stop_sequence == stop
        await r.until_idle()


@ways
async def test_a_completion_is_cut_as_a_chat_is(way: str) -> None:
    body = {"prompt": f"Once upon a time [len={LENGTH}]", "temperature": 0, "stop": None}
    async with rig(config(way)) as r:
        whole = await r.whole(body, api="completion")
        generation, sink = r.generation(body, api="completion", cut_at=list(range(1, LENGTH, 5)))
        end, _ = await finish(generation, sink)
        check(end, sink, whole)
        ids = await r.backend.tokenize(str(body["prompt"]))
        for prompt in (ids, [body["prompt"]]):
            generation, sink = r.generation({**body, "prompt": prompt}, api="completion", cut_at=[7, 20])
            end, _ = await finish(generation, sink)
            check(end, sink, whole)


@ways
async def test_a_turn_goes_on_in_any_slot(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=list(range(5, LENGTH, 5)))
        end, cuts = await finish(generation, sink, cycle([2, 0, 1, 1, 3]))
        check(end, sink, whole)
        assert len(cuts) > 5
        await r.until_idle()


@ways
async def test_another_turn_may_have_taken_the_slot(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=[20])
        cut = await generation.run(0, sink)
        assert isinstance(cut, Cut)
        await generation.discard()
        other = await r.whole(chat("Something else [len=5]"))
        assert other[0].finish_reason == "stop"
        end, _ = await finish(generation, sink)
        check(end, sink, whole)


@ways
@pytest.mark.parametrize("known", [True, False], ids=["ids known", "text only"])
async def test_another_process_goes_on_from_what_was_told(way: str, known: bool) -> None:
    async with rig(config(way, profile=TimingProfile())) as r:
        whole = await r.whole(BODY)
        for count in range(len(whole[1].parts) + 1):
            so_far = whole[1].so_far(count, known=known)
            generation, sink = r.generation(BODY, so_far=so_far)
            end, _ = await finish(generation, sink)
            assert end.completion_tokens == whole[0].completion_tokens
            assert "".join(part["content"] for part in so_far.parts) + sink.text == whole[1].text
            assert so_far.n_tokens + sink.n_tokens == LENGTH


async def test_a_recovered_turn_that_only_lacks_its_end_asks_the_engine_nothing() -> None:
    async with rig(config(multibyte_rate=0.0)) as r:
        _, told = await r.whole(BODY, 30)
        before = r.engine.stats().requests
        generation, sink = r.generation(BODY, 30, told.so_far(len(told.parts), known=True))
        end, _ = await finish(generation, sink)
        assert (end.finish_reason, end.completion_tokens) == ("length", 30)
        assert len(sink.starts) == 1, "a segment that ends has started"
        assert r.engine.stats().requests == before


# During prefill --------------------------------------------------------------------------------------

LONG = chat("Read this:" + " word" * 1000 + f" [len={LENGTH}]")
SLOW_PREFILL = TimingProfile(base_step_s=0.001, prefill_tokens_per_s=20_000, n_batch=64)


@ways
@pytest.mark.parametrize("pieces", [0, 128], ids=["whole", "pieces"])
async def test_a_cut_during_prefill_keeps_what_was_evaluated(way: str, pieces: int) -> None:
    async with rig(config(way, profile=SLOW_PREFILL), piece_tokens=pieces) as r:
        whole = await r.whole(LONG)
        await r.backend.erase(0)
        evaluated = r.engine.stats().tokens_prefilled
        generation, sink = r.generation(LONG)
        sink.on_started = generation.preempt
        first = await generation.run(0, sink)
        assert isinstance(first, Cut)
        if way != "parking":
            assert first.kv_tokens >= r.engine.stats().resident_kv_tokens > 0
        assert first.kv_tokens < sink.starts[0][0]
        sink.on_started = None
        end, _ = await finish(generation, sink)
        check(end, sink, whole)
        if way == "closing":
            again = r.engine.stats().tokens_prefilled - evaluated - sink.starts[0][0]
            assert again <= 2 * max(64, pieces)
        await r.until_idle()


@ways
async def test_a_cut_between_any_two_pieces(way: str) -> None:
    async with rig(config(way, profile=TimingProfile(n_batch=64)), piece_tokens=64) as r:
        whole = await r.whole(LONG)
        await r.backend.erase(0)
        generation, sink = r.generation(LONG, cut_at=[10, 20, 30])
        sink.on_started = generation.preempt
        for _ in range(8):
            assert isinstance(await generation.run(0, sink), Cut)
        sink.on_started = None
        end, _ = await finish(generation, sink)
        check(end, sink, whole)


async def test_pieces_leave_a_resident_turn_and_a_shared_prefix_in_place() -> None:
    async with rig(config(), piece_tokens=64) as r:
        generation, sink = r.generation(LONG, cut_at=list(range(3, LENGTH, 6)))
        end, cuts = await finish(generation, sink)
        assert len(cuts) > 5
        check_resident(sink)
        prompt = sink.starts[0][0]
        turns = [*LONG["messages"], {"role": "assistant", "content": sink.text}]
        follow_up = {**LONG, "messages": [*turns, {"role": "user", "content": "And then? [len=5]"}]}
        _, second = await r.whole(follow_up)
        assert second.starts[0][1] >= prompt - 64
        assert end.kv_tokens >= prompt + LENGTH - 1


# Before it started, and at the end -------------------------------------------------------------------


@ways
async def test_a_turn_preempted_before_it_ran_asks_the_engine_nothing(way: str) -> None:
    async with rig(config(way)) as r:
        generation, sink = r.generation(BODY)
        generation.preempt()
        cut = await generation.run(0, sink)
        assert isinstance(cut, Cut)
        assert not cut.resident
        assert r.engine.stats().requests == 0
        assert sink.starts == []
        end, cuts = await finish(generation, sink)
        assert end.completion_tokens == LENGTH + 1
        assert cuts == []


async def test_a_parked_turn_preempted_before_it_ran_stays_parked() -> None:
    async with rig(config("parking")) as r:
        whole = await r.whole(BODY)
        generation, sink = r.generation(BODY, cut_at=[9])
        assert isinstance(await generation.run(0, sink), Cut)
        generation.preempt()
        cut = await generation.run(0, sink)
        assert isinstance(cut, Cut)
        assert cut.resident
        assert [slot.parked for slot in await r.backend.slots()] == [True, False, False, False]
        end, _ = await finish(generation, sink)
        check(end, sink, whole)


@ways
async def test_a_cut_before_the_engine_picked_the_turn_up(way: str) -> None:
    async with rig(config(way)) as r:
        whole = await r.whole(BODY)
        other, others = r.generation(chat("Long [len=20000]"), 20_000)
        cuts: list[Finished | Cut] = []
        generation, sink = r.generation(BODY)
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            others.on_started = running.set
            tasks.start_soon(other.run, 0, others)
            await running.wait()

            async def queued() -> None:
                cuts.append(await generation.run(0, sink))
                tasks.cancel_scope.cancel()

            tasks.start_soon(queued)
            with anyio.fail_after(5):
                while r.engine.stats().queued != 1:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            generation.preempt()
        [cut] = cuts
        assert isinstance(cut, Cut)
        assert not cut.resident
        assert sink.starts == []
        assert r.engine.stats().queued == 0
        end, _ = await finish(generation, sink)
        check(end, sink, whole)


@ways
async def test_a_cut_that_races_with_the_end(way: str) -> None:
    """Whichever wins, the reply is whole and the turn ends."""
    async with rig(config(way, profile=TimingProfile())) as r:
        for limit in (LENGTH - 10, 500):
            whole = await r.whole(BODY, limit)
            for at in range(LENGTH - 14, LENGTH + 1):
                generation, sink = r.generation(BODY, limit, cut_at=[at])
                end, _ = await finish(generation, sink)
                check(end, sink, whole)
        await r.until_idle()


async def test_a_preempt_after_the_end_does_nothing_to_the_next_run() -> None:
    async with rig(config()) as r:
        end, _ = await r.whole(BODY)
        generation, sink = r.generation(BODY)
        assert await generation.run(0, sink) == end


# Letting go ------------------------------------------------------------------------------------------


async def test_a_discarded_parked_turn_leaves_its_slot() -> None:
    async with rig(config("parking")) as r:
        generation, sink = r.generation(BODY, cut_at=[9])
        assert isinstance(await generation.run(0, sink), Cut)
        assert (await r.backend.slots())[0].parked
        await generation.discard()
        await r.until_idle()
        await generation.discard()


@ways
@pytest.mark.parametrize("after", ["start", "tokens", "resume"])
async def test_a_cancelled_run_frees_the_slot(way: str, after: str) -> None:
    async with rig(config(way)) as r:
        generation, sink = r.generation(chat("Long [len=5000]"), 5000)
        if after == "resume":
            sink.cut_at = [5]
            assert isinstance(await generation.run(0, sink), Cut)
        with anyio.fail_after(5), anyio.CancelScope() as scope:
            if after == "tokens":
                sink.on_delta = lambda: scope.cancel() if sink.n_tokens > 10 else None
            else:
                sink.on_started = scope.cancel
            await generation.run(0, sink)
        assert scope.cancelled_caught
        assert not any(slot.processing for slot in await r.backend.slots())


async def test_a_cancel_while_the_engine_has_not_answered_frees_the_slot() -> None:
    async with rig(config()) as r:
        other, others = r.generation(chat("Long [len=20000]"), 20_000)
        async with anyio.create_task_group() as tasks:
            running = anyio.Event()
            others.on_started = running.set
            tasks.start_soon(other.run, 0, others)
            await running.wait()
            generation, sink = r.generation(BODY)
            async with anyio.create_task_group() as queued:
                queued.start_soon(generation.run, 0, sink)
                with anyio.fail_after(5):
                    while r.engine.stats().queued != 1:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
                queued.cancel_scope.cancel()
        await r.until_idle()
        assert r.engine.stats().queued == 0


# The request -----------------------------------------------------------------------------------------


async def test_the_engines_refusal_is_the_requests_fault() -> None:
    async with rig(config(n_slots=4, n_ctx=1024)) as r:
        generation, sink = r.generation(chat("word " * 400))
        with pytest.raises(EngineRefused, match="exceeds the available context") as raised:
            await generation.run(0, sink)
        assert (raised.value.status, raised.value.kind) == (400, "exceed_context_size_error")


@ways
@pytest.mark.parametrize("field", [{"grammar": "root ::= x"}, {"json_schema": {"type": "object"}}])
async def test_a_completion_with_a_grammar_is_forwarded_once_it_is_whole(
    way: str, field: dict[str, Any]
) -> None:
    """The grammar would start anew in the middle, so there is no going on from there."""
    body = {"prompt": f"Some words [len={LENGTH}]", "temperature": 0, **field}
    async with rig(config(way)) as r:
        whole = await r.whole(body, api="completion")
        generation, sink = r.generation(body, api="completion")
        assert isinstance(await cut_at_engine_tokens(r, generation, sink, 20), Cut)
        assert sink.parts == []
        end, _ = await finish(generation, sink)
        assert len(sink.parts) == 1
        check(end, sink, whole)


async def test_a_sampled_turn_is_still_whole() -> None:
    async with rig(config()) as r:
        body = {**BODY, "temperature": 1.0, "seed": 7}
        generation, sink = r.generation(body, cut_at=[10, 20])
        end, _ = await finish(generation, sink)
        assert (end.completion_tokens, sink.n_tokens) == (LENGTH + 1, LENGTH)


async def test_what_the_engine_is() -> None:
    async with rig(config("parking", n_slots=3, n_ctx=3000), kv=KvShape(9), model="m") as r:
        info: EngineInfo = await r.backend.describe()
        assert (info.model, info.engine_slots, info.slot_context) == ("m", 3, 1000)
        assert (info.kv_budget_tokens, info.kv, info.batch_tokens) == (3000, KvShape(9), 64)
        assert info.native_park
        assert await r.backend.healthy()
        assert await r.backend.count_tokens("completion", {"prompt": [1, 2, 3]}) == 3
        sink = (await r.whole(BODY))[1]
        assert await r.backend.count_tokens("chat", BODY) == sink.starts[0][0]


def test_nothing_so_far_is_known() -> None:
    assert Recorder().so_far(0, known=True) == ReplySoFar([], [], 0)
