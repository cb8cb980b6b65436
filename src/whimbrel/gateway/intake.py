"""The intake: what a row must be to become a record, and the reason if it is not.

First stop on a record's way. A row that cannot be taken in becomes a `BadRecord` with a reason, and the stream goes on.
The check is one call for a whole batch; only a batch with something bad in it is looked at row by row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from whimbrel.core.errors import BadRecord, Refused

Row = dict[str, Any]

_LONG = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_INT = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

_TYPES: dict[str, tuple[pa.DataType, Any]] = {
    "string": (pa.string(), str),
    "long": (pa.int64(), _LONG),
    "bigint": (pa.int64(), _LONG),
    "int": (pa.int32(), _INT),
    "double": (pa.float64(), float),
    "float": (pa.float32(), float),
    "boolean": (pa.bool_(), bool),
    "timestamp": (pa.timestamp("us", tz="UTC"), datetime),
    "date": (pa.date32(), date),
    "binary": (pa.binary(), bytes),
}
_INFERRED = {str: "string", bool: "boolean", int: "long", float: "double", datetime: "timestamp", date: "date"}


def parse_schema(text: str) -> pa.Schema:
    """`"sensor string, value double"` as a schema; the types are Spark's simple ones."""
    fields = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"`?([A-Za-z]\w*)`?\s*:?\s+(\w+)", part)
        if match is None or match[2].lower() not in _TYPES:
            known = ", ".join(_TYPES)
            raise Refused(f"cannot read {part!r} in a schema; write 'name type, ...' with a type of: {known}")
        fields.append(pa.field(match[1], _TYPES[match[2].lower()][0]))
    if not fields:
        raise Refused("a schema needs at least one column")
    return pa.schema(fields)


def infer_schema(rows: Sequence[Row]) -> pa.Schema:
    """The schema of some sample rows: each column has the type of its values; ints and floats together are doubles."""
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).update(() if value is None else {type(value)})
    fields = []
    for name, found in kinds.items():
        kind = float if found == {int, float} else next(iter(found)) if len(found) == 1 else str
        if kind not in _INFERRED or not re.fullmatch(r"[A-Za-z]\w*", name):
            raise Refused(f"cannot infer a type for column {name!r}; give the source a schema='name type, ...'")
        fields.append(pa.field(name, _TYPES[_INFERRED[kind]][0]))
    if not fields:
        raise Refused("the source has no rows to infer a schema from; give it a schema='name type, ...'")
    return pa.schema(fields)


class Intake:
    """Turns rows into (key, event, event time), or says why not."""

    def __init__(self, schema: pa.Schema, key: str, event_time: str | None = None, *, lenient: bool = False) -> None:
        for column in filter(None, (key, event_time)):
            if column not in schema.names:
                raise Refused(f"the source has no column {column!r}; it has: {', '.join(schema.names)}")
        self.schema, self.lenient = schema, lenient
        self._key = schema.names.index(key)
        self._time = None if event_time is None else schema.names.index(event_time)
        self._type = msgspec.defstruct("Event", [(field.name, _python(field) | None, None) for field in schema])

    def take(self, rows: Sequence[Row]) -> list[tuple[str, tuple[Any, ...], int | None] | BadRecord]:
        """One answer for each row, in order."""
        try:
            events = msgspec.convert(rows, list[self._type], strict=not self.lenient)  # type: ignore[name-defined]
        except msgspec.ValidationError:
            return [self._take_one(row) for row in rows]
        return [self._keyed(msgspec.structs.astuple(event)) for event in events]

    def _take_one(self, row: Row) -> tuple[str, tuple[Any, ...], int | None] | BadRecord:
        if not isinstance(row, dict):
            return BadRecord("wrong type", f"expected an object with columns, got {type(row).__name__}")
        try:
            return self._keyed(msgspec.structs.astuple(msgspec.convert(row, self._type, strict=not self.lenient)))
        except msgspec.ValidationError as error:
            return BadRecord("wrong type", str(error))

    def _keyed(self, event: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], int | None] | BadRecord:
        key = event[self._key]
        if key is None or key == "":
            return BadRecord("no key", f"column {self.schema.names[self._key]!r} is empty")
        moment = None if self._time is None else event[self._time]
        return str(key), event, _micros(moment)


def _python(field: pa.Field) -> Any:
    for arrow, python in _TYPES.values():
        if arrow == field.type:
            return python
    return Any


def _micros(moment: Any) -> int | None:
    if isinstance(moment, datetime):
        return round(moment.timestamp() * 1e6)
    return None if moment is None else int(moment)
