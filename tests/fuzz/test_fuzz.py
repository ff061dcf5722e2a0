"""A short run of what `make fuzz` does for ten minutes: no 500, nothing hangs, nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from anyio.from_thread import BlockingPortal

from tests.fuzz.by_schema import SchemaFuzz
from tests.fuzz.raw import RawFuzz
from tests.fuzz.raw_requests import CHANGES, make
from tests.fuzz.stage import Stage, stage
from tests.fuzz.tally import Tally

SCHEMA_S = 10.0
SCHEMA_EXAMPLES = 3
RAW_REQUESTS = 500

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def staged(portal: BlockingPortal) -> Iterator[Stage]:
    """One service for all."""
    with portal.wrap_async_context_manager(stage()) as found:
        yield found


@pytest.fixture
def first_seed() -> int:
    """Another one each time; a failure shows it."""
    return random.SystemRandom().randrange(1 << 32)


def check(tally: Tally, staged: Stage, portal: BlockingPortal, first_seed: int) -> None:
    """Nothing went wrong, and nothing is left of it."""
    assert not tally.problems, (first_seed, dict(tally.problems), tally.examples)
    assert tally.of_status(500, 500) == 0
    assert portal.call(staged.settled) == [], first_seed
    assert staged.traces() == [], first_seed


def test_no_request_that_the_document_allows_or_forbids(
    staged: Stage, portal: BlockingPortal, first_seed: int
) -> None:
    tally = Tally()
    fuzz = SchemaFuzz(staged.url, tally)
    until = time.monotonic() + SCHEMA_S
    for _ in fuzz.rounds(first_seed, SCHEMA_EXAMPLES):
        if time.monotonic() > until:
            break
    fuzz.close()
    check(tally, staged, portal, first_seed)
    assert tally.of_status(200, 200) > 0, "nothing was accepted"
    assert tally.of_status(400, 499) > 0, "nothing was refused"


def test_no_bytes_on_a_socket(staged: Stage, portal: BlockingPortal, first_seed: int) -> None:
    tally = Tally()
    portal.call(RawFuzz(staged.port, tally, first_seed).run, RAW_REQUESTS)
    check(tally, staged, portal, first_seed)
    assert tally.of_status(200, 200) > RAW_REQUESTS // 20
    assert tally.of_status(400, 499) > RAW_REQUESTS // 10


def test_every_change_is_made() -> None:
    done = {name for number in range(1000) for name in make(random.Random(number)).done}
    assert done == {change.__name__ for change in CHANGES}
