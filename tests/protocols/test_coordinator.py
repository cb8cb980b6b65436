"""The coordinator of a stage: what may be ordered, what collides, and who owns what afterwards."""

from __future__ import annotations

import copy

import pytest

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Refused, UnknownEvent, UnknownName
from whimbrel.core.keys import EVERYTHING, KeyMap, Selection, bin_of, selection_of
from whimbrel.core.protocols.machine import (
    Abandoned,
    Copied,
    Fenced,
    Forget,
    Loaded,
    Migration,
    Ordered,
    Started,
    StopInstance,
    Stopped,
)
from whimbrel.core.record import Aborted, Evicted, Left, Opened, Ready
from whimbrel.core.router import Abort, Begin, Cutover, Fence, RouteTable

SITES = {"a": "cloud", "b": "edge-1", "c": "edge-2"}
K = selection_of(["k"])


@pytest.fixture
def coordinator() -> Coordinator:
    """Of a stage whose every key is at a."""
    return Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))


def order(coordinator: Coordinator, selection: Selection, to: str, protocol: str = "live", id: str = "m1") -> Migration:
    """Plan and start a migration that must be exactly one."""
    (migration,) = coordinator.plan([(selection, to)], SITES[to], protocol, id)
    coordinator.start(migration)
    return migration


def finish(coordinator: Coordinator, migration: Migration) -> None:
    """Let a migration come to its happy end."""
    id, move = migration.move.id, migration.move
    if move.protocol == "restart":
        for event in (Stopped(), Copied(), Started(migration.to_site)):
            coordinator.handle(id, event)
    else:
        coordinator.handle(id, Ready(id, move.destination, 0, 1))
        coordinator.handle(id, Left(id, move.source, 0, 1))
        coordinator.handle(id, Opened(id, move.destination, 0, 1))
    assert migration.phase == "done"


def abort(coordinator: Coordinator, migration: Migration, *sides: str) -> None:
    """Abandon a migration, and let these sides be out."""
    coordinator.handle(migration.move.id, Abandoned("enough"))
    for side in sides:
        coordinator.handle(migration.move.id, Aborted(migration.move.id, side, 0, 1))


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_says_everything_and_starts_nothing(coordinator: Coordinator) -> None:
    (planned,) = coordinator.plan([(K, "b")], "edge-1", "pause", "m1", budget=5, chunk=6)
    move = planned.move
    assert (move.id, move.stage, move.protocol, move.source, move.destination) == ("m1", "stage", "pause", "a", "b")
    assert (move.selection, move.epoch, move.routers, move.hold) == (K, 1, frozenset({"r"}), True)
    assert (move.budget, move.chunk) == (5, 6)
    assert (planned.from_site, planned.to_site, planned.phase) == ("cloud", "edge-1", "ordered")
    assert coordinator.migrations == {}


def test_what_is_there_already_is_not_moved(coordinator: Coordinator) -> None:
    assert coordinator.plan([(K, "a")], "cloud", "live", "m1") == []
    assert coordinator.plan([(Selection(), "b")], "edge-1", "live", "m1") == []


def test_keys_move_between_two_instances_at_one_site(coordinator: Coordinator) -> None:
    coordinator.sites["d"] = "cloud"
    (planned,) = coordinator.plan([(K, "d")], "cloud", "live", "m1")
    assert (planned.move.source, planned.move.destination) == ("a", "d")
    assert (planned.from_site, planned.to_site) == ("cloud", "cloud")
    assert coordinator.plan([(EVERYTHING, "d")], "cloud", "restart", "m1") == [], "they are at the site already"


def test_a_selection_is_split_by_owner(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, selection_of(["k", "j"]), "b"))
    finish(coordinator, order(coordinator, selection_of(["there"]), "c", id="m2"))
    planned = coordinator.plan([(selection_of(["k", "x", "there"]), "c")], "edge-2", "live", "m3")
    assert [(p.move.id, p.move.source, p.move.selection, p.move.epoch) for p in planned] == [
        ("m3.1", "a", selection_of(["x"]), 1),
        ("m3.2", "b", K, 2),
    ]


