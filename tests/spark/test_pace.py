"""When a batch begins: the reader of an inbox, without Spark around it, and what the sink tells it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from whimbrel.core import wire
from whimbrel.core.record import Kind
from whimbrel.log import EmbeddedLog, Lane, MemoryLog
from whimbrel.log.reading import Offset, halt, hurry
from whimbrel.spark.processor import HURRY, POSTS
from whimbrel.spark.sink import Sink
from whimbrel.spark.source import InboxReader, Reading

LONG, SHORT = 60_000, 300
ALL = ReadMaxRows(100)


class Inbox:
    """A log, a reader of it, and the place up to which it has read."""

    def __init__(self, folder: Path, pace_ms: int) -> None:
        self.log, self.folder = EmbeddedLog(folder / "inbox"), str(folder)
        self.reader = InboxReader(
            Reading(str(folder / "inbox"), pa.schema([]), 4, 100, pace_ms=pace_ms, folder=self.folder)
        )
        self.place: Offset = self.reader.initialOffset()

    def append(self, lane: Lane, count: int = 1) -> None:
        self.log.append(b"entry", count=count, writer="w", counter=self.log.counter("w", lane) + 1, lane=lane)

    def read(self) -> dict[str, int]:
        """What the next batch brings, entries by lane."""
        before, self.place = self.place, self.reader.latestOffset(self.place, ALL)
        return {lane: self.place[lane] - before[lane] for lane in before if self.place[lane] != before[lane]}


@pytest.fixture
def begun(tmp_path: Path, request: pytest.FixtureRequest) -> Inbox:
    """An inbox of which a batch has just begun."""
    inbox = Inbox(tmp_path, request.param)
    inbox.append(Lane.DATA)
    assert inbox.read() == {"data": 1}, "the first batch waits for nothing"
    return inbox


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_a_batch_waits_for_its_time_and_takes_what_has_come_meanwhile(begun: Inbox) -> None:
    began = time.monotonic()
    begun.append(Lane.DATA)
    begun.append(Lane.CONTROL)
    assert begun.read() == {"data": 1, "control": 1}
    assert time.monotonic() - began > SHORT / 1000 * 0.8


@pytest.mark.parametrize("begun", [LONG], indirect=True)
def test_what_keys_stand_still_for_begins_a_batch_at_once(begun: Inbox) -> None:
    hurry(begun.folder, True)
    begun.append(Lane.DATA)
    begun.append(Lane.CONTROL)
    assert begun.read() == {"data": 1, "control": 1}


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
@pytest.mark.parametrize(("lane", "count"), [(Lane.DATA, 1), (Lane.CONTROL, 0)], ids=["data", "a nudge"])
def test_nothing_else_is_in_a_hurry(begun: Inbox, lane: Lane, count: int) -> None:
    began = time.monotonic()
    hurry(begun.folder, True)
    begun.append(lane, count)
    assert len(begun.read()) == 1
    assert time.monotonic() - began > SHORT / 1000 * 0.8


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_when_the_hurry_is_over_the_pace_is_as_before(begun: Inbox) -> None:
    began = time.monotonic()
    hurry(begun.folder, True)
    hurry(begun.folder, False)
    begun.append(Lane.CONTROL)
    assert begun.read() == {"control": 1}
    assert time.monotonic() - began > SHORT / 1000 * 0.8


@pytest.mark.parametrize("begun", [LONG], indirect=True)
def test_a_reader_that_is_to_halt_answers_at_once(begun: Inbox) -> None:
    begun.append(Lane.DATA)
    halt(begun.folder)
    assert begun.read() == {}


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_an_empty_inbox_is_waited_for_but_not_for_ever(begun: Inbox) -> None:
    assert begun.read() == {}


# ── What the sink tells ──────────────────────────────────────────────────────────────────────────────────────────────


def batch(*rows: tuple[int, Kind | None]) -> Any:
    """A micro-batch of rows, each a part and what it posts; None: it only hurries."""
    same = {"_to": "a", "_count": 0, "_file": ""}
    made = [
        {"_part": part, "_kind": POSTS, "_body": wire.encode([(kind, 0, b"")]), **same}
        if kind is not None
        else {"_part": part, "_kind": HURRY, "_body": b"", **same}
        for part, kind in rows
    ]
    return SimpleNamespace(toArrow=lambda: pa.Table.from_pylist(made))


def test_an_instance_hurries_as_long_as_one_of_its_parts_does() -> None:
    told: list[bool] = []
    inbox = MemoryLog()
    sink = Sink(lambda: "a@1", MemoryLog(), lambda name: inbox, hurry=told.append)
    batches: list[list[tuple[int, Kind | None]]] = [
        [(0, Kind.NUDGE)],
        [(0, None), (1, None)],
        [(0, Kind.FETCH)],
        [],
        [(1, Kind.FETCH), (1, None)],
        [(1, Kind.FETCH)],
    ]
    seen = []
    for number, rows in enumerate(batches):
        sink.append(batch(*rows), number)
        seen.append(list(told))
    assert seen == [[], [True], [True], [True], [True], [True, False]]


def test_nobody_waits_for_a_nudge() -> None:
    inbox = MemoryLog()
    sink = Sink(lambda: "a@1", MemoryLog(), lambda name: inbox)
    sink.append(batch((0, Kind.NUDGE), (1, Kind.NUDGE)), 0)
    assert (inbox.tail(Lane.CONTROL), inbox.backlog(0, Lane.CONTROL)) == (1, 0)
    sink.append(batch((0, Kind.NUDGE), (1, Kind.FETCH)), 1)
    assert (inbox.tail(Lane.CONTROL), inbox.backlog(0, Lane.CONTROL)) == (2, 1)
