"""The micro-batch host: one instance as a streaming query, inbox → prepare → groups → sink. Starts, watches, stops it.

    source ──────────────────────────────▶ bundles ─▶ shuffle by group ─▶ GroupProcessor ─▶ Sink      (no prepare)
    source ─▶ data rows ─▶ prepare ─┐
           └▶ other rows ───────────┴─▶ bundles ─▶ ...                                                 (prepare)

All durable state is in the checkpoint and the logs: a `StageQuery` that died is replaced by a new one with the same
arguments.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import ClassVar

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from whimbrel.core.errors import Conflict, Diverged, Full, Refused, Stale, Unavailable, WhimbrelError
from whimbrel.core.operator import takes_context
from whimbrel.host.contract import InstanceSpec
from whimbrel.host.events import OWN_NAMES
from whimbrel.host.starting import await_batch, check_age, renew, reset, wake_up
from whimbrel.log import Appendable, Log
from whimbrel.log.disk import is_full
from whimbrel.log.readers import INSTANCE, is_drained
from whimbrel.spark.bundle import DDL, bundle_batches
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.nearby import Nearby
from whimbrel.spark.processor import DDL as OUTPUT_DDL
from whimbrel.spark.processor import GroupProcessor
from whimbrel.spark.shipping import ship
from whimbrel.spark.signals import Signals
from whimbrel.spark.sink import Sink
from whimbrel.spark.source import FORMAT, InboxSource, Reading, open_log
from whimbrel.spark.stores import unload

OVERLOADED = ("failed to connect back", "exited unexpectedly")
"""Parts of Spark's messages about a Python worker that an overloaded machine has not started in time."""


_calls: dict[object, float] = {}
"""The calls into the JVM that are in progress, each with the moment when it began."""


