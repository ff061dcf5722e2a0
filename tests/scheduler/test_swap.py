"""The swap folder's books: what makes room for what, what is pinned, how a failing folder is left alone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.scheduler import Command, Forget, SwapPolicy
from orchestrator.scheduler.slots import Slot, SlotState
from orchestrator.scheduler.swap import SwapFile, SwapTable

HEAD = SwapPolicy(0, token_bytes=0).file_bytes(0)
#: A file of n tokens takes `HEAD + n * TOKEN` bytes.
TOKEN = 100


def folder(files: float) -> SwapTable:
    """Room for so many files of 100 tokens."""
    return SwapTable(
        SwapPolicy(
            int(files * (HEAD + 100 * TOKEN)),
            token_bytes=TOKEN - 16,
            tag="k",
            min_tokens=1,
            retry_s=5.0,
            retry_most_s=60.0,
        )
    )


def slot(number: int, *, turn: str | None = None, tokens: int = 100) -> Slot:
    state = SlotState.IDLE if turn is None else SlotState.PAUSED
    prefix = (1, 10 + number)
    return Slot(number, state, turn, f"a{number}", 20, tokens, prompt_tokens=tokens, prefix=prefix)


def save(table: SwapTable, of: Slot, *, leaves: bool = True) -> SwapFile:
    """A whole save; afterwards somebody takes the slot, or the file stays a copy."""
    commands: list[Command] = []
    file = table.write(of, commands)
    assert commands == []
    assert table.written(file.key, of.kv_tokens, HEAD + of.kv_tokens * TOKEN) is file
    if leaves:
        table.detach(file)
    return file


# Room ----------------------------------------------------------------------------------------------------


def test_idle_caches_go_least_recently_used_first() -> None:
    table = folder(3)
    a, b, c = (save(table, slot(number)) for number in range(3))
    table.touch(a)
    commands: list[Command] = []
    d = table.write(slot(3), commands)
    assert commands == [Forget(b.key)]
    assert list(table.files.values()) == [a, c, d]
    table.written(d.key, 100, HEAD + 100 * TOKEN)
    commands.clear()
    table.write(slot(4, tokens=200), commands)
    assert commands == [Forget(c.key), Forget(a.key)], "as many as it takes"


def test_files_of_paused_turns_never_go_for_others() -> None:
    table = folder(2)
    mine, cache = save(table, slot(0, turn="t")), save(table, slot(1))
    assert table.could_hold(slot(2))
    assert not table.could_hold(slot(2, tokens=250))
    cache.readers += 1
    assert not table.could_hold(slot(2)), "it is about to be read"
    assert not table.could_hold(slot(2, turn="u")), "whoever asks"
    cache.readers -= 1
    commands: list[Command] = []
    table.write(slot(2, turn="u"), commands)
    assert commands == [Forget(cache.key)]
    assert mine.key in table.files


def test_a_file_that_is_being_written_does_not_go() -> None:
    table = folder(1)
    writing = table.write(slot(0), [])
    assert not table.could_hold(slot(1))
    assert not table.could_hold(slot(1, turn="t"))
    table.written(writing.key, 100, HEAD)
    table.detach(writing)
    assert table.could_hold(slot(1))


def test_copies_give_way_to_turns_first_and_to_idle_cache_never() -> None:
    """A copy's KV is still in its slot: only the head start is lost with it."""
    table = folder(2)
    save(table, slot(0))
    copy = save(table, held := slot(1), leaves=False)
    commands: list[Command] = []
    file = table.write(slot(2, turn="t"), commands)
    assert commands == [Forget(copy.key)]
    assert held.copy is None
    table.written(file.key, 100, HEAD + 100 * TOKEN)

    table = folder(1)
    save(table, slot(0), leaves=False)
    assert not table.could_hold(slot(1))
    assert table.could_hold(slot(1, turn="t"))


