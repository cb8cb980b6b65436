"""Migrations that a stage has forgotten: what they did to its routes stays.

A coordinator that starts again gets the routes from its journal: it takes in every migration, in the order in which
they were ordered, and each that is done hands its keys over. So a migration may be removed from the journal only if
what it did is kept: `Retired` is that, the routes after all migrations that are over and old enough, in their order.

Migrations that are open are left out, though newer ones are folded. That changes nothing: two that are open at once
never hand over the same keys. And one that is over, but must be known, is folded and kept: it is not folded twice.
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
    """What is left of migrations that are over."""

    count: int = 0
    """How many are forgotten."""
    owners: tuple[list[str], dict[str, str]] | None = None
    epochs: tuple[list[int], dict[str, int]] | None = None
    """The routes after them; None if there are none."""
    places: dict[str, str] = {}
    """By instance that one of them has relocated: to which site."""
    folded: set[str] = set()
    """Migrations that are remembered, though what they did is in here."""

    def table(self, first: str) -> RouteTable:
        """The routes after them; `first`: who had every key at the beginning."""
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
    """The oldest migrations that are over and may be forgotten, such that `most` are left, and what is left of them.

    None as long as no more than `slack` would go: what is left is written as a whole. `is_needed`: who else
    must know one. Changes nothing: it has happened when it is journalled, and is then given to `Coordinator.retire`.
    """
    before, known = coordinator.retired, coordinator.migrations

    def needed(migration: Migration) -> bool:
        return coordinator.is_needed(migration) or is_needed(migration)

    too_many = len(known) - len(coordinator.open) - len(before.folded) - most
    if max(too_many, sum(not needed(known[id]) for id in before.folded)) <= slack:
        return [], before
    table, places, folded = before.table(coordinator.first), dict(before.places), {*before.folded}
    gone: list[Migration] = []
    for id, migration in known.items():
        if id in coordinator.open:
            continue
        if id not in folded:
            if too_many <= 0:
                break
            too_many -= 1
            _leave_routes(table, places, migration)
        if needed(migration):
            folded.add(id)
        else:
            folded.discard(id)
            gone.append(migration)
    return gone, Retired(before.count + len(gone), table.owners.dump(), table.epochs.dump(), places, folded)


def _leave_routes(table: RouteTable, places: dict[str, str], migration: Migration) -> None:
    """What a migration that is over has done to routes and places."""
    move = migration.move
    if move.replays and migration.has_begun:
        table.orphan(move, move.source)
    if migration.phase != DONE:
        return
    if move.relocates:
        places[move.source] = migration.to_site
    else:
        table.hand_over(move)
