"""Increments in a running pipeline, with the instance's part played by hand: ordered, spooled, committed, made
checkpoints of, and the ingress log trimmed behind them; whoever dies, and whether the store is there or not."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import whimbrel as wb
from tests.app.test_orchestrator import raising
from tests.app.waiting import until
from whimbrel.checkpoints import checkpointer as checkpointer_role
from whimbrel.checkpoints.checkpointer import Checkpointer
from whimbrel.checkpoints.place import Objects
from whimbrel.checkpoints.version import StoreStatus
from whimbrel.core import wire
from whimbrel.core.errors import Refused, Retry, Unavailable
from whimbrel.core.increments import STORE
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, EVERYTHING, part_of
from whimbrel.core.operator import Emit
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Kind, Message, Move, OutboxEntry, Outgoing, Record, Unreadable
from whimbrel.log import Lane, codec
from whimbrel.log.codec import encode_messages
from whimbrel.log.folder import Logs
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, Journal, JournalReader
from whimbrel.roles import gateway as gateway_role
from whimbrel.roles.flow import StageFlow
from whimbrel.roles.gateway import GatewayRole

PARTS = 2
RARELY = 1000.0
"""Seconds between increments: only those happen that a test orders."""


class Sum(wb.Operator):
    """Adds up."""

    class State(wb.State):
        """So far."""

        total: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One more."""
        state.total += event[1]
        emit(key=key, total=state.total)


class Hand:
    """An instance as Spark would run it: batch by batch, each one known by its number."""

    def __init__(self, logs: Logs, name: str = "sum-1") -> None:
        self.logs, self.name = logs, name
        self.batches: list[tuple[int, int]] = []
        """Where each batch ends, in both lanes of the inbox."""
        self.planned: tuple[int, int] | None = None
        """Where the batch ends that has begun and is not committed: it is repeated as it was."""
        self.blobs: list[list[bytes]] = [[] for _ in range(PARTS)]
        """What the parts have committed."""

    def batch(self, *, speaks: bool = True, commits: bool = True) -> None:
        """Do what lies in the inbox. It may die before it speaks, or before Spark knows that it has."""
        inbox, number = self.logs.inbox(self.name), len(self.batches)
        ends = self.planned = self.planned or (inbox.tail(Lane.DATA), inbox.tail(Lane.CONTROL))
        records = [*self._read(Lane.CONTROL, ends[1]), *self._read(Lane.DATA, ends[0])]
        said, messages = [], list[Message]()
        for part in range(PARTS):
            instance = Instance(self.name, Sum(), part=part, parts=PARTS)
            instance.load(self.blobs[part])
            out = instance.apply([one for one in records if one.bin == EVERY_BIN or part_of(one.bin, PARTS) == part])
            said.append(Outgoing(out.results, out.notices, part, instance.table.state_bytes))
            messages += out.messages
            if commits:
                self.blobs[part] += instance.deltas()
        who: dict[str, Any] = {"writer": f"{self.name}@x", "counter": number}
        for to in {message.to for message in messages}:
            mine = sorted((message for message in messages if message.to == to), key=lambda message: message.kind)
            contents = [(message.kind, message.bin, message.body) for message in mine]
            blob = wire.pack(contents) if to == STORE else encode_messages(contents)
            box = self.logs.increments(self.name) if to == STORE else self.logs.inbox(to)
            box.append(blob, count=len(mine), lane=Lane.CONTROL, **who)
        if speaks:
            self.logs.outbox(self.name).append(wire.pack(OutboxEntry(said)), count=1, **who)
        if commits:
            self.batches.append(ends)
            self.planned = None

    def _read(self, lane: Lane, end: int) -> Iterator[Record]:
        start = self.batches[-1][lane] if self.batches else 0
        for entry in self.logs.inbox(self.name).read(start, end, lane):
            yield from codec.records(entry)


class Door:
    """Objects that can be away."""

    def __init__(self, objects: Objects) -> None:
        self.objects, self.is_open = objects, True
        self.puts: Counter[str] = Counter()

    def _look(self) -> None:
        if not self.is_open:
            raise Unavailable("nobody answers")

    def put(self, name: str, blob: bytes) -> None:
        self._look()
        self.puts[name] += 1
        self.objects.put(name, blob)

    def get(self, name: str) -> bytes | None:
        self._look()
        return self.objects.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        self._look()
        return self.objects.get_all(names)

    def names(self, folder: str) -> list[str]:
        self._look()
        return self.objects.names(folder)

    def delete(self, names: Iterable[str]) -> None:
        self._look()
        self.objects.delete(names)


