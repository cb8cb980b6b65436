"""The orchestrator and its journal: what comes twice or late is harmless, and whoever starts from the journal goes on.

No Spark: the instances' notices are written by hand, in the order of the protocol, and then in every disorder that a
crash can make of it.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.app.stories import timeless
from tests.app.waiting import until
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Corrupt, Full, NewerFormat, Stop, Unavailable, UnknownName
from whimbrel.core.keys import EVERYTHING, KeyMap, Selection, bin_of
from whimbrel.core.protocols.machine import Abandoned, Migration
from whimbrel.core.record import Aborted, Kind, Left, Move, Opened, Ready, Warm
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import parse_schema
from whimbrel.log import codec
from whimbrel.log.contract import Lane
from whimbrel.log.memory import MemoryLog
from whimbrel.orchestrator.decisions import Order
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.journal import GatewayJournal, Journal, JournalReader
from whimbrel.orchestrator.orchestrator import Orchestrator
from whimbrel.orchestrator.orders import Answered, Request

KEYS = Selection(keys=frozenset({"a", "b"}))
READY = [Ready("m1", "s-2", part, 2) for part in range(2)]
LEFT = [Left("m1", "s-1", part, 2, keys=1, state_bytes=10, sent_bytes=20) for part in range(2)]
OPENED = [Opened("m1", "s-2", part, 2) for part in range(2)]
GONE = [Aborted("m1", "s-2", part, 2) for part in range(2)]
BACK = [Aborted("m1", "s-1", part, 2) for part in range(2)]


class House:
    """Journal and logs, which last, and the orchestrator and gateway of the moment."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.db"
        self.ingress, self.known = MemoryLog(), MemoryLog()
        self.inboxes = {name: MemoryLog() for name in ("s-1", "s-2")}
        self.now = 0
        self.begin()

    def begin(self) -> None:
        self.journal = Journal(self.path)
        router = Router("gateway", RouteTable("s-1"))
        encoding = codec.ArrowCodec(parse_schema("n long"))
        self.gateway = Gateway(router, self.ingress, self.known, self.inboxes.__getitem__, encoding, lambda: 1)
        self.gateway.recover(None)
        places = {"s-1": "cloud", "s-2": "edge"}
        self.coordinator = Coordinator("s", RouteTable("s-1"), places, KeyMap("gateway"))
        ports = self.ports()
        self.orchestrator = Orchestrator(self.journal, {"cloud": ports, "edge": ports}, ports, self.clock)
        self.orchestrator.stages["s"] = self.coordinator
        self.orchestrator.recover()
        self.orchestrator.start()

    def ports(self) -> Any:
        """What the orchestrator reaches."""
        return SimpleNamespace(
            command=lambda stage, command: self.gateway.command(command), send=self.send, failed=dict
        )

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        """What a site does with messages."""
        self.inboxes[destination].append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL)

    def clock(self) -> int:
        self.now += 1
        return self.now

    def end(self) -> None:
        self.orchestrator.stop()
        self.journal.close()

    def restart(self) -> None:
        self.end()
        self.begin()

    def migrate(
        self,
        protocol: str = "live",
        selection: Selection = KEYS,
        deadline: float = 60.0,
        request: Request | None = None,
        **options: Any,
    ) -> Handle:
        order = Order("s", [(selection, "s-2")], "edge", protocol, options)
        ids = self.orchestrator.order([order], deadline, request=request)
        return Handle(self.orchestrator, "s", ids)

    def hear(self, *notices: Any) -> None:
        """Each as soon as it can be: an instance says nothing about a marker that it has not got."""
        for notice in notices:
            marker = {Ready: "BEGIN", Aborted: "ABORT"}.get(type(notice), "CUTOVER")
            until(lambda notice=notice, marker=marker: marker in self.said(notice.instance), marker)  # type: ignore[misc]
            self.orchestrator.receive("s", notice)

    def phase(self, id: str = "m1") -> str:
        return self.coordinator.migrations[id].phase

    def said(self, inbox: str = "s-1", lane: Lane = Lane.DATA) -> list[str]:
        """The markers in an inbox."""
        entries = self.inboxes[inbox].read(0, lane=lane)
        return [Kind(record.kind).name for entry in entries for record in codec.records(entry)]

    def wait_for(self, *markers: str, inbox: str = "s-1", lane: Lane = Lane.DATA) -> None:
        until(lambda: self.said(inbox, lane) == list(markers), f"{markers} in {inbox}, not {self.said(inbox, lane)}")


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.01)


