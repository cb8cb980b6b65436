"""Restorations as the orchestrator carries them out: each command in its phase, from the journal, again if need be.

No Spark: gateway and journal are real, the store is a dictionary, and what instances say is written by hand.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.app.test_orchestrator import House
from tests.app.waiting import until
from tests.store.objects import Memory
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.restoring import Restoring
from whimbrel.checkpoints.version import Increment
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Corrupt, Refused, Retry, Stop, Unavailable
from whimbrel.core.increments import Version
from whimbrel.core.keys import EVERYTHING
from whimbrel.core.options import RestoreOptions
from whimbrel.core.protocols.machine import Abandoned, Loaded, Migration
from whimbrel.core.record import Aborted, Evicted, KeyState, Kind, Move, Opened, Parcel, Ready, Unreadable
from whimbrel.core.router import UNOWNED, Restore, Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import parse_schema
from whimbrel.log import codec
from whimbrel.log.contract import Lane
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.decisions import RestoreOrder

READY = [Ready("m1", "s-2", part, 2) for part in range(2)]
OPENED = [Opened("m1", "s-2", part, 2, replayed=5, silent=3) for part in range(2)]
GONE = [Evicted("m1", "s-1", part, 2) for part in range(2)]


class Checkpointed(House):
    """A house with a store."""

    def __init__(self, folder: Path) -> None:
        self.fences: list[str] = []
        self.loads: list[tuple[str, int | None]] = []
        self.unfenced: list[Exception] = []
        self.unloaded: list[Exception] = []
        """What the next calls raise."""
        super().__init__(folder)

    def ports(self) -> Any:
        return SimpleNamespace(**vars(super().ports()), fence=self.fence, load=self.load)

    def fence(self, stage: str, move: Move) -> None:
        if self.unfenced:
            raise self.unfenced.pop(0)
        self.fences.append(move.id)

    def load(self, stage: str, move: Move, checkpoint: int | None) -> Loaded:
        if self.unloaded:
            raise self.unloaded.pop(0)
        self.loads.append((move.id, checkpoint))
        return Loaded({"gateway": 0}, 7, 700)

    def restore(self, lost: str = "s-1", to: str = "s-2", checkpoint: int | None = None) -> Migration:
        (id,) = self.orchestrator.order([RestoreOrder("s", lost, to, checkpoint)], 60.0, ["edge is dead"])
        return self.coordinator.migrations[id]

    def await_phase(self, phase: str, id: str = "m1") -> None:
        until(lambda: self.phase(id) == phase, f"{id} is {phase}, not {self.phase(id)}")


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.01)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Checkpointed]:
    house = Checkpointed(tmp_path)
    yield house
    house.end()


def tell(house: Checkpointed, *notices: Any) -> None:
    for notice in notices:
        house.orchestrator.receive("s", notice)


def test_a_restoration_is_fenced_loaded_and_replayed_and_has_its_figures(house: Checkpointed) -> None:
    house.gateway.ingest([("a", (1,), None), ("b", (2,), None)], "source", 0)
    migration = house.restore(checkpoint=4)
    until(lambda: house.loads == [("m1", 4)], "loaded")
    assert house.said("s-1") == ["DATA", "DATA", "DISCARD"]
    assert house.gateway.router.owners() == {UNOWNED}
    tell(house, *READY)
    house.wait_for("DATA", "DATA", "CUTOVER", inbox="s-2")
    tell(house, *OPENED, *OPENED)
    assert migration.phase == "done"
    assert (migration.keys, migration.state_bytes, migration.checkpoint) == (7, 700, 4)
    assert (migration.replayed, migration.silent) == (10, 6)
    assert house.coordinator.table.owners["a"] == "s-2"
    assert house.coordinator.losses.instances() == {"s-1"}
    tell(house, *GONE)
    assert house.coordinator.losses.instances() == set()
    told = [f"{line.phase}: {line.event}" for line in migration.story]
    assert told[:4] == [
        "ordered: edge is dead",
        "ordered: Ordered",
        "fencing: Fenced",
        "loading: Loaded 7 keys, 700 bytes",
    ]
    assert house.fences == ["m1"]


@pytest.mark.parametrize("died", ["fencing", "loading", "replaying", "done"])
def test_whoever_starts_from_the_journal_says_again_what_its_phase_asks_for(house: Checkpointed, died: str) -> None:
    house.gateway.ingest([("a", (1,), None)], "source", 0)
    if died == "fencing":
        house.unfenced = [Retry("not yet") for _ in range(10_000)]
    house.restore()
    steps: dict[str, Callable[[], None]] = {
        "fencing": lambda: None,
        "loading": lambda: until(lambda: house.loads, "loaded"),
        "replaying": lambda: tell(house, *READY),
        "done": lambda: tell(house, *OPENED),
    }
    for phase, step in steps.items():
        if phase == "done":
            house.wait_for("DATA", "CUTOVER", inbox="s-2")
        step()
        house.await_phase(phase)
        if phase == died:
            break
    house.orchestrator.stop()
    house.unfenced, fences, loads = [], len(house.fences), len(house.loads)
    house.restart()
    if died == "fencing":
        house.await_phase("loading")
    if died in ("fencing", "loading"):
        until(lambda: len(house.loads) == loads + 1, "it is loaded again")
    assert len(house.fences) == fences + (died == "fencing")
    tell(house, *READY, *OPENED)
    house.await_phase("done")
    house.wait_for("DATA", "CUTOVER", inbox="s-2")
    assert house.coordinator.table.owners["a"] == "s-2"
    assert house.coordinator.migrations["m1"].replayed == 10


def test_what_is_not_there_is_asked_again(house: Checkpointed) -> None:
    house.unfenced, house.unloaded = [Retry("not committed yet")], [Unavailable("the store is away")]
    house.restore()
    until(lambda: house.loads == [("m1", None)], "loaded in the end")
    assert house.orchestrator.error is None


@pytest.mark.parametrize("error", [Corrupt("the checksum does not fit"), Refused("no such checkpoint")])
def test_a_store_that_cannot_be_read_ends_the_attempt_and_another_one_has_an_epoch_of_its_own(
    house: Checkpointed, error: Exception
) -> None:
    house.unloaded = [error]
    migration = house.restore()
    until(lambda: migration.phase == "aborted", "aborted")
    assert str(error) in str(migration.reason)
    assert house.orchestrator.spoilt == {"m1"}
    assert house.orchestrator.error is None
    assert house.coordinator.losses.interrupted() == ["s-1"]
    until(lambda: house.said("s-2", Lane.CONTROL) == ["ABORT"], "the destination is told")
    with pytest.raises(Conflict):
        house.restore(checkpoint=3)  # the destination has not dropped yet what it may have been sent
    tell(house, *(Aborted("m1", "s-2", part, 2) for part in range(2)))
    second = house.restore(checkpoint=3)
    assert second.move.epoch == migration.move.epoch + 1
    until(lambda: house.loads == [("m2", 3)], "loaded")


@pytest.mark.parametrize("by_notice", [False, True], ids=["by the answer", "by a notice"])
def test_a_log_that_cannot_be_read_again_ends_the_attempt_and_the_keys_can_be_restored_again(
    house: Checkpointed, by_notice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway refuses RESTORE; or it found out when it started, and tells so."""
    house.gateway.ingest([("a", (1,), None)], "source", 0)
    migration = house.restore()
    until(lambda: house.loads == [("m1", None)], "loaded")
    unreadable = "m1 needs all records of gateway from position 0 on: position 0 was trimmed"

    asked = threading.Event()

    def refuse(command: Any) -> None:
        assert isinstance(command, Restore)
        asked.set()
        if not by_notice:
            raise Stop(unreadable)

    with monkeypatch.context() as patch:
        patch.setattr(house.gateway, "command", refuse)
        tell(house, *READY)
        assert asked.wait(30)
        if by_notice:
            tell(house, Unreadable("m1", "gateway", unreadable))
        until(lambda: migration.phase == "aborted", "aborted")
    assert migration.reason == unreadable
    assert (house.orchestrator.error, house.coordinator.losses.interrupted()) == (None, ["s-1"])
    tell(house, Unreadable("m1", "gateway", unreadable), Unreadable("m0", "gateway", "nobody knows it"))
    until(lambda: house.said("s-2", Lane.CONTROL) == ["ABORT"], "the destination is told")
    tell(house, *(Aborted("m1", "s-2", part, 2) for part in range(2)))
    house.restore()
    until(lambda: house.loads[1:] == [("m2", None)], "loaded again")
    tell(house, *(Ready("m2", "s-2", part, 2) for part in range(2)))
    house.wait_for("DATA", "CUTOVER", inbox="s-2")


