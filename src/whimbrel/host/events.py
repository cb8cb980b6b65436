"""Events: the part of a record that an operator receives; and how an inbox's entries become records with them.

An event has an attribute for each user column of the stage, after `prepare`. Its type is derived from the Arrow schema,
precisely enough that an event which waits for its key's state survives a round trip through MessagePack unchanged.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import repeat, starmap
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import pyarrow as pa

from whimbrel.core.errors import Refused
from whimbrel.core.record import Kind, Record
from whimbrel.log.codec import META_NAMES, ROWS, decode, entry_schema
from whimbrel.log.contract import Entry, Lane

PLACE = [pa.field("_lane", pa.int8()), pa.field("_offset", pa.int64())]
"""The place of a record in the inbox. Sorting by both gives the order in which records are applied."""
OWN_NAMES = [*META_NAMES, *(field.name for field in PLACE)]
"""Whimbrel's own columns; all others are the user's."""


def values(column: pa.ChunkedArray) -> Sequence[Any]:
    """A column as Python objects: null is None and an integer stays an integer, also beside nulls."""
    kind = column.type
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if (plain and not column.null_count) or pa.types.is_string(kind) or pa.types.is_binary(kind):
        result: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return result
    if pa.types.is_nested(kind):
        return list(column.to_pylist(maps_as_pydicts="strict"))
    return list(column.to_pylist())


class _Latest(NamedTuple):
    schema: pa.Schema
    event_type: type[msgspec.Struct]


_latest = _Latest(pa.schema([]), msgspec.Struct)


def event_type_of(schema: pa.Schema) -> type[msgspec.Struct]:
    """The type of a stage's events: an attribute for each user column. The same type for an equal schema."""
    global _latest
    # A worker sees the same schema batch after batch; comparing is much cheaper than hashing.
    if not _latest.schema.equals(schema):
        _latest = _Latest(schema, _event_type(schema.remove_metadata()))
    return _latest.event_type


@lru_cache(maxsize=64)
def _event_type(schema: pa.Schema) -> type[msgspec.Struct]:
    fields = []
    for field in schema:
        if field.name in OWN_NAMES:
            continue
        if not field.name.isidentifier():
            raise Refused(
                f"column {field.name!r} cannot be an attribute of an event: rename it in prepare, "
                f"e.g. df.withColumnRenamed({field.name!r}, ...)"
            )
        fields.append((field.name, python_type(field.type) | None))
    # Frozen, because an operator that raised is run again on the same event.
    return msgspec.defstruct("Event", fields, frozen=True, gc=False, module=__name__)


def python_type(kind: pa.DataType) -> Any:
    """The Python type of a column's values, as precise as decoding from MessagePack needs."""
    if pa.types.is_struct(kind):
        return TypedDict("Struct", {field.name: python_type(field.type) | None for field in kind})  # type: ignore[operator]
    if pa.types.is_map(kind):
        return dict[python_type(kind.key_type), python_type(kind.item_type) | None]  # type: ignore[misc]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return list[python_type(kind.value_type) | None]  # type: ignore[misc]
    for test, python in _PYTHON_TYPES:
        if test(kind):
            return python
    raise Refused(f"a column of type {kind} cannot be part of an event: cast it in prepare")


_PYTHON_TYPES = [
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_string, str),
    (pa.types.is_large_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_large_binary, bytes),
    (pa.types.is_timestamp, datetime.datetime),
    (pa.types.is_date, datetime.date),
    (pa.types.is_time, datetime.time),
    (pa.types.is_duration, datetime.timedelta),
    (pa.types.is_decimal, decimal.Decimal),
]


# ── Entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain_schema(user: pa.Schema) -> pa.Schema:
    """A record as a row: Whimbrel's columns, the user's, and the record's place. Times are those of Spark: an operator
    receives the same events from every host."""
    return pa.schema([field.with_type(_plain(field.type)) for field in [*entry_schema(user), *PLACE]])


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


def placed(entry: Entry, lane: Lane, schema: pa.Schema) -> pa.RecordBatch:
    """An entry's records as rows of this schema, each with its place in the inbox."""
    batch = decode(entry.blob)
    first = entry.position * ROWS
    # Negative, so that the control lane sorts before the data lane.
    lanes = pa.array(np.full(batch.num_rows, -int(lane), np.int8))
    offsets = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
    batch = batch.append_column(PLACE[0], lanes).append_column(PLACE[1], offsets)
    if batch.schema.equals(schema):
        return batch.replace_schema_metadata(None)
    # Messages have no user columns, and entries from before a column was added lack that one.
    columns = [_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)


def records_of(table: pa.Table) -> tuple[list[Record], type[msgspec.Struct]]:
    """The records of rows, in their order, and the type of their events."""
    event_type = event_type_of(table.schema)
    own = {name: table.column(name) for name in OWN_NAMES}
    kinds = values(own["_kind"])
    users = [values(table.column(name)) for name in event_type.__struct_fields__]
    events: Iterable[Any] = starmap(event_type, zip(*users, strict=True)) if users else repeat(event_type(), len(kinds))
    bodies: Iterable[Any] = events
    if any(kinds):
        messages = values(own["_body"])
        triples = zip(kinds, events, messages, strict=True)
        bodies = [event if kind == Kind.DATA else message for kind, event, message in triples]
    meta = [values(own[name]) for name in META_NAMES[1:-1]]
    rows = zip(values(own["_offset"]), kinds, *meta, bodies, strict=True)
    # What `Record._make` does, without a Python call per record.
    return list(map(partial(tuple.__new__, Record), rows)), event_type
