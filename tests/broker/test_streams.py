"""Reading output: each entry once and in order, whatever the channel loses."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest
from redis.asyncio import Redis

from orchestrator.broker import Broker, Lease, LogAppend, OutputReader, TurnStream
from orchestrator.broker import keys as k
from orchestrator.broker.streams import BACKLOG
from orchestrator.turns import TurnState
from tests.broker.harness import GATEWAY, PERMANENT, POOL, lease_of, turn_in

pytestmark = pytest.mark.keys_without_ttl(*PERMANENT, "swarm:*:turns")


class Writer:
    """Appends numbered entries to one turn's log."""

    def __init__(self, broker: Broker, lease: Lease, turn: str) -> None:
        self._broker = broker
        self._lease = lease
        self.turn = turn
        self.written = 0

    async def write(self, count: int = 1, *, heard: bool = True) -> None:
        """Append `count` entries; `heard` False: the message goes astray."""
        lines = [orjson.dumps(["d", number]) for number in range(self.written, self.written + count)]
        gateway = GATEWAY if heard else "elsewhere"
        append = LogAppend(self.turn, gateway, self.written, lines)
        [self.written] = await self._broker.append(self._lease, [append])

    def message(self, start: int, stop: int) -> list[Any]:
        """What is published for these entries."""
        return [["d", number] for number in range(start, stop)]


async def writer_of(broker: Broker) -> Writer:
    lease = await lease_of(broker)
    return Writer(broker, lease, await turn_in(broker, lease, TurnState.RUNNING))


def numbers(entries: list[Any]) -> list[int]:
    return [entry[1] for entry in entries]


async def read(stream: TurnStream, count: int, timeout_s: float = 5.0) -> list[int]:
    """The next entries, at least `count`."""
    got: list[int] = []
    with anyio.fail_after(10):
        while len(got) < count:
            got += numbers(await stream.next(timeout_s))
    return got


@asynccontextmanager
async def reading(broker: Broker, url: str) -> AsyncIterator[OutputReader]:
    """A reader on a connection of its own."""
    async with Redis.from_url(url, socket_timeout=None) as subscriber, anyio.create_task_group() as tasks:
        reader = OutputReader(broker, subscriber, GATEWAY)
        await tasks.start(reader.run)
        yield reader
        tasks.cancel_scope.cancel()


async def test_what_is_pushed_is_read_without_the_log(redis: Redis) -> None:
    stream = TurnStream(Broker(redis), POOL, "not there")
    stream.push(0, [["d", 0], ["d", 1]])
    stream.push(2, [["d", 2]])
    assert numbers(await stream.next(0)) == [0, 1, 2]
    stream.push(3, [["d", 3]])
    assert numbers(await stream.next(0)) == [3]
    assert await stream.next(0) == []


async def test_repeated_and_overlapping_messages_are_read_once(redis: Redis) -> None:
    stream = TurnStream(Broker(redis), POOL, "not there")
    stream.push(0, [["d", 0], ["d", 1]])
    stream.push(0, [["d", 0], ["d", 1]])
    stream.push(1, [["d", 1], ["d", 2]])
    assert numbers(await stream.next(0)) == [0, 1, 2]
    stream.push(0, [["d", 0], ["d", 1], ["d", 2], ["d", 3]])
    stream.push(2, [["d", 2]])
    assert numbers(await stream.next(0)) == [3]


async def test_a_lost_message_is_filled_from_the_log(redis: Redis, valkey_url: str) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    async with reading(broker, valkey_url) as reader, reader.open(POOL, writer.turn) as stream:
        await writer.write(2)
        assert await read(stream, 2) == [0, 1]
        await writer.write(3, heard=False)
        await writer.write(1)
        assert await read(stream, 4) == [2, 3, 4, 5]
        await writer.write(2, heard=False)
        assert await read(stream, 2, timeout_s=0.05) == [6, 7]
        await writer.write(1)
        assert await read(stream, 1) == [8]


async def test_a_reader_behind_keeps_no_backlog(redis: Redis) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    stream = TurnStream(broker, POOL, writer.turn)
    total = 3 * BACKLOG
    for start in range(0, total, 10):
        stop = min(start + 10, total)
        await writer.write(stop - start)
        stream.push(start, writer.message(start, stop))
        assert len(stream._pushed) <= BACKLOG
    assert await read(stream, total) == list(range(total))
    await writer.write(1)
    stream.push(total, writer.message(total, total + 1))
    assert await read(stream, 1) == [total]


