"""Entries of records: any records come back as they were, and nothing but records is taken for records."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.record import Kind, Record
from whimbrel.log import codec
from whimbrel.log.contract import Entry

USER = pa.schema(
    [
        ("n", pa.int64()),
        ("text", pa.string()),
        ("x", pa.float64()),
        ("flag", pa.bool_()),
        ("list", pa.list_(pa.int32())),
    ]
)
SCHEMA = codec.entry_schema(USER)

int64s = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=8)
events = st.tuples(
    st.none() | int64s,
    st.none() | texts,
    st.none() | st.floats(allow_nan=False),
    st.none() | st.booleans(),
    st.none() | st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=3),
)


@st.composite
def records(draw: st.DrawFn, event: st.SearchStrategy[Any] = events) -> Record:
    kind = draw(st.sampled_from(Kind))
    return Record(
        offset=0,
        kind=kind,
        bin=draw(st.integers(-1, 1023)),
        key=draw(texts),
        seq=draw(int64s),
        epoch=draw(st.integers(0, 2**31 - 1)),
        src=draw(texts),
        event_us=draw(int64s),
        ingress_us=draw(int64s),
        body=draw(event if kind == Kind.DATA else st.binary(max_size=20)),
    )


def decoded(blob: bytes, position: int = 0) -> list[Record]:
    return list(codec.records(Entry(position, 0, blob)))


@given(st.lists(records(), min_size=1, max_size=6), st.integers(0, 2**40))
def test_records_come_back_as_they_were_and_know_their_place(batch: list[Record], position: int) -> None:
    expected = [record._replace(offset=position * codec.ROWS + row) for row, record in enumerate(batch)]
    assert decoded(codec.encode(batch, SCHEMA), position) == expected


@given(st.lists(records(st.just(())), min_size=1, max_size=6))
def test_a_stage_may_have_no_columns_of_its_own(batch: list[Record]) -> None:
    got = decoded(codec.encode(batch, codec.entry_schema(pa.schema([]))))
    assert [record._replace(offset=0) for record in got] == batch


def check(blob: bytes) -> None:
    with suppress(Corrupt, NewerFormat):
        decoded(blob)


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(blob: bytes) -> None:
    with pytest.raises(Corrupt):
        decoded(blob)


@given(st.lists(records(), min_size=1, max_size=3), st.data())
def test_an_entry_that_was_cut_off_is_corrupt(batch: list[Record], data: st.DataObject) -> None:
    """All but the mark of the end, whose absence Arrow forgives."""
    blob = codec.encode(batch, SCHEMA)
    with pytest.raises(Corrupt):
        decoded(blob[: data.draw(st.integers(0, len(blob) - 9))])


@given(st.lists(records(), min_size=1, max_size=3), st.data())
def test_damaged_bytes_never_do_worse_than_corrupt(batch: list[Record], data: st.DataObject) -> None:
    """The logs' checksums are there to notice; but should they not, an offset gone wild must not end the process."""
    blob = bytearray(codec.encode(batch, SCHEMA))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(blob))


def test_an_arrow_stream_of_something_else_is_corrupt() -> None:
    schema = pa.schema([("a", pa.int64())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1])], schema=schema))
    with pytest.raises(Corrupt, match="other columns"):
        decoded(sink.getvalue().to_pybytes())


def test_a_newer_format_says_so() -> None:
    newer = SCHEMA.with_metadata({"whimbrel": str(codec.VERSION + 1)})
    record = Record(0, Kind.DATA, 1, "k", 1, 0, "r", 0, 0, (1, "x", 1.5, True, []))
    with pytest.raises(NewerFormat, match="entry format 2"):
        decoded(codec.encode([record], newer))
