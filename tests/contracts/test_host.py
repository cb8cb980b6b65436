"""The host contract, over the inline host: a death before or after any write changes nothing.

The micro-batch host has tests of the same behaviours with real Spark: tests/spark/test_query.py and test_stale.py.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.rig import SCHEMA, Rig, Running, by_key, stream
from whimbrel.core import wire
from whimbrel.core.errors import Refused, Stale, Unavailable
from whimbrel.core.instance import Instance
from whimbrel.core.keys import Selection
from whimbrel.core.operator import Emit, Operator
from whimbrel.core.record import Closed, Left, Move, Opened, OutboxEntry, Parked, Ready
from whimbrel.core.router import Begin, Cutover
from whimbrel.host.checkpoint import FILE, Batch, Checkpoint, SavedLog
from whimbrel.host.events import event_type_of, plain_schema
from whimbrel.host.inline import InlineHost
from whimbrel.host.starting import check_age
from whimbrel.host.threaded import _records
from whimbrel.log import EmbeddedLog, Lane, MemoryLog

# ── A death before or after any write ────────────────────────────────────────────────────────────────────────────────


class Died(BaseException):
    """The process ends here."""


class Fuse:
    """Counts the moments before and after each write of a host, and kills at some of them."""

    def __init__(self, kills: Callable[[int], bool]) -> None:
        self.moment, self.kills, self.deaths, self.burns = 0, kills, 0, False

    def burn(self) -> None:
        if not self.burns:
            return
        self.moment += 1
        if self.kills(self.moment):
            self.deaths += 1
            raise Died


class MortalLog(MemoryLog):
    """Its writer may die before and after a write."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        self._fuse.burn()
        position = super().append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        self._fuse.burn()
        return position

    def trim(self, position: int, lane: Lane = Lane.DATA) -> None:
        self._fuse.burn()
        super().trim(position, lane)
        self._fuse.burn()

    def commit(self, reader: str, positions: Mapping[Lane, int], *, resets: bool = False) -> None:
        self._fuse.burn()
        super().commit(reader, positions, resets=resets)
        self._fuse.burn()


class Stage(Rig):
    """Two instances with step-driven hosts, over logs in memory; a host that dies is made anew."""

    def __init__(self, folder: Path, kills: Callable[[int], bool], parts: int = 3) -> None:
        super().__init__(None, folder, instances=("a", "b"))
        self.fuse, self.parts = Fuse(kills), parts
        self.inboxes: dict[str, Any] = {name: MortalLog(self.fuse) for name in "ab"}
        self.outboxes: dict[str, Any] = {name: MortalLog(self.fuse) for name in "ab"}
        self.checkpoints = {name: MortalLog(self.fuse) for name in "ab"}
        self.hosts = {name: self.make(name) for name in "ab"}

    def make(self, name: str) -> InlineHost:
        saved = SavedLog(Path(f"checkpoint of {name}"), self.checkpoints[name])
        check_age(saved, name, self.inboxes[name], self.outboxes[name])
        schema = plain_schema(SCHEMA)
        events, parts = event_type_of(schema), self.parts
        return InlineHost(
            name,
            self.parts,
            lambda part: Instance(name, Running(), events, part=part, parts=parts),
            inbox=self.inboxes[name],
            outbox=self.outboxes[name],
            inbox_of=self.inboxes.__getitem__,
            checkpoint=self.checkpoints[name],
            records=partial(_records, schema),
            max_records=25,
            trim_every=2,
            most=4,
        )

    def run(self) -> None:
        """Step until there is nothing left to do."""
        self.fuse.burns, idle = True, 0
        while idle < 2:
            for name in "ab":
                try:
                    idle = 0 if self.hosts[name].step() else idle + 1
                except Died:
                    self.hosts[name], idle = self.make(name), 0
        self.fuse.burns = False

    def live_move(self) -> None:
        """Records, and a move of half of the keys between them."""
        keys = frozenset(f"k{n}" for n in range(0, 10, 2))
        move = Move("m1", "stage", "live", "a", "b", Selection(keys=keys), 1, frozenset({"router"}))
        for n, act in enumerate([None, lambda: self.order(Begin(move)), lambda: self.order(Cutover(move)), None]):
            if act is not None:
                act()
            for half in range(2):
                self.feed(stream(20, 10, 40 * n + 20 * half))
            self.run()

    def check(self) -> None:
        """Every record has had its effect once, in the order of its key."""
        assert by_key(self.released()) == self.expected()
        told = [type(notice) for notice in (*self.notices("a"), *self.notices("b"))]
        assert {kind: told.count(kind) for kind in told} == dict.fromkeys((Ready, Closed, Left, Opened), self.parts)
        for inbox in self.inboxes.values():
            assert [inbox.committed("instance", lane) for lane in Lane] == [inbox.tail(lane) for lane in Lane]