async def test_one_message_above_the_backlog_is_read_from_the_log(redis: Redis, valkey_url: str) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    async with reading(broker, valkey_url) as reader, reader.open(POOL, writer.turn) as stream:
        await writer.write(BACKLOG + 50)
        assert await read(stream, BACKLOG + 50) == list(range(BACKLOG + 50))


async def test_a_reader_far_behind_takes_the_log_in_bounded_pieces_and_at_once(redis: Redis) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    total = 3 * BACKLOG + 7
    await writer.write(total, heard=False)
    stream = TurnStream(broker, POOL, writer.turn)
    stream.suspect()
    pieces: list[list[int]] = []
    with anyio.fail_after(10):  # none of the pieces is waited for
        while sum(map(len, pieces)) < total:
            pieces.append(numbers(await stream.next(3600)))
    assert [len(piece) for piece in pieces] == [BACKLOG] * 3 + [7]
    assert [number for piece in pieces for number in piece] == list(range(total))


async def test_what_is_pushed_while_the_log_is_read_is_read_once(redis: Redis) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    await writer.write(2 * BACKLOG, heard=False)
    stream = TurnStream(broker, POOL, writer.turn)
    stream.suspect()
    got = numbers(await stream.next(0))
    await writer.write(5, heard=False)
    stream.push(2 * BACKLOG, writer.message(2 * BACKLOG, 2 * BACKLOG + 5))
    got += await read(stream, BACKLOG + 5)
    assert got == list(range(2 * BACKLOG + 5))


async def test_each_of_several_readers_of_a_turn_gets_all_of_it(redis: Redis, valkey_url: str) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    async with reading(broker, valkey_url) as reader, reader.open(POOL, writer.turn) as first:
        await writer.write(2)
        async with reader.open(POOL, writer.turn) as second:
            second.suspect()
            await writer.write(2)
            assert await read(second, 4) == [0, 1, 2, 3]
        await writer.write(1)
        assert await read(first, 5) == [0, 1, 2, 3, 4]
    assert not reader._streams


async def test_a_reader_reconnects_and_misses_nothing(redis: Redis, valkey_url: str) -> None:
    broker = Broker(redis)
    writer = await writer_of(broker)
    channel = k.gateway_channel(GATEWAY)
    async with reading(broker, valkey_url) as reader, reader.open(POOL, writer.turn) as stream:
        for round_ in range(3):
            await writer.write(2)
            assert await read(stream, 2) == [3 * round_, 3 * round_ + 1]
            await redis.client_kill_filter(_type="pubsub")
            await writer.write(1)
            assert await read(stream, 1) == [3 * round_ + 2]
            with anyio.fail_after(10):
                while await redis.pubsub_numsub(channel) != [(channel.encode(), 1)]:  # noqa: ASYNC110
                    await anyio.sleep(0.01)


async def test_only_the_turn_that_is_open_is_heard(redis: Redis, valkey_url: str) -> None:
    broker = Broker(redis)
    lease = await lease_of(broker)
    one = Writer(broker, lease, await turn_in(broker, lease, TurnState.RUNNING))
    two = Writer(broker, lease, await turn_in(broker, lease, TurnState.RUNNING))
    async with reading(broker, valkey_url) as reader:
        async with reader.open(POOL, one.turn) as stream:
            await two.write(5)
            await one.write(1)
            assert await read(stream, 1) == [0]
        async with reader.open(POOL, two.turn) as stream:
            assert await read(stream, 5, timeout_s=0.01) == [0, 1, 2, 3, 4]
        assert not reader._streams


async def test_any_order_of_loss_repetition_and_reading(redis: Redis) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201
    chance = random.Random(seed)
    broker = Broker(redis)
    writer = await writer_of(broker)
    for _ in range(20):
        stream = TurnStream(broker, POOL, writer.turn)
        stream.suspect()
        got = await read(stream, writer.written) if writer.written else []
        for _ in range(40):
            start = writer.written
            await writer.write(chance.randint(1, 20), heard=False)
            if chance.random() < 0.7:
                stream.push(start, writer.message(start, writer.written))
            if chance.random() < 0.2:
                again = chance.randint(0, start)
                stream.push(again, writer.message(again, writer.written))
            if chance.random() < 0.05:
                stream.suspect()
            if chance.random() < 0.5:
                got += numbers(await stream.next(0))
        while len(got) < writer.written:
            got += numbers(await stream.next(0))
        assert got == list(range(writer.written))