def test_a_bin_is_split_into_its_keys_and_the_rest(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, selection_of(["k0"]), "b"))
    bin = selection_of(bins=[bin_of("k0")])
    rest, single = coordinator.plan([(bin, "c")], "edge-2", "live", "m2")
    assert (rest.move.source, single.move.source) == ("a", "b")
    assert ("k0" in rest.move.selection, "k673" in rest.move.selection) == (False, True)
    assert single.move.selection == selection_of(["k0"])


def test_more_keys_than_a_marker_can_name_are_refused_and_bins_are_not(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the sum of several orders: what is left of an instance's bins must fit into one marker, too."""
    monkeypatch.setattr("whimbrel.core.coordinator.NAMED_BYTES", 40)
    names = [f"key-{n}" for n in range(10)]
    finish(coordinator, order(coordinator, Selection(keys=frozenset(names[:6])), "b"))
    order(coordinator, Selection(keys=frozenset(names[6:8])), "b", id="m2")
    with pytest.raises(Refused, match=r"single keys of 45 bytes together in its routes, and at most 40 .* whole bins"):
        coordinator.plan([(Selection(keys=frozenset(names[8:9])), "b")], SITES["b"], "live", "m3")
    rest = frozenset(range(1024)) - {bin_of(name) for name in names}
    assert coordinator.plan([(Selection(bins=rest), "b")], SITES["b"], "live", "m3")
    assert coordinator.losses.plan("b", "a", "m3").move.selection.named == {*names[:6]}


def test_epochs_grow_with_every_hand_over(coordinator: Coordinator) -> None:
    epochs = []
    for number, to in enumerate("bcab", 1):
        migration = order(coordinator, K, to, id=f"m{number}")
        finish(coordinator, migration)
        epochs.append(migration.move.epoch)
    assert epochs == [1, 2, 3, 4]
    assert coordinator.table.epochs["k"] == 4
    assert coordinator.table.epochs["other"] == 0
    (whole,) = coordinator.plan([(EVERYTHING, "b")], "edge-1", "live", "m9")
    assert whole.move.epoch == 1, "k is at b already, and nobody else has moved"


def test_a_whole_move_gets_an_epoch_above_that_of_every_key(coordinator: Coordinator) -> None:
    for number, to in enumerate("ba", 1):
        finish(coordinator, order(coordinator, K, to, id=f"m{number}"))
    (whole,) = coordinator.plan([(EVERYTHING, "b")], "edge-1", "live", "m3")
    assert whole.move.epoch == 3


@pytest.mark.parametrize(
    ("destination", "protocol", "message"),
    [
        ("nowhere", "live", "unknown instance 'nowhere'; there is: a, b, c"),
        ("b", "teleport", "unknown protocol 'teleport'; there is: fetch, fluid, live, pause, push, replicate, restart"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(
    coordinator: Coordinator, destination: str, protocol: str, message: str
) -> None:
    with pytest.raises(UnknownName, match=message):
        coordinator.plan([(K, destination)], "edge-1", protocol, "m1")


@pytest.mark.parametrize("protocol", ["live", "pause"])
def test_keys_go_to_an_instance_where_it_runs(coordinator: Coordinator, protocol: str) -> None:
    """After a restart elsewhere an instance's name says little about its place: a would be moved to itself."""
    finish(coordinator, order(coordinator, EVERYTHING, "b", "restart"))
    assert coordinator.sites["a"] == "edge-1"
    with pytest.raises(Refused, match="a runs at edge-1, not at cloud"):
        coordinator.plan([(K, "a")], "cloud", protocol, "m2")


@pytest.mark.parametrize("limit", ["budget", "chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_under_which_nothing_could_travel_are_refused(coordinator: Coordinator, limit: str, value: int) -> None:
    with pytest.raises(Refused, match=f"{limit} must be at least 1"):
        coordinator.plan([(K, "b")], "edge-1", "live", "m1", **{limit: value})


# ── Restarts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_restart_moves_a_whole_instance_and_no_key(coordinator: Coordinator) -> None:
    migration = order(coordinator, EVERYTHING, "b", "restart")
    assert (migration.move.source, migration.move.destination) == ("a", "a")
    assert coordinator.sites["a"] == "cloud"
    finish(coordinator, migration)
    assert coordinator.sites["a"] == "edge-1"
    assert coordinator.table.owners["k"] == "a"
    assert coordinator.plan([(EVERYTHING, "b")], "edge-1", "restart", "m2") == []


def test_a_restart_needs_the_whole_instance(coordinator: Coordinator) -> None:
    with pytest.raises(Refused, match="restart moves a whole instance, and a has keys that were not selected"):
        coordinator.plan([(K, "b")], "edge-1", "restart", "m1")


def test_the_whole_instance_is_what_it_has_now(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, K, "b"))
    rest = Selection(EVERYTHING.bins, without=frozenset({"k"}))
    assert order(coordinator, rest, "c", "restart", id="m2").move.selection == rest
    assert order(coordinator, K, "c", "restart", id="m3").move.source == "b"


def test_a_restart_that_was_undone_leaves_the_instance_where_it_was(coordinator: Coordinator) -> None:
    migration = order(coordinator, EVERYTHING, "b", "restart")
    coordinator.handle("m1", Abandoned("enough"))
    coordinator.handle("m1", Started("cloud"))
    assert (migration.phase, coordinator.sites["a"], list(coordinator.open.values())) == ("aborted", "cloud", [])


# ── Conflicts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("selection", "to", "protocol"),
    [
        (K, "c", "live"),
        (K, "b", "pause"),
        (selection_of(["j", "k"]), "c", "live"),
        (selection_of(bins=[bin_of("k")]), "c", "live"),
        (EVERYTHING, "b", "restart"),
    ],
)
def test_keys_that_move_cannot_be_moved(coordinator: Coordinator, selection: Selection, to: str, protocol: str) -> None:
    order(coordinator, K, "b")
    before = copy.deepcopy(coordinator.migrations)
    with pytest.raises(
        Conflict, match=r"migration m1 \(copying\) (has some of these keys|needs one of these instances)"
    ):
        coordinator.plan([(selection, to)], SITES[to], protocol, "m2")
    assert coordinator.migrations == before


def test_other_keys_can_be_moved_meanwhile(coordinator: Coordinator) -> None:
    order(coordinator, K, "b")
    order(coordinator, selection_of(["j"]), "b", "pause", id="m2")
    order(coordinator, Selection(frozenset({bin_of("k")}), without=frozenset({"k"})), "c", id="m3")


def test_nothing_comes_to_or_leaves_an_instance_that_restarts(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, K, "b"))
    order(coordinator, K, "c", "restart", id="m2")
    for to in "bc":
        with pytest.raises(Conflict):
            coordinator.plan([(selection_of(["k", "j"]), to)], SITES[to], "live", "m3")
    with pytest.raises(Conflict):
        coordinator.plan([(selection_of(["j"]), "b")], SITES["b"], "live", "m3")
    order(coordinator, selection_of(["j"]), "c", id="m4")


def test_an_instance_that_gets_or_gives_keys_does_not_restart(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, selection_of(["j"]), "b"))
    order(coordinator, K, "b", id="m2")
    with pytest.raises(Conflict):
        coordinator.plan([(selection_of(["j"]), "c")], "edge-2", "restart", "m3")
    with pytest.raises(Conflict):
        coordinator.plan([(coordinator.table.owners.select("a"), "c")], "edge-2", "restart", "m3")


def test_a_plan_of_which_one_part_collides_is_refused_as_a_whole(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, K, "b"))
    order(coordinator, K, "a", id="m2")
    with pytest.raises(Conflict):
        coordinator.plan([(selection_of(["j", "k"]), "c")], "edge-2", "live", "m3")
    assert sorted(coordinator.migrations) == ["m1", "m2"]


def test_keys_that_have_moved_can_be_moved_again(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, K, "b"))
    assert order(coordinator, K, "c", id="m2").move.source == "b"