def test_moves_that_need_the_lost_one_end_and_are_journalled_as_such(house: Checkpointed) -> None:
    house.migrate("push")
    house.wait_for("BEGIN")
    restoration = house.restore()
    assert restoration.move.ends == {"m1"}
    ended = {m.move.id: m for m in house.journal.migrations()}["m1"]
    assert (ended.phase, ended.ended_by) == ("aborted", "m2")
    house.restart()
    assert house.coordinator.migrations["m1"].ended_by == "m2"
    assert house.phase("m2") != "aborted"


def test_what_was_still_to_be_said_of_a_move_that_has_ended_is_not_said(
    house: Checkpointed, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, away = house.gateway.command, [True]

    def fail(order: Any) -> None:
        if away:
            raise Unavailable("nobody is there")
        assert order.move.id == "m2", "m1 has ended"
        command(order)

    monkeypatch.setattr(house.gateway, "command", fail)
    house.migrate("push")
    until(lambda: house.orchestrator.waiting_of("s").keys() == {"m1"}, "its first command to fail")
    assert house.restore().move.ends == {"m1"}
    away.clear()
    until(lambda: house.loads == [("m2", None)], "the restoration to go on")
    until(lambda: house.orchestrator._workers.is_idle, "everything to be done")
    assert (house.orchestrator.error, house.orchestrator._workers.waiting) == (None, {})


@pytest.mark.parametrize("phase", ["fencing", "loading"])
def test_an_attempt_that_was_abandoned_is_neither_fenced_nor_loaded_any_more(house: Checkpointed, phase: str) -> None:
    """The outlet, or the store, could not do it before; and now another attempt may be under way."""
    refusals: list[Exception] = [Retry("not yet")] * 10_000
    house.unfenced, house.unloaded = (refusals, []) if phase == "fencing" else ([], refusals)
    migration = house.restore()
    until(lambda: house.phase() == phase and house.orchestrator.waiting_of("s"), f"{phase} to fail")
    before = list(house.fences)
    house.orchestrator.handle("s", "m1", Abandoned("enough"))
    refusals.clear()
    until(lambda: house.said("s-2", Lane.CONTROL) == ["ABORT"], "what comes behind it")
    assert (house.fences, house.loads, migration.reason) == (before, [], "enough")


def test_what_is_not_journalled_has_not_happened(house: Checkpointed, monkeypatch: pytest.MonkeyPatch) -> None:
    house.migrate("push")
    house.wait_for("BEGIN")
    owners, before = house.coordinator.table.owners.dump(), house.phase()

    def full(*statements: Any) -> None:
        raise Unavailable("the journal cannot be written: disk full") from sqlite3.OperationalError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(house.journal, "_execute", full)
        with pytest.raises(Unavailable, match="disk full"):
            house.restore()
    assert (house.phase(), house.coordinator.table.owners.dump()) == (before, owners)
    assert house.coordinator.losses.instances() == set()
    assert not house.fences
    house.restore()
    until(lambda: house.fences == ["m2"], "the next one is done")


# ── The load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_load_says_everything_again_though_the_first_stopped_half_way(
    house: Checkpointed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has grown meanwhile. Were it the same writer, the inbox would take its beginning for known."""
    monkeypatch.setattr("whimbrel.checkpoints.restoring.ENTRY", 1)
    memory = Memory()
    store, fuse = CentralStore(memory), [False]

    def write(number: int, *keys: str) -> None:
        bags = [Version.of(key, 0, KeyState(number, "gateway", [], f"{key}{number}".encode())) for key in keys]
        for place, one in enumerate(bags):
            store.write("s", Increment("s-1", place, number, number, number, [one]))

    class Halting(Memory):
        def get(self, name: str) -> bytes | None:
            if fuse[0] and "/segments/s-1/00001-" in name:
                raise Unavailable("away")
            return super().get(name)

    store.objects = Halting(memory.blobs)
    write(1, "a", "b", "c")
    gateway = Gateway(
        Router("gateway", RouteTable("s-1")), MemoryLog(), MemoryLog(), house.inboxes.__getitem__,
        codec.ArrowCodec(parse_schema("n long")), lambda: 1, stores=True,
    )  # fmt: skip
    outlet: Any = SimpleNamespace(delivered_of=lambda selection: {})
    restoring = Restoring("s", gateway, outlet, house.inboxes.__getitem__, store)
    lost = Move("m1", "s", "restore", "s-1", "s-2", EVERYTHING, 1, frozenset({"gateway"}), RestoreOptions())
    fuse[0] = True
    with pytest.raises(Unavailable):
        restoring.load(lost, None)
    fuse[0] = False
    write(2, "a")
    assert restoring.load(lost, None).keys == 3
    entries = house.inboxes["s-2"].read(0, lane=Lane.CONTROL)
    records = [record for entry in entries for record in codec.records(entry)]
    begun = [number for number, record in enumerate(records) if record.kind == Kind.RESTORE]
    assert len(begun) == 2
    parcels = [wire.unpack(r.body, Parcel) for r in records[begun[1] :] if r.kind == Kind.PARCEL]
    assert {key: bag.state for one in parcels for key, bag in one.keys.items()} == {"a": b"a2", "b": b"b1", "c": b"c1"}
    assert records[-1].kind == Kind.SHIPPED