class House:
    """A data directory, a store, and the gateway's role of the moment."""

    def __init__(self, folder: Path, store: Path | None = None) -> None:
        self.folder, self.delivered = folder, list[dict[str, Any]]()
        self.at = store or folder / "store"
        source = wb.Items([], schema="key string, n long")
        self.pipeline = wb.Pipeline("p", source=source, key="key").stage("sum", Sum(), groups=PARTS)
        self.pipeline.sink(self.delivered.append)
        self.truth: Counter[str] = Counter()
        self.sent = 0
        self.hand = Hand(Logs(folder / "data" / "logs"))
        self.door: Door | None = None
        self.begin()

    def begin(self, *, stores: bool = True, every: float = RARELY) -> None:
        """A gateway, from what its predecessor has left."""
        decisions = Journal(self.folder / "data" / JOURNAL)
        decisions.save("instances/sum", wire.pack({"sum-1": "cloud"}))
        decisions.close()
        self.begin_gateway(stores=stores, every=every)

    def begin_gateway(self, *, stores: bool = True, every: float = RARELY, is_open: bool = True) -> None:
        data, store = self.folder / "data", str(self.at) if stores else None
        self.journal, self.logs = GatewayJournal(data / GATEWAY_JOURNAL), Logs(data / "logs")
        options: dict[str, Any] = {"keep": False, "max_backlog": 1000, "watch": lambda results, now_us: None}
        self.role = GatewayRole(
            self.pipeline,
            self.logs,
            self.journal,
            JournalReader(data / JOURNAL),
            lambda stage, notice: None,
            lambda: 1_000_000,
            store=store,
            save_every=every,
            **options,
        )
        if self.role.store is not None:
            self.door = self.role.store.objects = Door(self.role.store.objects)
            self.door.is_open = is_open
        self.role.start()

    def end(self) -> None:
        for end in (*self.role.ends(), *self.role.outlet_ends(), self.logs.close, self.journal.close):
            end()

    @property
    def flow(self) -> StageFlow:
        return self.role.flows["sum"]

    @property
    def checkpointer(self) -> Checkpointer:
        assert self.flow.checkpointer is not None
        return self.flow.checkpointer

    @property
    def store(self) -> StoreStatus:
        found = self.role.status().stages["sum"].store
        assert found is not None
        return found

    def send(self, **amounts: int) -> None:
        self.sent += 1
        self.flow.gateway.ingest([(key, (key, n), None) for key, n in amounts.items()], "by hand", self.sent)
        self.truth.update(amounts)

    def order(self) -> None:
        """Order an increment, and wait until it lies in the inbox."""
        inbox = self.logs.inbox("sum-1")
        tail = inbox.tail()
        self.checkpointer.order()
        until(lambda: inbox.tail() > tail, "the order")

    def save(self) -> None:
        """An increment, and the checkpoint that comes of it."""
        before = self.store.checkpoint or 0
        self.order()
        self.hand.batch()
        until(lambda: self.store.checkpoint == before + 1, "the checkpoint")

    def stored(self, at: int | None = None) -> dict[str, int]:
        """The totals that the store has."""
        found = {}
        for version in self.checkpointer.store.load("sum", at=at):
            bag = version.unpacked()
            found[version.key] = msgspec.msgpack.decode(bag.state)["total"]
        return found

    def orders(self) -> list[int]:
        """The numbers of all increments that the instance was told to make."""
        return [one.seq for one in self.hand._read(Lane.DATA, 10**6) if one.kind == Kind.BARRIER]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(checkpointer_role, "FIRST", 0.01)
    monkeypatch.setattr(gateway_role, "PERIOD", 0.02)
    one = House(tmp_path)
    yield one
    one.end()


def test_a_saving_comes_to_the_store_and_the_ingress_log_is_trimmed_behind_the_oldest_checkpoint(house: House) -> None:
    ingress = house.flow.gateway.ingress

    def is_trimmed(head: int) -> bool:
        return ingress.head() == head

    for n, head in enumerate([1, 1, 1, 3, 5, 7]):  # each round is a record and its BARRIER; three checkpoints are kept
        house.send(a=n, b=2 * n, **{f"k{n}": n})
        house.hand.batch()
        house.save()
        assert house.stored() == house.truth
        until(partial(is_trimmed, head), "the log to be trimmed")
    assert [one.number for one in house.checkpointer.store.checkpoints("sum")] == [4, 5, 6]
    assert house.store == StoreStatus(6, 1_000_000, 11 * codec.ROWS, 0, None)


