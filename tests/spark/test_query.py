"""An instance inside Spark says what a plain core instance says, whatever happens to the query."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.spark.rig import Rig, by_key, stream
from whimbrel.core import wire
from whimbrel.core.errors import Full, Refused
from whimbrel.core.keys import Selection, bin_of
from whimbrel.core.record import Aborted, Closed, Kind, Left, Move, Opened, Parcel, Parked, Ready, Rejected
from whimbrel.core.router import Abort, Begin, Cutover
from whimbrel.log import EmbeddedLog, Lane
from whimbrel.log.carrier import MOST_BYTES, batches
from whimbrel.log.codec import encode_messages, messages
from whimbrel.spark.archive import archive
from whimbrel.spark.java import find_java
from whimbrel.spark.stores import loaded

pytestmark = pytest.mark.spark
Rigs = Callable[..., Rig]


@pytest.mark.parametrize(("groups", "partitions"), [(1, 1), (5, 2)])
def test_results_are_those_of_a_sequential_run(rig: Rigs, groups: int, partitions: int) -> None:
    one = rig(groups=groups, partitions=partitions, max_records=150)
    for n in range(4):
        one.feed(stream(100, 37, 100 * n))
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert len(one.results()) == 400
    assert one.outboxes["a"].tail() >= 3, "the batches were limited"
    assert one.queries["a"].batch_ms > 0


def test_what_is_large_comes_out_as_it_went_in_and_leaves_no_file(rig: Rigs) -> None:
    """Records, results and state of a batch: megabytes each, so that they go through files."""
    one = rig(groups=2)
    for half in range(2):
        one.feed((f"k{n % 5}", (n, chr(65 + n % 26) * 20_000)) for n in range(60 * half, 60 * half + 60))
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert sum(len(word) for result in one.results() for word in result.values["words"]) > 6_000_000
    assert not list(Path(one.queries["a"]._nearby.name).glob("batch-*"))


def test_output_that_is_too_large_for_one_entry_is_split_and_a_death_between_two_pieces_repeats_the_batch(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.log.carrier.MOST_BYTES", 2000)
    one = rig(groups=2)
    one.feed(stream(200, 20))
    append, outbox = EmbeddedLog.append, one.outboxes["a"].path

    def dying(self: EmbeddedLog, blob: bytes, **named: Any) -> int | None:
        if self.path == outbox and self.tail() == 3:
            raise RuntimeError("here it dies")
        return append(self, blob, **named)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedLog, "append", dying)
        one.start()
        query = one.queries.pop("a")
        one.until(lambda: not query.is_active)
    assert one.outboxes["a"].tail() == 3
    assert list(batches(one.outboxes["a"], 0)) == [], "the batch has not said its last word"
    query.stop()
    one.start()
    one.settle()
    entries = one.outboxes["a"].read(0)
    assert len(entries) > 5
    assert max(len(entry.blob) for entry in entries) < 2500
    whole = [group for _, groups in batches(one.outboxes["a"], 0) for group in groups]
    assert by_key(result for group in whole for result in group.results) == one.expected()


def test_a_restarted_query_goes_on_where_it_was(rig: Rigs) -> None:
    one = rig(max_records=60)
    one.feed(stream(50, 20))
    one.start()
    one.settle()
    one.feed(stream(50, 20, 50))
    one.feed(stream(50, 20, 100))
    one.queries["a"].stop()
    assert not one.queries["a"].is_active
    assert one.queries["a"].exception is None
    one.start()
    one.feed(stream(50, 20, 150))
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert len(one.results()) == 200


def test_a_start_that_fails_half_way_leaves_no_query_behind(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the last step: Spark runs no two queries of one name, so a leftover bars every start."""
    one = rig(groups=1, partitions=1)
    one.feed(stream(20, 5))
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedLog, "append", _no_room)
        with pytest.raises(Full):
            one.start()
    assert not [query for query in one.spark.streams.active if query.name == "a"]
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()


def _no_room(*_: object, **__: object) -> None:
    raise Full("inbox-a.db")


