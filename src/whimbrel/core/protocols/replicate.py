"""`replicate`: the destination is a standby, kept warm with the changes of each batch; a hand-over ships only the rest
(Rhino, ChronoStream).

::

    source ──copies, then changed keys──▶ standby ──WARM──▶ coordinator ...... until the takeover is ordered
    then as for `push`: SWITCH, BEGIN; the source ships what the copy lacks: the changes of its last batches

    ordered ─Ordered─▶ copying ─Warm (all parts)─▶ standby ─Takeover─▶ switching ─Ready─▶ settling ─Left, Opened─▶ done
                          └─────Abandoned─▶ ceasing ─Aborted (source)─▶ aborted ◀─┘

Without `standby=True` it takes over as soon as it is warm. `interval` is the number of batches between two transfers: a
longer one costs fewer bytes, and leaves more to ship at the hand-over. Any number of standbys may exist for the same
keys; when one takes over, or the keys move in another way, the coordinator stops the others.

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        continuous traffic: every key that a batch touches, once per interval. The hand-over itself stops only keys
             whose copy is out of date, for two batches.
No return    the takeover. Before it an abort costs nothing but the copies.
On failure   as for `push`. The standby continues from its checkpoint, with its copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from whimbrel.core.options import ReplicateOptions
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    STANDBY,
    Abandoned,
    Answer,
    Command,
    Event,
    Migration,
    Ordered,
    Protocol,
    Table,
    Takeover,
    abandon_unbegun,
    closing,
    cut_over,
    forget,
    hold_up,
    late,
    undone,
)
from whimbrel.core.protocols.switching import announce, switch
from whimbrel.core.record import Aborted, Kind, Left, Move, Opened, Ready, Rejected, Warm
from whimbrel.core.router import RouteTable

COPYING, SWITCHING, SETTLING, CEASING = "copying", "switching", "settling", "ceasing"


def _copy(migration: Migration) -> list[Command]:
    return announce(Kind.REPLICATE, migration)


def _cease(migration: Migration) -> list[Command]:
    return announce(Kind.CEASE, migration)


def copy(migration: Migration, event: Ordered) -> Answer:
    """Ordered: start the standby."""
    return COPYING, _copy(migration)


def warm(migration: Migration, event: Warm) -> Answer:
    """A part of the standby has a copy of every key."""
    if not migration.receive(event):
        return COPYING, []
    return (STANDBY, []) if _waits(migration) else (SWITCHING, switch(migration))


def _waits(migration: Migration) -> bool:
    options = migration.move.options
    return isinstance(options, ReplicateOptions) and options.standby


def take_over(migration: Migration, event: Takeover) -> Answer:
    """The takeover is ordered: switch."""
    return SWITCHING, switch(migration)


def abandon(migration: Migration, event: Abandoned | Rejected) -> Answer:
    """Abort: stop the standby and drop the copies."""
    migration.reason = event.reason
    return CEASING, _cease(migration)


TABLE: Table = {
    (ORDERED, Ordered): copy,
    (COPYING, Warm): warm,
    (STANDBY, Takeover): take_over,
    **closing(SWITCHING, SETTLING),
    # abort
    (ORDERED, Abandoned): abandon_unbegun,
    (COPYING, Abandoned): abandon,
    (STANDBY, Abandoned): abandon,
    (COPYING, Rejected): abandon,
    (STANDBY, Rejected): abandon,
    (SWITCHING, Rejected): hold_up,
    (CEASING, Aborted): undone,
    (ABORTED, Aborted): undone,
}
TABLE |= late(
    {
        COPYING: (Ordered,),
        STANDBY: (Ordered, Warm),
        SWITCHING: (Ordered, Warm, Takeover, Abandoned),
        SETTLING: (Ordered, Warm, Takeover, Ready, Abandoned),
        CEASING: (Ordered, Warm, Abandoned, Rejected),
        DONE: (Ordered, Warm, Takeover, Ready, Left, Opened, Abandoned, Rejected),
        ABORTED: (Ordered, Warm, Abandoned, Rejected),
    }
)

REPLICATE = Protocol(
    name="replicate",
    table=TABLE,
    resume={
        COPYING: _copy,
        SWITCHING: switch,
        SETTLING: cut_over,
        CEASING: _cease,
        ABORTED: forget,
    },
    options=ReplicateOptions(),
    choices=frozenset(ReplicateOptions.__struct_fields__),
)


def is_copy(migration: Migration) -> bool:
    """Whether a migration is only a copy, which ends when its keys move in another way."""
    return migration.move.protocol == REPLICATE.name and migration.phase in (COPYING, STANDBY)


def gives_way(standby: Migration, move: Move) -> bool:
    """Whether a standby ends for a move of its keys: unless the move is to be a second standby at the same instance."""
    is_second = move.protocol == REPLICATE.name and standby.move.destination == move.destination
    return is_copy(standby) and not is_second


def outlived(migrations: Iterable[Migration], table: RouteTable) -> list[tuple[str, Event]]:
    """Aborts of standbys whose keys move in another way, or have already moved. `migrations`: the open ones."""
    found = [(one, is_copy(one)) for one in migrations]
    movers = [one.move.selection for one, copy in found if not (copy or one.is_over or one.move.relocates)]
    return [
        (one.move.id, Abandoned("its keys move in another way"))
        for one, copy in found
        if copy
        and (
            {*table.owners.values(one.move.selection)} != {one.move.source}
            or any(selection.overlaps(one.move.selection) for selection in movers)
        )
    ]