def test_an_abort_is_a_conflict_until_the_source_is_out(coordinator: Coordinator) -> None:
    abort(coordinator, order(coordinator, K, "b"))
    with pytest.raises(Conflict, match="aborting"):
        coordinator.plan([(K, "c")], "edge-2", "live", "m2")


def test_after_it_only_the_destination_that_has_not_cleaned_up_is_blocked(coordinator: Coordinator) -> None:
    """What the aborted move has left there must not meet what a new one brings."""
    migration = order(coordinator, K, "b")
    abort(coordinator, migration, "a")
    assert migration.is_over
    assert list(coordinator.open.values()) == [migration]
    with pytest.raises(Conflict, match=r"migration m1 \(aborted\)"):
        coordinator.plan([(K, "b")], "edge-1", "live", "m2")
    with pytest.raises(Conflict):
        coordinator.plan([(EVERYTHING, "b")], "edge-1", "pause", "m2")
    order(coordinator, selection_of(["j"]), "b", id="m2")
    finish(coordinator, order(coordinator, K, "c", id="m3"))
    commands = coordinator.handle("m1", Aborted("m1", "b", 0, 1))
    assert commands == [Forget(migration.move)]
    assert order(coordinator, K, "b", id="m4").move.source == "c"


def test_what_was_abandoned_before_it_began_blocks_nobody(coordinator: Coordinator) -> None:
    (migration,) = coordinator.plan([(K, "b")], "edge-1", "live", "m1")
    coordinator.migrations["m1"] = migration
    coordinator.handle("m1", Abandoned("never mind"))
    assert list(coordinator.open.values()) == []
    coordinator.handle("m1", Abandoned("never mind, I said"))
    assert list(coordinator.open.values()) == [], "however often it is said"


# ── Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_routes_change_when_a_migration_is_done_and_not_before(coordinator: Coordinator) -> None:
    migration = order(coordinator, K, "b")
    coordinator.handle("m1", Ready("m1", "b", 0, 1))
    coordinator.handle("m1", Opened("m1", "b", 0, 1))
    assert coordinator.table.owners["k"] == "a"
    coordinator.handle("m1", Left("m1", "a", 0, 1))
    assert (coordinator.table.owners["k"], coordinator.table.epochs["k"]) == ("b", 1)
    assert migration.is_over


def test_a_late_notice_of_an_old_migration_does_not_bring_its_routes_back(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, K, "b"))
    finish(coordinator, order(coordinator, K, "c", id="m2"))
    coordinator.handle("m1", Left("m1", "a", 0, 1))
    assert (coordinator.table.owners["k"], coordinator.table.epochs["k"]) == ("c", 2)


def test_an_event_of_nobody_is_refused(coordinator: Coordinator) -> None:
    with pytest.raises(UnknownName, match="unknown migration 'm7'"):
        coordinator.handle("m7", Ready("m7", "b", 0, 1))


def test_an_impossible_event_changes_no_route(coordinator: Coordinator) -> None:
    order(coordinator, K, "b")
    with pytest.raises(UnknownEvent):
        coordinator.handle("m1", Opened("m1", "b", 0, 1))
    assert coordinator.table.owners["k"] == "a"


