"""The keeper: checkpoints come when their time has come, old ones go, and what is covered is known at once."""

from __future__ import annotations

from tests.app.failing import Fuse
from tests.store.objects import FailingObjects, Memory, increment, loaded, numbers, version
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.keeper import Keeper
from whimbrel.checkpoints.place import Objects
from whimbrel.checkpoints.version import Retention
from whimbrel.core.errors import Unavailable


class House:
    """A store with its keeper, and a clock that goes on by a second each round."""

    def __init__(self, objects: Objects | None = None) -> None:
        self.store = CentralStore(Memory() if objects is None else objects)
        self.parts = {"s-1": 1, "s-2": 1}
        self.now = 0
        self.begin()

    def begin(self) -> None:
        self.keeper = Keeper(self.store, "s", Retention(checkpoints=2), slack=0)

    def step(self, at_most: int | None = None) -> None:
        self.keeper.step(self.parts, self.now * 1_000_000, at_most)

    def save(self, instance: str) -> None:
        versions = [version("a" if instance == "s-1" else "b", 10 * self.now)]
        self.store.write("s", increment(self.now, *versions, reached=10 * self.now, instance=instance))

    def round(self) -> None:
        self.now += 1
        for instance in self.parts:
            self.save(instance)


def test_a_checkpoint_a_round_two_are_kept_and_the_oldest_says_what_is_covered() -> None:
    house = House()
    house.step()
    seen = [(numbers(house.store), house.keeper.horizon)]
    for _ in range(4):
        house.round()
        house.step()
        house.step()
        seen.append((numbers(house.store), house.keeper.horizon))
    assert seen == [([], -1), ([1], 10), ([1, 2], 10), ([2, 3], 20), ([3, 4], 30)]
    assert loaded(house.store, 3) == {"a": b"a@0.30", "b": b"b@0.30"}


def test_an_instance_that_does_not_save_holds_coverage_back_until_it_owns_nothing() -> None:
    house = House()
    house.round()
    house.step()
    for _ in range(3):
        house.now += 1
        house.save("s-1")
        house.step()
    assert (numbers(house.store), house.keeper.horizon) == ([1], 10)
    house.parts = {"s-1": 1}
    house.step()
    assert (numbers(house.store), house.store.horizon("s")) == ([1, 2], 40)


def test_a_keeper_that_begins_again_knows_what_is_covered_without_a_new_checkpoint() -> None:
    house = House()
    for _ in range(3):
        house.round()
        house.step()
    house.begin()
    assert (house.keeper.number, house.keeper.horizon) == (0, -1)
    house.keeper.look()
    assert (house.keeper.number, house.keeper.made_us, house.keeper.horizon) == (3, 3_000_000, 20)


def test_nothing_counts_as_covered_while_checkpoints_that_need_it_are_still_there() -> None:
    """The keeper's third round fails at each of its writes in turn."""
    for at in range(20):
        memory = Memory()
        house = House(memory)
        for _ in range(2):
            house.round()
            house.step()
        house.round()
        fuse = Fuse(at, error=lambda: Unavailable("away"))
        house.keeper.store = CentralStore(FailingObjects(memory, fuse))
        try:
            house.step()
        except Unavailable:
            assert house.keeper.horizon <= house.store.kept("s")
            house.round()
            house.step()
        assert (len(numbers(house.store)), house.keeper.horizon) == (2, house.store.kept("s"))
    assert not fuse.is_blown


def test_what_is_under_way_between_owners_is_not_covered_whatever_they_have_reached() -> None:
    house = House()
    house.round()
    house.step(at_most=7)
    assert (house.keeper.horizon, house.store.horizon("s")) == (7, 7)
    house.round()
    house.step(at_most=30)
    assert house.store.horizon("s") == 20


def test_what_one_checkpoint_covers_the_next_one_covers_too_while_an_owner_still_receives_keys() -> None:
    """That owner says -1. The records before the first checkpoint may be trimmed already."""
    house = House()
    house.round()
    house.step(at_most=10)
    house.now += 1
    house.save("s-1")
    house.store.write("s", increment(2, version("b", 20), reached=-1, instance="s-2"))
    house.step(at_most=10)
    assert (numbers(house.store), house.store.horizon("s"), house.keeper.horizon) == ([1, 2], 10, 10)


def test_stages_are_apart() -> None:
    house = House()
    other = Keeper(house.store, "t")
    house.round()
    house.step()
    other.step({"t-1": 1}, 1)
    assert (house.keeper.horizon, other.horizon) == (10, -1)
    house.store.write("t", increment(1, version("x", 1), reached=5, instance="t-1"))
    other.step({"t-1": 1}, 2)
    assert (house.keeper.horizon, other.horizon, numbers(house.store)) == (10, 5, [1])