def longest_call() -> float:
    """For how many seconds a call into the JVM has been in progress, at most. A JVM that cannot start a thread, for
    lack of memory, accepts a call and never answers it."""
    now = time.monotonic()
    return now - min([*_calls.values()], default=now)


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of Spark: `Full` if a disk is full, `Unavailable` if its JVM has ended."""
    call = object()
    _calls[call] = time.monotonic()
    try:
        yield
    except WhimbrelError:
        raise
    except Exception as error:
        if is_full(error):
            raise Full(str(error).strip().splitlines()[0]) from error
        if isinstance(error, ConnectionError) or (
            isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
        ):
            raise Unavailable(
                "the JVM that Spark runs in is gone; start again with the same data directory, "
                f"and the run continues where it was ({type(error).__name__}: {error})"
            ) from error
        raise
    finally:
        del _calls[call]


class StageQuery:
    """An instance's query. `inbox` is the path of its log, `inbox_of` returns the destination logs of its messages."""

    processor_type: ClassVar[type[GroupProcessor]] = GroupProcessor

    def __init__(
        self,
        spark: SparkSession,
        spec: InstanceSpec,
        *,
        inbox: str | Path,
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        checkpoint: str | Path,
        appended: Callable[[], None] = lambda: None,
        durable: bool = False,
    ) -> None:
        """`durable`: the effects of a batch survive a power failure before they become visible."""
        takes_context(spec.operator)
        self._durable = durable
        self.spark, self.spec, self.checkpoint = spark, spec, str(checkpoint)
        self._inbox, self._outbox, self._inbox_of, self._appended = str(inbox), outbox, inbox_of, appended
        self._query: StreamingQuery | None = None
        self._nearby = tempfile.TemporaryDirectory(prefix="whimbrel-")
        self._signals = Signals(self._nearby.name)

    # ── Life cycle ───────────────────────────────────────────────────────────────────────────────────────────────

    @translated()
    def start(self) -> None:
        """Start, from the checkpoint if there is one."""
        if self.is_active:
            raise Conflict(f"instance {self.spec.name} is running already")
        saved = Checkpoint(self.checkpoint)
        check_age(saved, self.spec.name, open_log(self._inbox), self._outbox)
        if saved.planned < 0:  # left by a start that planned no batch, or that a power failure cut short
            shutil.rmtree(self.checkpoint, ignore_errors=True)
        saved.settle()
        self._signals.clear()
        inbox = open_log(self._inbox, self._durable)
        wake_up(inbox)  # before Spark starts it, so that an error here leaves no orphaned query
        reset(inbox, saved.end(saved.committed))
        checkpoint_id: Future[str] = Future()
        writer = lambda: f"{self.spec.name}@{checkpoint_id.result()}"  # noqa: E731
        urge, nearby = self._signals.urge, Nearby(self._nearby.name)
        name = type(self.spec.operator).__name__
        synced = saved.sync if self._durable else lambda: None
        sink = Sink(writer, self._outbox, self._inbox_of, self._appended, urge, nearby, saved.range, name, synced)
        with _starting:
            # Spark reads both when it creates the query: it copies the session's conf, and inherits the thread's
            # properties.
            self.spark.conf.set("spark.sql.shuffle.partitions", str(self.spec.partitions))
            self.spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.spec.name)
            self._query = (
                self._results()
                .writeStream.queryName(self.spec.name)
                .outputMode("update")
                .trigger(processingTime="0 seconds")  # the source sets the pace
                .option("checkpointLocation", self.checkpoint)
                .foreachBatch(sink.append)
                .start()
            )
        checkpoint_id.set_result(self._query.id)

    def renew(self) -> None:
        """Discard the checkpoint, with the state of all keys: the next start is a first one, after the records whose
        results are in the outbox."""
        renew(open_log(self._inbox), self._outbox)
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def wait(self, timeout: float = 180.0) -> None:
        """Wait until it has done a batch: then it is warm, and any configuration error has surfaced.

        Appends a WAKE to the inbox, so that there is a batch to do.
        """
        inbox = open_log(self._inbox)
        await_batch(self, inbox, wake_up(open_log(self._inbox, self._durable)), timeout, OVERLOADED)

    def hold(self, held: bool) -> None:
        """Pause before the next batch, or resume."""
        with suppress(OSError):  # a disk too full for an empty file stops it anyway
            self._signals.halt(held)

    @translated()
    def stop(self, timeout: float = 30.0) -> None:
        """End the query and wait until it has ended.

        Stopping a query amid a batch interrupts Python at any point. So the source first reports no new data, the
        current batch ends, and stopping an idle query interrupts nothing. A query that does not become idle in time is
        interrupted nevertheless: its batch will be replayed.
        """
        query = self._query
        if query is None:
            return
        self._signals.halt(True)
        deadline = time.monotonic() + timeout
        while query.isActive and not _is_idle(query) and time.monotonic() < deadline:
            time.sleep(0.005)
        query.stop()
        while query.isActive:
            if time.monotonic() > deadline + timeout:
                raise Unavailable(f"instance {self.spec.name} did not end within {2 * timeout:.0f} s")
            time.sleep(0.005)
        unload(self.spark, query, self.checkpoint)

    # ── Monitoring ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    @translated()
    def is_active(self) -> bool:
        """Whether it runs."""
        return self._query is not None and self._query.isActive

    @property
    @translated()
    def exception(self) -> StreamingQueryException | None:
        """The error that ended it, if it was not stopped."""
        return self._query.exception() if self._query is not None else None

    @property
    def contradiction(self) -> str | None:
        """The error that ended it, if a new start would only repeat it: its checkpoint does not match its logs."""
        found = re.search(rf"errors\.(?:{Diverged.__name__}|{Stale.__name__}): (.+)", str(self.exception))
        return found[1] if found else None

    @property
    @translated()
    def progress(self) -> list[float]:
        """The durations of the recent micro-batches, in milliseconds, oldest first."""
        if self._query is None:
            return []
        took = [progress["durationMs"] for progress in self._query.recentProgress]
        # Without the time that the source waited before the batch; a replayed batch has not waited.
        return [float(ms["triggerExecution"] - ms.get("latestOffset", 0)) for ms in took if ms.get("addBatch")]

    @property
    @translated()
    def state_commits(self) -> list[float]:
        """The durations of the state commits of the recent micro-batches, in milliseconds."""
        recent = self._query.recentProgress if self._query is not None else []
        return [float(p["stateOperators"][0]["commitTimeMs"]) for p in recent if p["stateOperators"]]

    @property
    def is_drained(self) -> bool:
        """Whether every entry of the inbox has been applied, and its output is written."""
        return is_drained(open_log(self._inbox))

    @property
    def backlog(self) -> int:
        """The number of records waiting in the inbox."""
        return open_log(self._inbox).lag(INSTANCE)

    @property
    def batch_ms(self) -> float:
        """The median duration of the recent micro-batches, 0 before the first."""
        return median(self.progress or [0.0])

    # ── The plan ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _results(self) -> DataFrame:
        spec = self.spec
        processor = self.processor_type(spec.name, ship(spec.operator), spec.groups, self._nearby.name)
        return (
            self._bundles()
            .groupBy("_group")
            .transformWithState(processor, outputStructType=OUTPUT_DDL, outputMode="update", timeMode="none")
        )

    def _bundles(self) -> DataFrame:
        spec = self.spec
        self.spark.dataSource.register(InboxSource)
        reading = Reading(
            self._inbox,
            spec.schema,
            spec.groups,
            spec.max_records,
            rows=spec.prepare is not None,
            trim=spec.trim,
            pace_ms=round(spec.trigger_ms),
            reader=INSTANCE,
            nearby=self._nearby.name,
            checkpoint=self.checkpoint if self._durable else "",
        )
        source = self.spark.readStream.format(FORMAT).options(**reading.options()).load()
        if spec.prepare is None:
            return source
        prepared = spec.prepare(source.where("_kind = 0"))
        _check_prepared(prepared, spec)
        beside = source.where("_kind <> 0").select(*OWN_NAMES)
        rows = prepared.unionByName(beside, allowMissingColumns=True)
        groups, nearby = spec.groups, self._nearby.name

        def bundled(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            return bundle_batches(batches, groups, context.partitionId() << 32, Nearby(nearby))

        return rows.mapInArrow(bundled, DDL)


_starting = threading.Lock()
"""Held while a query starts: the session settings that it reads are set just before."""


def _is_idle(query: StreamingQuery) -> bool:
    status = query.status
    return (
        status["message"] in ("Waiting for data to arrive", "Waiting for next trigger")
        and not status["isDataAvailable"]
    )


def _check_prepared(prepared: DataFrame, spec: InstanceSpec) -> None:
    lost = [name for name in OWN_NAMES if name not in prepared.columns]
    if lost:
        raise Refused(
            f"prepare of stage {spec.stage} lost the columns {', '.join(lost)}, which identify a record: "
            "keep them, e.g. with df.withColumn(...) or df.select('*', ...) instead of df.select(...), "
            "and df.drop(...) for the columns that are not needed"
        )
    if not prepared.isStreaming:
        raise Refused(f"prepare of stage {spec.stage} must return a transformation of the DataFrame that it receives")
