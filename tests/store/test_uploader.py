"""The uploader: what a site has saved comes to the store once and in order, whoever dies or is away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.app.failing import Died, FailingLog, Fuse
from tests.app.waiting import until
from tests.store.objects import FailingObjects, Memory, loaded, saving, version
from whimbrel.core.errors import Conflict, Corrupt, Unavailable
from whimbrel.log import EmbeddedLog, Log, MemoryLog
from whimbrel.store import CentralStore, Keeper, Piece, Retention, Saving, Uploader
from whimbrel.store.place import Objects, Place


def piece(of: Saving, place: int = 0, *, is_last: bool = True, stage: str = "s") -> Piece:
    """A piece of a saving: all of it, unless said otherwise."""
    return Piece(stage, of, place, is_last)


BATCHES = [
    [piece(saving(1, version("a", 1), reached=1)), piece(saving(1, version("b", 1), reached=2, part=1))],
    [piece(saving(2, version("a", 2)), is_last=False), piece(saving(2, reached=3, part=1))],
    [piece(saving(2, version("c", 2)), 1, is_last=False)],
    [piece(saving(1, version("x", 1), reached=4), stage="t"), piece(saving(3, version("b", 3), reached=5, part=1))],
    [piece(saving(2, version("d", 2), reached=6), 2)],
    [piece(saving(3, reached=7))],
]
NEWEST = {"a": b"a@0.2", "b": b"b@0.3", "c": b"c@0.2", "d": b"d@0.2"}


def uploader(spool: Log, objects: Objects) -> Uploader:
    return Uploader("edge-1", spool, CentralStore(objects))


def append_all(one: Uploader) -> None:
    for counter, pieces in enumerate(BATCHES):
        one.append(pieces, "s-1@x", counter)


def carry(one: Uploader) -> None:
    while one.step():
        pass


def test_savings_arrive_whole_or_in_pieces_and_their_entries_are_given_up() -> None:
    spool, memory = MemoryLog(), Memory()
    one = uploader(spool, memory)
    append_all(one)
    assert (one.is_idle, one.under_way > 0, one.reached("s", "s-1", 0)) == (False, True, -1)
    heads = []
    while one.step():
        heads.append(spool.head())
    assert heads == [1, 1, 1, 1, 5, 6]  # the entry in which a saving begins stays until the one in which it ends
    store = CentralStore(memory)
    assert (loaded(store), loaded(store, stage="t")) == (NEWEST, {"x": b"x@0.1"})
    assert (one.is_idle, one.under_way) == (True, 0)
    assert [one.reached("s", "s-1", 0), one.reached("s", "s-1", 1), one.reached("t", "s-1", 0)] == [7, 5, 4]
    assert (store.checkpoint("s", {"s-1": 2}, 1), store.covered("s")) == (1, 5)


def test_a_saving_does_not_exist_before_its_last_piece() -> None:
    spool, memory = MemoryLog(), Memory()
    one = uploader(spool, memory)
    append_all(one)
    for _ in range(3):
        one.step()
    assert loaded(CentralStore(memory)) == {"a": b"a@0.1", "b": b"b@0.1"}


def test_a_batch_that_is_repeated_is_taken_over_once() -> None:
    spool, memory = MemoryLog(), Memory()
    one = uploader(spool, memory)
    append_all(one)
    append_all(one)
    assert spool.tail() == len(BATCHES)


WRITES = 40


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_any_write_loses_nothing(after: bool) -> None:
    for at in range(WRITES):
        spool, memory, fuse = MemoryLog(), Memory(), Fuse(at, after=after)
        append_all(uploader(spool, memory))
        try:
            carry(uploader(spool, FailingObjects(memory, fuse)))
        except Died:
            carry(uploader(spool, memory))
        store = CentralStore(memory)
        assert (loaded(store), loaded(store, stage="t"), spool.head()) == (NEWEST, {"x": b"x@0.1"}, spool.tail())
    assert not fuse.is_blown


def test_a_store_that_is_away_is_tried_again_and_nothing_is_written_twice() -> None:
    for at in range(WRITES):
        spool, memory, fuse = MemoryLog(), Memory(), Fuse(at, error=lambda: Unavailable("away"))
        one = uploader(spool, FailingObjects(memory, fuse))
        append_all(one)
        try:
            carry(one)
        except Unavailable:
            assert not one.is_idle
            carry(one)
        assert (loaded(CentralStore(memory)), one.is_idle) == (NEWEST, True)


def test_a_saving_that_is_never_finished_is_given_up_with_the_next() -> None:
    spool, memory = MemoryLog(), Memory()
    one = uploader(spool, memory)
    one.append([piece(saving(1, version("a", 1)), is_last=False)], "s-1@x", 0)
    one.append([piece(saving(2, version("a", 2)), is_last=False)], "s-1@y", 0)
    one.append([piece(saving(2, version("b", 2)), 1)], "s-1@y", 1)
    one.step()
    one.step()
    assert spool.head() == 1
    carry(one)
    assert (loaded(CentralStore(memory)), spool.head()) == ({"a": b"a@0.2", "b": b"b@0.2"}, 3)


def test_a_piece_too_few_is_noticed() -> None:
    one = uploader(MemoryLog(), Memory())
    one.append([piece(saving(1, version("a", 1)), 1)], "s-1@x", 0)
    with pytest.raises(Corrupt, match="piece 1 of saving 1 of part 0 of s-1 came where 0 was due"):
        one.step()
    one = uploader(MemoryLog(), Memory())
    one.append([piece(saving(1, version("a", 1)), is_last=False), piece(saving(2, version("a", 2)), 1)], "s-1@x", 0)
    with pytest.raises(Corrupt, match="piece 1 of saving 2 of part 0 of s-1 came where 0 was due"):
        one.step()


# ── With its thread ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_carries_what_comes_and_a_later_run_what_was_left(tmp_path: Path) -> None:
    spool, memory = EmbeddedLog(tmp_path / "spool.db"), Memory()
    append_all(uploader(spool, memory))
    one = uploader(spool, memory)
    one.start()
    until(lambda: one.is_idle, "what was left to be carried")
    one.append([piece(saving(4, version("e", 4), reached=9))], "s-1@x", 99)
    until(lambda: one.reached("s", "s-1", 0) == 9, "what came to be carried")
    one.stop()
    assert loaded(CentralStore(memory)) == {**NEWEST, "e": b"e@0.4"}
    assert (one.error, one.away) == (None, "")


class Closed(Memory):
    """Objects that nobody can write until they are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.tries = 0

    def put(self, name: str, blob: bytes) -> None:
        self.tries += 1
        if not self.is_open.is_set():
            raise Unavailable("not now")
        super().put(name, blob)