def test_a_restarted_coordinator_knows_what_its_journal_knows(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, selection_of(["done"]), "b", id="m1"))
    finish(coordinator, order(coordinator, selection_of(["done"]), "c", id="m2"))
    finish(coordinator, order(coordinator, selection_of(["done"]), "b", "restart", id="m3"))
    order(coordinator, selection_of(["copying"]), "b", id="m4")
    order(coordinator, selection_of(["cutting"]), "b", id="m5")
    coordinator.handle("m5", Ready("m5", "b", 0, 1))
    abort(coordinator, order(coordinator, selection_of(["aborting"]), "b", id="m6"))
    abort(coordinator, order(coordinator, selection_of(["unclean"]), "b", id="m7"), "a")
    abort(coordinator, order(coordinator, selection_of(["aborted"]), "b", id="m8"), "a", "b")
    (back,) = coordinator.plan([(selection_of(["done"]), "a")], "cloud", "restart", "m9")
    coordinator.start(back)

    journal = [wire.pack(migration) for migration in coordinator.migrations.values()]
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    said = {}
    for blob in journal:
        migration = wire.unpack(blob, Migration)
        said[migration.move.id] = [type(command) for command in again.adopt(migration)]
    assert {id: commands for id, commands in said.items() if commands} == {
        "m4": [Begin],
        "m5": [Cutover],
        "m6": [Abort],
        "m8": [Forget],
        "m9": [StopInstance],
    }
    assert again.sites == coordinator.sites == {"a": "cloud", "b": "edge-1", "c": "edge-1"}
    assert again.table.owners.dump() == coordinator.table.owners.dump()
    assert again.table.epochs.dump() == coordinator.table.epochs.dump()
    unsettled = [migration.move.id for migration in coordinator.open.values()]
    assert [migration.move.id for migration in again.open.values()] == unsettled == ["m4", "m5", "m6", "m7", "m9"]


def test_an_instance_that_was_scaled_away_does_not_come_back_with_its_past(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, EVERYTHING, "b", "restart"))
    finish(coordinator, order(coordinator, EVERYTHING, "c", id="m2"))
    again = Coordinator("stage", RouteTable("b"), {"b": "edge-1", "c": "edge-2"}, KeyMap("r"))
    for migration in coordinator.migrations.values():
        assert again.adopt(migration) == []
    assert again.sites == {"b": "edge-1", "c": "edge-2"}
    assert again.table.owners.dump() == coordinator.table.owners.dump()


def test_a_start_is_the_first_line_of_the_story(coordinator: Coordinator) -> None:
    (migration,) = coordinator.plan([(K, "b")], "edge-1", "live", "m1")
    assert coordinator.start(migration, now_us=42) == [Begin(migration.move)]
    assert [(line.phase, line.event, line.at_us) for line in migration.story] == [("ordered", Ordered.__name__, 42)]


# ── A lost instance ──────────────────────────────────────────────────────────────────────────────────────────────────


def restore(coordinator: Coordinator, lost: str, to: str, id: str = "r1") -> Migration:
    """Plan and start a restoration."""
    migration = coordinator.losses.plan(lost, to, id)
    assert coordinator.start(migration) == [Fence(migration.move)]
    return migration


def restored(coordinator: Coordinator, migration: Migration) -> None:
    """Let a restoration come to its happy end."""
    id, to = migration.move.id, migration.move.destination
    for event in (Fenced(), Loaded(), Ready(id, to, 0, 1), Opened(id, to, 0, 1)):
        coordinator.handle(id, event)
    assert migration.phase == "done"


def test_a_lost_instance_is_out_until_it_has_dropped_its_keys(coordinator: Coordinator) -> None:
    migration = restore(coordinator, "a", "b")
    assert (migration.move.selection, migration.move.epoch, migration.move.parties) == (EVERYTHING, 1, frozenset("a"))
    assert coordinator.losses.instances() == {"a"}
    for destination in "ac":
        with pytest.raises(Refused, match="a is lost"):
            coordinator.plan([(K, destination)], SITES[destination], "live", "m1")
    with pytest.raises(Conflict, match="restores a"):
        coordinator.losses.plan("a", "c", "r2")
    restored(coordinator, migration)
    assert set(coordinator.table.owners.by_bin) == {"b"}
    with pytest.raises(Refused, match="a is lost"):
        order(coordinator, K, "a")
    coordinator.handle("r1", Evicted("r1", "a", 0, 1))
    assert coordinator.losses.instances() == set()
    assert order(coordinator, K, "a").move.epoch == 2


