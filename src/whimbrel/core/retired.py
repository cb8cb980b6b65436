"""Compaction of a stage's finished migrations: they are removed, and their effect on the routes stays.

A restarted coordinator rebuilds the routes from its journal: it replays every migration in the order of the orders, and
each one that is done hands over its keys. So a migration may be removed from the journal only if its effect is kept.
`Retired` is that effect: the routes after all migrations that are over and old enough, in their order.

Migrations in progress are skipped, even if newer ones are folded. That is correct: two migrations in progress at the
same time never hand over the same keys. A finished migration that is still needed, or still open at its destination, is
folded and kept, and not folded twice: an aborted restoration has taken its keys from their owner, and a later one may
have given them to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from whimbrel.core.protocols.machine import DONE, Migration
from whimbrel.core.router import RouteTable

if TYPE_CHECKING:
    from whimbrel.core.coordinator import Coordinator


class Retired(msgspec.Struct):
    """The combined effect of finished migrations."""

    count: int = 0
    """Number of removed migrations."""
    owners: tuple[list[str], dict[str, str]] | None = None
    epochs: tuple[list[int], dict[str, int]] | None = None
    """The routes after them; None if there are none."""
    places: dict[str, str] = {}
    """By instance that one of them has relocated: its new site."""
    folded: set[str] = set()
    """Migrations that are kept although their effect is included here."""

    def table(self, first: str) -> RouteTable:
        """The routes after them; `first`: the initial owner of every key."""
        table = RouteTable(first)
        if self.owners is not None and self.epochs is not None:
            table.owners.restore(self.owners)
            table.epochs.restore(self.epochs)
        return table


def retirement(
    coordinator: Coordinator,
    most: int,
    slack: int = 0,
    is_needed: Callable[[Migration], bool] = lambda migration: False,
) -> tuple[list[Migration], Retired]:
    """The oldest finished migrations to remove, such that `most` are left, and the combined effect of all removed ones.

    Empty as long as no more than `slack` would be removed, because the effect is written as a whole. `is_needed`:
    further reasons to keep one. Changes nothing: journal the result, then pass it to `Coordinator.retire`.
    """
    before, known = coordinator.retired, coordinator.migrations

    def needed(migration: Migration) -> bool:
        return migration.move.id in coordinator.open or coordinator.is_needed(migration) or is_needed(migration)

    too_many = len(known) - len({*coordinator.open, *before.folded}) - most
    if max(too_many, sum(not needed(known[id]) for id in before.folded)) <= slack:
        return [], before
    table, places, folded = before.table(coordinator.first), dict(before.places), {*before.folded}
    gone: list[Migration] = []
    for id, migration in known.items():
        if not migration.is_over:
            continue
        if id not in folded:
            if too_many <= 0:
                break
            too_many -= id not in coordinator.open
            _leave_routes(table, places, migration)
        if needed(migration):
            folded.add(id)
        else:
            folded.discard(id)
            gone.append(migration)
    return gone, Retired(before.count + len(gone), table.owners.dump(), table.epochs.dump(), places, folded)


def _leave_routes(table: RouteTable, places: dict[str, str], migration: Migration) -> None:
    """Apply the effect of a finished migration to routes and places."""
    move = migration.move
    if move.replays and migration.has_begun:
        table.orphan(move, move.source)
    if migration.phase != DONE:
        return
    if move.relocates:
        places[move.source] = migration.to_site
    else:
        table.hand_over(move)
