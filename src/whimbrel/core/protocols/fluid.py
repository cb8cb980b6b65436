"""`fluid`: `pause` for a few bins at a time, following a plan: many short stoppages instead of a long one (Megaphone).

::

    pieces of the move:   holding ─▶ releasing ─▶ done      turn 1
                                                     holding ─▶ releasing ─▶ done      turn 2 ...

A plan is data: a list of turns, each a list of pieces that move at the same time. The pieces of a turn begin when those
of the turn before are done. Each is a hand-over of its own, with the table and the guarantees of `pause`.

    sudden    one turn with all bins, as in `pause`
    fluid     one piece per turn
    batched   per turn a piece for each pair of source and destination, so that no instance sends or receives more than
              one (a maximum matching of the pairs that have pieces left)
    a list    of lists of bins, one per turn (for example from a file); bins in none of them move in a last turn

Guarantees   as for `pause`, for each piece.
Price        a piece's keys wait only for their own state; the whole takes longer, one round of messages per turn.
No return    for each piece. An abort leaves the finished pieces at the destination, and cancels those to come.
On failure   as for `pause`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.keys import BINS, Selection, bin_of
from whimbrel.core.protocols.handover import handover
from whimbrel.core.protocols.machine import ABORTED, DONE, ORDERED, Abandoned, Event, Migration, Ordered

FLUID = handover(
    "fluid",
    preparing="holding",
    committing="releasing",
    undoing="resuming",
    hold=True,
    choices=frozenset({"plan", "step"}),
)

STEP = 64
"""Default number of bins per piece."""
PLANS = ("sudden", "batched", "fluid")
Plan = str | Sequence[Sequence[int]]
Pair = tuple[str, str]


def scheduled(migrations: Sequence[Migration], plan: Plan, step: int, id: str) -> list[Migration]:
    """The migrations split into pieces of `step` bins, each with its turn."""
    if isinstance(plan, str) and plan not in PLANS:
        raise UnknownName("plan", plan, [*PLANS, "a list of lists of bins"])
    if not isinstance(plan, str) and not _is_list(plan):
        raise Refused(f"a plan is one of {', '.join(PLANS)}, or a list of lists of bins from 0 to {BINS - 1}")
    turns = _turns(migrations, plan, step)
    pieces: list[Migration] = []
    for turn, moving in enumerate(turns):
        for migration, selection in moving:
            move = msgspec.structs.replace(migration.move, id=f"{id}/{len(pieces) + 1}", selection=selection)
            pieces.append(Migration(move, migration.from_site, migration.to_site, plan=id, turn=turn))
    return pieces


def _is_list(plan: object) -> bool:
    return isinstance(plan, Sequence) and all(
        isinstance(bins, Sequence) and all(isinstance(bin, int) and 0 <= bin < BINS for bin in bins) for bins in plan
    )


def _turns(migrations: Sequence[Migration], plan: Plan, step: int) -> list[list[tuple[Migration, Selection]]]:
    if plan == "sudden":
        return [[(migration, migration.move.selection) for migration in migrations]]
    if not isinstance(plan, str):
        left, turns = set(range(BINS)), []
        for bins in (*plan, range(BINS)):  # a bin that is listed twice moves in the first of its turns
            turns.append([(m, _of(left & {*bins}, m.move.selection)) for m in migrations])
            left -= {*bins}
        return [[piece for piece in turn if piece[1]] for turn in turns if any(selection for _, selection in turn)]
    cut: dict[Pair, list[tuple[Migration, Selection]]] = {}
    for m in migrations:
        pieces = [(m, selection) for selection in _pieces(m.move.selection, step)]
        cut.setdefault((m.move.source, m.move.destination), []).extend(pieces)
    turns = []
    while pairs := [pair for pair, pieces in cut.items() if pieces]:
        chosen = matched(pairs) if plan == "batched" else pairs[:1]
        turns.append([cut[pair].pop(0) for pair in chosen])
    return turns


def matched(pairs: Sequence[Pair]) -> list[Pair]:
    """As many of these pairs as possible, such that no source and no destination is in two of them."""
    partner: dict[str, str] = {}
    """By destination: its source."""

    def place(source: str, seen: set[str]) -> bool:
        """Assign a destination to a source, even if its current source must be reassigned."""
        for one, destination in pairs:
            if one == source and destination not in seen:
                seen.add(destination)
                if destination not in partner or place(partner[destination], seen):
                    partner[destination] = source
                    return True
        return False

    for source in dict.fromkeys(source for source, _ in pairs):
        place(source, set())
    return [(source, destination) for destination, source in partner.items()]


def _pieces(selection: Selection, step: int) -> list[Selection]:
    bins = sorted({*selection.bins, *map(bin_of, selection.keys)})
    return [_of(bins[at : at + step], selection) for at in range(0, len(bins), step)]


def _of(bins: Iterable[int], whole: Selection) -> Selection:
    """The part of a selection that is in these bins."""
    chosen = frozenset(bins)
    keys, without = (frozenset(key for key in some if bin_of(key) in chosen) for some in (whole.keys, whole.without))
    return Selection(whole.bins & chosen, keys, without)


class Turns:
    """The plans of a stage that have turns left."""

    def __init__(self) -> None:
        self.plans: dict[str, list[Migration]] = {}
        """By plan: all its migrations."""
        self._queued: list[Migration] = []
        """Migrations that wait for their turn."""

    def add(self, migration: Migration) -> None:
        """Add a migration of a plan."""
        self.plans.setdefault(migration.plan, []).append(migration)
        if migration.turn and migration.phase == ORDERED:
            self._queued.append(migration)

    def remove(self, migration: Migration) -> None:
        """Remove a migration of a plan."""
        for found in (self._queued, self.plans.get(migration.plan, [])):
            found[:] = [one for one in found if one is not migration]

    def due(self) -> list[tuple[str, Event]]:
        """Events for migrations whose turn it is, or whose plan has failed."""
        self._queued = [one for one in self._queued if one.phase == ORDERED]
        waiting = {one.plan for one in self._queued}
        self.plans = {plan: turns for plan, turns in self.plans.items() if plan in waiting}
        aborted: dict[str, int] = {}
        undone: dict[str, int] = {}
        """By plan: the first turn of which something was aborted, and of which something is not done."""
        for other in (one for turns in self.plans.values() for one in turns):
            if other.phase == ABORTED:
                aborted[other.plan] = min(other.turn, aborted.get(other.plan, other.turn))
            if other.phase != DONE:
                undone[other.plan] = min(other.turn, undone.get(other.plan, other.turn))
        found: list[tuple[str, Event]] = []
        for one in self._queued:
            if aborted.get(one.plan, one.turn) < one.turn:
                found.append((one.move.id, Abandoned("an earlier turn of its plan was aborted")))
            elif undone[one.plan] == one.turn:
                found.append((one.move.id, Ordered()))
        return found

    def need(self, migration: Migration) -> bool:
        """Whether a finished migration must be kept for later turns of its plan."""
        return any(one.plan == migration.plan for one in self._queued)