def lived(folder: Path, kills: Callable[[int], bool]) -> Stage:
    stage = Stage(folder, kills)
    stage.live_move()
    stage.check()
    return stage


def test_without_a_death(tmp_path: Path) -> None:
    stage = lived(tmp_path, lambda moment: False)
    assert stage.fuse.moment > 80, "there are many writes"
    assert stage.checkpoints["a"].head() > 0, "deltas were compacted"


def test_a_death_before_and_after_every_write(tmp_path: Path) -> None:
    moments = lived(tmp_path / "whole", lambda moment: False).fuse.moment
    for deadly in range(1, moments + 1):
        assert lived(tmp_path / str(deadly), lambda moment, deadly=deadly: moment == deadly).fuse.deaths == 1  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(20))
def test_many_deaths(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    assert lived(tmp_path, lambda moment: dice.random() < 0.2).fuse.deaths > 5


def _commit_first(self: InlineHost, batch: Batch) -> None:
    out = self._apply(batch)
    self._commit(batch, out)
    self._carry(batch, out)


def _plan_in_memory(self: Checkpoint, end: Any) -> Batch:
    self.last = Batch(self.id, self.parts, self.last.number + 1, self.at, end)
    return self.last


def _tell_first(self: InlineHost, batch: Batch) -> None:
    self.inbox.trim(batch.end["data"])
    _do(self, batch)


_do = InlineHost._do


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (InlineHost, "_do", _commit_first),
        (InlineHost, "_do", _tell_first),
        (Checkpoint, "begin", _plan_in_memory),
        (InlineHost, "forget", lambda self: None),
    ],
    ids=["effect first", "trim last", "durable plan", "a failed batch is forgotten"],
)
def test_each_of_these_safeguards_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any
) -> None:
    """Some death shows that it is missing: what is checked above can fail."""

    class Unlucky(Stage):
        def run(self) -> None:
            if name == "forget":  # the process lives on: only its step has failed
                self.make = lambda name: self.hosts[name]  # type: ignore[method-assign]
            super().run()

    monkeypatch.setattr(owner, name, broken)
    moments = 400
    for deadly in range(1, moments):
        stage = Unlucky(tmp_path / str(deadly), lambda moment, deadly=deadly: moment == deadly)  # type: ignore[misc]
        try:
            stage.live_move()
            stage.check()
        except Exception:
            return
    pytest.fail("nothing was missed")


def test_a_planned_batch_is_repeated_with_the_same_records(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda moment: stage.checkpoints["a"].tail() == 1)  # after the plan
    stage.feed(stream(10, 5))
    stage.fuse.burns = True
    with pytest.raises(Died):
        stage.hosts["a"].step()
    assert stage.outboxes["a"].tail() == 0
    stage.fuse.burns, stage.fuse.kills = False, lambda moment: False
    stage.feed(stream(10, 5, 10))
    stage.hosts["a"] = stage.make("a")
    stage.run()
    ends = [wire.unpack(entry.blob, OutboxEntry).end["data"] for entry in stage.outboxes["a"].read(0)]
    assert ends == [1, 2]
    assert by_key(stage.results()) == stage.expected()


def test_parts_that_are_lost_from_memory_are_loaded_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda moment: False)
    for n in range(12):
        stage.feed(stream(20, 10, 20 * n))
        stage.hosts["a"].forget(*range(n % 4))
        stage.run()
    assert by_key(stage.results()) == stage.expected()


# ── With a thread, over files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(None, tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


