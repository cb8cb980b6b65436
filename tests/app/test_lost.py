"""Sites die in a running pipeline, and what they had comes back elsewhere, out of the central store: results are exact.

Everything is real but Spark: the instances run batch by batch, as a test tells them to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_checkpointer import PARTS, RARELY, Hand, Sum
from tests.app.waiting import until
from whimbrel.checkpoints import checkpointer as checkpointer_role
from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.core.protocols.machine import Migration
from whimbrel.core.router import UNOWNED
from whimbrel.host.checkpoint import SavedLog
from whimbrel.log.contract import Lane
from whimbrel.log.folder import Logs
from whimbrel.log.readers import INSTANCE
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, Journal, JournalReader
from whimbrel.orchestrator.known_keys import keys_in
from whimbrel.orchestrator.policy import Policy
from whimbrel.orchestrator.stage import Shape
from whimbrel.roles import gateway as gateway_role
from whimbrel.roles.gateway import GatewayRole
from whimbrel.site.status import SiteStatus

SITES = ["cloud", "edge-1", "edge-2"]
KEYS = [f"k{n}" for n in range(6)]


class Mortal(Control):
    """A control whose sites may be dead."""

    dead: set[str]

    def is_dead(self, site: str) -> bool:
        return site in self.dead


class House:
    """A pipeline over three sites, with or without a store."""

    def __init__(self, folder: Path, *, stores: bool = True) -> None:
        self.folder, self.data = folder, folder / "data"
        self.results: dict[str, list[int]] = defaultdict(list)
        self.truth: dict[str, list[int]] = defaultdict(list)
        self.sent, self.now = 0, 1_000_000
        pipeline = wb.Pipeline("p", source=wb.Items([], schema="key string, n long"), key="key")
        pipeline.stage("sum", Sum(), groups=PARTS).sink(lambda row: self.results[row["key"]].append(row["total"]))
        self.journal, self.logs = Journal(self.data / JOURNAL), Logs(self.data / "logs")
        self.places, decided = GatewayJournal(self.data / GATEWAY_JOURNAL), JournalReader(self.data / JOURNAL)
        options: dict[str, Any] = {"keep": False, "max_backlog": 1000, "watch": lambda results, now_us: None}
        store = str(folder / "store") if stores else None
        self.role = GatewayRole(
            pipeline, self.logs, self.places, decided, self.hear, self.clock, store=store, save_every=RARELY, **options
        )
        sites: dict[str, Any] = {name: self.site() for name in SITES}
        shapes = {"sum": Shape(PARTS)}
        keys, role = keys_in(self.logs), self.role
        self.control = Mortal("p", shapes, self.data, self.journal, keys, sites, role, self.clock, "ideal", SavedLog)
        self.control.dead = set()
        self.stage = self.control.stages["sum"]
        self.hands = {name: Hand(self.logs, name) for name in self.stage.coordinator.sites}
        self.control.orchestrator.start()
        self.control.chores.send_places()
        self.role.start()

    def site(self) -> Any:
        """It does what it must."""

        def send(source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
            self.logs.inbox(destination).append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL)

        nothing = lambda *arguments, **named: None  # noqa: E731
        return SimpleNamespace(
            start=nothing, stop=nothing, place=nothing, send=send, failed=dict, status=SiteStatus, is_idle=lambda: True
        )

    def hear(self, stage: str, notice: Any) -> None:
        self.control.receive(stage, notice)

    def clock(self) -> int:
        return self.now

    def end(self) -> None:
        ends = (self.control.orchestrator.stop, *self.role.ends(), *self.role.outlet_ends())
        for end in (*ends, self.logs.close, self.journal.close, self.places.close):
            end()

    # ── What happens ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, amount: int = 1) -> None:
        """A record of every key."""
        self.sent += 1
        self.role.first.gateway.ingest([(key, (key, amount), None) for key in KEYS], "by hand", self.sent)
        for key in KEYS:
            self.truth[key].append((self.truth[key] or [0])[-1] + amount)

    def batch(self, *names: str) -> None:
        """A micro-batch of each of these, or of all that live."""
        sites = self.stage.coordinator.sites
        for name in names or [name for name, site in sites.items() if site not in self.control.dead]:
            if name not in self.hands:
                self.hands[name] = Hand(self.logs, name)
            hand = self.hands[name]
            hand.batch()
            self.logs.inbox(name).commit(INSTANCE, dict(zip(Lane, hand.batches[-1], strict=True)))

    def save(self) -> int:
        """A checkpoint of all; its number."""
        checkpointer = self.role.first.checkpointer
        assert checkpointer is not None
        before = checkpointer.status().checkpoint or 0
        checkpointer.order()

        def is_made() -> bool:
            self.batch()
            return checkpointer.status().checkpoint == before + 1

        until(is_made, "the checkpoint")
        return before + 1

    def run(self, handle: Handle) -> Migration:
        """Batches, until a migration is over."""

        def is_over() -> bool:
            self.batch()
            return all(migration.is_over for migration in handle.migrations)

        until(is_over, f"{handle.ids} to be over")
        return handle.migrations[0]

    def is_exact(self) -> bool:
        self.batch()
        return self.results == self.truth

    @property
    def refused(self) -> int:
        return self.role.status().stages["sum"].refused

    def owner(self) -> set[str]:
        return self.stage.owners()


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_role, "FIRST", 0.01)
    monkeypatch.setattr(gateway_role, "PERIOD", 0.02)
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.02)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.02)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    one = House(tmp_path)
    yield one
    one.end()


def lived(house: House) -> int:
    """Records, a checkpoint, more records whose results are out, and some that nobody has applied. Then cloud dies."""
    house.send()
    number = house.save()
    house.send(10)
    house.batch()
    until(lambda: house.results == house.truth, "results are out")
    house.send(100)
    house.control.dead = {"cloud"}
    return number


# ── By order ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", [None, "auto", "restore"])
def test_what_a_dead_site_had_goes_on_elsewhere_and_the_dead_may_come_back(house: House, protocol: str | None) -> None:
    lived(house)
    migration = house.run(house.control.orders.migrate("sum", to="edge-1", protocol=protocol))
    assert (migration.phase, migration.move.protocol, migration.keys) == ("done", "restore", len(KEYS))
    assert (migration.replayed, migration.silent) == (2 * len(KEYS), len(KEYS))
    until(house.is_exact, "every result once")
    assert house.owner() == {"sum-2"}
    assert house.stage.coordinator.losses.instances() == {"sum-1"}

    house.control.dead = set()  # it applies what it had in its inbox, and says so; then it hears what has happened
    house.batch("sum-1")
    until(lambda: not house.stage.coordinator.losses.instances(), "it has dropped its keys")
    assert house.refused == len(KEYS)
    house.send(1000)
    until(house.is_exact, "every result once")
    assert house.run(house.control.orders.migrate("sum", to="cloud")).phase == "done"
    house.send(1)
    until(house.is_exact, "every result once")
    assert house.owner() == {"sum-1"}


def test_an_instance_that_lost_its_checkpoint_does_not_take_what_an_undone_move_sent_it(house: House) -> None:
    """It has forgotten the BEGIN of the move; what its router sent to both ends is not its own."""
    house.send()
    house.batch("sum-1")
    handle = house.control.orders.migrate("sum", to="edge-1", protocol="live")
    until(lambda: house.logs.inbox("sum-2").tail(), "BEGIN is there")
    house.batch("sum-2")
    house.send(10)
    handle.abort()
    anew = Hand(house.logs, "sum-2")
    anew.batches = house.hands["sum-2"].batches  # where it was; the states of its parts are gone
    house.hands["sum-2"] = anew
    house.send(100)
    house.control.chores.renew("sum-2")
    house.batch("sum-2")
    until(lambda: house.is_exact() and not house.stage.coordinator.open, "every result once, and the move is undone")
    assert house.run(house.control.orders.migrate("sum", to="edge-1", protocol="live")).phase == "done"
    house.send(1000)
    until(house.is_exact, "every result once")


def test_an_older_checkpoint_takes_longer_and_gives_the_same(house: House) -> None:
    house.send()
    first = house.save()
    house.send(10)
    assert house.save() == first + 1
    house.control.dead = {"cloud"}
    migration = house.run(house.control.orders.migrate("sum", to="edge-2", from_checkpoint=first))
    assert (migration.checkpoint, migration.phase, migration.silent) == (first, "done", len(KEYS))
    until(house.is_exact, "every result once")


def test_somebody_who_lives_may_be_restored_as_well(house: House) -> None:
    house.send()
    house.save()
    house.send(10)
    migration = house.run(house.control.orders.migrate("sum", to="edge-1", protocol="restore"))
    assert migration.phase == "done"
    until(house.is_exact, "every result once")
    assert not house.stage.coordinator.losses.instances()


def test_an_instance_is_invoked_from_its_state_elsewhere_or_beside_itself(house: House) -> None:
    house.send()
    number = house.save()
    assert house.run(house.control.orders.invoke("sum-1", "edge-2", number)).phase == "done"
    assert house.owner() == {"sum-3"}
    house.send(10)
    assert house.run(house.control.orders.invoke("sum-3", "edge-2")).phase == "done"
    assert house.owner() == {"sum-4"}
    assert house.stage.coordinator.sites["sum-4"] == "edge-2"
    until(house.is_exact, "every result once")


def test_an_instance_that_is_detached_gives_its_keys_away_and_leaves(house: House) -> None:
    house.send()
    house.save()
    house.run(house.control.orders.detach("sum-1"))
    until(lambda: "sum-1" not in house.stage.coordinator.sites, "it has left")
    assert house.owner() == {"sum-2", "sum-3"}
    until(house.is_exact, "every result once")
    house.control.dead = {"edge-1"}
    house.run(house.control.orders.detach("sum-2"))
    assert house.owner() == {"sum-3"}
    with pytest.raises(Refused, match="is the only instance"):
        house.control.orders.detach("sum-3")
    house.control.dead = set()
    until(house.is_exact, "every result once")
    until(lambda: "sum-2" not in house.stage.coordinator.sites, "it has left, when it was back")


def test_a_dead_site_is_drained_by_restoring_it(house: House) -> None:
    lived(house)
    (handle,) = house.control.orders.drain("cloud").values()
    assert house.run(handle).move.protocol == "restore"
    until(house.is_exact, "every result once")
    until(lambda: house.is_exact() and house.control.is_settled(), "nobody waits for the dead")


def test_what_cannot_be_restored_is_refused_and_nothing_has_happened(house: House) -> None:
    lived(house)
    migrate = house.control.orders.migrate
    with pytest.raises(Unavailable, match=r"cannot give its keys by live; .*protocol='restore'"):
        migrate("sum", to="edge-1", protocol="live")
    with pytest.raises(Unavailable, match="cannot give its keys by live"):
        house.control.orders.drain("cloud", protocol="live")
    with pytest.raises(UnknownName, match="unknown checkpoint '9'; there is: 1"):
        migrate("sum", to="edge-1", from_checkpoint=9)
    with pytest.raises(Refused, match=r"all keys of sum-1.*at='cloud'"):
        migrate("sum", to="edge-1", keys=["k1"])
    house.control.dead = {"cloud", "edge-1"}
    with pytest.raises(Unavailable, match="site edge-1 is dead; choose another one"):
        migrate("sum", to="edge-1")
    house.control.dead = set()
    with pytest.raises(Refused, match="nothing is restored here"):
        migrate("sum", to="edge-1", from_checkpoint=1)
    assert not house.stage.coordinator.migrations
    migrate("sum", to="edge-1", protocol="restore")
    with pytest.raises(Conflict, match="restores sum-1"):
        migrate("sum", to="edge-2", protocol="restore")


def test_without_a_store_nothing_is_restored(tmp_path: Path) -> None:
    house = House(tmp_path, stores=False)
    try:
        house.send()
        house.control.dead = {"cloud"}
        with pytest.raises(Refused, match=r"there is no central store.*--store"):
            house.control.orders.migrate("sum", to="edge-1")
        assert not house.stage.coordinator.migrations
    finally:
        house.end()


def test_no_checkpoint_is_made_while_keys_have_no_owner(house: House) -> None:
    """Whoever has others saves, and that says nothing of those that nobody has."""
    house.send()
    house.run(house.control.orders.migrate("sum", to="edge-1", share=0.5))
    number = house.save()
    checkpointer = house.role.first.checkpointer
    assert checkpointer is not None
    house.control.dead = {"cloud"}
    handle = house.control.orders.migrate("sum", to="edge-2", at="cloud")
    until(lambda: handle.outcome == "loading", "the fence")
    assert house.role.first.gateway.owners() == {"sum-2", UNOWNED}
    for amount in (10, 100):
        house.send(amount)
        before = checkpointer._ordered
        checkpointer.order()
        until(
            lambda: checkpointer.status().under_way_bytes == 0 and checkpointer._ordered > before,  # noqa: B023
            "BARRIER has its place",
        )
        house.batch("sum-2")
        until(
            lambda: {("sum-2", part) for part in range(PARTS)} <= checkpointer._committed,
            "all that has an owner is saved",
        )
        checkpointer.wake()
    until(lambda: checkpointer._wake.is_set() is False, "one more look at it")
    assert checkpointer.status().checkpoint == number
    house.run(handle)
    house.send(1000)
    assert house.save() == number + 1
    until(house.is_exact, "every result once")


# ── By itself ────────────────────────────────────────────────────────────────────────────────────────────────────────


def restorations(house: House) -> list[Migration]:
    return list(house.stage.coordinator.migrations.values())


def alive(house: House) -> list[str]:
    return [site for site in SITES if site not in house.control.dead]


def look(house: House, policy: Policy) -> None:
    house.now += 10_000_000
    policy.look(house.control.dead, alive(house))


def test_a_dead_site_is_restored_by_itself_where_that_may_be(house: House) -> None:
    lived(house)
    policy = Policy(house.control, ["edge-2"], house.clock)
    look(house, policy)
    look(house, policy)
    (migration,) = restorations(house)
    assert (migration.to_site, migration.move.source) == ("edge-2", "sum-1")
    assert "sum-1 at cloud is gone" in migration.story[0].event
    house.run(Handle(house.control.orchestrator, "sum", [migration.move.id]))
    look(house, policy)
    assert len(restorations(house)) == 1, "nothing hangs on it any more"
    until(house.is_exact, "every result once")
    house.control.dead = {"edge-2", "cloud"}
    look(house, policy)
    assert policy.waiting == {"sum-3": "no live site may take its keys"}


def test_if_the_destination_dies_too_it_is_the_next_sites_turn(house: House) -> None:
    lived(house)
    policy = Policy(house.control, None, house.clock)
    look(house, policy)
    assert restorations(house)[0].to_site == "edge-1"
    house.control.dead = {"cloud", "edge-1"}
    house.control.orchestrator.abandon("edge-1", "site edge-1 is dead")
    until(lambda: restorations(house)[0].phase == "aborted", "the first attempt is over")

    def is_restored() -> bool:
        look(house, policy)
        house.batch()
        return house.owner() == {"sum-3"} and restorations(house)[-1].phase == "done"

    until(is_restored, "restored at the third site")
    until(house.is_exact, "every result once")
    house.control.dead = set()
    until(house.is_exact, "every result once")
    until(lambda: not house.stage.coordinator.losses.instances(), "all are back")


def test_a_clock_that_is_put_back_keeps_nobody_from_being_restored(house: House) -> None:
    lived(house)
    policy = Policy(house.control, None, house.clock)
    look(house, policy)
    house.control.dead = {"cloud", "edge-1"}
    house.control.orchestrator.abandon("edge-1", "site edge-1 is dead")
    until(lambda: restorations(house)[0].phase == "aborted", "the first attempt is over")
    house.now -= 3_600_000_000
    look(house, policy)
    assert [one.to_site for one in restorations(house)] == ["edge-1", "edge-2"]


def failed_at_first(house: House) -> Policy:
    """An attempt to restore what the cloud had was called off at edge-1, which lives."""
    lived(house)
    policy = Policy(house.control, None, house.clock)
    look(house, policy)
    (first,) = restorations(house)
    assert first.to_site == "edge-1"
    Handle(house.control.orchestrator, "sum", [first.move.id]).abort("enough")
    until(lambda: first.phase == "aborted", "the first attempt is over")
    return policy


def test_a_site_where_it_failed_is_tried_after_those_where_it_has_not(house: House) -> None:
    look(house, failed_at_first(house))
    assert [one.to_site for one in restorations(house)] == ["edge-1", "edge-2"]


def test_where_it_was_is_the_last_choice_also_if_that_is_back(house: House) -> None:
    policy = failed_at_first(house)
    house.control.dead = {"edge-1"}
    look(house, policy)
    assert [one.to_site for one in restorations(house)] == ["edge-1", "edge-2"]


def test_failures_before_it_was_restored_count_no_more_when_it_is_lost_again(house: House) -> None:
    policy = failed_at_first(house)
    look(house, policy)
    house.run(Handle(house.control.orchestrator, "sum", [restorations(house)[-1].move.id]))
    house.control.dead = set()
    until(lambda: house.is_exact() and not house.stage.coordinator.losses.instances(), "all are back")
    assert house.run(house.control.orders.migrate("sum", to="cloud")).phase == "done"
    house.control.dead = {"cloud"}
    policy.look(house.control.dead, alive(house))  # at once: nothing has failed since
    assert (restorations(house)[-1].move.source, restorations(house)[-1].to_site) == ("sum-1", "edge-1")
    assert policy.waiting == {}


def test_if_nobody_else_lives_it_is_restored_where_it_was(house: House) -> None:
    """By then it has been fenced, and has dropped its keys."""
    lived(house)
    policy = Policy(house.control, ["cloud", "edge-1"], house.clock)
    look(house, policy)
    until(lambda: restorations(house)[0].phase == "loading", "it is fenced")
    house.control.dead = {"cloud", "edge-1"}
    house.control.orchestrator.abandon("edge-1", "site edge-1 is dead")
    look(house, policy)
    assert set(policy.waiting) == {"sum-1"}
    house.control.dead = {"edge-1"}
    house.batch("sum-1")

    def is_restored() -> bool:
        look(house, policy)
        house.batch()
        return restorations(house)[-1].phase == "done"

    until(is_restored, "restored beside itself")
    assert house.owner() == {"sum-4"}
    assert house.stage.coordinator.sites["sum-4"] == "cloud"
    until(house.is_exact, "every result once")


def test_if_the_store_is_damaged_it_is_an_older_checkpoints_turn(house: House) -> None:
    first = lived(house)
    house.control.dead = set()
    house.send()
    house.save()
    house.control.dead = {"cloud"}
    files = [file for file in (house.folder / "store" / "sum" / "segments").rglob("*") if file.is_file()]
    max(files, key=lambda file: file.stat().st_mtime_ns).write_bytes(b"damaged")
    policy = Policy(house.control, None, house.clock)

    def is_restored() -> bool:
        look(house, policy)
        house.batch()
        return restorations(house)[-1].phase == "done"

    until(is_restored, "restored from an older checkpoint")
    tried = [(one.checkpoint, one.phase) for one in restorations(house)]
    assert tried[0] == (None, "aborted")
    assert tried[-1] == (first, "done")
    assert "the store cannot be read" in str(restorations(house)[0].reason)
    until(house.is_exact, "every result once")