def test_an_orchestrator_that_is_stopped_inside_a_write_holds_up_no_record(house: House) -> None:
    """It has the lock of its file for as long as it is stopped."""
    with closing(sqlite3.connect(house.folder / "data" / JOURNAL, isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        house.send(a=1)
        house.hand.batch()
        until(lambda: house.delivered == [{"key": "a", "total": 1}], "the result")
        assert house.flow.save(), "the router's snapshot"
        house.save()
        until(lambda: house.flow.outlet.is_idle, "the outlet's commit")
        house.end()
        house.begin_gateway()
        assert (house.role.errors(), house.flow.instances, house.stored()) == ([], {"sum-1": "cloud"}, {"a": 1})
        stopped.execute("ROLLBACK")


def test_nothing_is_trimmed_for_a_snapshot_that_could_not_be_stored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a successor would start from the one before, whose records are gone."""
    house.end()
    house.begin_gateway(stores=False)
    house.role._stopping.set()
    house.role._saver.join()
    house.send(a=1)
    house.send(a=2)
    head = house.flow.gateway.ingress.head()
    with monkeypatch.context() as full:
        full.setattr(house.flow._journal, "_execute", raising(Unavailable("the disk is full")))
        with pytest.raises(Unavailable):
            house.flow.save()
    assert house.flow.gateway.ingress.head() == head
    assert house.flow.save()
    assert house.flow.gateway.ingress.head() == head + 2


def test_nothing_is_trimmed_before_it_is_known_which_checkpoints_there_are(house: House) -> None:
    """A gateway starts while the store is away: the oldest checkpoint may need more than the newest one covers."""
    for n in (1, 2):
        house.send(a=n)
        house.save()
    ingress = house.flow.gateway.ingress
    until(lambda: ingress.head() == 1, "the log to be trimmed")
    assert house.flow.gateway.horizon() // codec.ROWS == 3
    assert house.flow.save()
    house.end()
    house.begin_gateway(is_open=False)
    until(lambda: house.store.error is not None, "the store to be missed")
    assert house.flow.save()
    assert (house.flow.gateway.horizon() // codec.ROWS, house.flow.gateway.ingress.head()) == (3, 1)


def test_a_checkpoint_covers_no_more_than_the_gateway_knows_to_be_saved(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys may be under way between two instances, each of which has saved all that it has."""
    monkeypatch.setattr(house.flow.gateway, "horizon", lambda: 7)
    house.send(a=1)
    house.save()
    assert house.checkpointer.store.horizon("sum", 1) == 7


def test_a_fence_that_the_outlet_has_not_committed_is_none(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be down to its last commit any moment, and let the lost one's results out again."""
    monkeypatch.setattr("whimbrel.checkpoints.restoring.FENCE_TIMEOUT", 0.01)
    assert house.flow.restoring is not None
    lost = Move("m1", "sum", "restore", "sum-1", "sum-2", EVERYTHING, 1, frozenset({"gateway-sum"}), RestoreOptions())
    house.flow.outlet.stop()
    with pytest.raises(Retry, match="has not committed the fence of m1 yet"):
        house.flow.restoring.fence(lost)


def test_what_cannot_be_restored_is_told_until_it_is_heard(house: House) -> None:
    heard: list[Any] = []
    away = [Unavailable("no orchestrator")] * 3

    def hear(stage: str, notice: Any) -> None:
        if away:
            raise away.pop()
        heard.append((stage, notice))

    house.role.notify = hear
    house.flow.gateway.refused["m7"] = "its records are gone"
    until(lambda: heard, "it to be heard")
    assert house.flow.save()
    assert heard == [("sum", Unreadable("m7", "gateway-sum", "its records are gone"))]
    assert house.role.errors() == []
    house.end()
    house.begin_gateway()
    assert house.flow.gateway.refused == {"m7": "its records are gone"}, "who asks again hears it also then"


def test_a_checkpoint_is_what_it_was(house: House) -> None:
    house.send(a=1)
    house.save()
    house.send(a=10, b=1)
    house.save()
    assert (house.stored(1), house.stored(2)) == ({"a": 1}, {"a": 11, "b": 1})
    store = house.checkpointer.store
    assert store.horizon("sum", 1) == 1 * codec.ROWS
    assert house.flow.gateway.horizon() == store.horizon("sum", 2) == 3 * codec.ROWS


def test_an_idle_instance_saves_when_it_is_asked(house: House) -> None:
    house.send(a=1)
    house.save()
    horizon = house.store.horizon
    house.save()
    assert (house.store.horizon > horizon, house.stored()) == (True, {"a": 1})


def test_what_is_not_confirmed_is_not_committed(house: House) -> None:
    """Its site dies when it has sent and before it speaks: nobody knows the results that go with it."""
    house.send(a=1)
    house.save()
    house.send(a=10)
    house.order()
    house.hand.batch(speaks=False, commits=False)
    until(lambda: house.store.under_way_bytes > 0, "the spool to have it")
    house.checkpointer.wake()
    house.order()
    assert (house.stored(), house.store.checkpoint) == ({"a": 1}, 1)
    house.hand.batch()
    until(lambda: house.store.checkpoint == 2, "the checkpoint")
    assert (house.stored(), house.delivered[-1]) == ({"a": 11}, {"key": "a", "total": 11})
    house.hand.batch()
    until(lambda: house.store.under_way_bytes == 0, "the other order")


def test_a_batch_that_is_repeated_is_saved_once(house: House) -> None:
    house.send(a=1)
    house.order()
    house.hand.batch(commits=False)
    house.hand.batch()
    until(lambda: house.store.checkpoint == 1, "the checkpoint")
    house.save()
    assert house.door is not None
    assert (house.stored(), max(house.door.puts.values())) == ({"a": 1}, 1)


@pytest.mark.parametrize("died_after", ["order", "batch", "confirmation", "checkpoint"])
def test_a_gateway_that_comes_back_goes_on(house: House, died_after: str) -> None:
    house.send(a=1)
    house.save()
    house.send(a=10, b=5)
    first = house.store.horizon
    house.order()
    if died_after == "batch":
        house.role.flows["sum"].outlet.stop()
    if died_after == "confirmation":
        assert house.door is not None
        house.door.is_open = False
    if died_after != "order":
        house.hand.batch()
    if died_after == "confirmation":
        until(
            lambda: house.logs.log("increments-sum-1").tail(Lane.CONTROL) == 2 * PARTS, "the gate to have confirmed it"
        )
    if died_after == "checkpoint":
        until(lambda: house.store.checkpoint == 2, "the checkpoint")
    house.end()
    house.begin()
    if died_after == "order":
        house.hand.batch()
    until(lambda: house.store.checkpoint == 2, "the checkpoint")
    assert (house.stored(), house.store.horizon >= first) == (house.truth, True)
    house.send(c=7)
    house.save()
    assert (house.stored(), house.stored(2)) == (house.truth, {"a": 11, "b": 5})
    assert house.store.horizon > house.checkpointer.store.horizon("sum", 2) > first
    assert house.flow.gateway.ingress.counter("increments") == 2


def test_while_the_store_is_away_everything_goes_on_and_no_more_is_ordered(house: House) -> None:
    house.send(a=1)
    house.save()
    assert house.door is not None
    house.door.is_open = False
    house.send(a=10)
    house.order()
    house.hand.batch()
    until(lambda: house.store.error is not None, "somebody to notice")
    assert "nobody answers" in (house.store.error or "")
    assert house.store.under_way_bytes > 0
    house.checkpointer.order()
    house.send(b=3)
    house.hand.batch()
    until(lambda: house.delivered[-1] == {"key": "b", "total": 3}, "results to go out all the same")
    assert (house.orders(), house.role.errors()) == ([], [])
    house.door.is_open = True
    until(lambda: house.orders(), "the order that was due")
    assert (house.store.checkpoint, house.store.error) == (2, None)
    house.hand.batch()
    until(lambda: house.store.checkpoint == 3, "the checkpoint")
    assert (house.stored(), house.store.under_way_bytes) == (house.truth, 0)


@pytest.mark.parametrize("mounted", [False, True], ids=["no folder", "an empty folder"])
def test_a_store_that_is_not_mounted_is_no_store_that_has_nothing(house: House, mounted: bool) -> None:
    """What is put there meanwhile does not count, and nothing is restored from it as if there had never been more."""
    house.send(a=1)
    house.save()
    horizon, store = house.store.horizon, house.folder / "store"
    store.rename(house.folder / "elsewhere")
    if mounted:
        store.mkdir()
    house.send(a=10)
    house.order()
    house.hand.batch()
    until(lambda: "it is unavailable or not mounted" in (house.store.error or ""), "it is noticed")
    assert (house.store.horizon, house.store.checkpoint) == (horizon, 1)
    move = Move(
        "m1", "sum", "restore", "sum-1", "sum-2", EVERYTHING, 1, frozenset({house.flow.gateway.name}), RestoreOptions()
    )
    assert house.flow.restoring is not None
    with pytest.raises(Unavailable, match="it is unavailable or not mounted"):
        house.flow.restoring.load(move, None)
    shutil.rmtree(store, ignore_errors=True)
    (house.folder / "elsewhere").rename(store)
    until(lambda: house.store.checkpoint == 2, "it is back")
    assert house.stored() == {"a": 11}


@pytest.mark.parametrize("is_spooled", [False, True], ids=["at rest", "with an increment under way"])
def test_another_store_gets_everything(house: House, is_spooled: bool) -> None:
    """What was saved for the old one does not count for it, and makes no checkpoint of it."""
    house.send(a=1)
    house.save()
    house.send(b=2)
    assert house.door is not None
    house.door.is_open = not is_spooled
    if is_spooled:
        house.order()
        house.hand.batch()
        until(
            lambda: house.logs.log("increments-sum-1").tail(Lane.CONTROL) == 2 * PARTS, "the gate to have confirmed it"
        )
    house.end()
    (house.folder / "store").rename(house.folder / "old")
    house.begin()
    until(lambda: house.orders(), "the order to save everything")
    assert (house.store.checkpoint, house.store.horizon) == (None, -1)
    house.hand.batch()
    until(lambda: house.store.checkpoint == 1, "the checkpoint")
    assert house.stored(1) == house.stored() == {"a": 1, "b": 2}


def test_a_store_of_another_run_is_left_alone(house: House, tmp_path: Path) -> None:
    house.send(a=1)
    house.save()
    other = House(tmp_path / "other", store=tmp_path / "store")
    other.send(a=5)
    until(lambda: other.store.error, "the error to be told")
    assert "belong to another run" in (other.store.error or "")
    other.checkpointer.order()
    other.hand.batch()
    until(lambda: other.delivered, "results to go out all the same")
    assert (other.flow.gateway.ingress.counter("increments"), other.stored()) == (-1, {"a": 1})
    other.end()


def test_what_counted_while_there_was_no_store_is_not_lost(house: House) -> None:
    """The part believes it saved: nobody would ask it for these versions again."""
    house.send(a=1)
    house.order()
    house.end()
    house.begin(stores=False)
    house.hand.batch()
    until(lambda: house.flow.outlet.is_idle, "its notices to be heard")
    assert house.role.status().stages["sum"].store is None
    house.end()
    house.begin()
    until(lambda: house.store.checkpoint == 1, "the checkpoint")
    assert house.stored() == {"a": 1}


def test_savings_come_by_themselves_as_long_as_something_does(house: House) -> None:
    house.end()
    house.begin(every=0.01)

    def has_saved() -> bool:
        house.hand.batch()
        return house.flow.gateway.has_saved

    for _ in range(3):
        house.send(a=1)
        until(has_saved, "everything to be saved")
        assert house.stored() == house.truth
    tail, due = house.flow.gateway.ingress.tail(), house.checkpointer._next
    until(lambda: house.checkpointer._next > due + 0.1, "some moments at which an increment would be due")
    assert house.flow.gateway.ingress.tail() == tail


def test_what_is_delivered_is_kept_across_a_restart(house: House) -> None:
    house.send(a=1, b=1)
    house.send(a=1)
    house.hand.batch()
    until(lambda: len(house.delivered) == 3, "the results")
    house.end()
    house.begin()
    assert house.flow.outlet.reached == {"a": codec.ROWS, "b": 1}


def test_without_a_store_there_is_nothing_of_it(house: House) -> None:
    house.end()
    house.begin(stores=False)
    house.send(a=1)
    house.hand.batch()
    until(lambda: house.flow.gateway.ingress.head() == 1, "the log to be trimmed at once")
    assert (house.flow.checkpointer, house.flow.outlet.reached, house.journal.reached("outlet/sum")) == (None, {}, {})


def test_a_store_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(Refused, match="save_every must be > 0 s, got 0"):
        gateway_role.store_at("memory://x", 0.0)
    with pytest.raises(Refused, match="not a store address"):
        gateway_role.store_at("ftp://x", 5.0)
    assert gateway_role.store_at(None, 0.0) is None