def test_appending_never_waits_for_a_store_that_is_away() -> None:
    objects = Closed()
    one = uploader(MemoryLog(), objects)
    one.start()
    append_all(one)
    until(lambda: objects.tries > 1, "a second try")
    assert (one.away, one.error, one.is_idle) == ("not now", None, False)
    objects.is_open.set()
    until(lambda: one.is_idle, "everything to be carried")
    one.stop()
    assert loaded(CentralStore(objects)) == NEWEST


def test_what_cannot_be_repaired_by_waiting_ends_the_thread_and_is_told() -> None:
    memory = Memory()
    CentralStore(memory).write("s", saving(1, version("other", 1)))
    one = uploader(MemoryLog(), memory)
    one.start()
    append_all(one)
    until(lambda: one.error is not None, "the error to be told")
    assert isinstance(one.error, Conflict)
    one.stop()


def test_a_spool_that_is_away_for_one_append_takes_the_same_batch_again() -> None:
    spool = FailingLog(MemoryLog(), Fuse(2, after=True, error=lambda: Unavailable("full")))
    memory = Memory()
    one = uploader(spool, memory)
    with pytest.raises(Unavailable):
        append_all(one)
    append_all(one)
    carry(one)
    assert loaded(CentralStore(memory)) == NEWEST


def test_from_the_spool_to_a_checkpoint_at_every_kind_of_place(place: Place, tmp_path: Path) -> None:
    store = CentralStore(place)
    one = Uploader("edge-1", EmbeddedLog(tmp_path / "spool.db"), store)
    keeper = Keeper(store, lambda: {"s": {"s-1": 2}}, lambda: 1, Retention(checkpoints=1), every=0.05, slack=0)
    append_all(one)
    one.start()
    until(lambda: one.is_idle, "everything to be carried")
    keeper.start()
    until(lambda: keeper.covered("s") == 5, "the checkpoint")
    keeper.stop()
    one.stop()
    assert (loaded(store), loaded(store, 1), place.names("s/seals")) == (NEWEST, NEWEST, [])
