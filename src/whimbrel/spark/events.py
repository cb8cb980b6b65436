"""Events: the part of a record that an operator receives, and their conversion from columns.

An event has an attribute for each user column of the stage, after `prepare`. Its type is derived from the Arrow schema,
precisely enough that an event which waits for its key's state survives a round trip through MessagePack unchanged.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

import msgspec
import pyarrow as pa

from whimbrel.core.errors import Refused
from whimbrel.log.codec import META_NAMES

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
