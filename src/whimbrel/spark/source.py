"""The source: a Spark streaming data source over an instance's inbox.

It is between the inbox log and the shuffle. A batch is the whole content of the control lane, and as much of the data
lane as the batch may hold; Spark's offset is the pair of log positions. Two shapes of the same records:

    bundles   one row per group (bundle.py), built from the log's entries without work per record
    rows      one row per record, typed, for a stage with a `prepare`

The source decides when a batch begins, not Spark's trigger: at most once per `pace_ms`, so that queries on few cores
do not compete, and less often if the instance cannot keep that pace; but at once if keys wait for messages of the
control lane.

Spark calls for the next batch when it has committed the previous one: then the source commits its position to the inbox
log, where other components read it, and trims the inbox. It does not wait for the disk, nor long for another process
that holds the log's lock: a position that is late, or lost in a power failure, is too low, and the start of a query
corrects it (query.py).

Spark runs a reader in two places: `latestOffset` and `partitions` in one long-lived process beside the driver, `read`
in a task.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from whimbrel.core.errors import Unavailable
from whimbrel.host.events import PLACE, placed
from whimbrel.log import EmbeddedLog, Lane, Log
from whimbrel.log.codec import entry_schema
from whimbrel.log.readers import LANES, Offset, beginning, end_of, positions
from whimbrel.spark.bundle import DDL, bundle
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.nearby import Nearby
from whimbrel.spark.signals import Signals

FORMAT = "whimbrel"
MOST_CONTROL = 64 << 20
"""Approximate bytes of parcels per batch: the rest waits, as it would in a link."""
TRIM_EVERY = 64
"""Entries per trim of the inbox: a trim is a write, and writers wait for each other."""
BUSY = 0.05
"""Seconds that a batch waits at most to commit its position while another process writes to the inbox."""

LONGEST_REST = 2
"""The longest pause of an instance that cannot keep its pace, as a multiple of the pace."""
GLANCE = 0.02
"""Seconds between polls of the inbox while it is empty, or while it is too early for a batch."""

NUMBERS = ("groups", "max_records", "rows", "trim", "pace_ms")
TEXTS = ("reader", "nearby", "checkpoint")


@dataclass(frozen=True)
class Reading:
    """The options of a reader; Spark passes options as strings."""

    path: str
    schema: pa.Schema
    """The user's columns."""
    groups: int
    max_records: int
    rows: bool = False
    trim: bool = True
    pace_ms: int = 0
    """The minimum time between the starts of two batches."""
    reader: str = ""
    """The name under which it commits its position; empty: it does not commit."""
    nearby: str = ""
    """The query's own folder: for large blobs, and for the signals halt and urgent (signals.py)."""
    checkpoint: str = ""
    """The folder of the checkpoint, if it must be fsynced before the inbox is trimmed."""

    def options(self) -> dict[str, str]:
        """For `readStream.options`."""
        schema = self.schema.serialize().to_pybytes().hex()
        numbers = {name: str(int(getattr(self, name))) for name in NUMBERS}
        return {"path": self.path, "schema": schema, **{name: getattr(self, name) for name in TEXTS}, **numbers}

    @staticmethod
    def of(options: Any) -> Reading:
        """Parse Spark's options."""
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(options["schema"])))
        groups, most, rows, trim, pace_ms = (int(options[name]) for name in NUMBERS)
        texts = (options[name] for name in TEXTS)
        return Reading(options["path"], schema, groups, most, bool(rows), bool(trim), pace_ms, *texts)


