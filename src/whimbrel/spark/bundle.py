"""Bundles: the format of a batch's records inside Spark, from the source to the processor of their group.

Spark moves rows one by one: through the shuffle, into Python, one object per value. A bundle is *one* row that holds
all records of one group as an Arrow blob, so that Spark has no cost per record between the log and the operator. It
also preserves the order of the records, which a shuffle of rows would not.

    inbox entries ──▶ table ──▶ bundle(table) ──▶ shuffle by group ──▶ unbundle ──▶ core Records
                        └─▶ the user's prepare, row by row ─▶┘

A bundle of a group also holds the records for every group: markers and ticks. A large one goes to a file nearby, and
its row has the file's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Record
from whimbrel.host.events import PLACE, records_of
from whimbrel.spark.groups import group_ids
from whimbrel.spark.nearby import NOWHERE, Nearby

SCHEMA = pa.schema([("_group", pa.int32()), ("_order", pa.int64()), ("_bundle", pa.binary()), ("_file", pa.string())])
DDL = "_group int, _order bigint, _bundle binary, _file string"


def bundle(table: pa.Table, groups: int, order: int, nearby: Nearby = NOWHERE) -> pa.RecordBatch:
    """One row per group that has records in the table. `order` sorts bundles of one group: lower comes first."""
    ids = group_ids(groups)
    bins = table.column("_bin").to_numpy()
    cuts: list[tuple[int, pa.Table]] = []
    if groups == 1:
        cuts = [(0, table)]
    elif (bins == EVERY_BIN).any():
        for part in range(groups):
            cuts.append((part, table.filter(pa.array((bins % groups == part) | (bins == EVERY_BIN)))))
    else:
        parts = bins % groups
        table = table.take(np.argsort(parts, kind="stable"))
        ends = np.cumsum(np.bincount(parts, minlength=groups)).tolist()
        cuts = [(part, table[start:end]) for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    cuts = [(part, cut) for part, cut in cuts if cut.num_rows]
    blobs = [_write(cut) for _, cut in cuts]
    files = [nearby.leave(blob) for blob in blobs]
    blobs = [b"" if file else blob for blob, file in zip(blobs, files, strict=True)]
    columns = [[ids[part] for part, _ in cuts], [order] * len(cuts), blobs, files]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def unbundle(bundles: Iterable[tuple[int, bytes]]) -> tuple[list[Record], type[msgspec.Struct]]:
    """The records of all bundles of one group, in the order in which they are applied, and the type of their events.

    Takes pairs of `order` and blob, in any order, as a shuffle returns them.
    """
    tables = [_read(blob) for _, blob in sorted(bundles)]
    table = tables[0]
    if len(tables) > 1:
        # The sort is stable: rows that `prepare` made of one record share its place and keep their order.
        table = pa.concat_tables(tables)
        table = table.take(pc.sort_indices(table, [(field.name, "ascending") for field in PLACE]))
    return records_of(table.combine_chunks())


def bundle_batches(
    batches: Iterable[pa.RecordBatch], groups: int, first: int, nearby: Nearby
) -> Iterator[pa.RecordBatch]:
    """Bundle rows that come from `prepare`, batch by batch."""
    for number, batch in enumerate(batches):
        if batch.num_rows:
            yield bundle(pa.Table.from_batches([batch]), groups, first + number, nearby)


def _write(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    blob: bytes = sink.getvalue().to_pybytes()
    return blob


def _read(blob: bytes) -> pa.Table:
    with pa.ipc.open_stream(blob) as reader:
        return reader.read_all()
