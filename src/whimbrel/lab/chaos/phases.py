"""Kills in every phase: one move after the other, one kill in each, until every party has died in every phase.

A phase may end before it is seen. So each case has several tries, the journal shows afterwards in which phase the kill
happened, and the report lists cases that were not hit.
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
TIMEOUT = 300.0
"""Seconds that a move has to end, and its victim to come back."""
SHARE = 0.6
"""The share of a site's keys that each move takes."""


class Case(msgspec.Struct, frozen=True):
    """A party to be killed in a phase."""

    protocol: str
    phase: str
    victim: str


class Outcome(msgspec.Struct):
    """The outcome of a case."""

    case: Case
    found: list[str]
    """Of each try: the phase in which the kill happened, by the journal."""
    ended: str
    """How the last move ended."""
    reason: str | None
    after: float | None = None
    """The seconds after the order at which the phase was half over, by the journal, if it was not hit."""

    @property
    def is_hit(self) -> bool:
        """Whether the last kill happened in its planned phase."""
        return self.found[-1:] == [self.case.phase]


def cases(protocols: Sequence[str] = (), wanted: Sequence[str] = (), victims: Sequence[str] = ()) -> list[Case]:
    """All cases, or those of some protocols, phases and victims. The victims alternate, so that each has run for a
    while before it is killed again."""
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
    """Run cases. `phase_of`: returns the phase of a migration at a time, by the journal, and the migration."""
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
        # A standby waits: only then can it be hit in this phase, or aborted before it has taken over.
        deed = STANDBY if case.phase in ("standby", "ceasing") else MIGRATE
        ordered = time.monotonic()
        moves.append(engine.orders.order(Move(case.protocol, SHARE, 0.0, deed=deed)))
        return moves[-1].is_new

    engine.until(is_ordered, TIMEOUT, "a move can be ordered")
    move, handle = moves[-1], moves[-1].handle
    assert handle is not None
    target = engine.aim(case.victim, move, with_keys=outcome.after is None)
    if outcome.after is None:
        seen = engine.reach(move, case.phase, TIMEOUT)
    else:  # the phase is too short to be seen; the previous try has shown its time
        time.sleep(max(0.0, ordered + outcome.after - time.monotonic()))
        seen = None
    struck = engine.strike("kill", target, 0.0, move, seen)
    engine.until(lambda: struck.back_ms is not None, TIMEOUT, f"{struck.target} is back")
    engine.until(engine.orders.finish, TIMEOUT, f"{case.protocol} is over")
    phase, migration = phase_of(struck.migration or handle.ids[0], struck.at_us)
    outcome.found.append(phase)
    outcome.after = middle(migration, case.phase) if phase != case.phase else None
    outcome.ended, outcome.reason = migration.phase, migration.reason


def middle(migration: Migration, phase: str) -> float | None:
    """The seconds after the order at which a phase was half over; None if it did not occur, or belongs to an abort."""
    story = migration.story
    lines = [place for place, line in enumerate(story) if line.phase == phase]
    if not lines or not lines[0] or phase in UNDOING:
        return None
    begun, ended = story[lines[0] - 1].at_us, story[lines[-1]].at_us
    return ((begun + ended) / 2 - story[0].at_us) / 1e6