Rigs = Callable[..., Rig]


def test_results_are_those_of_a_sequential_run(rig: Rigs) -> None:
    one = rig(groups=5, max_records=150)
    for n in range(4):
        one.feed(stream(100, 37, 100 * n))
    one.start()
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert one.outboxes["a"].tail() >= 3, "the batches were limited"
    host = one.queries["a"]
    assert host.batch_ms > 0
    assert (host.backlog, host.is_active, host.exception, host.contradiction) == (0, True, None, None)


def test_a_host_that_is_stopped_goes_on_where_it_was(rig: Rigs) -> None:
    one = rig(max_records=60)
    one.apply_some(50)
    for n in range(1, 4):
        one.feed(stream(50, 20, 50 * n))
    one.start()
    one.queries["a"].wait(30)
    one.settle()
    one.queries["a"].stop()
    assert not one.queries["a"].is_active
    one.start()
    one.feed(stream(50, 20, 200))
    one.settle()
    assert by_key(one.results()) == one.expected()
    assert len(one.results()) == 250


def test_a_host_that_is_held_begins_no_batch(rig: Rigs) -> None:
    one = rig()
    one.start()
    one.settle()
    host = one.queries["a"]
    host.hold(True)
    one.feed(stream(10, 5))
    with pytest.raises(Unavailable, match="instance a did no batch within 0 s"):
        host.wait(0.3)
    assert not one.results()
    host.hold(False)
    one.settle()
    assert len(one.results()) == 10


def test_nulls_are_none_and_integers_stay_integers(rig: Rigs) -> None:
    one = rig(groups=1)
    one.feed([("k", (2**60 + 1, None)), ("k", (None, "x"))])
    one.start()
    one.settle()
    values = [result.values["value"] for result in one.results()]
    assert values == [2**60 + 1, None]
    assert type(values[0]) is int


def test_an_operator_that_raises_parks_the_record(rig: Rigs) -> None:
    one = rig(groups=1)
    one.feed([("k", (1, "good")), ("k", (2, "bad")), ("k", (3, "good"))])
    one.start()
    one.settle()
    assert [result.values["total"] for result in one.results()] == [1, 4]
    (parked,) = one.notices()
    assert isinstance(parked, Parked)
    assert (parked.key, parked.seq, parked.error) == ("k", 1, "ValueError: a bad word")


def test_deltas_are_compacted(rig: Rigs) -> None:
    one = rig(groups=1, max_records=10)
    for n in range(9):
        one.feed((key, (value, word * 5_000)) for key, (value, word) in stream(10, 10, 10 * n))
    one.start()
    one.settle()
    one.queries["a"].stop()
    log = EmbeddedLog(one.folder / "checkpoint-a" / FILE)
    assert 0 < log.head() < log.tail()
    log.close()
    one.start()
    one.feed(stream(10, 10, 90))
    one.settle()
    assert by_key(one.results()) == one.expected()


def test_another_number_of_groups_ends_it_and_says_why(rig: Rigs) -> None:
    one = rig(groups=2)
    one.apply_some(10)
    one.start(groups=3)
    host = one.queries.pop("a")
    one.until(lambda: not host.is_active)
    assert "made with 2 groups, not 3" in str(host.exception)
    assert host.contradiction is None
    with pytest.raises(Unavailable, match=r"instance a has ended: .* made with 2 groups"):
        host.wait(10)


def test_a_stage_that_needs_spark_is_refused(rig: Rigs) -> None:
    with pytest.raises(Refused, match=r"stage stage has a prepare, .*use host='micro-batch'"):
        rig(prepare=lambda frame: frame).start()


def test_a_checkpoint_that_is_gone_is_noticed_and_can_be_given_up(rig: Rigs) -> None:
    one = rig(groups=1)
    one.apply_some()
    shutil.rmtree(one.folder / "checkpoint-a")
    one.feed(stream(10, 5, 40))
    for _ in range(2):
        with pytest.raises(Stale, match=r"checkpoint of a is gone.*'data': 1.*accept_loss=\['a'\]"):
            one.start()
    one.queries["a"].renew()
    one.queries["a"].start()
    one.settle()
    assert len(one.results()) == 50, "nothing twice"
    one.sent = one.sent[40:]
    assert by_key(one.results()[40:]) == one.expected(), "and without what was lost"