def test_a_query_that_has_ended_writes_nothing_more_to_its_checkpoint(rig: Rigs) -> None:
    """Else, up to a minute later, Spark would write a snapshot into a folder that may be another run's by then."""
    one = rig(groups=2, partitions=2)
    one.feed(stream(20, 5))
    one.start()
    one.settle()
    query = one.queries["a"]
    assert query._query is not None
    assert loaded(one.spark, query._query, query.checkpoint) == 2
    query.stop()
    assert loaded(one.spark, query._query, query.checkpoint) == 0
    one.feed(stream(20, 5, 20))
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()


def test_the_jvm_has_room_for_what_it_compiles(rig: Rigs) -> None:
    """Two stages fill 48 MB, what a JVM with the quick compiler alone reserves, within five minutes."""
    jvm = rig().spark.sparkContext._jvm
    assert jvm is not None
    pools = jvm.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
    sizes = [pool.getUsage().getMax() for pool in pools if "Code" in pool.getName()]
    assert sum(sizes) >= 200 << 20


def test_a_query_that_was_interrupted_repeats_its_batch_without_a_trace(rig: Rigs) -> None:
    one = rig(max_records=40)
    one.start()
    for n in range(6):
        one.feed(stream(40, 20, 40 * n))
    one.until(lambda: one.outboxes["a"].tail() >= 1)
    query = one.queries["a"]._query
    assert query is not None
    query.stop()
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert len(one.results()) == 240


def test_workers_that_die_are_replaced_from_the_state_store(rig: Rigs) -> None:
    one = rig(groups=3)
    one.feed(stream(80, 20))
    one.start()
    one.settle()
    workers = python_workers()
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    one.feed(stream(80, 20, 80))
    one.settle()
    assert by_key(one.results()) == one.expected()


