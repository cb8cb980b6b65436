"""The uploader: what counts of an instance's increments comes to the store once and in order, whoever dies or is
away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.failing import Died, Fuse
from tests.store.objects import FailingObjects, Memory
from whimbrel.checkpoints import uploader
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.keeper import Keeper
from whimbrel.checkpoints.place import Objects, Place
from whimbrel.checkpoints.uploader import Uploader
from whimbrel.checkpoints.version import Increment, Retention
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Unavailable
from whimbrel.core.increments import Version, VersionChunk
from whimbrel.core.keys import EVERY_BIN, bin_of
from whimbrel.core.record import Checkpointed, KeyState, Kind
from whimbrel.log import EmbeddedLog, Lane, Log, MemoryLog
from whimbrel.log.codec import Content
from whimbrel.log.spool import IncrementSpool


def state(number: int, key: str, seq: int, text: str, piece: int = 0, pieces: int = 1) -> Content:
    """Keys a, b, c lie in part 1; d, e, f in part 0."""
    bag = KeyState(seq, "r", [], text.encode())
    chunk = VersionChunk.of(("r", number), [Version.of(key, 0, bag)], piece, pieces)
    return Kind.PARCEL, bin_of(key), wire.pack(chunk)


def saved(number: int, part: int) -> Checkpointed:
    return Checkpointed("s-1", part, 2, "r", number, number)


def end(number: int, part: int) -> Content:
    return Kind.CHECKPOINTED, EVERY_BIN, wire.pack(saved(number, part))


BATCHES = [
    [state(10, "d", 1, "d1"), state(10, "a", 1, "a1"), end(10, 0), end(10, 1)],
    [state(20, "d", 2, "d2, ", 0, 2), state(20, "b", 2, "b2"), end(20, 1)],
    [state(20, "d", 2, "and more", 1, 2)],
    [state(20, "e", 2, "e2"), end(20, 0)],
    [state(40, "a", 4, "a4"), end(30, 0), end(40, 0), end(30, 1), end(40, 1)],  # asked twice, and answered at once
    [state(50, "f", 5, "f5"), end(50, 0), end(50, 1)],
]
CONFIRMED = [(10, 0), (10, 1), (20, 1), (20, 0), (30, 0), (40, 0), (30, 1), (40, 1), (50, 0), (50, 1)]
COMMITTED = [saved(number, part) for number, part in CONFIRMED if number != 30]
NEWEST = {"a": "a4", "b": "b2", "d": "d2, and more", "e": "e2", "f": "f5"}


def send_all(log: Log, batches: list[list[Content]] = BATCHES) -> None:
    for counter, messages in enumerate(batches):
        IncrementSpool(log).append(wire.pack(messages), count=len(messages), writer="s-1@x", counter=counter)


def confirm(log: Log, *increments: tuple[int, int]) -> None:
    for number, part in increments:
        IncrementSpool(log).confirm(saved(number, part), number)


def filled() -> MemoryLog:
    log = MemoryLog()
    send_all(log)
    confirm(log, *CONFIRMED)
    return log


def born(log: Log, objects: Objects, committed: list[Checkpointed] | None = None) -> Uploader:
    committed = [] if committed is None else committed
    return Uploader("s", "s-1", 2, IncrementSpool(log), CentralStore(objects), committed.append)


def states(objects: Objects, at: int | None = None) -> dict[str, str]:
    """All that the store has: state by key, each key once."""
    versions = list(CentralStore(objects).load("s", at=at))
    found = {one.key: one.unpacked().state.decode() for one in versions}
    assert len(found) == len(versions)
    return found


def is_empty(log: Log) -> bool:
    return all(log.head(lane) == log.tail(lane) for lane in Lane)


def test_what_counts_comes_to_the_store_and_leaves_the_spool() -> None:
    log, memory, committed = filled(), Memory(), list[Checkpointed]()
    one = born(log, memory, committed)
    assert one.spool.under_way > 0
    one.step()
    assert (states(memory), committed) == (NEWEST, COMMITTED)
    assert (is_empty(log), one.spool.under_way) == (True, 0)
    store = CentralStore(memory)
    assert (store.checkpoint("s", {"s-1": 2}, 1), store.horizon("s")) == (1, 50)


def test_what_is_not_confirmed_does_not_exist_and_stays_in_the_spool() -> None:
    log, memory = MemoryLog(), Memory()
    send_all(log)
    confirm(log, (10, 0), (10, 1), (20, 1))
    one = born(log, memory)
    one.step()
    assert (states(memory), log.head()) == ({"a": "a1", "b": "b2", "d": "d1"}, 1)  # where increment 20 of part 0 begins
    confirm(log, (20, 0))
    one.step()
    assert (states(memory)["d"], log.head()) == ("d2, and more", 4)


def test_what_is_heard_twice_counts_once() -> None:
    log, committed = filled(), list[Checkpointed]()
    send_all(log)
    confirm(log, *CONFIRMED)
    born(log, Memory(), committed).step()
    assert committed == COMMITTED


def test_whoever_begins_again_after_any_batch_goes_on_where_the_other_was() -> None:
    log, memory, committed = MemoryLog(), Memory(), list[Checkpointed]()
    send_all(log)
    for one in CONFIRMED:
        confirm(log, one)
        born(log, memory, committed).step()
    assert (states(memory), committed) == (NEWEST, COMMITTED)


WRITES = 25


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_any_write_loses_nothing(after: bool) -> None:
    for at in range(WRITES):
        log, memory, fuse = filled(), Memory(), Fuse(at, after=after)
        try:
            born(log, FailingObjects(memory, fuse)).step()
        except Died:
            born(log, memory).step()
        assert (states(memory), is_empty(log)) == (NEWEST, True)
    assert not fuse.is_blown


class MortalLog(MemoryLog):
    """A log whose reader dies at one of its trims."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        if self.fuse.burn():
            raise self.fuse.error()
        super().trim(position, lane)


