"""The entrance: every row goes to the home of its key, once, in the order of the source."""

from __future__ import annotations

from typing import Any

import pytest

from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import KeyMap, selection_of
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.entrance import Door, Entrance
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.ingress import Event
from whimbrel.gateway.intake import parse_schema
from whimbrel.log.codec import ArrowCodec, records
from whimbrel.log.memory import MemoryLog

CODEC = ArrowCodec(parse_schema("sensor string, value long"))
HERE, THERE = "edge-1", "cloud"


class Died(Exception):
    """The process dies here."""


class Place:
    """A gateway with its logs; a second one over the same logs is a restart."""

    def __init__(self, name: str, now_us: int) -> None:
        self.name, self.now_us = name, now_us
        self.ingress, self.known, self.inbox = MemoryLog(), MemoryLog(), MemoryLog()
        self.start()

    def start(self) -> None:
        router = Router(f"gateway@{self.name}", RouteTable("s-1"))
        self.gateway = Gateway(
            router, self.ingress, self.known, lambda name: self.inbox, CODEC, lambda: self.now_us, wall_clock=True
        )
        self.gateway.recover(None)

    def rows(self) -> list[tuple[str, int, int]]:
        """Key, value and time of entry of all records, in the order of the inbox."""
        found = [record for entry in self.inbox.read(0) for record in records(entry)]
        return [(record.key, record.body[1], record.ingress_us) for record in found]


class Rig:
    """Two places; `a` and `b` are at home here, all other keys there."""

    def __init__(self) -> None:
        self.here, self.there = Place(HERE, 1_000), Place(THERE, 9_000)
        self.homes = KeyMap(THERE)
        self.homes.put(selection_of(["a", "b"]), HERE)
        self.saved = -1
        self.dies = False

    def save(self, writer: str, row: int) -> None:
        if self.dies:
            raise Died
        self.saved = row

    def entrance(self) -> Entrance:
        return Entrance(
            HERE,
            self.homes,
            self.here.gateway,
            lambda place: Door(self.there.gateway, CODEC),
            CODEC,
            lambda writer: self.saved,
            self.save,
        )


def events(*keys: str, start: int = 0) -> list[Event]:
    return [(key, (key, start + row), None) for row, key in enumerate(keys)]


def ingest(entrance: Entrance, *keys: str, start: int = 0) -> bool:
    given = events(*keys, start=start)
    return entrance.ingest(given, "source", start + len(keys) - 1, range(start, start + len(keys)).__getitem__)


def test_each_record_goes_to_the_home_of_its_key_with_the_time_at_which_it_entered() -> None:
    rig = Rig()
    assert ingest(rig.entrance(), "a", "x", "b", "y", "x")
    assert rig.here.rows() == [("a", 0, 1_000), ("b", 2, 1_000)]
    assert rig.there.rows() == [("x", 1, 1_000), ("y", 3, 1_000), ("x", 4, 1_000)]
    assert rig.entrance().counter("source") == 4


def test_if_all_homes_are_here_nothing_is_sent_and_nothing_is_saved() -> None:
    rig = Rig()
    rig.homes = KeyMap(HERE)
    ingest(rig.entrance(), "a", "x")
    assert (len(rig.here.rows()), rig.there.rows(), rig.saved) == (2, [], -1)
    assert rig.entrance().counter("source") == 1


def test_rows_that_come_again_in_other_batches_change_nothing() -> None:
    """A restart reads from the last position that was saved, and cuts batches elsewhere."""
    rig = Rig()
    keys = ["a", "x", "b", "y", "x", "a"]
    rig.dies = True
    with pytest.raises(Died):
        ingest(rig.entrance(), *keys[:4])
    rig.dies = False
    rig.here.start()
    again = rig.entrance()
    assert again.counter("source") == -1
    ingest(again, *keys[:1])
    ingest(again, *keys[1:], start=1)
    assert [row[:2] for row in rig.here.rows()] == [("a", 0), ("b", 2), ("a", 5)]
    assert [row[:2] for row in rig.there.rows()] == [("x", 1), ("y", 3), ("x", 4)]


def test_a_home_that_is_away_holds_its_rows_up_and_none_is_lost_or_doubled() -> None:
    rig = Rig()
    taken: list[Any] = []

    class Away(Door):
        def append(self, blob: bytes, **more: Any) -> int | None:
            if not taken:
                taken.append(blob)
                raise Unavailable("the link is cut")
            return super().append(blob, **more)

    entrance = Entrance(
        HERE,
        rig.homes,
        rig.here.gateway,
        lambda place: Away(rig.there.gateway, CODEC),
        CODEC,
        lambda writer: rig.saved,
        rig.save,
    )
    with pytest.raises(Unavailable):
        ingest(entrance, "x", "a", "y")
    assert rig.saved == -1
    ingest(entrance, "x", "a", "y")
    assert [row[:2] for row in rig.there.rows()] == [("x", 0), ("y", 2)]
    assert [row[:2] for row in rig.here.rows()] == [("a", 1)]


def test_several_entrances_feed_one_home_each_under_its_own_name() -> None:
    rig = Rig()
    door = Door(rig.there.gateway, CODEC)
    for place in (HERE, "edge-2"):
        other = Place(place, 5)
        entrance = Entrance(place, rig.homes, other.gateway, lambda _: door, CODEC, lambda _: -1, lambda *_: None)
        ingest(entrance, "x", "y")
    assert [row[:2] for row in rig.there.rows()] == [("x", 0), ("y", 1)] * 2
    assert rig.there.gateway.counter(f"source@{HERE}") == rig.there.gateway.counter("source@edge-2") == 1
