"""When a batch begins: the reader of an inbox, without Spark around it, and what the sink tells it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.spark.rig import Running
from whimbrel.core import wire
from whimbrel.core.record import Kind, OutboxEntry
from whimbrel.host.contract import InstanceSpec
from whimbrel.log import EmbeddedLog, Lane, MemoryLog
from whimbrel.log.carrier import number
from whimbrel.log.readers import INSTANCE, Offset
from whimbrel.spark.processor import MESSAGES, URGENT
from whimbrel.spark.query import StageQuery
from whimbrel.spark.signals import Signals
from whimbrel.spark.sink import Sink
from whimbrel.spark.source import TRIM_EVERY, InboxReader, Reading

LONG, SHORT = 60_000, 300
ALL = ReadMaxRows(100)


class Inbox:
    """A log, a reader of it, and the place up to which it has read."""

    def __init__(self, folder: Path, pace_ms: int) -> None:
        self.log, self.signals = EmbeddedLog(folder / "inbox"), Signals(str(folder))
        self.reader = InboxReader(
            Reading(str(folder / "inbox"), pa.schema([]), 4, 100, pace_ms=pace_ms, reader="r", nearby=str(folder))
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
    begun.signals.urge(True)
    begun.append(Lane.DATA)
    begun.append(Lane.CONTROL)
    assert begun.read() == {"data": 1, "control": 1}


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
@pytest.mark.parametrize(("lane", "count"), [(Lane.DATA, 1), (Lane.CONTROL, 0)], ids=["data", "a wake-up"])
def test_nothing_else_is_in_a_hurry(begun: Inbox, lane: Lane, count: int) -> None:
    began = time.monotonic()
    begun.signals.urge(True)
    begun.append(lane, count)
    assert len(begun.read()) == 1
    assert time.monotonic() - began > SHORT / 1000 * 0.8


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_when_the_hurry_is_over_the_pace_is_as_before(begun: Inbox) -> None:
    began = time.monotonic()
    begun.signals.urge(True)
    begun.signals.urge(False)
    begun.append(Lane.CONTROL)
    assert begun.read() == {"control": 1}
    assert time.monotonic() - began > SHORT / 1000 * 0.8


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
@pytest.mark.parametrize(("waiting", "rests"), [(1, True), (100, False)], ids=["little to do", "a batch full to do"])
def test_an_instance_that_cannot_hold_its_pace_rests_for_as_long_as_it_is_late(
    begun: Inbox, waiting: int, rests: bool
) -> None:
    for batch in range(2):
        time.sleep(2 * SHORT / 1000)  # the batch takes so long
        begun.append(Lane.DATA, waiting)
        ended = time.monotonic()
        assert begun.read() == {"data": 1}
        assert (time.monotonic() - ended > SHORT / 1000 * 0.8) == (rests and batch == 1), "one alone says nothing"


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_a_rest_is_short_however_long_a_batch_has_taken(begun: Inbox) -> None:
    for _ in range(2):
        time.sleep(6 * SHORT / 1000)
        begun.append(Lane.DATA)
        ended = time.monotonic()
        while not begun.read():
            pass
    assert time.monotonic() - ended < 4 * SHORT / 1000


@pytest.mark.parametrize("begun", [LONG], indirect=True)
def test_a_reader_that_is_to_halt_answers_at_once(begun: Inbox) -> None:
    begun.append(Lane.DATA)
    begun.signals.halt(True)
    assert begun.read() == {}


@pytest.mark.parametrize("begun", [SHORT], indirect=True)
def test_an_empty_inbox_is_waited_for_but_not_for_ever(begun: Inbox) -> None:
    assert begun.read() == {}


# ── What the reader says ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("begun", [0], indirect=True)
def test_a_position_is_committed_when_the_next_batch_is_asked_for_and_not_before(begun: Inbox) -> None:
    begun.append(Lane.CONTROL)
    assert (begun.log.committed("r"), begun.log.committed("r", Lane.CONTROL)) == (0, 0)
    begun.read()
    assert (begun.log.committed("r"), begun.log.committed("r", Lane.CONTROL)) == (1, 0)
    begun.read()
    assert (begun.log.committed("r"), begun.log.committed("r", Lane.CONTROL)) == (1, 1)


@pytest.mark.parametrize("begun", [0], indirect=True)
def test_a_locked_inbox_holds_no_batch_up_and_the_position_is_committed_later(begun: Inbox) -> None:
    for _ in range(2 * TRIM_EVERY):
        begun.append(Lane.DATA)
    begun.read()
    other = sqlite3.connect(begun.log.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asked = time.monotonic()
    begun.read()
    assert time.monotonic() - asked < 5, "as long as an append would wait"
    assert (begun.log.committed("r"), begun.log.head()) == (1, 0)
    other.close()
    begun.read()
    assert (begun.log.committed("r"), begun.log.head()) == (begun.log.tail(), begun.log.tail())


def test_a_reader_without_a_name_commits_nothing_and_trims_all_the_same(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "inbox")
    for counter in range(TRIM_EVERY):
        log.append(b"entry", count=1, writer="w", counter=counter)
    reader = InboxReader(Reading(str(log.path), pa.schema([]), 4, 100))
    reader.latestOffset(reader.latestOffset(reader.initialOffset(), ALL), ALL)
    assert (log.readers(), log.head()) == ({}, TRIM_EVERY)


@pytest.mark.parametrize(
    ("commits", "expected"),
    [([0, 1], (7, 2)), ([0], (4, 1)), ([], (1, 0))],
    ids=["all done", "one undone", "none done"],
)
def test_a_start_resets_the_position_to_where_its_checkpoint_stands(
    tmp_path: Path, commits: list[int], expected: tuple[int, int]
) -> None:
    """Above it is what a log has kept in a power failure that took the checkpoint's last commit."""
    inbox, outbox, checkpoint = EmbeddedLog(tmp_path / "inbox"), EmbeddedLog(tmp_path / "outbox"), tmp_path / "saved"
    for counter in range(8):
        for lane in Lane:
            inbox.append(b"entry", count=1, writer="w", counter=counter, lane=lane)
    inbox.trim(1)
    inbox.commit(INSTANCE, {Lane.DATA: 8, Lane.CONTROL: 8})
    for kind in ("offsets", "commits"):
        (checkpoint / kind).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id": "x"}')
    for batch, offset in enumerate(['{"data": 4, "control": 1}', '{"data": 7, "control": 2}']):
        (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{offset}")
        outbox.append(wire.pack(OutboxEntry([])), count=0, writer="a@x", counter=number(batch))
    for batch in commits:
        (checkpoint / "commits" / str(batch)).touch()
    spec = InstanceSpec("a", "stage", Running(), pa.schema([]))
    no_spark: Any = object()
    query = StageQuery(
        no_spark, spec, inbox=inbox.path, outbox=outbox, inbox_of=lambda name: inbox, checkpoint=checkpoint
    )
    with pytest.raises(AttributeError):  # it comes as far as Spark
        query.start()
    assert (inbox.committed(INSTANCE), inbox.committed(INSTANCE, Lane.CONTROL)) == expected
    assert not query.is_drained


# ── What the sink tells ──────────────────────────────────────────────────────────────────────────────────────────────


def batch(*rows: tuple[int, Kind | None]) -> Any:
    """A micro-batch of rows, each a part and what it messages; None: it only hurries."""
    same = {"_to": "a", "_count": 0, "_file": ""}
    made = [
        {"_part": part, "_kind": MESSAGES, "_body": wire.encode([(kind, 0, b"")]), **same}
        if kind is not None
        else {"_part": part, "_kind": URGENT, "_body": b"", **same}
        for part, kind in rows
    ]
    return made


def test_an_instance_hurries_as_long_as_one_of_its_parts_does() -> None:
    told: list[bool] = []
    inbox = MemoryLog()
    sink = Sink(lambda: "a@1", MemoryLog(), lambda name: inbox, urge=told.append, rows_of=list)
    batches: list[list[tuple[int, Kind | None]]] = [
        [(0, Kind.WAKE)],
        [(0, None), (1, None)],
        [(0, Kind.FETCH)],
        [],
        [(1, Kind.FETCH), (1, None)],
        [(1, Kind.FETCH)],
    ]
    seen = []
    for batch_id, rows in enumerate(batches):
        sink.append(batch(*rows), batch_id)
        seen.append(list(told))
    assert seen == [[], [True], [True], [True], [True], [True, False]]


def test_nobody_waits_for_a_nudge() -> None:
    inbox = MemoryLog()
    sink = Sink(lambda: "a@1", MemoryLog(), lambda name: inbox, rows_of=list)
    sink.append(batch((0, Kind.WAKE), (1, Kind.WAKE)), 0)
    assert (inbox.tail(Lane.CONTROL), inbox.backlog(0, Lane.CONTROL)) == (1, 0)
    sink.append(batch((0, Kind.WAKE), (1, Kind.FETCH)), 1)
    assert (inbox.tail(Lane.CONTROL), inbox.backlog(0, Lane.CONTROL)) == (2, 1)
