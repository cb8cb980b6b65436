"""The table that `push` and `fetch` share: switch at once, then bring the state after; there is no way back.

    ordered ─Ordered─▶ moving ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The two instances are told first, ahead of all that waits in their inboxes, the destination before the source: when the
first parcel comes it knows what it is. Only then do routers switch. CUTOVER changes no route here: it tells everybody
that the move is over.
"""

from __future__ import annotations

from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Announce,
    Command,
    Migration,
    Ordered,
    Protocol,
    Table,
    abandon_unbegun,
    stay,
    weigh,
)
from whimbrel.core.record import Kind, Left, Opened, Order, Ready
from whimbrel.core.router import Begin, Cutover

Answer = tuple[str, list[Command]]


def announce(kind: Kind, migration: Migration) -> list[Command]:
    """Tell both ends, the destination first."""
    move = migration.move
    return [Announce(kind, move, move.destination), Announce(kind, move, move.source)]


def switch(migration: Migration) -> list[Command]:
    """Tell both ends, then let the routers switch."""
    return [*announce(Kind.SWITCH, migration), Begin(migration.move)]


def switching(name: str, *, moving: str, settling: str, order: Order, options: frozenset[str]) -> Protocol:
    """A protocol of this shape, with its own words for the phases."""

    def begin(migration: Migration, event: Ordered) -> Answer:
        return moving, switch(migration)

    def ready(migration: Migration, event: Ready) -> Answer:
        return (settling, [Cutover(migration.move)]) if migration.hear(event) else (moving, [])

    def settle(migration: Migration, event: Left | Opened) -> Answer:
        return (DONE if weigh(migration, event) else settling), []

    table: Table = {
        (ORDERED, Ordered): begin,
        (ORDERED, Abandoned): abandon_unbegun,
        (moving, Ready): ready,
        (settling, Left): settle,
        (settling, Opened): settle,
    }
    # What comes twice or late changes nothing.
    for phase, events in {
        moving: (Ordered, Abandoned),
        settling: (Ordered, Ready, Abandoned),
        DONE: (Ordered, Ready, Left, Opened, Abandoned),
        ABORTED: (Ordered, Abandoned),
    }.items():
        table |= {(phase, event): stay for event in events}

    return Protocol(
        name=name,
        table=table,
        resume={moving: switch, settling: lambda migration: [Cutover(migration.move)]},
        routing="switch",
        order=order,
        options=options,
    )
