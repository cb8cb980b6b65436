"""Whoever writes to the store may die at any write: what is there can be read, and going on leads to the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.app.failing import Died, Fuse
from tests.store.objects import FailingObjects, Memory, increment, loaded, version
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Retention
from whimbrel.core.errors import Unavailable

KEEP = Retention(checkpoints=2)
Step = Callable[[CentralStore], object]


def rounds() -> list[Step]:
    """What writers and the keeper do, each step one that may be repeated: four rounds of two instances."""
    steps: list[Step] = []
    for n in range(1, 5):
        one = increment(n, version("a", 10 * n), version(f"b{n}", 10 * n), reached=10 * n)
        other = increment(n, version("c", 10 * n, epoch=n % 2), reached=10 * n + 1, instance="s-2")
        steps.append(partial(CentralStore.write, stage="s", increment=one))
        steps.append(partial(CentralStore.write, stage="s", increment=other))
        steps.append(partial(CentralStore.checkpoint, stage="s", parts={"s-1": 1, "s-2": 1}, at_us=n))
        steps.append(partial(CentralStore.compact, stage="s", retention=KEEP, now_us=n, slack=0))
    return steps


def states() -> list[tuple[dict[str, bytes], dict[int, dict[str, bytes]]]]:
    """What a reader may find before the first step and after each."""
    store = CentralStore(Memory())
    found = [seen(store)]
    for step in rounds():
        step(store)
        found.append(seen(store))
    return found


def seen(store: CentralStore) -> tuple[dict[str, bytes], dict[int, dict[str, bytes]]]:
    """The newest versions, and those of each checkpoint that is listed: all of them can be loaded."""
    listed = store.checkpoints("s")
    assert not [one for one in listed if one.damage]
    by_checkpoint = {one.number: loaded(store, one.number) for one in listed}
    assert [one.keys for one in listed] == [len(held) for held in by_checkpoint.values()]
    return loaded(store), by_checkpoint


STATES = states()


def writes() -> int:
    """How many writes and deletions all of it takes."""
    fuse = Fuse()
    store = CentralStore(FailingObjects(Memory(), fuse))
    for step in rounds():
        step(store)
    return fuse.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(writes()))
def test_a_death_at_any_write_leaves_a_store_that_can_be_read(at: int, after: bool) -> None:
    memory, fuse = Memory(), Fuse(at, after=after)
    store = CentralStore(FailingObjects(memory, fuse))
    for number, step in enumerate(rounds()):
        try:
            step(store)
        except Died:
            newest, by_checkpoint = seen(CentralStore(memory))
            before, then = STATES[number], STATES[number + 1]
            assert newest in (before[0], then[0])
            for checkpoint, held in by_checkpoint.items():
                assert held == {**before[1], **then[1]}[checkpoint]
            assert {*by_checkpoint} >= {*before[1]} & {*then[1]}
            store = CentralStore(FailingObjects(memory, fuse))
            step(store)
        assert seen(CentralStore(memory)) == STATES[number + 1]
    assert fuse.is_blown


def test_the_last_compaction_finds_all_that_dead_ones_left() -> None:
    """Dying at every single write once, one after the other, leaves not one object more than living through it."""
    calm, rough = Memory(), Memory()
    for step in rounds():
        step(CentralStore(calm))
        for at in range(100):
            fuse = Fuse(at)
            try:
                step(CentralStore(FailingObjects(rough, fuse)))
            except Died:
                continue
            break
    assert sorted(rough.blobs) == sorted(calm.blobs)
    assert seen(CentralStore(rough)) == seen(CentralStore(calm))


def test_a_reader_whose_objects_are_compacted_away_finds_them_in_the_fold() -> None:
    """Between two segments of one load."""
    memory = Memory()
    store = CentralStore(memory)
    for step in rounds()[:-1]:
        step(store)
    expected = loaded(store)
    versions = store.load("s")
    first = next(versions)
    store.compact("s", Retention(checkpoints=1), 9, slack=0)
    assert {one.key: one.key_state for one in [first, *versions]} == expected


class Between(Memory):
    """Objects that change between a reader's first listing and its second."""

    def __init__(self, blobs: dict[str, bytes], deed: Callable[[], None]) -> None:
        super().__init__(blobs)
        self.deeds: list[Callable[[], None]] = [lambda: None, deed]

    def names(self, folder: str) -> list[str]:
        if self.deeds:
            self.deeds.pop(0)()
        return super().names(folder)


def test_a_reader_between_whose_listings_everything_is_compacted_finds_everything() -> None:
    """It has seen the increments: what is folded after that is in a base for sure. The other way round it would see no
    base, and no increments that are in one."""
    memory = Memory()
    store = CentralStore(memory)
    for step in rounds()[:2]:
        step(store)
    expected = loaded(store)

    def compact_twice() -> None:
        for number in (2, 3):
            store.write("s", increment(number, version("a", 9 + number), reached=30))
            store.write("s", increment(number, version("z", number), reached=30, instance="s-2"))
            store.checkpoint("s", {"s-1": 1, "s-2": 1}, number)
            store.compact("s", Retention(checkpoints=1), number, slack=0)

    found = loaded(CentralStore(Between(memory.blobs, compact_twice)))
    assert {*found} >= {*expected}
    assert len(memory.names("s/bases")) == 2
    assert not [name for name in memory.names("s/manifests") if name.endswith("0001")]


def test_a_store_that_is_away_for_one_write_is_told_and_nothing_is_lost() -> None:
    memory = Memory()
    store = CentralStore(FailingObjects(memory, Fuse(1, error=lambda: Unavailable("away"))))
    with pytest.raises(Unavailable):
        store.write("s", increment(1, version("a", 1)))
    assert loaded(CentralStore(memory)) == {}
    store.write("s", increment(1, version("a", 1)))
    assert loaded(CentralStore(memory)) == {"a": b"a@0.1"}
