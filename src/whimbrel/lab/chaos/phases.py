"""Kills in every phase: one move after the other, each killed once, until every party has died in every phase.

A phase may be over before it is seen. So each case has some tries, the journal says afterwards in which phase the kill
came, and what was not hit is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.core.protocols.machine import Migration
from whimbrel.lab.chaos.engine import Engine
from whimbrel.lab.chaos.orders import Ordered
from whimbrel.lab.chaos.plan import DESTINATION, GATEWAY, MIGRATE, ORCHESTRATOR, SOURCE, STANDBY, UNDOING, Move, phases

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
    after: float | None = None
    """In how many seconds behind the order the phase was half over, by the journal, if it was not hit."""

    @property
    def is_hit(self) -> bool:
        """Whether the last kill came in the phase it was meant for."""
        return self.found[-1:] == [self.case.phase]


def cases(protocols: Sequence[str] = (), wanted: Sequence[str] = (), victims: Sequence[str] = ()) -> list[Case]:
    """All of them, or those of some protocols, phases and victims. The victims take turns, so that each has lived for a
    while when its turn comes again."""
    known = list(dict.fromkeys(phase for protocol in PROTOCOLS for phase in phases(protocol)))
    for what, names, there in (
        ("protocol", protocols, list(PROTOCOLS)),
        ("phase", wanted, known),
        ("victim", victims, list(VICTIMS)),
    ):
        for name in names:
            if name not in there:
                raise UnknownName(what, name, there)
    found = [
        Case(protocol, phase, victim)
        for protocol in protocols or PROTOCOLS
        for phase in phases(protocol)
        for victim in victims or VICTIMS
        if not wanted or phase in wanted
    ]
    if not found:
        raise Refused(f"none of {', '.join(protocols)} has a phase {', '.join(wanted)}")
    return found


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
    ordered = 0.0

    def is_ordered() -> bool:
        nonlocal ordered
        engine.orders.finish()
        # A standby waits: only so can it be struck there, or called off before it has taken over.
        deed = STANDBY if case.phase in ("standby", "ceasing") else MIGRATE
        ordered = time.monotonic()
        moves.append(engine.orders.order(Move(case.protocol, SHARE, 0.0, deed=deed)))
        return moves[-1].is_new

    engine.until(is_ordered, PATIENCE, "a move can be ordered")
    move, handle = moves[-1], moves[-1].handle
    assert handle is not None
    target = engine.aim(case.victim, move, with_keys=outcome.after is None)
    if outcome.after is None:
        seen = engine.reach(move, case.phase, PATIENCE)
    else:  # it is too short to be seen; the try before has shown when it comes
        time.sleep(max(0.0, ordered + outcome.after - time.monotonic()))
        seen = None
    struck = engine.strike("kill", target, 0.0, move, seen)
    engine.until(lambda: struck.back_ms is not None, PATIENCE, f"{struck.target} is back")
    engine.until(engine.orders.finish, PATIENCE, f"{case.protocol} is over")
    phase, migration = phase_of(struck.migration or handle.ids[0], struck.at_us)
    outcome.found.append(phase)
    outcome.after = middle(migration, case.phase) if phase != case.phase else None
    outcome.ended, outcome.reason = migration.phase, migration.reason


def middle(migration: Migration, phase: str) -> float | None:
    """In how many seconds behind the order a phase was half over; None if it never came, or came of an abort."""
    story = migration.story
    lines = [place for place, line in enumerate(story) if line.phase == phase]
    if not lines or not lines[0] or phase in UNDOING:
        return None
    begun, ended = story[lines[0] - 1].at_us, story[lines[-1]].at_us
    return ((begun + ended) / 2 - story[0].at_us) / 1e6
