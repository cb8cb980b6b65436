"""The cost of being movable while nothing moves: the group processor with and without the code for moves.

`Bare` is an `Instance` without the protocols: no check of a record's kind or for duplicates, no tracking of positions,
no search for departures. All else is the same code. Measured twice: in this process, many short rounds, which is
precise; and as micro-batches through Spark, which is the cost that a user observes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, cast

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from whimbrel.core import table
from whimbrel.core.instance import Instance
from whimbrel.core.record import Emissions, Record
from whimbrel.core.serving import APPLIED, PARKED, Served, Serving
from whimbrel.host.events import placed
from whimbrel.lab.bench.throughput import SCHEMA, Candidate, Count, entries, take_turns
from whimbrel.log.contract import Entry, Lane
from whimbrel.spark.bundle import bundle
from whimbrel.spark.groups import group_ids
from whimbrel.spark.processor import GroupProcessor
from whimbrel.spark.query import StageQuery
from whimbrel.spark.shipping import ship
from whimbrel.spark.source import row_schema

MOVABLE, BARE = "movable", "bare"


class BareServing(Serving):
    """Serves every record: there are no duplicates."""

    def serve(self, record: Record, out: Emissions, silent: bool = False) -> Served:
        entry = self._entries.get(record.key)
        if entry is None:
            entry = self._entries[record.key] = table.Entry(self.operator.State())
        self._touched.add(record.key)
        if entry.timers and entry.timers[0] <= record.event_us:
            self.fire(entry, record, out, silent)
        return APPLIED if self._attempt(entry, record, out, silent) else PARKED


class Bare(Instance):
    """A part that no keys can be moved from or to."""

    serving_type: ClassVar[type[Serving]] = BareServing

    def apply(self, records: Sequence[Record]) -> Emissions:
        """Apply one batch of data. The records of the host's start precede it, and are ignored here."""
        out = Emissions()
        while records and records[0].kind:
            records = records[1:]
        serve = self.serving.serve
        for record in records:
            serve(record, out)
        self._seal(out)
        return out


class BareProcessor(GroupProcessor):
    """Hosts bare parts."""

    instance_type: ClassVar[type[Instance]] = Bare


class BareQuery(StageQuery):
    """A stage of bare parts."""

    processor_type: ClassVar[type[GroupProcessor]] = BareProcessor


class Memory:
    """A state store without Spark: the methods that `StoredPart` calls on a handle and on its map."""

    def __init__(self) -> None:
        self._blobs: dict[Any, Any] = {}
        self.getValue, self.updateValue, self.clear = self._blobs.get, self._blobs.__setitem__, self._blobs.clear

    def getMapState(self, *schema: object) -> Memory:
        return self


def in_process(
    rounds: int = 150, keys: int = 2_500, rows: int = 5_000, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """The whole processor of one group with its store in memory: both get the same batches, alternating. `clock`
    measures the cost of a batch, in seconds or in its own unit."""
    processors = {MOVABLE: GroupProcessor(MOVABLE, ship(Count()), 1), BARE: BareProcessor(BARE, ship(Count()), 1)}
    for processor in processors.values():
        processor.init(cast(StatefulProcessorHandle, Memory()))
    times: dict[str, list[float]] = {MOVABLE: [], BARE: []}
    warm_up = max(1, rounds // 10)
    for turn, blob in enumerate(entries(warm_up + rounds, keys, rows)):
        batch = placed(Entry(turn, rows, blob), Lane.DATA, row_schema(SCHEMA))
        bundles = [Row(**row) for row in bundle(pa.Table.from_batches([batch]), 1, 0).to_pylist()]
        for name in (MOVABLE, BARE) if turn % 2 else (BARE, MOVABLE):
            start = clock()
            list(processors[name].handleInputRows(group_ids(1), iter(bundles), None))
            times[name].append((clock() - start) * 1000)
    return _compared(times, warm_up)


def through_spark(
    spark: SparkSession, folder: Path, batches: int = 30, keys: int = 10_000, rows: int = 20_000, warm_up: int = 6
) -> dict[str, Any]:
    """Both as queries in one session, with alternating batches."""
    running = [
        Candidate(spark, folder, MOVABLE, 2, rows, StageQuery),
        Candidate(spark, folder, BARE, 2, rows, BareQuery),
    ]
    times, checks = take_turns(running, entries(warm_up + batches, keys, rows), rows)
    return {**_compared(times, warm_up), "results_equal": checks[MOVABLE] == checks[BARE]}


def _compared(times: dict[str, list[float]], warm_up: int) -> dict[str, Any]:
    """The median ratio of neighbouring batches, two turns at a time: other load on the machine, and the order in a
    turn, affect both alike."""
    measured = {name: series[warm_up:] for name, series in times.items()}
    pairs = {name: [a + b for a, b in pairwise(series)] or series for name, series in measured.items()}
    ratios = [one / other for one, other in zip(pairs[MOVABLE], pairs[BARE], strict=True)]
    return {
        "ratio": round(median(ratios), 4),
        "batch_ms": {name: round(median(series), 3) for name, series in measured.items()},
        "batches": len(measured[BARE]),
    }
