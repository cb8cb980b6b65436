"""Many seeds: find the first that breaks a promise, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from whimbrel.sim.check import Invariants, Violation, check_end
from whimbrel.sim.sabotage import sabotaged
from whimbrel.sim.world import World


class Found(msgspec.Struct, frozen=True):
    """A seed that breaks a promise."""

    protocol: str
    seed: int
    what: str


def run_seed(protocol: str, seed: int) -> World:
    """One history. Raises `Violation` if a promise was broken."""
    world = World(seed, protocol)
    world.watchers.append(Invariants(world))
    try:
        world.run()
        check_end(world)
    except Violation:
        raise
    except Exception as error:  # nothing that can happen here may raise anything
        raise Violation("crashed", f"{type(error).__name__}: {error}") from error
    return world


def search(
    protocols: Iterable[str],
    seeds: Iterable[int],
    sabotage: str | None = None,
    progress: Callable[[int], None] = lambda schedules: None,
) -> tuple[Found | None, int, int, float]:
    """The first violation (or None), and how many schedules and steps were run in how many seconds."""
    schedules = steps = 0
    start = time.monotonic()
    found = None
    with sabotaged(sabotage):
        for seed in seeds:
            for protocol in protocols:
                schedules += 1
                try:
                    steps += run_seed(protocol, seed).steps
                except Violation as violation:
                    found = Found(protocol, seed, str(violation))
                    return found, schedules, steps, time.monotonic() - start
            progress(schedules)
    return found, schedules, steps, time.monotonic() - start
