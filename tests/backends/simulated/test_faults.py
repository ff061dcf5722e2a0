"""Scripted faults, alone and over HTTP."""

from collections.abc import Callable
from dataclasses import asdict

import anyio
import httpx
import orjson
import pytest

from backends.simulated import PROFILES, Fault, FaultBook, SimulatedConfig
from tests.backends.simulated.harness import Reply, connect

BODY = {"prompt": "[len=20]", "stream": True}


def prompt(text: str) -> Callable[[], str]:
    return lambda: text


def test_a_fault_hits_the_nth_matching_request_so_many_times() -> None:
    fault = Fault("hang", match="agent-1", nth_request=2, times=2)
    book = FaultBook([fault])
    asked = ["agent-1", "agent-2", "agent-1", "agent-1", "agent-1"]
    assert [book.for_request(prompt(text)) for text in asked] == [None, None, fault, fault, None]
    assert book.snapshot() == [asdict(fault) | {"seen": 4, "fired": 2}]


def test_kinds_do_not_mix_and_clearing_ends_them() -> None:
    book = FaultBook([Fault("slow_health", times=None)])
    assert book.for_request(prompt("")) is None
    assert book.take("slow_health") is book.take("slow_health") is not None
    book.clear()
    assert book.take("slow_health") is None


@pytest.mark.parametrize(
    "wrong", [{"kind": "fire"}, {"kind": "hang", "after_tokens": -1}, {"kind": "hang", "times": 0}]
)
async def test_wrong_faults_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Fault(**wrong)  # type: ignore[arg-type]
    async with connect(SimulatedConfig()) as client:
        assert (await client.post("/simulated/faults", wrong)).status_code == 400
        assert (await client.post("/simulated/faults", {"kind": "hang", "what": 1})).status_code == 400


async def test_faults_are_set_and_cleared_at_run_time() -> None:
    async with connect(SimulatedConfig()) as client:
        added = await client.json("/simulated/faults", [{"kind": "http_500", "times": None}])
        assert [fault["kind"] for fault in added["faults"]] == ["http_500"]
        assert (await client.post("/completion", BODY)).status_code == 500
        assert (await client.http.delete("/simulated/faults")).json() == {"faults": []}
        assert (await client.post("/completion", BODY)).status_code == 200
        assert (await client.http.get("/simulated/stats")).json()["requests"] == 1


async def test_a_broken_connection_ends_after_the_tokens_and_frees_the_slot() -> None:
    async with connect(SimulatedConfig(n_slots=1, faults=(Fault("disconnect", after_tokens=3),))) as client:
        reply = Reply()
        with pytest.raises(httpx.RemoteProtocolError):
            await client.stream(BODY, into=reply)
        assert reply.last["tokens_predicted"] == 3
        await client.until_idle()
        assert client.stats.disconnects == 0
        assert (await client.stream(BODY)).last["stop"] is True


@pytest.mark.parametrize("kind", ["disconnect", "refuse"])
async def test_a_connection_broken_before_the_answer(kind: str) -> None:
    async with connect(SimulatedConfig()) as client:
        await client.json("/simulated/faults", {"kind": kind})
        with pytest.raises(httpx.TransportError):
            await client.post("/completion", BODY)
        assert (await client.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_tokens", [0, 3])
@pytest.mark.parametrize(("kind", "status"), [("http_500", 500), ("html_error", 502)])
async def test_errors_before_and_in_a_stream(kind: str, status: int, after_tokens: int, stream: bool) -> None:
    async with connect(SimulatedConfig()) as client:
        await client.json("/simulated/faults", {"kind": kind, "after_tokens": after_tokens})
        response = await client.post("/completion", {"prompt": "[len=9]", "stream": stream})
        text = response.text
        if stream and after_tokens:
            assert response.status_code == 200
            assert text.count('"stop":false') == 3
            assert '"stop":true' not in text
        else:
            assert response.status_code == status
        assert ("<html>" in text) == (kind == "html_error")
        assert ('"server_error"' in text) == (kind == "http_500")
        await client.until_idle()


@pytest.mark.parametrize("after_tokens", [0, 2])
async def test_a_truncated_stream_ends_inside_an_event(after_tokens: int) -> None:
    async with connect(SimulatedConfig()) as client:
        await client.json("/simulated/faults", {"kind": "truncated_sse", "after_tokens": after_tokens})
        text = (await client.post("/completion", BODY)).text
        assert text.count("\n\n") == after_tokens
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(text.split("data: ")[-1])


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
async def test_invalid_utf8_is_in_one_event_only(path: str) -> None:
    async with connect(SimulatedConfig()) as client:
        await client.json("/simulated/faults", {"kind": "invalid_utf8", "after_tokens": 2})
        events = (await client.post(path, BODY)).content.split(b"\n\n")
        spoilt = []
        for number, event in enumerate(events):
            try:
                event.decode()
            except UnicodeDecodeError:
                spoilt.append(number)
        assert spoilt == [2]
        assert len(events) > 10


@pytest.mark.parametrize("after_tokens", [0, 3])
async def test_a_hung_request_keeps_its_slot_until_its_client_leaves(after_tokens: int) -> None:
    async with connect(SimulatedConfig(n_slots=2)) as client:
        await client.json("/simulated/faults", {"kind": "hang", "after_tokens": after_tokens})
        reply = Reply()
        with anyio.move_on_after(0.3):
            await client.stream(BODY, into=reply)
        assert len(reply.chunks) == after_tokens
        await client.until_idle()
        async with anyio.create_task_group() as tasks:
            await client.json("/simulated/faults", {"kind": "hang"})
            tasks.start_soon(client.stream, BODY)
            await client.until(lambda stats: stats.running == 1)
            assert (await client.stream(BODY)).last["stop"] is True
            tasks.cancel_scope.cancel()


async def test_an_engine_may_not_notice_that_its_client_left() -> None:
    config = SimulatedConfig(n_slots=1, profile=PROFILES["fast"])
    async with connect(config) as client:
        await client.json("/simulated/faults", {"kind": "ignore_disconnect"})
        await client.stream({"prompt": "[len=200]"}, until=2)
        await client.until_idle()
        assert client.stats.disconnects == 1
        assert client.stats.tokens_generated == 201


async def test_slow_health_is_slow_once() -> None:
    async with connect(SimulatedConfig(faults=(Fault("slow_health", delay_s=0.3),))) as client:
        began = anyio.current_time()
        assert (await client.http.get("/health")).status_code == 200
        middle = anyio.current_time()
        assert (await client.http.get("/health")).status_code == 200
        assert middle - began >= 0.29
        assert anyio.current_time() - middle < 0.25


async def test_a_hidden_request_body_needs_no_match_text() -> None:
    async with connect(SimulatedConfig(faults=(Fault("http_500", match="secret"),))) as client:
        assert (await client.post("/completion", BODY)).status_code == 200
        assert (await client.post("/completion", {"prompt": "a secret"})).status_code == 500
