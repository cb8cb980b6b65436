"""Compaction of a stage's finished migrations: they are removed, and their effect on the routes stays.

A restarted coordinator rebuilds the routes from its journal: it replays every migration in the order of the orders, and
each one that is done hands over its keys. So a migration may be removed from the journal only if its effect is kept.
`Retired` is that effect: the routes at the moment of the removal. They include the effect of every migration that is
over, removed or not, so those that are kept are listed and not replayed. Migrations in progress are replayed: no other
one can have changed their keys since they began.
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

    def restore(self, table: RouteTable) -> None:
        """Give a new table the routes after them."""
        if self.owners is not None and self.epochs is not None:
            table.owners.restore(self.owners)
            table.epochs.restore(self.epochs)


def retirement(
    coordinator: Coordinator,
    most: int,
    slack: int = 0,
    is_needed: Callable[[Migration], bool] = lambda migration: False,
) -> tuple[list[Migration], Retired]:
    """The finished migrations to remove: all but the last `most`, and those that are needed; and the effect that stays.

    Empty as long as no more than `slack` would be removed, because the effect is written as a whole. `is_needed`:
    further reasons to keep one. Changes nothing: journal the result, then pass it to `Coordinator.retire`.
    """
    before, table, sites = coordinator.retired, coordinator.table, coordinator.sites
    over = [migration for migration in coordinator.migrations.values() if migration.is_over]
    settled = [one for one in over if one.move.id not in coordinator.open]
    older = settled[: max(0, len(settled) - most)]
    gone = [one for one in older if not coordinator.is_needed(one) and not is_needed(one)]
    if len(gone) <= slack:
        return [], before
    moved = {*before.places, *(one.move.source for one in over if one.move.relocates and one.phase == DONE)}
    places = {name: sites[name] for name in moved if name in sites}
    folded = {one.move.id for one in over} - {one.move.id for one in gone}
    return gone, Retired(before.count + len(gone), table.owners.dump(), table.epochs.dump(), places, folded)
