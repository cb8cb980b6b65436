"""Runs many seeds, and finds the first that violates a guarantee, if any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from whimbrel.core.errors import Diverged, Stale, Trimmed
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.lab.sim.actors import Violation
from whimbrel.lab.sim.check import Invariants, check_end
from whimbrel.lab.sim.orders import MIXED
from whimbrel.lab.sim.sabotage import sabotaged
from whimbrel.lab.sim.world import Stuck, World

CHOICES = [*PROTOCOLS, MIXED]
"""The protocols that a world can be created with."""


class Found(msgspec.Struct, frozen=True):
    """A seed that violates a guarantee."""

    protocol: str
    seed: int
    what: str


class Outcome(msgspec.Struct):
    """The outcome of a search: the first violation if there was one, and by protocol the counts of events."""

    found: Found | None = None
    tallies: dict[str, Counter[str]] = {}

    def __iadd__(self, other: Outcome) -> Outcome:
        self.found = self.found or other.found
        for protocol, tally in other.tallies.items():
            self.tallies.setdefault(protocol, Counter()).update(tally)
        return self

    def total(self, what: str) -> int:
        """The count of an event over all protocols."""
        return sum(tally[what] for tally in self.tallies.values())


def run_seed(protocol: str, seed: int, *, links: bool | None = None) -> World:
    """Run one history. Raises `Violation` if a guarantee was violated."""
    world = World(seed, protocol, links=links)
    world.watchers.append(Invariants(world))
    try:
        world.run()
        check_end(world)
    except Violation:
        raise
    except Diverged as error:
        raise Violation("repeated otherwise", str(error)) from error
    except Stale as error:
        raise Violation("of one age", str(error)) from error
    except Trimmed as error:
        raise Violation("lost", f"needed entries are trimmed: {error}") from error
    except Stuck as error:
        raise Violation("settled", str(error)) from error
    except Exception as error:  # no other exception is expected in any history
        raise Violation("crashed", f"{type(error).__name__}: {error}") from error
    for migration in world.coordinator.every:
        world.tally[f"migrations {migration.phase}"] += 1
        world.tally["restored"] += migration.move.protocol == "restore" and migration.phase == "done"
        world.tally["moves inside a site"] += migration.from_site == migration.to_site
    world.tally["zombies refused"] = sum(outlet.gate.refused for outlet in world.outlets.values())
    world.tally[f"results to {world.spread.how}"] += 1
    return world


def search(protocols: Iterable[str], seeds: Iterable[int], sabotage: str | None = None) -> Outcome:
    """Run every seed with every protocol, up to the first violation."""
    outcome = Outcome()
    with sabotaged(sabotage):
        for seed in seeds:
            for protocol in protocols:
                tally = outcome.tallies.setdefault(protocol, Counter())
                tally["schedules"] += 1
                try:
                    world = run_seed(protocol, seed)
                except Violation as violation:
                    outcome.found = Found(protocol, seed, str(violation))
                    return outcome
                tally["steps"] += world.steps
                tally.update(world.tally)
                world.vanish()
    return outcome