def test_an_old_checkpoint_is_noticed(rig: Rigs) -> None:
    one = rig(groups=1)
    one.apply_some()
    shutil.copytree(one.folder / "checkpoint-a", one.folder / "backup")
    one.apply_some(10, 40)
    shutil.rmtree(one.folder / "checkpoint-a")
    (one.folder / "backup").rename(one.folder / "checkpoint-a")
    with pytest.raises(Stale, match=r"the checkpoint of a .* is old: it knows batches up to"):
        one.start()
    one.queries.clear()


def undo_last_commit(one: Rig) -> int:
    """What a death leaves behind that came between the outbox and the commit; returns the batch."""
    path = one.folder / "checkpoint-a" / FILE
    log = EmbeddedLog(path)
    entries = log.read(log.head())[:-1]
    log.close()
    path.unlink()
    short = EmbeddedLog(path)
    for entry in entries:
        batch = wire.unpack(entry.blob, Batch)
        number = 2 * batch.number + (batch.deltas is not None)
        short.append(entry.blob, count=0, writer="host", counter=number)
    short.close()
    return wire.unpack(entries[-1].blob, Batch).number


def test_a_batch_that_is_repeated_after_a_death_is_taken_for_what_it_is(rig: Rigs) -> None:
    one = rig(groups=2)
    one.apply_some()
    undo_last_commit(one)
    one.apply_some(10, 40)
    assert by_key(one.results()) == one.expected()


class Changed(Running):
    """The same job with changed code."""

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        super().process(key, event, state, lambda **values: emit(**values, more=1))


def test_a_repeated_batch_that_says_something_else_is_an_error(rig: Rigs) -> None:
    one = rig(groups=1)
    one.apply_some()
    batch = undo_last_commit(one)
    one.start(operator=Changed())
    host = one.queries.pop("a")
    one.until(lambda: not host.is_active)
    assert host.contradiction is not None
    assert f"batch {batch} of a@" in host.contradiction
    assert "Changed gave {" in host.contradiction
    assert len(one.results()) == 40, "nothing was appended"


def test_a_checkpoint_goes_on_elsewhere(rig: Rigs) -> None:
    one = rig()
    one.apply_some()
    there, here = one.folder / "checkpoint-a", one.folder / "elsewhere"
    saved = SavedLog(there)
    shutil.copytree(there, here, ignore=saved.needless)
    shutil.rmtree(there)
    assert (SavedLog(here).id, SavedLog(here).planned) == (saved.id, saved.planned)
    assert SavedLog(there).planned == -1
    one.feed(stream(40, 5, 40))
    one.start(checkpoint=here)
    one.settle()
    assert by_key(one.results()) == one.expected()


class Keeping(Operator):
    """Keeps something in itself."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        self.seen.append(key)
        emit(seen=len(self.seen))


def test_what_an_operator_keeps_in_itself_stays_in_its_host(rig: Rigs) -> None:
    operator = Keeping()
    one = rig(groups=1, operator=operator)
    one.feed(stream(5, 5))
    one.start()
    one.settle()
    assert [result.values["seen"] for result in one.results()] == [1, 2, 3, 4, 5]
    assert operator.seen == []


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.int8(), pa.int64(), pa.float32(), pa.bool_(), pa.string(), pa.large_string(), pa.binary()),
        *(pa.date32(), pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.decimal128(9, 2), pa.list_(pa.timestamp("s"))),
        *(pa.struct([("a", pa.timestamp("ms"))]), pa.map_(pa.string(), pa.int16())),
    ],
    ids=str,
)
def test_an_operator_receives_the_same_events_from_every_host(kind: pa.DataType) -> None:
    from whimbrel.host.events import python_type
    from whimbrel.spark.source import row_schema

    user = pa.schema([("value", kind)])
    inline, spark = (schema(user).field("value").type for schema in (plain_schema, row_schema))
    assert str(python_type(inline)) == str(python_type(spark))
    if pa.types.is_temporal(kind):
        assert inline == spark, "and the same times"