class InboxSource(DataSource):
    """`spark.readStream.format("whimbrel")`; the options are a `Reading`'s."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        reading = Reading.of(self.options)
        return from_arrow_schema(row_schema(reading.schema)) if reading.rows else DDL

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return InboxReader(Reading.of(self.options))


@dataclass
class Range(InputPartition):
    """The entries of one batch."""

    start: Offset
    end: Offset


class InboxReader(DataSourceStreamReader):
    """Reads one inbox."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._signals = Signals(reading.nearby)
        self._trimmed = dict.fromkeys(LANES, 0)
        self._finished: Offset | None = None
        self._began = -math.inf
        self._late = 0.0
        """By how many seconds the last batch took longer than the pace."""
        self._due: float | None = -math.inf
        """The earliest time of the next batch, unless it is urgent; None while a batch runs."""

    def initialOffset(self) -> Offset:
        return beginning(open_log(self.reading.path))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.reading.max_records)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        if start != self._finished:  # Spark calls this when all before `start` is committed
            with suppress(Unavailable):  # locked, or a full disk: retry at the next call
                self._finish(start)
                self._finished = start
        log = open_log(self.reading.path)
        if self._due is None:
            self._due = self._next(log, start)
        if not self._awaits(log, start, self._due):
            return start
        self._began, self._due = time.monotonic(), None
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sys.maxsize
        return end_of(log, start, most, MOST_CONTROL)

    def _finish(self, start: Offset) -> None:
        """Commit that everything before `start` is applied and written, and trim it in steps of `TRIM_EVERY`."""
        log = open_log(self.reading.path, timeout=BUSY)
        if self.reading.reader:
            log.commit(self.reading.reader, positions(start))
        for name, lane in LANES.items() if self.reading.trim else ():
            if start[name] - self._trimmed[name] >= TRIM_EVERY:
                if self.reading.checkpoint:
                    Checkpoint(self.reading.checkpoint).sync_commits()
                log.trim(start[name], lane)
                self._trimmed[name] = start[name]

    def _next(self, log: Log, start: Offset) -> float:
        """The earliest time of the next batch, now that the previous one has ended. If two in a row took longer than
        the pace, the machine is overloaded: the instance pauses for as long as they were late, so that batches become
        fewer and larger. It does not pause if a full batch waits already."""
        pace, took = self.reading.pace_ms / 1000, time.monotonic() - self._began
        late, before = max(took - pace, 0.0), self._late
        self._late = late
        rest = 0.0 if log.backlog(start["data"]) >= self.reading.max_records else min(late, before)
        return self._began + max(pace, took + min(rest, LONGEST_REST * pace))

    def _awaits(self, log: Log, start: Offset, due: float) -> bool:
        """Wait until a batch is due, for a bounded time; return whether it is. Spark calls again."""
        pace = self.reading.pace_ms / 1000
        end = time.monotonic() + pace
        while not self._signals.halts:
            now = time.monotonic()
            if now >= due and any(log.tail(lane) > start[name] for name, lane in LANES.items()):
                return True
            if self._signals.is_urgent and log.backlog(start["control"], Lane.CONTROL):
                return True
            if now >= max(due, end):
                return False
            time.sleep(GLANCE)
        return False

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        return [Range(start, end)] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        table = self._table(partition)
        if not table.num_rows:
            return
        if self.reading.rows:
            yield from table.to_batches()
        else:
            yield bundle(table, self.reading.groups, 0, Nearby(self.reading.nearby))

    def _table(self, part: Range) -> pa.Table:
        """The records of a batch in the order in which they are applied: control lane first."""
        log = open_log(self.reading.path)
        schema = row_schema(self.reading.schema)
        batches = []
        for name, lane in (("control", Lane.CONTROL), ("data", Lane.DATA)):
            for entry in log.read(part.start[name], part.end[name], lane):
                batches.append(placed(entry, lane, schema))
        return pa.Table.from_batches(batches, schema).combine_chunks()


def row_schema(user: pa.Schema) -> pa.Schema:
    """A record as a row: Whimbrel's columns, the user's, and the record's place; in types that Spark supports."""
    columns = [*entry_schema(user), *PLACE]
    schema = to_arrow_schema(from_arrow_schema(pa.schema(columns)), timezone="UTC")
    assert isinstance(schema, pa.Schema)
    return schema


# ── Logs of this process ─────────────────────────────────────────────────────────────────────────────────────────────

_logs: dict[tuple[str, bool, float], tuple[Log, int]] = {}
"""By path and mode: the log, and the inode of its file."""


def open_log(path: str, durable: bool = False, timeout: float = 10.0) -> Log:
    """The log at a path, opened once per process, because each task creates new readers. A worker may outlive a data
    directory: another file under the same name is another log."""
    found = _logs.get((path, durable, timeout))
    if found is None or _inode(path) != found[1]:
        if found is not None:
            found[0].close()
        log = EmbeddedLog(Path(path), create=True, durable=durable, timeout=timeout)
        found = _logs[path, durable, timeout] = log, _inode(path)
    return found[0]


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1
