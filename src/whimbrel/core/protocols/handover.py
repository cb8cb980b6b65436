"""The two-step hand-over that `live` and `pause` share: prepare until the destination is READY, then CUTOVER.

    ordered ─Ordered─▶ preparing ─Ready (all parts)─▶ committing ─Left and Opened (all parts)─▶ done
                           └─────Abandoned or Rejected─▶ undoing ─Aborted (source, all parts)─▶ aborted

The point of no return is the order to CUTOVER: a router that has received it routes to the destination, and the source
will drop the keys. Everything before can be undone, because until then the source drops nothing.
"""

from __future__ import annotations

from whimbrel.core.options import HandoverOptions
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Answer,
    Migration,
    Ordered,
    Protocol,
    Table,
    abandon_unbegun,
    closing,
    cut_over,
    forget,
    late,
    undone,
)
from whimbrel.core.record import Aborted, Left, Opened, Ready, Rejected
from whimbrel.core.router import Abort, Begin


def handover(
    name: str, *, preparing: str, committing: str, undoing: str, hold: bool, choices: frozenset[str] = frozenset()
) -> Protocol:
    """A protocol of this shape, with its own names for the three phases."""

    def begin(migration: Migration, event: Ordered) -> Answer:
        return preparing, [Begin(migration.move)]

    def abandon(migration: Migration, event: Abandoned | Rejected) -> Answer:
        migration.reason = event.reason
        return undoing, [Abort(migration.move)]

    table: Table = {
        (ORDERED, Ordered): begin,
        **closing(preparing, committing),
        # abort
        (ORDERED, Abandoned): abandon_unbegun,
        (preparing, Abandoned): abandon,
        (preparing, Rejected): abandon,
        (undoing, Aborted): undone,
        (ABORTED, Aborted): undone,
    }
    table |= late(
        {
            preparing: (Ordered,),
            committing: (Ordered, Ready, Abandoned),
            undoing: (Ordered, Ready, Abandoned, Rejected),
            DONE: (Ordered, Ready, Left, Opened, Abandoned, Rejected),
            ABORTED: (Ordered, Ready, Abandoned, Rejected),
        }
    )
    return Protocol(
        name=name,
        table=table,
        resume={
            preparing: lambda migration: [Begin(migration.move)],
            committing: cut_over,
            undoing: lambda migration: [Abort(migration.move)],
            ABORTED: forget,
        },
        options=HandoverOptions(hold),
        choices=choices,
    )