@pytest.mark.parametrize("protocol", ["live", "push", "fetch", "pause", "replicate"])
def test_a_move_from_a_lost_instance_ends_and_both_ends_discard(coordinator: Coordinator, protocol: str) -> None:
    migration = order(coordinator, K, "b", protocol)
    restoration = restore(coordinator, "a", "c")
    assert (migration.phase, migration.ended_by) == ("aborted", "r1")
    assert (restoration.move.ends, restoration.move.parties) == (frozenset({"m1"}), frozenset("ab"))
    assert restoration.move.epoch > migration.move.epoch
    assert coordinator.handle("m1", Ready("m1", "b", 0, 1)) == []
    assert coordinator.losses.ended_by(restoration) == [migration]


def test_a_move_to_a_lost_instance_that_can_be_undone_is(coordinator: Coordinator) -> None:
    migration = order(coordinator, K, "b")
    restoration = restore(coordinator, "b", "c")
    assert (restoration.move.ends, restoration.move.selection) == (frozenset(), Selection())
    assert coordinator.due() == [("m1", Abandoned("b is lost"))]
    assert coordinator.handle("m1", Abandoned("b is lost")) == [Abort(migration.move)]
    assert coordinator.due() == []


@pytest.mark.parametrize("protocol", ["live", "push"])
def test_one_that_cannot_ends_and_its_keys_are_restored(coordinator: Coordinator, protocol: str) -> None:
    order(coordinator, K, "b", protocol)
    coordinator.handle("m1", Ready("m1", "b", 0, 1))
    restoration = restore(coordinator, "b", "c")
    assert (restoration.move.ends, restoration.move.selection) == (frozenset({"m1"}), K)
    restored(coordinator, restoration)
    assert coordinator.table.owners["k"] == "c"


def test_keys_do_not_come_back_to_who_has_not_dropped_them(coordinator: Coordinator) -> None:
    """A parcel would overtake the DISCARD that waits in its inbox, and be taken for what is there already."""
    order(coordinator, K, "b")
    coordinator.handle("m1", Ready("m1", "b", 0, 1))
    restored(coordinator, restore(coordinator, "b", "c"))
    with pytest.raises(Conflict, match="a has not yet dropped what it had of these keys before r1 restored them"):
        order(coordinator, K, "a", id="m2")
    other = Selection(keys=frozenset({"other"}))
    assert coordinator.plan([(other, "c")], SITES["c"], "live", "m3"), "the rest of its keys may move"
    assert coordinator.is_needed(coordinator.migrations["r1"])
    coordinator.handle("r1", Evicted("r1", "a", 0, 1))
    assert order(coordinator, K, "a", id="m2").move.epoch == 3


def test_an_attempt_that_is_abandoned_leaves_the_keys_to_the_next_one(coordinator: Coordinator) -> None:
    order(coordinator, K, "b", "push")
    first = restore(coordinator, "b", "c")
    coordinator.handle("r1", Abandoned("no such site"))
    coordinator.handle("r1", Aborted("r1", "c", 0, 1))
    coordinator.handle("r1", Evicted("r1", "b", 0, 1))
    assert (coordinator.losses.interrupted(), coordinator.losses.instances()) == (["b"], {"b"})
    second = restore(coordinator, "b", "a", "r2")
    assert second.move.selection == first.move.selection == K
    assert second.move.epoch > first.move.epoch
    restored(coordinator, second)
    assert (coordinator.losses.interrupted(), coordinator.table.owners["k"]) == ([], "a")


def test_a_restoration_whose_destination_is_lost_as_well_is_part_of_the_next(coordinator: Coordinator) -> None:
    first = restore(coordinator, "a", "b")
    for event in (Fenced(), Loaded(), Ready("r1", "b", 0, 1)):
        coordinator.handle("r1", event)
    second = restore(coordinator, "b", "c", "r2")
    assert (first.ended_by, second.move.selection, second.move.parties) == ("r2", EVERYTHING, frozenset("ab"))
    assert coordinator.losses.interrupted() == []
    assert coordinator.losses.instances() == {"a", "b"}


