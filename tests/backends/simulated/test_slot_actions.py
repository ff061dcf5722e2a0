"""Save, restore, erase, and the native park and unpark."""

from pathlib import Path

import anyio
import pytest

from backends.simulated import PROFILES, Fault, SimulatedConfig, TimingProfile
from backends.simulated.tokenizer import encode
from tests.backends.simulated.harness import chat_prompt, connect

BODY = {"prompt": "word " * 40, "n_predict": 1}
ENDLESS = {"ignore_eos": True, "n_predict": -1}


async def test_a_saved_slot_comes_back_in_any_slot(tmp_path: Path) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path)) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        saved = await client.json("/slots/0?action=save", {"filename": "a.bin"})
        size = (tmp_path / "a.bin").stat().st_size
        n_tokens = len(encode("word " * 40))
        assert (saved["n_saved"], saved["n_written"], saved["id_slot"]) == (n_tokens, size, 0)
        assert (await client.json("/slots/0?action=erase"))["n_erased"] == n_tokens
        assert client.stats.resident_kv_tokens == 0
        restored = await client.json("/slots/3?action=restore", {"filename": "a.bin"})
        assert (restored["n_restored"], restored["n_read"]) == (n_tokens, size)
        again = await client.json("/completion", BODY | {"id_slot": 3})
        assert again["timings"]["cache_n"] == n_tokens - 1


async def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path, kv_bytes_per_token=1)) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        await client.json("/slots/0?action=save", {"filename": "a.bin"})
        whole = (tmp_path / "a.bin").read_bytes()
        spoilt = {
            "short.bin": whole[:-4],
            "odd.bin": whole[:-1],
            "head.bin": whole[:30],
            "foreign.bin": b"GGUF" + whole,
            "changed.bin": whole[:-1] + b"\x7f",
            "list.bin": whole[: whole.index(b"\n") + 1] + b"[]\nx",
        }
        for name, raw in spoilt.items():
            (tmp_path / name).write_bytes(raw)
        for name in (*spoilt, "missing.bin"):
            response = await client.post("/slots/1?action=restore", {"filename": name})
            assert response.status_code == 400, name
            assert "Unable to restore slot" in response.json()["error"]["message"]
        for name in ("../a.bin", "", "..", "x/y"):
            response = await client.post("/slots/0?action=save", {"filename": name})
            assert response.json()["error"]["message"] == "Invalid filename"


async def test_a_file_has_the_size_of_its_kv_and_takes_no_room(tmp_path: Path) -> None:
    config = SimulatedConfig(slot_save_path=tmp_path, kv_bytes_per_token=1 << 20, kv_fixed_bytes=1 << 28)
    async with connect(config) as client:
        sizes = []
        for words in (10, 40):
            await client.json("/completion", {"prompt": "word " * words, "n_predict": 1, "id_slot": 0})
            saved = await client.json("/slots/0?action=save", {"filename": "a.bin"})
            assert (tmp_path / "a.bin").stat().st_size == saved["n_written"]
            assert (tmp_path / "a.bin").stat().st_blocks * 512 < 1 << 20
            sizes.append((saved["n_saved"], saved["n_written"]))
        (few, small), (many, large) = sizes
        assert large - small == pytest.approx((many - few) << 20, abs=16)
        assert small == pytest.approx((1 << 28) + (few << 20), abs=256)
        restored = await client.json("/slots/1?action=restore", {"filename": "a.bin"})
        assert (restored["n_restored"], restored["n_read"]) == (many, large)


async def test_what_a_slot_tells_of_its_tokens(tmp_path: Path) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path)) as client:

        async def told(slot: int) -> int | None:
            shown: dict[str, int] = (await client.http.get("/slots")).json()[slot]
            return shown.get("n_prompt_tokens")

        assert await told(0) is None
        end = await client.json("/completion", {"prompt": "word " * 40 + "[len=9]", "id_slot": 0})
        assert await told(0) == end["tokens_evaluated"] + end["tokens_predicted"] - 1 == end["tokens_cached"]
        await client.json("/slots/0?action=save", {"filename": "a.bin"})
        await client.json("/slots/0?action=erase")
        assert await told(0) == 0
        for slot in (0, 1):
            await client.json(f"/slots/{slot}?action=restore", {"filename": "a.bin"})
        assert await told(0) == end["tokens_cached"]
        assert await told(1) is None, "it has run nothing"


