"""The ingress log as its one writer sees it: one transaction an append, and a `seq` that cannot belong elsewhere; and
no entry without a bound."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.app.failing import Died, FailingLog, Fuse
from tests.app.waiting import until
from whimbrel.core.errors import Bug, Corrupt
from whimbrel.core.record import Record
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.ingress import IngressWriter, stored
from whimbrel.gateway.intake import Intake
from whimbrel.gateway.sources import Items
from whimbrel.log import MemoryLog, codec

SCHEMA = pa.schema([("value", pa.int64())])


class Asked(MemoryLog):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            self.asked.append(name)
        return found


def entry(seq: int, rows: int = 2) -> bytes:
    records = [Record(0, 0, 1, "k", seq + row, 0, "gateway", 0, 0, (row,)) for row in range(rows)]
    return codec.encode(records, codec.entry_schema(SCHEMA))


def made(ingress: MemoryLog) -> Gateway:
    gateway = Gateway(
        Router("gateway", RouteTable("s-1")),
        ingress,
        MemoryLog(),
        lambda _: MemoryLog(),
        codec.ArrowCodec(SCHEMA),
        lambda: 1,
    )
    gateway.recover(None)
    return gateway


def test_records_are_taken_in_by_one_operation_of_the_ingress_log() -> None:
    log = Asked()
    gateway = made(log)
    gateway.ingest([("k", (0,), None)], "source", 0)
    log.asked.clear()
    for number in range(1, 4):
        assert gateway.ingest([("k", (number,), None), ("j", (number,), None)], "source", number)
        assert not gateway.ingest([("k", (number,), None)], "source", number)
    assert log.asked == ["append"] * 3
    assert [record.seq for each in log.read(1) for record in stored(each.position, codec.records(each))] == [
        position * codec.ROWS + row for position in (1, 2, 3) for row in (0, 1)
    ]


def test_a_writer_goes_on_where_the_log_ends_and_notices_another_one() -> None:
    log = MemoryLog()
    log.append(entry(0), count=2, writer="source", counter=4)
    one, other = (IngressWriter("gateway", log, codec.ArrowCodec(SCHEMA)) for _ in range(2))
    assert (one.seq, one.counter("source")) == (codec.ROWS, 4)
    assert one.append(entry(one.seq), 2, "source", 5) == 1
    assert (one.seq, one.counter("source")) == (2 * codec.ROWS, 5)
    with pytest.raises(Bug, match="expected position 1 of its ingress log and got 2"):
        other.append(entry(other.seq), 2, "source", 6)
    other.look()
    assert (other.seq, other.counter("source")) == (3 * codec.ROWS, 6)


def test_an_entry_whose_seq_belongs_to_another_position_is_corrupt() -> None:
    log = MemoryLog()
    for counter, seq in enumerate((0, 5 * codec.ROWS)):
        log.append(entry(seq), count=2, writer="source", counter=counter)
    good, bad = log.read(0)
    assert [record.seq for record in stored(good.position, codec.records(good))] == [0, 1]
    with pytest.raises(Corrupt, match="position 1 begins with seq 5242880"):
        stored(bad.position, codec.records(bad))
    with pytest.raises(Corrupt):
        made(log)


# ── Entries of bounded size ──────────────────────────────────────────────────────────────────────────────────────────

BOUND = 4_000
SIZES = [10, 3_000, 20, 30, 9_000, 1_500, 1_500, 1_500, 40, 50, 60, 70]
EVENTS = [(f"k{place % 3}", ("x" * size,), None) for place, size in enumerate(SIZES)]
TEXTS = pa.schema([("text", pa.string())])


class World:
    """A gateway over logs that may fail; `again` is its next life."""

    def __init__(self, fuse: Fuse, before: World | None = None) -> None:
        self.ingress: MemoryLog = before.ingress if before else MemoryLog()
        self.inbox: MemoryLog = before.inbox if before else MemoryLog()
        self.known: MemoryLog = before.known if before else MemoryLog()
        ingress, inbox, known = (FailingLog(log, fuse) for log in (self.ingress, self.inbox, self.known))
        router = Router("gateway", RouteTable("s-1"))
        self.gateway = Gateway(router, ingress, known, lambda _: inbox, codec.ArrowCodec(TEXTS), lambda: 1)
        self.gateway.recover(None)

    def ingest(self, number: int) -> bool:
        """Take all events in as the hand-on of a stage does."""
        return self.gateway.ingest(EVENTS, "w", number * 100 + 99, lambda place: number * 100 + place)

    def bodies(self, log: MemoryLog) -> list[int]:
        return [len(record.body[0]) for entry in log.read(0) for record in codec.records(entry)]

    def sizes(self, log: MemoryLog) -> list[tuple[int, int]]:
        return [(entry.records, len(entry.blob)) for entry in log.read(0)]


@pytest.fixture
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.gateway.ingress.MOST_BYTES", BOUND)


@pytest.mark.usefixtures("_bounded")
def test_what_comes_in_at_once_becomes_entries_of_bounded_size_each_record_once() -> None:
    """Whatever append fails, before it has happened or after, whether the process lives on or not."""
    whole = World(Fuse())
    assert whole.ingest(0)
    assert (whole.bodies(whole.ingress), whole.bodies(whole.inbox)) == (SIZES, SIZES)
    assert all(records == 1 or size <= BOUND for records, size in whole.sizes(whole.ingress) + whole.sizes(whole.inbox))
    assert whole.sizes(whole.ingress) == whole.sizes(whole.inbox), "the same bytes go on"
    assert not whole.ingest(0)
    appends = sum(log.tail() for log in (whole.ingress, whole.inbox, whole.known))
    for at in range(appends):
        for after in (False, True):
            for dies in (False, True):
                fuse = Fuse(at, after=after)
                world = World(fuse)
                with pytest.raises(Died):
                    world.ingest(0)
                if dies:
                    world = World(Fuse(), world)
                world.ingest(0)
                assert not world.ingest(0)
                assert (world.bodies(world.ingress), world.bodies(world.inbox)) == (SIZES, SIZES), (at, after, dies)
                assert world.gateway.sent == len(SIZES)
                assert world.ingest(1)
                assert world.bodies(world.inbox) == [*SIZES, *SIZES]


@pytest.mark.usefixtures("_bounded")
def test_without_numbers_it_is_one_entry_and_the_inbox_gets_several() -> None:
    world = World(Fuse())
    world.gateway.ingest(EVENTS, "w", 0)
    assert world.ingress.tail() == 1
    assert all(records == 1 or size <= BOUND for records, size in world.sizes(world.inbox))
    before = world.sizes(world.inbox)
    assert world.bodies(world.inbox) == SIZES
    World(Fuse(), world)
    assert world.sizes(world.inbox) == before, "a replay cuts at the same places"


@pytest.mark.usefixtures("_bounded")
def test_large_rows_are_fed_in_entries_that_are_numbered_by_their_last_rows() -> None:
    """Bad rows among them, and rows that were set aside in an earlier life."""
    rows: list[Any] = [{"key": "k", "text": "x" * size} if size != 40 else "bad" for size in SIZES]
    good = [size for size in SIZES if size != 40]
    schema = pa.schema([("key", pa.string()), ("text", pa.string())])

    def live(at: int | None, logs: list[MemoryLog]) -> Exception | None:
        ingress, inbox, known, dead = (FailingLog(log, fuse) for fuse in [Fuse(at)] for log in logs)
        gateway = Gateway(
            Router("gateway", RouteTable("s-1")), ingress, known, lambda _: inbox, codec.ArrowCodec(schema), lambda: 1
        )
        gateway.recover(None)
        feed = Feed(Items(rows, schema, None), Intake(schema, "key"), gateway, DeadLetters(dead), lambda: False)
        feed.start()
        until(lambda: feed.ended.is_set() or feed.error, "it ends or fails")
        feed.stop()
        return feed.error

    for at in range(12):
        logs = [MemoryLog() for _ in range(4)]
        assert isinstance(live(at, logs), Died)
        assert live(None, logs) is None
        for log in logs[:2]:
            found = [len(record.body[1]) for entry in log.read(0) for record in codec.records(entry)]
            assert found == good, at
        assert (logs[0].counter("source"), logs[3].tail()) == (len(rows) - 1, 1)
        assert all(entry.records == 1 or len(entry.blob) <= BOUND for entry in logs[0].read(0))