def python_workers() -> list[int]:
    """The processes forked from a Spark daemon of this process's JVM."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    daemons = {int(pid) for pid, _, args in rows if "whimbrel.spark.daemon" in args}

    def ancestors(pid: int) -> list[int]:
        return [pid, *ancestors(parents[pid])] if pid in parents else [pid]

    return [pid for pid in daemons if parents[pid] in daemons and os.getpid() in ancestors(pid)]


def test_deltas_are_compacted(rig: Rigs) -> None:
    one = rig(groups=1, partitions=1, max_records=10)
    # About 300 KB of state a batch: more than a base may be outgrown by.
    for n in range(9):
        one.feed((key, (value, word * 5_000)) for key, (value, word) in stream(10, 10, 10 * n))
    one.start()
    one.settle()
    one.queries["a"].stop()
    assert stored_deltas(one) < 9
    one.start()
    one.feed(stream(10, 10, 90))
    one.settle()
    assert by_key(one.results()) == one.expected()


def stored_deltas(one: Rig) -> int:
    """How many deltas, base included, lie in the state store of a stopped instance."""
    reader = one.spark.read.format("statestore").option("stateVarName", "blobs")
    return reader.load(str(one.folder / "checkpoint-a")).count() - 1  # the head


def test_another_number_of_groups_is_refused(rig: Rigs) -> None:
    one = rig(groups=2)
    one.feed(stream(10, 5))
    one.start()
    one.settle()
    one.queries["a"].stop()
    one.feed(stream(10, 5))
    one.start(groups=3)
    query = one.queries.pop("a")
    one.until(lambda: not query.is_active)
    assert "made with 2 groups, not 3" in str(query.exception)


def test_nulls_are_none_and_integers_stay_integers(rig: Rigs) -> None:
    schema = pa.schema([("value", pa.int64()), ("word", pa.string())])
    one = rig(schema=schema, groups=1, partitions=1)
    one.feed([("k", (2**60 + 1, None)), ("k", (None, "x"))])
    one.start()
    one.settle()
    values = [result.values["value"] for result in one.results()]
    assert values == [2**60 + 1, None]
    assert type(values[0]) is int


def test_an_operator_that_raises_parks_the_record(rig: Rigs) -> None:
    one = rig(groups=1, partitions=1)
    one.feed([("k", (1, "good")), ("k", (2, "bad")), ("k", (3, "good"))])
    one.start()
    one.settle()
    assert [result.values["total"] for result in one.results()] == [1, 4]
    (parked,) = one.notices()
    assert isinstance(parked, Parked)
    assert (parked.key, parked.seq, parked.error) == ("k", 1, "ValueError: a bad word")


# ── prepare ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prepare_may_filter_add_and_multiply(rig: Rigs) -> None:
    def prepare(df):  # type: ignore[no-untyped-def]
        twice = df.where("value % 2 = 0").withColumn("value", F.explode(F.array("value", F.col("value") + 1)))
        return twice.withColumn("word", F.upper("word")).withColumn("extra", F.lit(7))

    one = rig(prepare=prepare)
    one.feed(stream(60, 10))
    one.start()
    one.settle()
    sent, one.sent = one.sent, []
    for record in sent:
        value, word = record.body
        if value % 2 == 0:
            one.sent += [record._replace(offset=record.seq, body=(v, word.upper())) for v in (value, value + 1)]
    assert by_key(one.results()) == one.expected()


def test_a_prepare_that_loses_our_columns_is_refused(rig: Rigs) -> None:
    one = rig(prepare=lambda df: df.select("value", "word", "_key"))
    with pytest.raises(Refused, match=r"prepare of stage stage lost the columns _kind, _bin, .*df\.withColumn"):
        one.start()
    one.queries.clear()


# ── A move ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prepare", "most"), [(None, MOST_BYTES), (lambda df: df.where("value is not null"), MOST_BYTES), (None, 300)]
)
def test_a_live_move_loses_and_doubles_nothing(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch, prepare: object, most: int
) -> None:
    monkeypatch.setattr("whimbrel.log.carrier.MOST_BYTES", most)
    two = rig(instances=("a", "b"), groups=2, partitions=1, prepare=prepare)
    keys = frozenset(f"k{n}" for n in range(0, 30, 2))
    move = Move("m1", "stage", "live", "a", "b", Selection(keys=keys), 1, frozenset({"router"}))
    two.feed(stream(100, 30))
    two.start()
    two.order(Begin(move))
    two.feed(stream(100, 30, 100))
    two.until(lambda: [type(notice) for notice in two.notices("b")] == [Ready, Ready])
    two.feed(stream(100, 30, 200))
    two.order(Cutover(move))
    two.feed(stream(100, 30, 300))
    two.settle()
    two.until(lambda: [type(notice) for notice in two.notices("b")].count(Opened) == 2)
    assert [type(notice) for notice in two.notices("a")] == [Closed, Left, Closed, Left]
    assert {result.key for result in two.results("b")} == keys
    released = two.released()
    assert by_key(released) == two.expected()
    assert len({(r.key, r.epoch, r.seq, r.n) for r in released}) == len(released) == 400
    sent = [len(messages(entry.blob)) for entry in two.inboxes["b"].read(0, lane=Lane.CONTROL)]
    assert (max(sent) > 4) == (most > 300), "parcels travel in one entry, or in several"


def test_a_damaged_parcel_is_refused_the_move_called_off_and_no_query_dies(rig: Rigs) -> None:
    two = rig(instances=("a", "b"), groups=1, partitions=1)
    move = Move("m1", "stage", "live", "a", "b", Selection(keys=frozenset({"k0"})), 1, frozenset({"router"}))
    two.feed(stream(30, 3))
    two.start("b")
    spoilt = wire.pack(Parcel("m1", bin_of("k0"), {}))[:-1] + b"?"
    parcel = encode_messages([(Kind.PARCEL, bin_of("k0"), spoilt)])
    two.inboxes["b"].append(parcel, count=1, writer="a", counter=0, lane=Lane.CONTROL)
    two.order(Begin(move))
    two.start("a")
    two.until(lambda: any(isinstance(notice, Rejected) for notice in two.notices("b")))
    two.feed(stream(30, 3, 30))
    two.order(Abort(move))
    two.feed(stream(30, 3, 60))
    two.settle()
    (rejected, aborted) = two.notices("b")
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith("b refuses a PARCEL: the checksum does not fit"), "before BEGIN or behind it"
    assert [type(aborted), *map(type, two.notices("a"))] == [Aborted, Aborted]
    assert two.results("b") == []
    assert by_key(two.released()) == two.expected()


def test_the_jvm_takes_its_classes_from_the_archive(spark: SparkSession) -> None:
    java = find_java()
    assert java is not None
    assert spark.sparkContext._jvm is not None
    told = spark.sparkContext._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    made = archive(java)
    used = [option.partition("=")[2] for option in told if option.startswith("-XX:SharedArchiveFile=")]
    assert used == ([] if made is None else [str(made)])
