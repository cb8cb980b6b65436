"""Every party of every protocol dies in every phase: it comes back, or it is lost for good and its keys are restored.

No other deaths, so that what is seen is what this one does. The seeds make the rest different: who is slow, which keys,
how many parts and routers.
"""

from __future__ import annotations

from collections import Counter

import pytest

from whimbrel.core.protocols import PROTOCOLS
from whimbrel.core.protocols.machine import ABORTED, DONE, ORDERED, Migration
from whimbrel.lab.sim.actors import Actor
from whimbrel.lab.sim.check import Invariants, check_end
from whimbrel.lab.sim.world import World

SEEDS = 4
PARTIES = ("source", "destination", "router", "coordinator")


class Killer:
    """Kills one party the first time that a migration of a protocol is seen in a phase."""

    def __init__(self, world: World, protocol: str, phase: str, party: str, for_good: bool) -> None:
        self.world, self.protocol, self.phase, self.party, self.for_good = world, protocol, phase, party, for_good
        self.struck = False

    def __call__(self, actor: Actor) -> None:
        if self.struck or not self.world.coordinator.alive:
            return
        for migration in self.world.coordinator.coordinator.migrations.values():
            if (migration.move.protocol, migration.phase) == (self.protocol, self.phase):
                self.struck = self._strike(migration)
                return

    def _strike(self, migration: Migration) -> bool:
        world, move = self.world, migration.move
        if self.for_good:
            name = move.source if self.party == "source" else move.destination
            thought_lost = {name} | ({move.source} if self.protocol == "restore" else set())
            if not world.instances.keys() - thought_lost:
                return False  # somebody must be there to go on
            world.loss.lose(name, "for good")
            return True
        victims: dict[str, Actor] = {
            "source": world.instances[move.source],
            "destination": world.instances[move.destination],
            "router": next(iter(world.gateways.values())),
            "coordinator": world.coordinator,
        }
        victim = victims[self.party]
        victim.die()
        return True


class OneDeath(World):
    """A world with a central store in which nobody dies of himself."""

    def __init__(self, seed: int, protocol: str) -> None:
        super().__init__(seed, "restore", chaos=0)
        self.coordinator.wanted = 0 if protocol == "restore" else 2
        self.coordinator.only = protocol
        self.loss.pace = self.coordinator.pace = 3.0


def history(protocol: str, phase: str, party: str, for_good: bool, seed: int) -> bool:
    """One history; whether the death happened. Raises if a promise was broken."""
    world = OneDeath(seed, protocol)
    if protocol == "restore":
        world.loss.left = sorted(world.instances)[:1]
    killer = Killer(world, protocol, phase, party, for_good)
    world.watchers += [Invariants(world), killer]
    world.run()
    check_end(world)
    return killer.struck


def phases(protocol: str) -> list[str]:
    """The phases in which something is under way, and those that come only after an abort left out."""
    undoing = {phase for phase, event in PROTOCOLS[protocol].table if event.__name__ == "Aborted"}
    return sorted({phase for phase, _ in PROTOCOLS[protocol].table} - {ORDERED, DONE, ABORTED, "returning"} - undoing)


CASES = [
    (protocol, phase, party, for_good)
    for protocol in PROTOCOLS
    for phase in phases(protocol)
    for party in PARTIES
    for for_good in ([False, True] if party in ("source", "destination") else [False])
    if not (protocol == "restore" and party == "source" and for_good)  # it is lost already
]


def test_every_phase_is_among_the_cases() -> None:
    assert Counter(protocol for protocol, *_ in CASES) == {
        "live": 12,
        "push": 12,
        "fetch": 12,
        "pause": 12,
        "fluid": 12,
        "replicate": 24,
        "restart": 18,
        "restore": 15,
    }


@pytest.mark.parametrize(("protocol", "phase", "party", "for_good"), CASES)
def test_whoever_dies_in_whichever_phase(protocol: str, phase: str, party: str, for_good: bool) -> None:
    struck = [history(protocol, phase, party, for_good, seed) for seed in range(SEEDS)]
    assert any(struck), "it must have happened"
