"""The intake: validates rows against the schema, and converts them to keyed events.

First step on a record's way. An invalid row becomes a `BadRecord` with a reason, and the stream continues.
The check is one call for a whole batch; only a batch with an invalid row is checked row by row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from whimbrel.core.errors import BadRecord, Refused

Row = dict[str, Any]
Taken = tuple[str, tuple[Any, ...], int | None]
"""A key, its event, and the event's time in microseconds if it has one."""

FUTURE = "from the future"
"""The reason of a record whose event time is too far ahead."""

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
    fields: list[pa.Field] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"`?([A-Za-z]\w*)`?\s*:?\s+(\w+)", part)
        if match is None or match[2].lower() not in _TYPES:
            known = ", ".join(_TYPES)
            raise Refused(f"cannot read {part!r} in a schema; write 'name type, ...' with a type of: {known}")
        if match[1] in (field.name for field in fields):
            raise Refused(f"column {match[1]!r} is twice in the schema; names must be unique")
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
    """Converts each row to (key, event, event time), or to a `BadRecord`."""

    def __init__(self, schema: pa.Schema, key: str, event_time: str | None = None, *, lenient: bool = False) -> None:
        for column in filter(None, (key, event_time)):
            if column not in schema.names:
                raise Refused(f"the source has no column {column!r}; it has: {', '.join(schema.names)}")
        if event_time is not None and not _is_time(schema.field(event_time).type):
            raise Refused(
                f"{event_time!r} cannot be the event time: make it a timestamp, a date or microseconds (long)"
            )
        self.schema, self.lenient, self.has_time = schema, lenient, event_time is not None
        self._key = schema.names.index(key)
        self._time = None if event_time is None else schema.names.index(event_time)
        self._type = msgspec.defstruct("Event", [(field.name, _python(field) | None, None) for field in schema])
        self._texts = [number for number, field in enumerate(schema) if pa.types.is_string(field.type)]
        self._others = [(number, field.type) for number, field in enumerate(schema) if _python(field) is Any]

    def take(self, rows: Sequence[Row], until_us: int | None = None) -> list[Taken | BadRecord]:
        """One result for each row, in order. `until_us`: the latest event time that is accepted; None: any."""
        try:
            converted = msgspec.convert(rows, list[self._type], strict=not self.lenient)  # type: ignore[name-defined]
            events = [msgspec.structs.astuple(event) for event in converted]
            self._check(events)
        except (ValueError, TypeError, OverflowError):
            return [self._take_one(row, until_us) for row in rows]
        return [self._keyed(event, until_us) for event in events]

    def key_of(self, row: Row) -> str | None:
        """The key of a row, as `take` gives it; None: it has none, or not of its column's type."""
        field = self.schema.field(self._key)
        try:
            key = msgspec.convert(row.get(field.name), _python(field) | None, strict=not self.lenient)
        except (ValueError, TypeError, OverflowError):
            return None
        return None if key is None or key == "" else str(key)

    def _check(self, events: Sequence[tuple[Any, ...]]) -> None:
        """Raise if one of these cannot be encoded: text that is not UTF-8, or a value not of its column's type."""
        for column in self._texts:
            "".join(event[column] or "" for event in events).encode()
        for column, kind in self._others:
            pa.array([event[column] for event in events], kind)

    def _take_one(self, row: Row, until_us: int | None) -> Taken | BadRecord:
        if not isinstance(row, dict):
            return BadRecord("wrong type", f"expected an object with columns, got {type(row).__name__}")
        try:
            event = msgspec.structs.astuple(msgspec.convert(row, self._type, strict=not self.lenient))
            self._check([event])
        except (ValueError, TypeError, OverflowError) as error:
            return BadRecord("wrong type", str(error))
        return self._keyed(event, until_us)

    def _keyed(self, event: tuple[Any, ...], until_us: int | None) -> Taken | BadRecord:
        key = event[self._key]
        if key is None or key == "":
            return BadRecord("no key", f"column {self.schema.names[self._key]!r} is empty")
        if self._time is None:
            return str(key), event, None
        try:
            moment = _micros(event[self._time])
        except (ValueError, OverflowError) as error:
            return BadRecord("wrong type", f"column {self.schema.names[self._time]!r} is not a time: {error}")
        if until_us is not None and moment is not None and moment > until_us:
            ahead = (moment - until_us) / 1e6
            return BadRecord(
                FUTURE,
                f"column {self.schema.names[self._time]!r} is {event[self._time]}: {ahead:,.3f} s later than "
                "the gateway's clock plus the pipeline's max_ahead",
            )
        return str(key), event, moment


def _python(field: pa.Field) -> Any:
    for arrow, python in _TYPES.values():
        if arrow == field.type:
            return python
    return Any


def _is_time(kind: pa.DataType) -> bool:
    tests = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, pa.types.is_floating)
    return any(test(kind) for test in tests)


def _micros(moment: Any) -> int | None:
    """A time in microseconds; without a time zone it is UTC, as in Arrow and in Spark here."""
    if moment is None:
        return None
    if isinstance(moment, date):
        whole = moment if isinstance(moment, datetime) else datetime.combine(moment, time())
        return (whole.replace(tzinfo=whole.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)
    micros = int(moment)
    if not -(2**63) <= micros < 2**63:
        raise ValueError(f"{moment} microseconds")
    return micros


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
