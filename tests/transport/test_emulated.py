"""Emulated links: delay, rate, loss and cuts, in a simulated time."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.transport.places import Places, blobs, fill
from whimbrel.core.link import Link
from whimbrel.log import EmbeddedLog, Lane, Log, MemoryLog
from whimbrel.transport.connection import local
from whimbrel.transport.emulated import EmulatedLink

DAY = 86_400


def emulated(places: Places, link: str) -> EmulatedLink:
    """A link from edge-1 to cloud, in the time of the places."""
    return EmulatedLink("edge-1->cloud", Link.parse(link), local(places.receiver(), "edge-1"), lambda: places.now_us)


@pytest.mark.parametrize(
    ("spooled", "every_s", "size"),
    [(lambda path: EmbeddedLog(path), 10, 2000), (lambda path: MemoryLog(), 1, 200)],
    ids=["embedded, an entry every 10 s", "memory, an entry every second"],
)
def test_a_day_of_spool_drains_in_order_in_bounded_memory(
    spooled: Callable[[Path], Log], every_s: int, size: int, tmp_path: Path
) -> None:
    """An edge that was cut off for a day: 86,400 s of entries, with a simulated clock and an emulated link."""
    log, number = spooled(tmp_path / "spool"), DAY // every_s
    places = Places(make=lambda name: log if name == "spool" else Digest())  # type: ignore[arg-type, return-value]
    link = emulated(places, "delay=20ms,rate=100mbit,loss=0.1%")
    link.cut(True)
    remote, sender = places.remote(), places.sender(link.connect)
    for counter in range(number):
        remote.append(counter.to_bytes(4, "big") * (size // 4), count=1, writer="w", counter=counter)
        places.now_us += every_s * 1_000_000
        if counter % 1000 == 0:
            sender.step(places.now_us)
    held_up = sender.held_up()
    assert held_up is not None
    assert held_up.for_s > 70_000
    assert sender.spool.waiting > number * size
    link.cut(False)
    tracemalloc.start()
    places.drain(sender, most=100_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    inbox: Any = places.logs["inbox"]
    assert inbox.seen == number, "in order, exactly once"
    assert peak < number * size, "less than the spool"
    log.close()


class Digest:
    """A log of one writer that keeps nothing but its counter, and wants the next number each time."""

    def __init__(self) -> None:
        self.seen = 0

    def append(self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane, replays: bool) -> int | None:
        if counter < self.seen:
            return None
        assert counter == self.seen
        assert blob[:4] == blob[-4:] == counter.to_bytes(4, "big")
        self.seen += 1
        return counter


def test_over_an_emulated_link_with_cuts_everything_arrives_once_and_in_order() -> None:
    places = Places()
    expected = fill(places, 60)
    link = emulated(places, "delay=20ms,jitter=5ms,rate=1mbit,loss=20%")
    sender = places.sender(link.connect, batch=200, window=400)
    cuts = 0
    for step in range(20_000):
        if sender.spool.is_empty:
            break
        if step % 7 == 6:
            link.cut(not link.is_cut)
            cuts += 1
        due_us = sender.step(places.now_us)
        places.now_us = max(places.now_us + 1000, due_us or 0)
    assert sender.spool.is_empty
    assert cuts > 4
    assert blobs(places.logs["inbox"]) == expected
    assert link.sent > sum(map(len, expected)), "with what was lost"


def test_a_link_of_40_ms_is_not_idle_between_batches() -> None:
    """A window of several batches: the time is that of the bytes and one round trip, not a round trip a batch."""
    places = Places()
    remote, size, number = places.remote(), 20_000, 40
    for counter in range(number):
        remote.append(os.urandom(size), count=1, writer="w", counter=counter)
    link = emulated(places, "delay=20ms,rate=80mbit")
    sender = places.sender(link.connect, batch=size)
    places.drain(sender)
    on_the_line_us = number * size * 8 / 80
    assert on_the_line_us < places.now_us < on_the_line_us + 100_000 < number * 40_000
