"""Instances come and go as one decision: whenever everything dies, there are the old ones afterwards, or the new.

No Spark: sites only note who runs, and an order is one line in the journal, as the orchestrator writes it.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Refused
from whimbrel.orchestrator.instances import Instances
from whimbrel.orchestrator.journal import Journal


class Dead(BaseException):
    """Killed: from here on nothing is written any more."""


class House:
    """What an application has that instances need. Dies instead of writing, when its time has come."""

    def __init__(self, folder: Path, life: int = 10**9) -> None:
        self.life, self.running = life, set[str]()
        self.placed: list[set[str]] = []
        self._journal = Journal(folder / "journal.db")
        self.load = self._journal.load
        me: Any = self
        self.instances = Instances("s", me, {"cloud": me, "edge": me}, self.engaged, self.place)
        self.running |= self.instances.sites.keys()

    def save(self, name: str, blob: bytes) -> None:
        self.life -= 1
        if self.life < 0:
            raise Dead
        self._journal.save(name, blob)

    def place(self) -> None:
        self.placed.append(set(self.instances.sites))

    def start(self, name: str, *, wait: bool) -> None:
        self.running.add(name)

    def stop(self, name: str) -> None:
        self.running.discard(name)

    def moves(self) -> list[tuple[str, str]]:
        """What was ordered and is not over."""
        return wire.unpack(self.load("moves") or wire.pack([]), list[tuple[str, str]])

    def owning(self) -> set[str]:
        return wire.unpack(self.load("owning") or wire.pack({"s-1"}), set[str])

    def engaged(self) -> tuple[set[str], set[str]]:
        return {end for move in self.moves() for end in move}, self.owning()

    def scale(self, to: int) -> None:
        """From one instance to two, or from two to one."""
        with self.instances.staying("cloud", dict.fromkeys(self.instances.sites, 1), to) as there:
            first, *fresh = there
            others = [name for name in self.instances.at("cloud") if name not in there]
            move = [(first, name) for name in fresh] + [(name, first) for name in others]
            self.save("moves", wire.pack(move))

    def ask(self, to: int, counts: dict[str, int] | None = None) -> list[str]:
        """Who would stay, if the order were taken."""
        there: list[str] = []
        with suppress(Refused), self.instances.staying("cloud", defaultdict(int, counts or {}), to) as staying:
            there += staying
            raise Refused("only asking")
        return there

    def finish(self) -> None:
        """The moves come to their end, and whoever can leave leaves."""
        for source, destination in self.moves():
            owning = {*self.owning(), destination} - ({source} if source != "s-1" else set())
            self._journal.save("owning", wire.pack(owning))
            self._journal.save("moves", wire.pack([]))
        self.instances.see_off(*self.instances.idle())

    def now(self) -> set[str]:
        """Who is in the cloud."""
        here = set(self.instances.at("cloud"))
        assert here <= self.running
        assert not self.placed or self.placed[-1] == self.instances.sites.keys(), "everybody hears of it"
        return here


def test_one_becomes_two_and_one_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    assert house.instances.sites == {"s-1": "cloud", "s-2": "edge"}
    house.scale(2)
    house.finish()
    assert house.now() == {"s-1", "s-3"}
    house.scale(1)
    assert house.now() == {"s-1", "s-3"}, "not before its keys have left"
    house.finish()
    assert house.now() == house.running - {"s-2"} == {"s-1"}
    house.scale(2)
    assert house.now() == {"s-1", "s-4"}, "a name is given once"
    assert House(tmp_path).instances.past == ["s-3"]


@pytest.mark.parametrize("to", [2, 1])
def test_whenever_everything_dies_there_are_the_old_ones_or_the_new(tmp_path: Path, to: int) -> None:
    for life in count(1):
        folder = tmp_path / str(life)
        house = House(folder)
        if to == 1:
            house.scale(2)
            house.finish()
        old = house.now()
        house.life = life - 1
        ended = True
        try:
            house.scale(to)
            house.finish()
        except Dead:
            ended = False
        ordered = bool(house.moves()) or ended or house.owning() != ({"s-1", "s-3"} if to == 1 else {"s-1"})
        again = House(folder)
        again.finish()
        assert again.instances.leaving == []
        assert len(again.now()) == (to if ordered else len(old))
        assert again.owning() == again.now()
        assert House(folder).now() == again.now()
        if ended:
            break
    assert life > 3, "there were several moments to die at"


@pytest.mark.parametrize("to", [2, 1])
def test_an_order_that_is_not_taken_changes_nothing(tmp_path: Path, to: int) -> None:
    house = House(tmp_path)
    if to == 1:
        house.scale(2)
        house.finish()
    before = house.now()

    house.ask(to)
    house.finish()
    assert house.now() == before
    assert house.instances.leaving == []
    assert house.running == {*before, "s-2"}


def test_the_ones_with_the_fewest_keys_go_and_of_two_alike_the_newest(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.scale(4)
    assert house.ask(2, {"s-1": 1, "s-3": 2, "s-4": 2, "s-5": 2}) == ["s-3", "s-4"]
    assert house.ask(2, {}) == ["s-1", "s-3"]