@pytest.mark.parametrize("at", [0, 1])
def test_a_death_between_the_last_manifest_and_the_end_of_a_trim_is_made_good(at: int) -> None:
    """Part 1 is committed while part 0, which began in the same batch, is not: half of what part 1 sent may be gone."""
    log, memory, committed = MortalLog(), Memory(), list[Checkpointed]()
    begun = [[state(10, "a", 1, "a1")], [state(10, "b", 1, "b1"), state(10, "d", 1, "d1"), end(10, 0), end(10, 1)]]
    send_all(log, begun)
    confirm(log, (10, 1))
    log.fuse = Fuse(at)
    with pytest.raises(Died):
        born(log, memory).step()
    log.fuse = Fuse()
    born(log, memory, committed).step()
    confirm(log, (10, 0))
    born(log, memory, committed).step()
    assert (states(memory), committed[-1]) == ({"a": "a1", "b": "b1", "d": "d1"}, saved(10, 0))


def test_a_store_that_is_away_is_tried_again_and_everything_counts_once() -> None:
    for at in range(WRITES):
        log, memory, committed = filled(), Memory(), list[Checkpointed]()
        fuse = Fuse(at, error=lambda: Unavailable("away"))
        one = born(log, FailingObjects(memory, fuse), committed)
        try:
            one.step()
        except Unavailable:
            assert one.spool.under_way > 0
            one.step()
        assert (states(memory), committed, one.spool.under_way) == (NEWEST, COMMITTED, 0)
    assert not fuse.is_blown


def test_what_another_run_has_written_is_a_conflict() -> None:
    memory = Memory()
    CentralStore(memory).write("s", Increment("s-1", 0, 10, 1, 1))
    with pytest.raises(Conflict, match="is there already and differs"):
        born(filled(), memory).step()


def test_a_saving_that_is_never_finished_is_given_up_with_the_next() -> None:
    log, memory = MemoryLog(), Memory()
    send_all(log, [[state(10, "d", 1, "d1")], [state(20, "e", 2, "e2")], [state(20, "f", 2, "f2"), end(20, 0)]])
    one = born(log, memory)
    one.step()
    assert log.head() == 1
    confirm(log, (20, 0))
    one.step()
    assert (states(memory), log.head()) == ({"e": "e2", "f": "f2"}, 3)


def test_a_saving_that_is_never_confirmed_is_given_up_when_a_later_one_is() -> None:
    log, memory = MemoryLog(), Memory()
    send_all(log, [[state(10, "d", 1, "wrong"), end(10, 0)], [state(20, "e", 2, "e2"), end(20, 0)]])
    confirm(log, (20, 0))
    born(log, memory).step()
    assert (states(memory), is_empty(log)) == ({"e": "e2"}, True)


def test_a_large_saving_is_put_in_pieces_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "PIECE", 1)
    log, memory = MemoryLog(), Memory()
    send_all(log, [[state(10, "d", 1, "d1")], [state(10, "e", 1, "e1")], [end(10, 0)]])
    one = born(log, memory)
    one.step()
    assert (len(memory.names("s/segments")), states(memory)) == (2, {})
    born(log, memory).step()
    confirm(log, (10, 0))
    one.step()
    assert (states(memory), is_empty(log)) == ({"d": "d1", "e": "e1"}, True)


def test_from_the_spool_to_a_checkpoint_at_every_kind_of_place(place: Place, tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "spool.db")
    send_all(log)
    confirm(log, *CONFIRMED)
    born(log, place).step()
    keeper = Keeper(CentralStore(place), "s", Retention(checkpoints=1), slack=0)
    keeper.step({"s-1": 2}, 7)
    assert (keeper.number, keeper.made_us, keeper.horizon) == (1, 7, 50)
    assert (states(place), states(place, 1), len(place.names("s/bases"))) == (NEWEST, NEWEST, 1)