@pytest.mark.parametrize("restored", [True, False])
async def test_kv_from_a_file_is_of_no_use_where_it_cannot_be_rolled_back(
    tmp_path: Path, restored: bool
) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path, resume_reprefills=True)) as client:
        ids = encode("word " * 40)

        async def reused(prompt: list[int]) -> int:
            body = {"prompt": prompt, "n_predict": 1, "id_slot": 0}
            return int((await client.json("/completion", body))["timings"]["cache_n"])

        assert await reused(ids) == 0
        if restored:
            await client.json("/slots/0?action=save", {"filename": "a.bin"})
            await client.json("/slots/0?action=restore", {"filename": "a.bin"})
        assert await reused([*ids, *ids]) == (0 if restored else len(ids))
        assert await reused([*ids, *ids, *ids]) == 2 * len(ids), "a file's KV once used is as any other"


@pytest.mark.parametrize("kind", ["save_fails", "save_short"])
async def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path)) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        await client.json("/simulated/faults", {"kind": kind, "match": "a."})
        whole = await client.json("/slots/0?action=save", {"filename": "b.bin"})
        response = await client.post("/slots/0?action=save", {"filename": "a.bin"})
        assert response.status_code == (500 if kind == "save_fails" else 200)
        if kind == "save_short":
            assert response.json()["n_written"] == whole["n_written"]
        assert (tmp_path / "a.bin").stat().st_size == whole["n_written"] // 2
        assert (await client.post("/slots/1?action=restore", {"filename": "a.bin"})).status_code == 400


async def test_restores_that_fail_or_bring_back_less(tmp_path: Path) -> None:
    async with connect(SimulatedConfig(slot_save_path=tmp_path)) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        saved = await client.json("/slots/0?action=save", {"filename": "a.bin"})
        await client.json("/simulated/faults", [{"kind": "restore_fails"}, {"kind": "restore_short"}])
        assert (await client.post("/slots/0?action=restore", {"filename": "a.bin"})).status_code == 400
        assert client.stats.resident_kv_tokens == 0
        less = await client.json("/slots/0?action=restore", {"filename": "a.bin"})
        assert less["n_restored"] == client.stats.resident_kv_tokens == saved["n_saved"] // 2


async def test_a_slow_save_and_restore_stall_every_slot(tmp_path: Path) -> None:
    faults = tuple(Fault(kind, delay_s=0.3) for kind in ("slow_save", "slow_restore"))
    config = SimulatedConfig(slot_save_path=tmp_path, faults=faults, profile=PROFILES["fast"])
    async with connect(config) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        async with anyio.create_task_group() as tasks:
            reply = client.open(tasks, {**ENDLESS, "prompt": "a", "id_slot": 1})
            await reply.first_chunk.wait()
            for action, time in (("save", "save_ms"), ("restore", "restore_ms")):
                before, began = client.stats.steps, anyio.current_time()
                answer = await client.json(f"/slots/0?action={action}", {"filename": "a.bin"})
                assert anyio.current_time() - began >= 0.3
                assert answer["timings"][time] >= 300
                assert client.stats.steps - before < 50
            tasks.cancel_scope.cancel()


async def test_other_refusals(tmp_path: Path) -> None:
    async with connect(SimulatedConfig()) as client:
        for path in ("/slots/0?action=bogus", "/slots/0?action=park", "/slots/9?action=erase", "/slots/x"):
            assert (await client.post(path)).status_code == 400
        assert (await client.post("/slots/0?action=save", {})).status_code == 400
        assert (await client.post("/slots/0?action=save", {"filename": "a"})).status_code == 501
    async with connect(SimulatedConfig(slot_save_path=tmp_path / "missing")) as client:
        assert (await client.post("/slots/0?action=save", {"filename": "a"})).status_code == 500


async def test_a_restore_that_does_not_fit_the_pool_is_refused(tmp_path: Path) -> None:
    config = SimulatedConfig(n_slots=2, n_ctx=100, kv_unified=True, slot_save_path=tmp_path)
    async with connect(config) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        await client.json("/slots/0?action=save", {"filename": "a.bin"})
        assert (await client.post("/slots/1?action=restore", {"filename": "a.bin"})).status_code == 400


