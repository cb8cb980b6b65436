"""The keeper: checkpoints come when their time has come, old ones go, and what is covered is known at once."""

from __future__ import annotations

from tests.app.failing import Fuse
from tests.app.waiting import until
from tests.store.objects import FailingObjects, Memory, loaded, numbers, saving, version
from whimbrel.core.errors import Unavailable
from whimbrel.store import CentralStore, Keeper, Retention
from whimbrel.store.place import Objects


class House:
    """A store with its keeper, and a clock that goes on by a second each round."""

    def __init__(self, objects: Objects | None = None) -> None:
        self.store = CentralStore(Memory() if objects is None else objects)
        self.parts: dict[str, dict[str, int]] = {"s": {"s-1": 1, "s-2": 1}}
        self.now = 0
        self.begin()

    def begin(self) -> None:
        keep = Retention(checkpoints=2)
        self.keeper = Keeper(self.store, lambda: self.parts, lambda: self.now * 1_000_000, keep, every=0.01, slack=0)

    def save(self, instance: str) -> None:
        versions = [version("a" if instance == "s-1" else "b", 10 * self.now)]
        self.store.write("s", saving(self.now, *versions, reached=10 * self.now, instance=instance))

    def round(self) -> None:
        self.now += 1
        for instance in self.parts["s"]:
            self.save(instance)


def test_a_checkpoint_a_round_two_are_kept_and_the_oldest_says_what_is_covered() -> None:
    house = House()
    house.keeper.step()
    seen = [(numbers(house.store), house.keeper.covered("s"))]
    for _ in range(4):
        house.round()
        house.keeper.step()
        house.keeper.step()
        seen.append((numbers(house.store), house.keeper.covered("s")))
    assert seen == [([], -1), ([1], 10), ([1, 2], 10), ([2, 3], 20), ([3, 4], 30)]
    assert loaded(house.store, 3) == {"a": b"a@0.30", "b": b"b@0.30"}


def test_an_instance_that_does_not_save_holds_coverage_back_until_it_owns_nothing() -> None:
    house = House()
    house.round()
    house.keeper.step()
    for _ in range(3):
        house.now += 1
        house.save("s-1")
        house.keeper.step()
    assert (numbers(house.store), house.keeper.covered("s")) == ([1], 10)
    house.parts["s"] = {"s-1": 1}
    house.keeper.step()
    assert (numbers(house.store), house.store.covered("s")) == ([1, 2], 40)


def test_a_keeper_that_begins_again_knows_what_is_covered_without_a_new_checkpoint() -> None:
    house = House()
    for _ in range(3):
        house.round()
        house.keeper.step()
    house.begin()
    assert house.keeper.covered("s") == -1
    house.keeper.step()
    assert (numbers(house.store), house.keeper.covered("s")) == ([2, 3], 20)


def test_nothing_counts_as_covered_while_checkpoints_that_need_it_are_still_there() -> None:
    """The keeper's third round fails at each of its writes in turn."""
    for at in range(20):
        memory = Memory()
        house = House(memory)
        for _ in range(2):
            house.round()
            house.keeper.step()
        house.round()
        fuse = Fuse(at, error=lambda: Unavailable("away"))
        house.keeper.store = CentralStore(FailingObjects(memory, fuse))
        try:
            house.keeper.step()
        except Unavailable:
            assert house.keeper.covered("s") <= house.store.kept("s")
            house.round()
            house.keeper.step()
        assert (len(numbers(house.store)), house.keeper.covered("s")) == (2, house.store.kept("s"))
    assert not fuse.is_blown


def test_its_thread_goes_on_after_an_error() -> None:
    house = House(FailingObjects(Memory(), Fuse(4, error=lambda: Unavailable("away"))))
    house.round()
    house.keeper.start()
    until(lambda: isinstance(house.keeper.error, Unavailable), "the store to be away")
    until(lambda: house.keeper.error is None and numbers(house.store) == [1], "the next try")
    house.keeper.stop()


def test_stages_are_apart() -> None:
    house = House()
    house.parts["t"] = {"t-1": 1}
    house.round()
    house.keeper.step()
    assert (house.keeper.covered("s"), house.keeper.covered("t")) == (10, -1)
    house.store.write("t", saving(1, version("x", 1), reached=5, instance="t-1"))
    house.keeper.step()
    assert (house.keeper.covered("s"), house.keeper.covered("t")) == (10, 5)
