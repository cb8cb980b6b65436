"""Whatever is written, folded, given up and repeated, in whatever order: the store answers as a dictionary would."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.app.failing import Died, Fuse
from tests.store.objects import FailingObjects, Memory
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Increment, Retention
from whimbrel.core.increments import Version
from whimbrel.core.keys import bin_of, selection_of

KEYS = ["a", "b", "c", "d"]
PARTS = [("s-1", 0), ("s-1", 1), ("s-2", 0)]
Held = dict[str, Version]

versions = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 2), st.integers(0, 5)), max_size=4)


class Model(RuleBasedStateMachine):
    """The store beside what it must be: the newest version of each key, and a copy of that for each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.newest: Held = {}
        self.reached: dict[tuple[str, int], int] = {}
        self.fresh: set[tuple[str, int]] = set()
        self.checkpoints: dict[int, tuple[Held, int]] = {}
        self.increments: list[Increment] = []
        self.last = 0

    def store(self, dies_at: int | None = None) -> CentralStore:
        return CentralStore(FailingObjects(self.memory, Fuse(dies_at)))

    def repeated(self, dies_at: int, deed: Any) -> Any:
        """Do it, dying in the middle perhaps, and if so do it once more."""
        try:
            return deed(self.store(dies_at))
        except Died:
            return deed(self.store())

    @rule(part=st.sampled_from(PARTS), given=versions, reached=st.integers(0, 9), dies_at=st.integers(0, 3))
    def save(self, part: tuple[str, int], given: list[tuple[str, int, int]], reached: int, dies_at: int) -> None:
        number = 1 + sum((one.instance, one.part) == part for one in self.increments)
        # What a key is at some (epoch, seq) follows from the records: two versions of one moment are the same.
        made = [Version(key, bin_of(key), epoch, seq, f"{key}{epoch}{seq}".encode()) for key, epoch, seq in given]
        increment = Increment(*part, number, 0, reached, made)
        self.increments.append(increment)
        self.repeated(dies_at, lambda store: store.write("s", increment))
        for version in made:
            held = self.newest.get(version.key)
            if held is None or (version.epoch, version.seq) > (held.epoch, held.seq):
                self.newest[version.key] = version
        self.reached[part] = reached
        self.fresh.add(part)

    @precondition(lambda self: self.increments)
    @rule(data=st.data())
    def save_once_more(self, data: st.DataObject) -> None:
        self.store().write("s", data.draw(st.sampled_from(self.increments)))

    @rule(number=st.integers(1, 3))
    def checkpoint(self, number: int) -> None:
        needed = PARTS[:number]
        parts = {instance: sum(one == instance for one, _ in needed) for instance, _ in needed}
        made = self.store().checkpoint("s", parts, 0)
        assert (made is not None) == (self.fresh >= set(needed))
        if made is not None:
            assert made > self.last
            self.last = made
            # All that the last one has belongs to it as well.
            before = max(self.checkpoints.items(), default=(0, ({}, -1)))[1][1]
            self.checkpoints[made] = dict(self.newest), max(before, min(self.reached[part] for part in needed))
            self.fresh.clear()

    @rule(keep=st.integers(1, 3), slack=st.sampled_from([0.0, 0.5, 1.0]), dies_at=st.integers(0, 12))
    def compact(self, keep: int, slack: float, dies_at: int) -> None:
        self.repeated(dies_at, lambda store: store.compact("s", Retention(checkpoints=keep), 0, slack))
        self.checkpoints = dict(list(self.checkpoints.items())[-keep:])

    @invariant()
    def the_store_is_the_model(self) -> None:
        store = self.store()
        assert {one.key: one for one in store.load("s")} == self.newest
        listed = {one.number: one for one in store.checkpoints("s")}
        assert list(listed) == list(self.checkpoints)
        for number, (held, horizon) in self.checkpoints.items():
            assert {one.key: one for one in store.load("s", at=number)} == held
            size = sum(len(version.key_state) for version in held.values())
            found = listed[number]
            assert (found.keys, found.bytes, found.horizon, found.damage) == (len(held), size, horizon, "")
        assert store.kept("s") == min((horizon for _, horizon in self.checkpoints.values()), default=-1)
        some = selection_of(keys=["a"], bins=[bin_of("b")])
        assert {one.key for one in store.load("s", some)} == {"a", "b"} & set(self.newest)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