@pytest.fixture
def house(tmp_path: Path) -> Any:
    house = House(tmp_path)
    yield house
    house.end()


# ── The happy path, with everything twice ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["live", "pause"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_notice_that_is_heard_again_changes_nothing(house: House, protocol: str, times: int) -> None:
    handle = house.migrate(protocol)
    for notice in [*READY, *LEFT, *OPENED]:
        house.hear(*[notice] * times)
    house.hear(*[*READY, *LEFT, *OPENED] * (times - 1))
    assert handle.wait(5).outcome == "done"
    house.wait_for("BEGIN", "CUTOVER")
    house.wait_for("BEGIN", "CUTOVER", inbox="s-2")
    (migration,) = handle.migrations
    assert (migration.keys, migration.state_bytes, migration.sent_bytes) == (2, 20, 40)
    assert house.coordinator.table.owners["a"] == "s-2"
    assert house.coordinator.table.epochs["a"] == 1


@pytest.mark.parametrize("protocol", ["live", "pause"])
@pytest.mark.parametrize("died_after", range(7))
def test_whoever_starts_from_the_journal_goes_on_though_it_hears_everything_again(
    house: House, protocol: str, died_after: int
) -> None:
    """The outlet had not committed what the orchestrator had journalled: all notices come once more."""
    notices = [*READY, *LEFT, *OPENED]
    house.migrate(protocol)
    house.hear(*notices[:died_after])
    before = house.phase()
    house.restart()
    assert house.phase() == before
    house.hear(*notices)
    assert house.phase() == "done"
    house.wait_for("BEGIN", "CUTOVER")
    house.wait_for("BEGIN", "CUTOVER", inbox="s-2")
    house.restart()
    assert house.coordinator.table.owners["a"] == "s-2"
    assert house.phase() == "done"


def test_an_order_whose_commands_were_never_carried_out_is_carried_out_by_the_successor(tmp_path: Path) -> None:
    """Journalled, then dead: before the orchestrator's thread had done anything."""
    house = House(tmp_path)
    house.orchestrator.stop()
    house.migrate()
    assert house.said() == []
    house.restart()
    house.wait_for("BEGIN")
    house.hear(*READY, *LEFT, *OPENED)
    assert house.phase() == "done"
    house.end()


def test_a_notice_about_a_migration_that_nobody_ordered_is_an_error_and_changes_nothing(house: House) -> None:
    with pytest.raises(UnknownName, match="unknown migration 'm1'"):
        house.orchestrator.receive("s", READY[0])
    assert house.journal.migrations() == []


# ── The way out, with everything twice and late ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["live", "pause"])
def test_an_abort_before_the_cutover_brings_everything_back(house: House, protocol: str) -> None:
    handle = house.migrate(protocol)
    house.hear(READY[0])
    handle.abort("changed my mind").abort("again")
    house.hear(READY[1])
    house.wait_for("BEGIN", "ABORT")
    assert not house.coordinator.migrations["m1"].is_over
    house.hear(*BACK, *BACK)
    assert handle.wait(5).outcome == "aborted"
    assert handle.migrations[0].reason == "changed my mind"
    assert house.said("s-2", Lane.CONTROL) == [], "the destination may still get what is under way"
    house.hear(*GONE, *GONE, *BACK)
    house.wait_for("FORGET", inbox="s-2", lane=Lane.CONTROL)
    assert house.coordinator.table.owners["a"] == "s-1"
    house.restart()
    house.hear(*READY, *BACK, *GONE)
    assert house.phase() == "aborted"
    house.wait_for("BEGIN", "ABORT")
    assert house.said("s-2", Lane.CONTROL) == ["FORGET"]


