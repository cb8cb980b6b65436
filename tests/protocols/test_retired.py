"""Migrations that are forgotten: the routes stay what they were, and what somebody must still know is kept."""

from __future__ import annotations

import random

import pytest

from tests.protocols.test_coordinator import SITES, K, abort, coordinator, finish, order
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.keys import EVERYTHING, KeyMap, Selection, selection_of
from whimbrel.core.protocols.machine import Abandoned, Fenced, Loaded, Migration
from whimbrel.core.record import Aborted, Evicted, Opened, Ready
from whimbrel.core.retired import Retired, retirement
from whimbrel.core.router import RouteTable

__all__ = ["coordinator"]


def forget(coordinator: Coordinator, most: int = 0) -> list[str]:
    """Forget as many as can be; return which."""
    gone, retired = retirement(coordinator, most)
    coordinator.retire(gone, wire.unpack(wire.pack(retired), Retired))
    return [migration.move.id for migration in gone]


def restarted(coordinator: Coordinator) -> Coordinator:
    """Another one, from what the journal of this one has."""
    again = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    again.resume(wire.unpack(wire.pack(coordinator.retired), Retired))
    for migration in coordinator.migrations.values():
        again.adopt(wire.unpack(wire.pack(migration), Migration))
    return again


def routes(coordinator: Coordinator) -> tuple[object, ...]:
    table = coordinator.table
    return (
        table.owners.dump(),
        table.epochs.dump(),
        coordinator.sites,
        coordinator.losses.instances(),
        list(coordinator.open),
    )


def restore(coordinator: Coordinator, lost: str, to: str, id: str) -> Migration:
    """A restoration that is done; nobody has dropped anything yet."""
    migration = coordinator.losses.plan(lost, to, id)
    coordinator.start(migration)
    for event in (Fenced(), Loaded(), Ready(id, to, 0, 1), Opened(id, to, 0, 1)):
        coordinator.handle(id, event)
    assert migration.phase == "done"
    return migration


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_forgotten_a_restart_finds_the_same_routes(seed: int) -> None:
    chance = random.Random(seed)
    one = Coordinator("stage", RouteTable("a"), dict(SITES), KeyMap("r"))
    keys = [f"k{number}" for number in range(6)]
    for number in range(40):
        selection: Selection = chance.choice(
            [selection_of(chance.sample(keys, 3)), selection_of(bins=range(chance.randrange(1000))), EVERYTHING]
        )
        to = chance.choice(sorted(SITES))
        for migration in one.plan([(selection, to)], SITES[to], "live", f"m{number}"):
            one.start(migration)
            if chance.random() < 0.3:
                abort(one, migration, migration.move.source, migration.move.destination)
            else:
                finish(one, migration)
        if chance.random() < 0.5:
            forget(one, chance.randrange(4))
        assert routes(restarted(one)) == routes(one)
    assert one.retired.count > 5, "or nothing is shown"


def test_so_many_are_remembered_and_the_oldest_go_first(coordinator: Coordinator) -> None:
    for number in range(5):
        finish(coordinator, order(coordinator, K, "bc"[number % 2], id=f"m{number}"))
    assert retirement(coordinator, 3, slack=2) == ([], coordinator.retired), "not worth while"
    assert forget(coordinator, 3) == ["m0", "m1"]
    assert list(coordinator.migrations) == ["m2", "m3", "m4"]
    assert coordinator.retired.count == 2


def test_what_is_open_stays_and_newer_ones_are_forgotten(coordinator: Coordinator) -> None:
    going = order(coordinator, selection_of(["x"]), "b", id="m1")
    finish(coordinator, order(coordinator, K, "b", id="m2"))
    assert forget(coordinator) == ["m2"]
    finish(coordinator, going)
    assert routes(restarted(coordinator)) == routes(coordinator)
    assert forget(coordinator) == ["m1"]
    assert routes(restarted(coordinator)) == routes(coordinator)


def test_a_place_that_a_restart_has_changed_is_kept(coordinator: Coordinator) -> None:
    finish(coordinator, order(coordinator, EVERYTHING, "c", "restart"))
    assert forget(coordinator) == ["m1"]
    assert restarted(coordinator).sites["a"] == "edge-2"


def test_a_lost_instance_stays_lost_until_it_has_dropped_its_keys(coordinator: Coordinator) -> None:
    restore(coordinator, "a", "b", "m1")
    finish(coordinator, order(coordinator, EVERYTHING, "c", id="m2"))
    assert forget(coordinator) == ["m2"], "the older one must be known, and does not bring its routes back"
    again = restarted(coordinator)
    assert routes(again) == routes(coordinator)
    assert (again.losses.instances(), again.table.owners.values()) == ({"a"}, {"c"})
    coordinator.handle("m1", Evicted("m1", "a", 0, 1))
    assert coordinator.losses.instances() == set()
    assert forget(coordinator) == ["m1"], "nobody needs it any more"
    assert routes(restarted(coordinator)) == routes(coordinator)


def test_an_aborted_restoration_that_stays_open_does_not_bring_its_routes_back(coordinator: Coordinator) -> None:
    """Its destination never comes back, so it is open for ever; the keys have been restored elsewhere since."""
    coordinator.start(coordinator.losses.plan("a", "c", "m1"))
    coordinator.handle("m1", Abandoned("c is lost"))
    restore(coordinator, "a", "b", "m2")
    for id in ("m1", "m2"):
        coordinator.handle(id, Evicted(id, "a", 0, 1))
    assert list(coordinator.open) == ["m1"]
    assert forget(coordinator) == ["m2"]
    again = restarted(coordinator)
    assert again.table.owners.values() == {"b"}
    assert routes(again) == routes(coordinator)
    coordinator.handle("m1", Aborted("m1", "c", 0, 1))
    assert forget(coordinator) == ["m1"]
    assert routes(restarted(coordinator)) == routes(coordinator)


def test_of_many_attempts_to_restore_an_instance_the_last_one_is_kept(coordinator: Coordinator) -> None:
    for number in range(5):
        attempt = coordinator.losses.plan("a", "b", f"m{number}")
        coordinator.start(attempt)
        coordinator.handle(f"m{number}", Abandoned("it takes too long"))
        coordinator.handle(f"m{number}", Aborted(f"m{number}", "b", 0, 1))
        assert attempt.phase == "aborted"
    attempts = [one.move.id for one in coordinator.losses.attempts.get("a", [])]
    gone = forget(coordinator)
    left = [id for id in attempts if id not in gone]
    assert attempts[-1] in left
    assert coordinator.losses.interrupted() == restarted(coordinator).losses.interrupted()
    assert coordinator.losses.instances() == restarted(coordinator).losses.instances() == {"a"}
