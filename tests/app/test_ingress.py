"""The ingress log as its one writer sees it: one transaction an append, and a `seq` that cannot belong elsewhere."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from whimbrel.core.errors import Bug, Corrupt
from whimbrel.core.record import Record
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.ingress import IngressWriter, stored
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
        Router("gateway", RouteTable("s-1")), ingress, MemoryLog(), lambda _: MemoryLog(), SCHEMA, lambda: 1
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
    one, other = IngressWriter("gateway", log), IngressWriter("gateway", log)
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
