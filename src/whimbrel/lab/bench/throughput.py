"""Throughput against stock PySpark: the same keyed count over the same records, one result per record, in one session.

Four candidates, each a streaming query over its own inbox with the same entries; an entry is a micro-batch. They
alternate: a batch of one, a batch of the next, and so on, then in reverse order, so that other load on the machine
affects all alike. A batch's time is Spark's own (`triggerExecution`). Stock queries write to Spark's `noop` sink, which
costs nothing; Whimbrel's time includes the append of all results to its outbox.

    whimbrel                     the group processor, as any stage runs
    transformWithState           Spark's stateful processor for Rows, grouped by key
    transformWithStateInPandas   the same with pandas
    native_count                 groupBy(key).count(): no Python, one result per *key*; a reference, not a competitor
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from whimbrel.core.errors import Unavailable
from whimbrel.core.keys import bin_of
from whimbrel.core.operator import Emit, Operator, State
from whimbrel.core.record import Record
from whimbrel.host.contract import InstanceSpec
from whimbrel.log import EmbeddedLog
from whimbrel.log.carrier import outgoing
from whimbrel.log.codec import encode, entry_schema
from whimbrel.spark.query import StageQuery
from whimbrel.spark.source import FORMAT, InboxSource, Reading

WHIMBREL, ROWS, PANDAS, NATIVE = "whimbrel", "transformWithState", "transformWithStateInPandas", "native_count"
CANDIDATES = (WHIMBREL, ROWS, PANDAS, NATIVE)

SCHEMA = pa.schema([("value", pa.float64())])
RESULT = "bin int, n bigint"

Check = tuple[int, int, int]
"""The number of results, the sum of their counts, and the sum of counts times bins: equal for equal results."""


class Count(Operator):
    """Counts the records of each key."""

    class State(State):
        n: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        state.n += 1
        emit(n=state.n)


class CountRows(StatefulProcessor):
    """The same with Spark's Rows."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        found = self.count.get()
        n = found[0] if found else 0
        for row in rows:
            n += 1
            yield Row(bin=row.place, n=n)
        self.count.update((n,))

    def close(self) -> None:
        pass


