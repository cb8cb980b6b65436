"""The table that `push` and `fetch` share: switch at once, then transfer the state; it cannot be undone.

    ordered ─Ordered─▶ moving ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The coordinator first sends SWITCH to the two instances, ahead of their inboxes' backlog, to the destination before the
source: so the destination has the move when the first parcel arrives. Only then do routers switch. CUTOVER changes no
route here: it marks the end of the move for both instances.
"""

from __future__ import annotations

from whimbrel.core.options import FetchOptions, PushOptions
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Announce,
    Answer,
    Command,
    Migration,
    Ordered,
    Protocol,
    Table,
    abandon_unbegun,
    closing,
    cut_over,
    hold_up,
    late,
)
from whimbrel.core.record import Kind, Left, Opened, Ready, Rejected
from whimbrel.core.router import Begin


def announce(kind: Kind, migration: Migration) -> list[Command]:
    """Announce to both ends, the destination first."""
    move = migration.move
    return [Announce(kind, move, move.destination), Announce(kind, move, move.source)]


def switch(migration: Migration) -> list[Command]:
    """Announce to both ends, then make the routers switch."""
    return [*announce(Kind.SWITCH, migration), Begin(migration.move)]


def switching(name: str, *, moving: str, settling: str, options: PushOptions | FetchOptions) -> Protocol:
    """A protocol of this shape, with its own names for the phases."""

    def begin(migration: Migration, event: Ordered) -> Answer:
        return moving, switch(migration)

    table: Table = {
        (ORDERED, Ordered): begin,
        (ORDERED, Abandoned): abandon_unbegun,
        **closing(moving, settling),
        (moving, Rejected): hold_up,
    }
    table |= late(
        {
            moving: (Ordered, Abandoned),
            settling: (Ordered, Ready, Abandoned),
            DONE: (Ordered, Ready, Left, Opened, Abandoned, Rejected),
            ABORTED: (Ordered, Abandoned),
        }
    )
    return Protocol(
        name=name,
        table=table,
        resume={moving: switch, settling: cut_over},
        options=options,
        choices=frozenset(options.__struct_fields__),
    )