@pytest.mark.parametrize("died_after", range(5))
def test_an_abort_is_finished_by_the_successor(house: House, died_after: int) -> None:
    handle = house.migrate()
    house.wait_for("BEGIN")
    handle.abort()
    house.hear(*[*BACK, *GONE][:died_after])
    house.restart()
    house.hear(*BACK, *GONE)
    assert house.phase() == "aborted"
    house.wait_for("BEGIN", "ABORT")
    house.wait_for("FORGET", inbox="s-2", lane=Lane.CONTROL)


@pytest.mark.parametrize(
    "notices", [READY, [*READY, *LEFT], [*READY, *LEFT, *OPENED]], ids=["cutting", "closed", "done"]
)
def test_an_abort_after_the_point_of_no_return_has_no_effect(house: House, notices: list[Any]) -> None:
    handle = house.migrate()
    house.hear(*notices)
    handle.abort()
    house.hear(*READY, *LEFT, *OPENED)
    assert handle.wait(5).outcome == "done"
    assert handle.migrations[0].reason is None
    house.wait_for("BEGIN", "CUTOVER")


def test_a_deadline_abandons_a_migration_that_stands_still(house: House) -> None:
    house.migrate(deadline=0.0)
    house.wait_for("BEGIN", "ABORT")
    house.hear(*BACK)
    assert house.coordinator.migrations["m1"].reason == "its deadline has passed"