async def test_an_action_on_a_busy_slot_waits_until_it_is_idle(tmp_path: Path) -> None:
    config = SimulatedConfig(n_slots=1, slot_save_path=tmp_path, profile=PROFILES["fast"])
    async with connect(config) as client, anyio.create_task_group() as tasks:
        reply = client.open(tasks, {"prompt": "[len=40]"})
        await reply.first_chunk.wait()
        saved = await client.json("/slots/0?action=save", {"filename": "a.bin"})
        assert saved["n_saved"] == len(encode("[len=40]")) + 40


async def test_a_save_stalls_every_slot(tmp_path: Path) -> None:
    profile = TimingProfile(base_step_s=0.001, save_tokens_per_s=200)
    async with connect(SimulatedConfig(slot_save_path=tmp_path, profile=profile)) as client:
        await client.json("/completion", BODY | {"id_slot": 0})
        async with anyio.create_task_group() as tasks:
            reply = client.open(tasks, {**ENDLESS, "prompt": "a", "id_slot": 1})
            await reply.first_chunk.wait()
            began = anyio.current_time()
            await client.json("/slots/0?action=save", {"filename": "a.bin"})
            assert anyio.current_time() - began > 0.2
            steps_during = len(reply.chunks)
            assert steps_during < 50
            tasks.cancel_scope.cancel()


PARKING = SimulatedConfig(
    n_slots=2, native_park=True, park_keepalive_s=0.02, profile=PROFILES["fast"], kv_unified=True
)


async def test_a_parked_stream_pauses_and_goes_on() -> None:
    prompt = chat_prompt("[len=60]")
    async with connect(PARKING) as client:
        whole = await client.json("/completion", {"prompt": prompt})
        async with anyio.create_task_group() as tasks:
            reply = client.open(tasks, {"prompt": prompt, "id_slot": 1})
            await reply.first_chunk.wait()
            parked = await client.json("/slots/1?action=park")
            assert parked["is_preempted"] is True
            assert parked["preempt_manual"] is True
            assert parked["preempt_ram_bytes"] > 0
            slot = (await client.http.get("/slots")).json()[1]
            assert slot["is_processing"] and slot["is_preempted"] and slot["preempt_manual"]
            received = len(reply.chunks)
            await anyio.sleep(0.1)
            assert len(reply.chunks) <= received + 2
            again = await client.json("/slots/1?action=park")
            assert again == parked
            unparked = await client.json("/slots/1?action=unpark")
            assert (unparked["is_preempted"], unparked["preempt_ram_bytes"]) == (False, 0)
        assert reply.comments[0] == "preempted"
        assert reply.comments[-1] == "resumed"
        assert reply.comments.count("preempt-keepalive") >= 2
        assert reply.text == whole["content"]
        assert client.stats.parks == 1


async def test_parked_kv_leaves_the_pool_and_is_lost_with_its_client() -> None:
    async with connect(PARKING) as client:
        async with anyio.create_task_group() as tasks:
            reply = client.open(tasks, {**ENDLESS, "prompt": "word " * 20})
            await reply.first_chunk.wait()
            await client.json("/slots/0?action=park")
            assert client.stats.resident_kv_tokens == 0
            tasks.cancel_scope.cancel()
        await client.until_idle()
        assert client.stats.resident_kv_tokens == 0


@pytest.mark.parametrize("action", ["park", "unpark"])
async def test_an_idle_slot_is_neither_parked_nor_unparked(action: str) -> None:
    async with connect(PARKING) as client:
        assert (await client.post(f"/slots/0?action={action}")).status_code == 400
        slot = (await client.http.get("/slots")).json()[0]
        assert (slot["is_preempted"], slot["preempt_manual"]) == (False, False)


async def test_parking_is_bounded_by_host_memory() -> None:
    config = SimulatedConfig(native_park=True, preempt_ram_bytes=10, profile=PROFILES["fast"])
    async with connect(config) as client, anyio.create_task_group() as tasks:
        reply = client.open(tasks, {**ENDLESS, "prompt": "a", "id_slot": 0})
        await reply.first_chunk.wait()
        assert (await client.post("/slots/0?action=park")).status_code == 503
        tasks.cancel_scope.cancel()
