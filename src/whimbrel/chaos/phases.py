"""Kills in every phase: one move after the other, each killed once, until every party has died in every phase.

A phase may be over before it is seen. So each case has some tries, the journal says afterwards in which phase the kill
came, and what was not hit is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from whimbrel.chaos.engine import Engine, Ordered
from whimbrel.chaos.plan import DESTINATION, GATEWAY, ORCHESTRATOR, SOURCE, Move, phases
from whimbrel.core.protocols.machine import Migration

PROTOCOLS = ("live", "pause", "push", "fetch")
VICTIMS = (SOURCE, DESTINATION, GATEWAY, ORCHESTRATOR)
TRIES = 3
PATIENCE = 300.0
"""Seconds until a move is over and its victim back."""
SHARE = 0.6
"""Of the keys of a site, that each move takes."""


class Case(msgspec.Struct, frozen=True):
    """A party that is to die in a phase."""

    protocol: str
    phase: str
    victim: str


class Outcome(msgspec.Struct):
    """What came of a case."""

    case: Case
    found: list[str]
    """Of each try: in which phase the kill came, by the journal."""
    ended: str
    """How the last move ended."""
    reason: str | None

    @property
    def is_hit(self) -> bool:
        """Whether the last kill came in the phase it was meant for."""
        return self.found[-1:] == [self.case.phase]


def cases(protocols: Sequence[str] = PROTOCOLS) -> list[Case]:
    """All of them. The victims take turns, so that each has lived for a while when its turn comes again."""
    return [Case(protocol, phase, victim) for protocol in protocols for phase in phases(protocol) for victim in VICTIMS]


def play(
    engine: Engine, wanted: Sequence[Case], phase_of: Callable[[str, int], tuple[str, Migration]]
) -> Iterator[Outcome]:
    """Carry cases out. `phase_of`: in which phase a migration was at a moment, by the journal, and the migration."""
    for case in wanted:
        outcome = Outcome(case, [], "", None)
        while not outcome.is_hit and len(outcome.found) < TRIES:
            _try(engine, outcome, phase_of)
        yield outcome


def _try(engine: Engine, outcome: Outcome, phase_of: Callable[[str, int], tuple[str, Migration]]) -> None:
    case = outcome.case
    moves: list[Ordered] = []

    def is_ordered() -> bool:
        moves.append(engine.order(Move(case.protocol, SHARE, 0.0)))
        return moves[-1].is_new

    engine.until(is_ordered, PATIENCE, "a move can be ordered")
    move, handle = moves[-1], moves[-1].handle
    assert handle is not None
    target = engine.aim(case.victim, move)
    struck = engine.strike("kill", target, 0.0, move, engine.reach(move, case.phase, PATIENCE))
    engine.until(lambda: struck.back_ms is not None, PATIENCE, f"{struck.target} is back")
    over = lambda: all(one.is_over for one in handle.migrations)  # noqa: E731
    engine.until(lambda: engine.deployed.ask(over), PATIENCE, f"{case.protocol} is over")
    phase, migration = phase_of(handle.ids[0], struck.at_us)
    outcome.found.append(phase)
    outcome.ended, outcome.reason = migration.phase, migration.reason