def test_who_adopts_a_restoration_knows_what_it_has_ended(coordinator: Coordinator) -> None:
    """Only the restoration was journalled before the crash."""
    migration = order(coordinator, K, "b", "push")
    before = wire.pack(migration)
    restoration = restore(coordinator, "a", "c")
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    again.adopt(wire.unpack(before, Migration))
    assert again.adopt(wire.unpack(wire.pack(restoration), Migration)) == [Fence(restoration.move)]
    assert again.migrations["m1"].ended_by == "r1"
    assert again.losses.instances() == {"a"}


def test_who_has_dropped_its_keys_is_back_though_nobody_had_heard_of_the_first_attempt(
    coordinator: Coordinator,
) -> None:
    restore(coordinator, "a", "b")
    coordinator.handle("r1", Abandoned("b is dead"))
    restored(coordinator, restore(coordinator, "a", "c", "r2"))
    assert coordinator.losses.instances() == {"a"}
    coordinator.handle("r2", Evicted("r2", "a", 0, 1))
    assert coordinator.losses.instances() == set()


def test_restore_is_not_ordered_as_a_move(coordinator: Coordinator) -> None:
    with pytest.raises(Refused, match="a lost instance had"):
        coordinator.plan([(K, "b")], "edge-1", "restore", "m1")
    with pytest.raises(Refused, match="restore to another instance"):
        coordinator.losses.plan("a", "a", "r1")
    with pytest.raises(UnknownName):
        coordinator.losses.plan("z", "a", "r1")


def test_the_next_attempt_says_what_the_one_before_may_not_have_said(coordinator: Coordinator) -> None:
    order(coordinator, K, "b", "push")
    restore(coordinator, "a", "c")
    coordinator.handle("r1", Abandoned("before anybody was fenced"))
    coordinator.handle("r1", Aborted("r1", "c", 0, 1))
    second = coordinator.losses.plan("a", "c", "r2")
    assert (second.move.ends, second.move.parties) == (frozenset({"m1"}), frozenset("ab"))
    for name in "ab":
        coordinator.handle("r1", Evicted("r1", name, 0, 1))
    third = coordinator.losses.plan("a", "c", "r2")
    assert (third.move.ends, third.move.parties) == (frozenset(), frozenset("a"))


# ── What is open ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_over_and_cleaned_up_is_not_looked_at_any_more(coordinator: Coordinator) -> None:
    for number in range(3):
        finish(coordinator, order(coordinator, K, "bc"[number % 2], id=f"m{number}"))
    off = order(coordinator, selection_of(["x"]), "b", id="m3")
    going = order(coordinator, selection_of(["y"]), "b", id="m4")
    abort(coordinator, off, "a")
    assert list(coordinator.open) == ["m3", "m4"], "its destination has not cleaned up"
    coordinator.handle("m3", Aborted("m3", "b", 0, 1))
    assert list(coordinator.open.values()) == [going]
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    for migration in coordinator.migrations.values():
        again.adopt(migration)
    assert again.open == coordinator.open


def test_what_a_restoration_ends_is_not_open_and_opens_again_if_it_has_not_happened(coordinator: Coordinator) -> None:
    moving = order(coordinator, K, "b")
    table, before = copy.deepcopy((coordinator.table, moving))
    restoration = coordinator.losses.plan("a", "c", "m2")
    coordinator.start(restoration)
    assert list(coordinator.open) == ["m2"]
    coordinator.withdraw(restoration)
    coordinator.put_back(table, [before])
    assert (list(coordinator.open), moving.phase, coordinator.losses.attempts.get("a", [])) == (["m1"], "copying", [])
    assert coordinator.losses.instances() == set()
