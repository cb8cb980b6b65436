"""The encoding of ingress and inbox entries: one Arrow record batch per entry, in Arrow's IPC stream format.

Columnar, because Spark's source passes the entries on unchanged: Python touches no record of an inbox between the
router that wrote it and the operator that applies it. User columns follow Whimbrel's own, typed by the stage's schema,
and are null in everything that is not data.

`_offset` is not stored: it is computed from the entry's position and the row in it when the entry is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from whimbrel.core.errors import Bug, Corrupt, NewerFormat
from whimbrel.core.record import Kind, Record
from whimbrel.log.contract import Entry

VERSION = 1
ROWS = 1 << 20
"""The maximum number of rows per entry, so that position * ROWS + row is a monotonic offset."""

Content = tuple[int, int, bytes]
"""A message without its destination: kind, bin and body."""

_META = [
    pa.field("_kind", pa.int8()),
    pa.field("_bin", pa.int16()),
    pa.field("_key", pa.string()),
    pa.field("_seq", pa.int64()),
    pa.field("_epoch", pa.int32()),
    pa.field("_src", pa.string()),
    pa.field("_event_us", pa.int64()),
    pa.field("_ingress_us", pa.int64()),
    pa.field("_body", pa.binary()),
]
META_NAMES = [field.name for field in _META]


def entry_schema(user: pa.Schema) -> pa.Schema:
    """Whimbrel's columns, then the user's."""
    return pa.schema([*_META, *user], metadata={"whimbrel": str(VERSION)})


_CONTROL = entry_schema(pa.schema([]))
_UNUSED = [pa.scalar(value, field.type) for value, field in zip(("", -1, 0, "", 0, 0), _META[2:-1], strict=True)]
"""What messages have in the columns between bin and body."""


def encode(records: Sequence[Record], schema: pa.Schema) -> bytes:
    """Encode records; `schema` is what `entry_schema` returned. A data record's body is a sequence of columns."""
    _, kinds, bins, keys, seqs, epochs, srcs, events, ingresses, bodies = zip(*records, strict=True)
    width = len(schema) - len(_META)
    blank = (None,) * width
    columns: Iterable[Sequence[Any]]
    if any(kinds):
        columns = zip(*(tuple(b) if k == Kind.DATA else blank for k, b in zip(kinds, bodies, strict=True)), strict=True)
        messages = [None if k == Kind.DATA else b for k, b in zip(kinds, bodies, strict=True)]
    else:
        columns = zip(*bodies, strict=True)
        messages = [None] * len(records)
    meta = (kinds, bins, keys, seqs, epochs, srcs, events, ingresses, messages)
    return _written([_array(values, field) for values, field in zip([*meta, *columns], schema, strict=True)], schema)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    return pa.array(values, field.type)


def _written(arrays: list[pa.Array], schema: pa.Schema) -> bytes:
    if len(arrays[0]) > ROWS:
        raise Bug(f"an entry has at most {ROWS} records, or their offsets would overlap: got {len(arrays[0])}")
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    blob: bytes = sink.getvalue().to_pybytes()
    return blob


def encode_messages(messages: Iterable[tuple[int, int, bytes | memoryview]]) -> bytes:
    """Encode an entry of the control lane: messages, each with its kind, its bin and its bytes.

    Messages have no seq in any router's stream and no user columns: the reader of the entry fills in those fields.
    """
    kinds, bins, bodies = zip(*messages, strict=True)
    unused = [pa.repeat(value, len(kinds)) for value in _UNUSED]
    return _written([_array(kinds, _META[0]), _array(bins, _META[1]), *unused, _array(bodies, _META[-1])], _CONTROL)


def messages(blob: bytes) -> list[Content]:
    """Decode what `encode_messages` encoded."""
    batch = decode(blob)
    columns = [batch.column(name).to_pylist() for name in ("_kind", "_bin", "_body")]
    return list(zip(*columns, strict=True))


def decode(blob: bytes) -> pa.RecordBatch:
    """Decode a blob into its record batch. Raises `Corrupt` or `NewerFormat`, never anything else."""
    try:
        with pa.ipc.open_stream(blob) as reader:
            version = int((reader.schema.metadata or {}).get(b"whimbrel", b"0"))
            if version > VERSION:
                raise NewerFormat(f"entry format {version}, this version reads up to {VERSION}")
            if reader.schema.names[: len(_META)] != META_NAMES or list(reader.schema)[: len(_META)] != _META:
                raise Corrupt("not an entry of records: other columns")
            batch = reader.read_next_batch()
            batch.validate(full=True)  # otherwise Arrow would follow a damaged offset to any address
            return batch
    except (pa.ArrowException, StopIteration, OSError, ValueError) as error:
        raise Corrupt(f"not an entry of records: {error}") from error


def records(entry: Entry) -> Iterator[Record]:
    """The records of an entry, one by one; a data record's body is a tuple of its user columns."""
    columns = [column.to_pylist() for column in decode(entry.blob).columns]
    meta, user = columns[: len(_META)], columns[len(_META) :]
    bodies = zip(*user, strict=True) if user else iter([()] * len(meta[0]))
    offset = entry.position * ROWS
    for row, body in zip(zip(*meta, strict=True), bodies, strict=True):
        kind, message = row[0], row[-1]
        yield Record._make((offset, *row[:-1], body if kind == Kind.DATA else message))
        offset += 1


class Codec(Protocol):
    """Encodes records into entries, and decodes them."""

    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode records into a blob."""

    def records(self, entry: Entry) -> Iterable[Record]:
        """The records of an entry, with their offsets."""


class ArrowCodec:
    """Encodes records as Arrow batches, with these user columns."""

    def __init__(self, user: pa.Schema) -> None:
        self._schema = entry_schema(user)

    def encode(self, records: Sequence[Record]) -> bytes:
        return encode(records, self._schema)

    def records(self, entry: Entry) -> Iterable[Record]:
        return records(entry)
