"""How many keys each instance has: kept up to date, and always what a count would find."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from whimbrel.core import wire
from whimbrel.core.keys import BINS, KeyMap, selection_of
from whimbrel.core.router import RouteTable
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.known_keys import KnownKeys, seen


def write(log: MemoryLog, *keys: str) -> None:
    log.append(wire.pack(list(keys)), count=len(keys), writer="gateway", counter=log.tail())


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_count_finds_whatever_came_and_moved_meanwhile(seed: int) -> None:
    chance, log, table = random.Random(seed), MemoryLog(), RouteTable("s-1")
    known, written = KnownKeys([partial(seen, log)]), 0
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                more = chance.randrange(1, 20)
                write(log, *(f"k{number}" for number in range(written, written + more)))
                written += more
            case 1:
                some = chance.sample(range(BINS), 200)
                table.owners.put(selection_of(bins=some), f"s-{chance.randrange(4)}")
            case 2:
                keys = [f"k{chance.randrange(written + 5)}" for _ in range(5)]  # some of them never came
                table.owners.put(selection_of(keys), f"s-{chance.randrange(4)}")
            case 3:
                assert len(known.now()) == written
            case _:
                expected = Counter(table.owners[f"k{number}"] for number in range(written))
                assert known.counts(table) == expected
    assert known.unknown([f"k{written}"]) == [f"k{written}"]


def test_an_answer_can_be_changed_and_other_routes_are_counted_anew() -> None:
    log, table = MemoryLog(), RouteTable("s-1")
    write(log, "a", "b")
    known = KnownKeys([partial(seen, log)])
    known.counts(table)["s-1"] = 99
    assert known.counts(table) == {"s-1": 2}
    assert known.counts(RouteTable("s-2")) == {"s-2": 2}, "with as many changes"


def test_who_looks_while_something_is_put_will_look_again() -> None:
    subject = KeyMap("a")

    class Watched(list[str]):
        seen: list[int] = []

        def __setitem__(self, place: object, value: object) -> None:
            self.seen.append(subject.changes)
            super().__setitem__(place, value)  # type: ignore[call-overload]

    subject.by_bin = Watched(subject.by_bin)
    subject.put(selection_of(bins=[1]), "b")
    assert Watched.seen
    assert subject.changes not in Watched.seen