def test_could_hold_only_looks() -> None:
    table = folder(2)
    for number in range(2):
        save(table, slot(number))
    before = table.view(0.0), dict(table.files), [file.order for file in table.files.values()]
    for tokens in (50, 100, 200, 300):
        table.could_hold(slot(9, tokens=tokens))
        table.could_hold(slot(9, turn="t", tokens=tokens))
    assert (table.view(0.0), dict(table.files), [file.order for file in table.files.values()]) == before
    commands: list[Command] = []
    assert table.could_hold(slot(9, tokens=100), commands=commands)
    assert len(commands) == 1, "unless it is told to"


def test_nothing_is_removed_for_what_will_not_fit() -> None:
    table = folder(2)
    save(table, slot(0, turn="t"))
    save(table, slot(1))
    commands: list[Command] = []
    assert not table.could_hold(slot(2, tokens=300), commands=commands)
    assert commands == []
    assert len(table.files) == 2


def test_without_a_policy_there_is_no_folder() -> None:
    table = SwapTable(None)
    assert not table.usable(0.0)
    assert not table.could_hold(slot(0, tokens=1))
    assert table.view(0.0).budget_bytes == 0


# The end of a save ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "charged"), [(0.5, 0.5), (1.5, 1.5), (7.0, 2.0)])
def test_the_books_follow_the_disk_within_the_budget(said: float, charged: float) -> None:
    table = folder(2)
    file = table.write(slot(0), [])
    whole = HEAD + 100 * TOKEN
    assert table.written(file.key, 90, int(said * whole)) is file
    assert (file.ready, file.kv_tokens) == (True, 90)
    assert table.ledger.charged == int(charged * whole)
    commands: list[Command] = []
    table.remove(file, commands)
    assert (commands, table.ledger.charged) == ([Forget(file.key)], 0)


def test_a_file_that_was_given_up_while_it_was_written() -> None:
    table = folder(2)
    saved = slot(0, turn="t")
    commands: list[Command] = []
    file = table.write(saved, commands)
    table.remove(file, commands)
    assert commands == [], "there is nothing on the disk to remove yet"
    assert (saved.copy, table.ledger.charged, table.writing) == (None, 0, file)
    assert table.written(file.key, 100, 1) is None
    assert (table.writing, table.saves) == (None, 1)

    file = table.write(slot(1), [])
    table.remove(file, [])
    assert table.failed(file.key, 0.0) is None
    assert (table.writing, table.failures) == (None, 1)


@pytest.mark.parametrize("well", [True, False])
def test_news_of_a_file_nobody_knows_changes_no_book(well: bool) -> None:
    table = folder(2)
    file = table.write(slot(0), [])
    assert (table.written("k-99", 5, 5) if well else table.failed("k-99", 0.0)) is None
    assert table.writing is file
    assert list(table.files) == [file.key]
    assert table.ledger.charged == HEAD + 100 * TOKEN


def test_a_failed_save_leaves_nothing() -> None:
    table = folder(2)
    file = table.write(saved := slot(0, turn="t"), [])
    assert table.failed(file.key, 3.0) is file
    assert (table.files, table.ledger.charged, saved.copy, table.writing) == ({}, 0, None, None)
    assert not table.usable(7.9)
    assert table.usable(8.0)
    assert table.view(7.9).paused_until == 8.0
    assert table.view(8.0).paused_until is None


# Failures ------------------------------------------------------------------------------------------------