class CountFrames(StatefulProcessor):
    """The same with pandas."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        found = self.count.get()
        n = found[0] if found else 0
        for frame in rows:
            yield pd.DataFrame({"bin": frame["place"], "n": range(n + 1, n + len(frame) + 1)})
            n += len(frame)
        self.count.update((n,))

    def close(self) -> None:
        pass


Ours = Callable[..., StageQuery]

# ── Candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Candidate:
    """One query over its own inbox. `run` processes one batch and returns its time in milliseconds."""

    def __init__(
        self, spark: SparkSession, folder: Path, name: str, partitions: int, batch_rows: int, ours: Ours | None = None
    ) -> None:
        """`ours`: creates the query of a Whimbrel stage; without it, `name` is one of the stock queries."""
        self.name, self._inbox = name, EmbeddedLog(folder / f"inbox-{name}")
        self._batches = 0
        self._metrics: list[dict[str, int | None]] = []
        self.stop: Callable[[], None]
        self._outbox = EmbeddedLog(folder / f"outbox-{name}") if ours is not None else None
        if self._outbox is not None and ours is not None:
            spec = InstanceSpec(name, "bench", Count(), SCHEMA, partitions=partitions, max_records=batch_rows)
            stage = ours(
                spark,
                spec,
                inbox=folder / f"inbox-{name}",
                outbox=self._outbox,
                inbox_of=lambda _: self._inbox,
                checkpoint=folder / f"checkpoint-{name}",
            )
            stage.start()
            assert stage._query is not None
            self.query, self.stop = stage._query, lambda: stage.stop()
        else:
            reading = Reading(str(folder / f"inbox-{name}"), SCHEMA, 1, batch_rows, rows=True)
            self.query = _start(spark, _STOCK[name], reading, folder / f"checkpoint-{name}", partitions)
            self.stop = self.query.stop

    def run(self, blob: bytes, count: int, timeout: float = 300.0) -> float:
        """Append one entry, wait for its batch."""
        self._inbox.append(blob, count=count, writer="bench", counter=self._batches)
        self._batches += 1
        deadline = time.monotonic() + timeout
        while True:
            last = self._progress()[-1:]
            # Not the batch's number: a query's first batch may be empty.
            if last and json.loads(last[0]["sources"][0]["endOffset"])["data"] == self._batches:
                # Recorded now: Spark keeps 100 progress reports, and some of them are of empty batches.
                self._metrics += last[0]["observedMetrics"].values()
                return float(last[0]["durationMs"]["triggerExecution"])
            if not self.query.isActive or time.monotonic() > deadline:
                raise Unavailable(f"{self.name} did not complete a batch: {self.query.exception() or 'timeout'}")
            time.sleep(0.01)

    def check(self) -> Check:
        """The check of all results so far."""
        if self._outbox is not None:
            groups = [group for entry in self._outbox.read(0) for group in outgoing(entry)]
            results = [(result.values["n"], bin_of(result.key)) for group in groups for result in group.results]
            return len(results), sum(n for n, _ in results), sum(n * bin for n, bin in results)
        count, total, product = (sum(one[name] or 0 for one in self._metrics) for name in ("count", "sum", "product"))
        return count, total, product

    def _progress(self) -> list[dict[str, Any]]:
        recent: Sequence[Any] = self.query.recentProgress
        return [dict(progress) for progress in recent if progress["durationMs"].get("addBatch")]


def _start(
    spark: SparkSession, plan: Callable[[DataFrame], DataFrame], reading: Reading, checkpoint: Path, partitions: int
) -> StreamingQuery:
    spark.dataSource.register(InboxSource)
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    source = spark.readStream.format(FORMAT).options(**reading.options()).load()
    n, bin = F.col("n"), F.col("bin")
    # pandas frames cannot have columns whose names begin with an underscore.
    checked = plan(source.selectExpr("_key as key", "_bin as place")).observe(
        "check", F.count(n).alias("count"), F.sum(n).alias("sum"), F.sum(n * bin).alias("product")
    )
    return checked.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(checkpoint)).start()


_STOCK: dict[str, Callable[[DataFrame], DataFrame]] = {
    ROWS: lambda df: df.groupBy("key").transformWithState(CountRows(), RESULT, "update", "none"),
    PANDAS: lambda df: df.groupBy("key").transformWithStateInPandas(CountFrames(), RESULT, "update", "none"),
    NATIVE: lambda df: df.groupBy("key", "place").count().selectExpr("place as bin", "count as n"),
}


# ── The run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def entries(count: int, keys: int, rows: int) -> Iterator[bytes]:
    """Micro-batches: each key as often as any other, in a scattered order."""
    schema = entry_schema(SCHEMA)
    for batch in range(count):
        numbers = range(batch * rows, (batch + 1) * rows)
        names = [f"key-{n * 7919 % keys:06d}" for n in numbers]
        records = (
            Record(0, 0, bin_of(key), key, n, 0, "bench", n, n, (float(n),))
            for n, key in zip(numbers, names, strict=True)
        )
        yield encode(list(records), schema)


def take_turns(
    running: Sequence[Candidate], blobs: Iterable[bytes], batch_rows: int
) -> tuple[dict[str, list[float]], dict[str, Check]]:
    """Run each batch with each candidate, in one order and then in reverse; returns all batch times, and the checks."""
    times: dict[str, list[float]] = {candidate.name: [] for candidate in running}
    try:
        for turn, blob in enumerate(blobs):
            for candidate in running[::-1] if turn % 2 else running:
                times[candidate.name].append(candidate.run(blob, batch_rows))
        return times, {candidate.name: candidate.check() for candidate in running}
    finally:
        for candidate in running:
            candidate.stop()


def throughput(
    spark: SparkSession,
    folder: Path,
    *,
    keys: int = 10_000,
    rows: int = 200_000,
    batch_rows: int = 20_000,
    warm_up: int = 10,
    partitions: int = 2,
    candidates: Sequence[str] = CANDIDATES,
) -> dict[str, Any]:
    """Run the candidates side by side; the report of `whimbrel bench throughput`."""
    batches = max(1, rows // batch_rows)
    running = [
        Candidate(spark, folder, name, partitions, batch_rows, StageQuery if name == WHIMBREL else None)
        for name in candidates
    ]
    times, checks = take_turns(running, entries(warm_up + batches, keys, batch_rows), batch_rows)
    batch_ms = {name: median(series[warm_up:]) for name, series in times.items()}
    per_record = {check for name, check in checks.items() if name != NATIVE}
    ours = batch_ms.get(WHIMBREL)
    ratio = {
        f"vs_{'native' if name == NATIVE else name}": round(ms / ours, 2)
        for name, ms in batch_ms.items()
        if ours and name != WHIMBREL
    }
    return {
        "rows_per_s": {name: round(batch_rows / ms * 1000) for name, ms in batch_ms.items()},
        "batch_ms": {name: round(ms, 1) for name, ms in batch_ms.items()},
        "ratio": ratio,
        "results_equal": len(per_record) == 1,
        "parameters": {"keys": keys, "batch_rows": batch_rows, "batches": batches, "partitions": partitions},
    }