RAISED = [Unavailable("disk full"), sqlite3.ProgrammingError("no database"), ValueError("bug"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("heard", range(7))
def test_whatever_a_journal_raises_nothing_has_happened_and_nothing_is_carried_out(
    house: House, monkeypatch: pytest.MonkeyPatch, error: BaseException, heard: int
) -> None:
    """Before the order, and at each notice up to the one that hands the keys over."""
    notices = [*READY, *LEFT, *OPENED]

    def act(number: int) -> None:
        house.hear(notices[number - 1]) if number else house.migrate()

    def told() -> Any:
        table = house.coordinator.table
        migrations = {id: wire.pack(one) for id, one in house.coordinator.migrations.items()}
        return migrations, table.owners.dump(), table.epochs.dump(), house.said(), house.said("s-2")

    for number in range(heard):
        act(number)
    until(lambda: house.orchestrator._workers.is_idle, "all commands to be carried out")
    before = told()
    with monkeypatch.context() as full:
        full.setattr(house.journal, "_execute", raising(error))
        with pytest.raises(type(error)):
            act(heard)
    until(lambda: house.orchestrator._workers.is_idle, "all commands to be carried out")
    assert told() == before
    for number in range(heard, 7):
        act(number)
    assert house.phase() == "done"
    assert house.coordinator.table.owners["a"] == "s-2"


def raising(error: BaseException) -> Any:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    return fail


# ── Deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("passed", "left"),
    [(50, 10.0), (61, 0.0), (-3600, 60.0), (3600, 0.0)],
    ids=["some", "all", "the clock was put back", "the clock was put on"],
)
def test_a_restart_gives_a_migration_no_more_time_than_it_had_left(
    house: House, moment: SimpleNamespace, passed: int, left: float
) -> None:
    house.migrate(deadline=60.0)
    house.wait_for("BEGIN")
    house.orchestrator.stop()  # before the time passes: it checks its deadlines
    house.now += passed * 1_000_000
    moment.now = 1000.0
    house.restart()
    if left:
        assert house.orchestrator._deadlines["s", "m1"] == pytest.approx(1000.0 + left, abs=0.001)
        assert house.phase() == "copying"
        moment.now += left + 0.001
    house.wait_for("BEGIN", "ABORT")
    assert house.coordinator.migrations["m1"].reason == "its deadline has passed"


def test_the_time_of_a_turn_that_has_not_begun_survives_a_restart(house: House, moment: SimpleNamespace) -> None:
    house.migrate("fluid", plan=TURNS, deadline=10.0)
    house.now += 9_000_000
    house.restart()
    house.hear(*through("m1/1"))
    assert house.phase("m1/2") == "holding"
    assert house.orchestrator._deadlines["s", "m1/2"] == 10.0


def test_who_has_been_a_standby_has_no_deadline_also_after_a_restart(house: House) -> None:
    handle = house.migrate("replicate", deadline=60.0, standby=True)
    house.orchestrator.receive("s", Warm("m1", "s-2", 0, 1))
    assert handle.wait_warm(5).outcome == "standby"
    house.now += 3_600_000_000
    house.restart()
    assert house.phase() == "standby"
    Handle(house.orchestrator, "s", ["m1"]).take_over()
    house.restart()
    assert (house.phase() != "standby", house.coordinator.migrations["m1"].reason) == (True, None)
    assert house.orchestrator._deadlines == {}


# ── Orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_move_to_where_everything_is_does_nothing(house: House) -> None:
    handle = Handle(
        house.orchestrator, "s", house.orchestrator.order([Order("s", [(KEYS, "s-1")], "cloud", "live", {})], 9.0)
    )
    assert handle.is_noop
    assert handle.wait(0).abort().outcome == "already there"
    assert house.journal.migrations() == []


def test_a_migration_that_overlaps_is_refused_until_the_other_is_over(house: House) -> None:
    handle = house.migrate()
    for selection in (EVERYTHING, Selection(keys=frozenset({"b", "c"}))):
        with pytest.raises(Conflict, match=r"m1 \(copying\).*wait for it or abort"):
            house.migrate(selection=selection)
    assert len(house.journal.migrations()) == 1
    house.hear(*READY, *LEFT, *OPENED)
    handle.wait(5)
    assert house.migrate(selection=EVERYTHING).ids == ["m2"]


def test_an_order_that_cannot_be_journalled_has_not_happened(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    write = house.journal.write

    def fail(*migrations: Migration, answer: object) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(house.journal, "write", fail)
    with pytest.raises(Unavailable):
        house.migrate()
    assert house.coordinator.migrations == {}
    monkeypatch.setattr(house.journal, "write", write)
    assert house.migrate().ids == ["m1"]
    house.wait_for("BEGIN")


def test_an_order_and_that_its_request_was_answered_are_journalled_as_one(house: House) -> None:
    request = Request("mine", "said")
    assert house.migrate(request=request).ids == ["m1"]
    found = house.journal.answer("mine")
    assert found is not None
    assert request.check(wire.unpack(found, Answered)).ids == ["m1"]
    migration = house.coordinator.migrations["m1"]
    unfit: Any = object()
    with pytest.raises(sqlite3.Error):
        house.journal.write(msgspec.structs.replace(migration, phase="nowhere"), answer=("other", unfit))
    assert house.journal.answer("other") is None
    assert [journalled.phase for journalled in house.journal.migrations()] == [migration.phase]


def test_an_order_of_several_moves_is_journalled_as_one(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(Selection(keys=frozenset({key})), "s-2") for key in "abc"]
    assert house.orchestrator.order([Order("s", wanted, "edge", "live", {})], 60.0) == ["m1.1", "m1.2", "m1.3"]
    assert [migration.move.id for migration in house.journal.migrations()] == ["m1.1", "m1.2", "m1.3"]
    assert house.orchestrator.engaged("s") == ({"s-1", "s-2"}, {"s-1"})
    with pytest.raises(Conflict, match=r"m1.2"):
        house.orchestrator.order(
            [Order("s", [(Selection(keys=frozenset({key})), "s-2") for key in "zb"], "edge", "live", {})], 9
        )
    assert len(house.journal.migrations()) == 3, "the one that could have started has not"


def test_who_was_scaled_away_is_not_told_to_forget(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor says it again for every aborted move there has ever been."""
    house.migrate().abort()
    house.hear(*BACK, *GONE)
    house.wait_for("FORGET", inbox="s-2", lane=Lane.CONTROL)
    del house.coordinator.sites["s-2"]
    monkeypatch.setattr(house, "inboxes", {})
    house.orchestrator.recover()
    until(lambda: house.orchestrator._workers.is_idle, "everything is said again")
    house.orchestrator.stop()
    assert house.orchestrator.error is None


def test_a_command_that_cannot_be_carried_out_now_is_repeated(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    command, failed = house.gateway.command, threading.Event()

    def fail_once(order: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise Unavailable("busy")
        command(order)

    monkeypatch.setattr(house.gateway, "command", fail_once)
    house.migrate()
    house.wait_for("BEGIN")
    assert failed.is_set()


def test_what_comes_behind_a_command_that_is_repeated_stays_behind_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway is away for a while: an abort must not overtake the BEGIN of the same move, others go on."""
    command, away = house.gateway.command, [True]

    def fail(order: Any) -> None:
        if away and order.move.id == "m1":
            raise Unavailable("nobody is there")
        command(order)

    monkeypatch.setattr(house.gateway, "command", fail)
    house.migrate().abort()
    house.migrate(selection=Selection(keys=frozenset({"z"})))
    house.wait_for("BEGIN")
    away.clear()
    house.wait_for("BEGIN", "BEGIN", "ABORT")


def test_a_notice_that_cannot_be_journalled_has_not_been_heard(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.migrate()
    house.hear(READY[0])

    def fail(*migrations: Migration, answer: object = None) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(house.journal, "write", fail)
        with pytest.raises(Unavailable):
            house.hear(READY[1])
    assert house.phase() == "copying"
    house.hear(READY[1], *LEFT, *OPENED)
    assert house.phase() == "done"


def test_moves_from_and_to_a_site_that_is_dead_are_called_off(house: House) -> None:
    house.migrate()
    house.orchestrator.abandon("moon", "it is dead")
    assert house.phase() == "copying"
    house.orchestrator.abandon("edge", "it is dead")
    house.wait_for("BEGIN", "ABORT")
    assert house.coordinator.migrations["m1"].reason == "it is dead"


def test_waiting_ends_with_the_time_that_was_given_and_the_migration_goes_on(house: House) -> None:
    handle = house.migrate()
    assert repr(handle) == "<migration m1 of s: copying>"
    with pytest.raises(Unavailable, match="m1 is still copying"):
        handle.wait(0.01)
    house.hear(*READY, *LEFT, *OPENED)
    assert timeless(handle.wait(5).progress)[-1] == "m1 cutting: Opened s-2 2/2"


# ── Turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TURNS = [[bin_of("a")], [bin_of("b")]]


def through(id: str, destination: str = "s-2") -> list[Any]:
    """All that is said of a piece."""
    return [Ready(id, destination, 0, 1), Left(id, "s-1", 0, 1), Opened(id, destination, 0, 1)]


def aborted(id: str) -> list[Any]:
    return [Aborted(id, "s-1", 0, 1), Aborted(id, "s-2", 0, 1)]


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What deadlines are measured with; set `now`."""
    clock: SimpleNamespace = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.time", clock)
    return clock


@pytest.mark.parametrize("restarts", [False, True])
def test_the_turns_of_a_plan_follow_each_other(house: House, restarts: bool) -> None:
    handle = house.migrate("fluid", plan=TURNS)
    assert handle.ids == ["m1/1", "m1/2"]
    house.wait_for("BEGIN")
    house.hear(*through("m1/1"))
    house.wait_for("BEGIN", "CUTOVER", "BEGIN")
    assert [house.phase(id) for id in handle.ids] == ["done", "holding"]
    if restarts:
        house.restart()
    house.hear(*through("m1/2"))
    house.wait_for("BEGIN", "CUTOVER", "BEGIN", "CUTOVER")
    assert [house.phase(id) for id in handle.ids] == ["done", "done"]


def test_a_turn_that_was_due_when_the_orchestrator_died_begins_with_its_successor(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.migrate("fluid", plan=TURNS)
    monkeypatch.setattr(house.orchestrator, "_handle_due", lambda stage: None)
    house.hear(*through("m1/1"))
    assert [house.phase(id) for id in ("m1/1", "m1/2")] == ["done", "ordered"]
    house.restart()
    house.wait_for("BEGIN", "CUTOVER", "BEGIN")
    assert house.phase("m1/2") == "holding"


def test_a_turn_that_cannot_be_journalled_when_it_is_due_begins_later_and_what_was_heard_was_heard(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.migrate("fluid", plan=TURNS)
    *first, last = through("m1/1")
    house.hear(*first)
    write, full = house.journal.write, [True]

    def fail(*migrations: Migration, answer: object = None) -> None:
        if full and migrations[0].move.id == "m1/2":
            raise Unavailable("the disk is full")
        write(*migrations)

    monkeypatch.setattr(house.journal, "write", fail)
    house.hear(last)  # and raises nothing: this notice is journalled
    assert [house.phase(id) for id in ("m1/1", "m1/2")] == ["done", "ordered"]
    full.clear()
    until(lambda: house.phase("m1/2") == "holding", "the watch to try again")


def test_a_later_turn_has_its_whole_time_from_when_it_begins(house: House, moment: SimpleNamespace) -> None:
    house.migrate("fluid", plan=TURNS, deadline=60.0)
    moment.now = 50.0
    house.hear(*through("m1/1"))
    assert house.phase("m1/2") == "holding"
    assert house.orchestrator._deadlines["s", "m1/2"] == 110.0
    moment.now = 111.0
    until(lambda: house.phase("m1/2") == "resuming", "the deadline has passed")
    assert house.coordinator.migrations["m1/2"].reason == "its deadline has passed"


def test_a_deadline_cancels_the_turns_to_come(house: House, moment: SimpleNamespace) -> None:
    house.migrate("fluid", plan=TURNS, deadline=60.0)
    moment.now = 61.0
    until(lambda: house.phase("m1/1") == "resuming", "the deadline has passed")
    assert house.phase("m1/2") == "ordered", "its time has not begun"
    house.hear(*aborted("m1/1"))
    assert [house.phase(id) for id in ("m1/1", "m1/2")] == ["aborted", "aborted"]
    assert house.coordinator.migrations["m1/2"].reason == "an earlier turn of its plan was aborted"
    house.wait_for("BEGIN", "ABORT")
    house.restart()
    assert [house.phase(id) for id in ("m1/1", "m1/2")] == ["aborted", "aborted"]


def two_destinations(house: House, deadline: float = 60.0) -> list[str]:
    """Order a turn of one piece, and then one of two."""
    house.coordinator.sites["s-3"] = "edge"
    house.inboxes["s-3"] = MemoryLog()
    wanted = [(KEYS, "s-2"), (Selection(keys=frozenset({"c"})), "s-3")]
    plan = [[bin_of("a")], [bin_of("b"), bin_of("c")]]
    return house.orchestrator.order([Order("s", wanted, "edge", "fluid", {"plan": plan})], deadline)


def test_the_pieces_of_a_turn_are_each_told_once(house: House) -> None:
    ids = two_destinations(house)
    house.hear(*through(ids[0]))
    stories = [[line.event for line in house.coordinator.migrations[id].story] for id in ids[1:]]
    assert stories == [["Ordered"], ["Ordered"]]


def test_every_piece_of_a_later_turn_has_the_time_of_its_order(house: House, moment: SimpleNamespace) -> None:
    ids = two_destinations(house, deadline=10.0)
    house.hear(*through(ids[0]))
    assert [house.phase(id) for id in ids] == ["done", "holding", "holding"]
    assert [house.orchestrator._deadlines["s", id] for id in ids[1:]] == [10.0, 10.0]


def test_the_turns_that_an_abort_cancels_are_each_told_once(house: House) -> None:
    ids = house.migrate("fluid", EVERYTHING, step=128).ids
    assert len(ids) == 8
    house.orchestrator.handle("s", ids[1], Abandoned("enough"))
    assert [house.phase(id) for id in ids] == ["holding", *["aborted"] * 7]
    assert [len(house.coordinator.migrations[id].story) for id in ids] == [1] * 8


def test_a_plan_that_could_not_be_journalled_leaves_no_turns_behind(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*migrations: Migration, answer: object) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(house.journal, "write", fail)
        with pytest.raises(Unavailable):
            house.migrate("fluid", plan=TURNS)
    assert house.migrate("fluid", plan=TURNS).ids == ["m1/1", "m1/2"]
    house.hear(*through("m1/1"), *through("m1/2"))
    assert [house.phase(id) for id in ("m1/1", "m1/2")] == ["done", "done"]


# ── The journal ──────────────────────────────────────────────────────────────────────────────────────────────────────


def migration(id: str, phase: str = "copying") -> Migration:
    return Migration(Move(id, "s", "live", "s-1", "s-2", KEYS, 1, frozenset({"g"})), "cloud", "edge", phase)


def test_a_journal_keeps_migrations_in_the_order_of_their_orders_and_snapshots_by_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.db"
    journal = Journal(path)
    for id in ("m1", "m10", "m2"):
        journal.write(migration(id))
    journal.write(migration("m10", "done"))
    journal.save("router/s", b"first")
    journal.save("router/s", b"second")
    journal.close()
    again = Journal(path)
    assert [(m.move.id, m.phase) for m in again.migrations()] == [("m1", "copying"), ("m10", "done"), ("m2", "copying")]
    assert again.migrations()[0] == migration("m1")
    assert (again.load("router/s"), again.load("router/t")) == (b"second", None)
    again.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_journal_knows_what_every_key_has_reached_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.journal.FLOOR", 500)
    path, truth = tmp_path / "gateway.db", dict[str, int]()
    journal = GatewayJournal(path)
    most = 0
    for n in range(400):
        noted = {f"k{n % 50}": n, f"k{n * 7 % 50}": n}
        truth |= noted
        journal.keep("outlet/s", b"%d" % n, noted)
        journal.keep("outlet/t", b"", {"other": n} if n % 2 else {})
        if reopened and n % 9 == 0:
            journal.close()
            journal = GatewayJournal(path)
            assert journal.reached("outlet/s") == truth
        with sqlite3.connect(path) as db:
            most = max(most, db.execute("SELECT sum(length(blob)) FROM reached WHERE name = 'outlet/s'").fetchone()[0])
    assert (journal.reached("outlet/s"), journal.reached("outlet/t")) == (truth, {"other": 399})
    assert journal.load("outlet/s") == b"399"
    assert most < 6 * len(wire.pack(truth)) < 400 * len(wire.pack({"k1": 1}))
    journal.close()


class Mortal:
    """A connection whose process dies at one of its statements, and says nothing more."""

    def __init__(self, db: sqlite3.Connection, at: int) -> None:
        self.db, self.left = db, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, *statement: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.db.execute(*statement)


@pytest.mark.parametrize("floor", [0, 1 << 20], ids=["written anew", "noted"])
def test_a_commit_and_what_its_keys_have_reached_are_written_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: int
) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.journal.FLOOR", floor)
    monkeypatch.setattr("whimbrel.orchestrator.journal.GROWTH", 0)
    states = []
    for at in range(12):
        path = tmp_path / f"{at}.db"
        journal = GatewayJournal(path)
        journal.keep("outlet/s", b"1", {"a": 1, "b": 1})
        journal._db = Mortal(journal._db, at)  # type: ignore[assignment]
        try:
            journal.keep("outlet/s", b"2", {"a": 2})
        except KeyboardInterrupt:
            states.append("died")
        journal.close()
        again = GatewayJournal(path)
        found = (again.load("outlet/s"), again.reached("outlet/s"))
        assert found in [(b"1", {"a": 1, "b": 1}), (b"2", {"a": 2, "b": 1})]
        again.close()
    assert 3 < len(states) < 12


class Failing(Mortal):
    """A connection that finds the file locked at one of its statements, and at no other."""

    def execute(self, *statement: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise sqlite3.OperationalError("database is locked")
        return self.db.execute(*statement)


@pytest.mark.parametrize("floor", [0, 1 << 20], ids=["written anew", "noted"])
def test_a_commit_that_fails_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: int) -> None:
    """Its outlet goes back to the one before, and cuts its files to that. Were it there, the next start would miss what
    was cut off."""
    monkeypatch.setattr("whimbrel.orchestrator.journal.FLOOR", floor)
    monkeypatch.setattr("whimbrel.orchestrator.journal.GROWTH", 0)
    failed = 0
    for at in range(12):
        journal = GatewayJournal(tmp_path / f"{at}.db")
        journal.keep("outlet/s", b"1", {"a": 1, "b": 1})
        db = journal._db
        journal._db = Failing(db, at)  # type: ignore[assignment]
        try:
            journal.keep("outlet/s", b"2", {"a": 2})
            expected = (b"2", {"a": 2, "b": 1})
        except Exception:
            failed += 1
            expected = (b"1", {"a": 1, "b": 1})
        journal._db = db
        assert (journal.load("outlet/s"), journal.reached("outlet/s")) == expected
        journal.close()
    assert 3 < failed < 12


def test_migrations_and_the_answer_to_a_request_are_written_as_one_wherever_the_process_dies(
    tmp_path: Path,
) -> None:
    died = 0
    for at in range(12):
        path = tmp_path / f"{at}.db"
        journal = Journal(path)
        journal._db = Mortal(journal._db, at)  # type: ignore[assignment]
        try:
            journal.write(migration("m1"), migration("m2"), answer=("mine", b"m1, m2"))
        except KeyboardInterrupt:
            died += 1
        journal.close()
        again = Journal(path)
        found = ([one.move.id for one in again.migrations()], again.answer("mine"))
        assert found in [([], None), (["m1", "m2"], b"m1, m2")]
        again.close()
    assert 3 < died < 12


def test_a_journal_for_which_there_is_no_room_says_so_and_goes_on_when_there_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Full, match="no room on the disk: the journal cannot be written"):
        journal.save("large", b"x" * 100_000)
    assert journal.load("large") is None
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.save("large", b"x" * 100_000)
    journal.close()


def test_a_journal_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(NewerFormat, match="99"):
        Journal(path)


def test_a_journal_of_an_older_version_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """In format 1 the gateway's snapshots were in there as well."""
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    for opened in (Journal, lambda path: JournalReader(path).load("x")):
        with pytest.raises(Stop, match="format 1, this version reads format 4: start in a new data directory"):
            opened(path)


def test_a_reader_waits_for_nobody_and_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    reader = JournalReader(path)
    assert (reader.load("x"), reader.migrations()) == (None, [])
    assert not path.exists(), "only the writer makes it"
    journal = Journal(path)
    journal.save("x", b"1")
    journal.write(migration("m1"))
    with sqlite3.connect(path, isolation_level=None) as stopped:
        stopped.execute("BEGIN IMMEDIATE")  # and there its process is stopped
        stopped.execute("UPDATE snapshots SET blob = 'half'")
        assert (reader.load("x"), reader.migrations()) == (b"1", [migration("m1")])
        stopped.execute("ROLLBACK")
    journal.close()
    assert reader.load("x") == b"1"


def test_what_is_no_journal_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"not a database at all, but longer than a header " * 100)
    with pytest.raises(Corrupt, match=r"journal\.db"):
        Journal(path)


def test_a_damaged_entry_is_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.write(migration("m1"))
    with sqlite3.connect(tmp_path / "journal.db") as db:
        (blob,) = db.execute("SELECT blob FROM migrations").fetchone()
        db.execute("UPDATE migrations SET blob = ?", (blob[:-1] + bytes([blob[-1] ^ 1]),))
    with pytest.raises(Corrupt):
        journal.migrations()
    journal.close()