def test_the_wait_doubles_up_to_its_most_and_starts_anew_after_a_success() -> None:
    table = folder(2)
    waits = []
    for number in range(6):
        table.fault(now := 1000.0 * number)
        waits.append(table.paused_until - now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    save(table, slot(0))
    assert table.failures == 6
    table.fault(9000.0)
    assert table.paused_until == 9005.0


def test_a_folder_that_never_works_again_is_still_asked_now_and_then() -> None:
    table = folder(2)
    for _ in range(3000):
        table.fault(now := table.paused_until)
        assert 0 < table.paused_until - now <= 60.0


# What a prompt shares ------------------------------------------------------------------------------------


def test_the_file_that_shares_most_and_of_those_the_smallest() -> None:
    table = folder(10)
    short, long = slot(0, tokens=100), slot(1, tokens=300)
    short.prefix, long.prefix = (1, 2), (1, 2, 3, 4)
    files = save(table, short), save(table, long)
    assert table.best_for((1, 2, 3, 4, 5), 1000) == (300, files[1])
    assert table.best_for((1, 2, 9), 1000) == (150, files[1])
    assert table.best_for((1, 2, 9), 200) == (100, files[0]), "what has to fit the reservation"
    assert table.best_for((7,), 1000) == (0, None)
    long.prefix = ()
    twin = slot(2, tokens=120)
    twin.prefix, twin.prompt_tokens = (1, 2, 9), 150
    save(table, twin)
    assert table.best_for((1, 2), 200) == (100, files[0])
    writing = slot(3, tokens=400)
    writing.prefix = (1, 2, 3, 4, 5)
    table.write(writing, [])
    assert table.best_for((1, 2, 3, 4, 5), 1000) == (300, files[1]), "not one that is being written"


# Any sequence --------------------------------------------------------------------------------------------


class FolderMachine(RuleBasedStateMachine):
    """A folder beside a model of what is on the disk, for any order of saves, ends and removals."""

    @initialize(files=st.sampled_from([0.0, 1.0, 2.5, 6.0]))
    def begin(self, files: float) -> None:
        self.table = folder(files)
        self.disk: dict[str, int] = {}
        self.slots = [slot(number) for number in range(5)]
        self.now = 0.0
        self.made: set[str] = set()

    @rule(pick=st.integers(0, 4), turn=st.sampled_from([None, "t", "u"]), tokens=st.integers(1, 300))
    def saves(self, pick: int, turn: str | None, tokens: int) -> None:
        chosen = self.slots[pick]
        if self.table.writing is not None or chosen.copy is not None or not self.table.usable(self.now):
            return
        chosen.turn, chosen.kv_tokens = turn, tokens
        if not self.table.could_hold(chosen):
            return
        pinned = {f.key for f in self.table.files.values() if f.turn is not None or f.readers}
        commands: list[Command] = []
        file = self.table.write(chosen, commands)
        assert file.key not in self.made, "a key is used once"
        self.made.add(file.key)
        self.obey(commands)
        assert pinned <= set(self.table.files)

    @rule(well=st.booleans(), tokens=st.integers(0, 300))
    def save_ends(self, well: bool, tokens: int) -> None:
        writing = self.table.writing
        if writing is None:
            return
        wanted = writing.key in self.table.files
        size = HEAD + tokens * TOKEN
        if well:
            assert (self.table.written(writing.key, tokens, size) is writing) == wanted
            if wanted:
                self.disk[writing.key] = size
        else:
            assert (self.table.failed(writing.key, self.now) is writing) == wanted
            assert not self.table.usable(self.now)
        assert self.table.writing is None

    @rule(pick=st.integers(0, 9), what=st.sampled_from(["removed", "detached", "read", "unread", "orphaned"]))
    def happens(self, pick: int, what: str) -> None:
        if not self.table.files:
            return
        file = list(self.table.files.values())[pick % len(self.table.files)]
        commands: list[Command] = []
        match what:
            case "removed" if not file.readers:
                self.table.remove(file, commands)
            case "detached" if file.ready:
                self.table.detach(file)
            case "read" if file.ready:
                file.readers += 1
            case "unread" if file.readers:
                file.readers -= 1
            case "orphaned":
                file.turn = None
            case _:
                pass
        self.obey(commands)

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            assert isinstance(command, Forget)
            del self.disk[command.key]

    @invariant()
    def books_and_disk_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        table, view = self.table, self.table.view(self.now)
        assert 0 <= view.used_bytes <= view.budget_bytes
        assert view.used_bytes == sum(table.ledger.of(key) for key in table.files)
        assert {key for key, file in table.files.items() if file.ready} == set(self.disk)
        assert view.files == len(table.files)
        for each in self.slots:
            file = table.files.get(each.copy or "")
            assert (each.copy is None) == (file is None), "a copy that is gone"
            assert file is None or file.slot is each


TestFolderMachine = FolderMachine.TestCase
TestFolderMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
