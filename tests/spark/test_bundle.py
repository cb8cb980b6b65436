"""Records survive the way through Spark: their order, their values, and the groups they belong to."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from whimbrel.core.errors import Refused
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Kind, Record
from whimbrel.host.events import event_type_of, placed
from whimbrel.log import Entry, Lane
from whimbrel.log.codec import encode, entry_schema
from whimbrel.spark.bundle import bundle, unbundle
from whimbrel.spark.groups import group_ids
from whimbrel.spark.source import row_schema

USER = pa.schema([("value", pa.int32())])


def table(records: list[Record], position: int = 0, lane: Lane = Lane.DATA, user: pa.Schema = USER) -> pa.Table:
    entry = Entry(position, len(records), encode(records, entry_schema(user)))
    return pa.Table.from_batches([placed(entry, lane, row_schema(user))])


def data(bin: int, value: Any) -> Record:
    seq = value if type(value) is int else 0
    return Record(0, 0, bin, f"k{bin}", seq, 3, "r", 1, 2, (value,))


def marker(body: bytes) -> Record:
    return Record(0, Kind.BEGIN, EVERY_BIN, "", 9, 0, "r", 0, 0, body)


def opened(batches: list[pa.RecordBatch], groups: int) -> list[list[Record]]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [
        unbundle([(row["_order"], row["_bundle"]) for row in reversed(rows) if row["_group"] == id])[0]
        for id in group_ids(groups)
        if any(row["_group"] == id for row in rows)
    ]


@pytest.mark.parametrize("groups", [1, 3])
def test_each_group_gets_its_bins_in_order(groups: int) -> None:
    records = [data(n % 10, n) for n in range(50)]
    found = opened([bundle(table(records), groups, 0)], groups)
    assert [[r.bin % groups for r in group] for group in found] == [[g] * len(found[g]) for g in range(groups)]
    for group in found:
        assert [r.offset for r in group] == sorted(r.offset for r in group)
        assert [r.body.value for r in group] == [r.seq for r in group]
    assert sum(map(len, found)) == 50


def test_a_marker_reaches_every_group_at_its_place() -> None:
    records = [data(0, 1), data(1, 2), marker(b"m"), data(1, 3), data(0, 4)]
    found = opened([bundle(table(records), 2, 0)], 2)
    assert [[r.body.value if r.kind == Kind.DATA else r.body for r in group] for group in found] == [
        [1, b"m", 4],
        [2, b"m", 3],
    ]


def test_bundles_are_put_in_order_control_lane_first() -> None:
    batches = [
        bundle(table([data(0, 3)], position=7), 1, 1 << 32),
        bundle(table([marker(b"late")], position=9, lane=Lane.CONTROL), 1, 2 << 32),
        bundle(table([data(0, 1), data(0, 2)], position=6), 1, 3 << 32),
    ]
    (found,) = opened(batches, 1)
    assert [r.body.value if r.kind == Kind.DATA else r.body for r in found] == [b"late", 1, 2, 3]


def test_rows_made_of_one_record_stay_as_they_came() -> None:
    rows = table([data(0, 1)] * 3).set_column(9, "value", pa.array([5, 6, 7], pa.int32()))
    rows = rows.set_column(rows.schema.get_field_index("_offset"), "_offset", pa.array([4, 4, 4], pa.int64()))
    (found,) = opened([bundle(rows[:2], 1, 0), bundle(rows[2:], 1, 1)], 1)
    assert [r.body.value for r in found] == [5, 6, 7]


EVERY_TYPE: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), True),
    "whole": (pa.int64(), 2**62 + 1),
    "real": (pa.float64(), 0.1),
    "text": (pa.string(), "ß"),
    "raw": (pa.binary(), b"\x00\xff"),
    "moment": (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC)),
    "local": (pa.timestamp("us"), dt.datetime(2026, 1, 2, 3, 4, 5, 6)),
    "day": (pa.date32(), dt.date(2026, 1, 2)),
    "money": (pa.decimal128(10, 2), Decimal("12.30")),
    "many": (pa.list_(pa.date32()), [dt.date(2026, 1, 2), None]),
    "pairs": (pa.map_(pa.string(), pa.int64()), {"a": 1}),
    "nested": (pa.struct([("x", pa.float64()), ("on", pa.date32())]), {"x": 1.5, "on": dt.date(2026, 1, 2)}),
}


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_values_of_every_type_arrive_and_can_wait(name: str) -> None:
    kind, value = EVERY_TYPE[name]
    user = pa.schema([(name, kind)])
    records, event_type = unbundle([(0, bundle(table([data(0, value), data(0, None)], user=user), 1, 0)[2][0].as_py())])
    events = [record.body for record in records]
    assert [getattr(event, name) for event in events] == [value, None]
    assert type(getattr(events[0], name)) is type(value)
    # Events that wait for their key's state are stored like this.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[event_type]) == events  # type: ignore[valid-type]


def test_a_name_that_cannot_be_an_attribute_is_refused_with_a_way_out() -> None:
    with pytest.raises(Refused, match="withColumnRenamed"):
        event_type_of(row_schema(pa.schema([("my value", pa.int32())])))
