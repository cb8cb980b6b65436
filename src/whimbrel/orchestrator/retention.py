"""Retention: the last migrations that are over are remembered, and of the others what they did to the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.protocols.machine import Migration
from whimbrel.core.retired import Retired, retirement
from whimbrel.orchestrator.journal import MigrationJournal

KEPT, SLACK = 1_000, 100
"""How many migrations of a stage that are over are remembered: the last ones, and some more until it is worth while to
write down what is left of the others."""


def resume(journal: MigrationJournal, coordinators: Iterable[Coordinator]) -> None:
    """Let coordinators begin with what forgotten migrations have left."""
    for coordinator in coordinators:
        left = journal.load(f"retired/{coordinator.stage}")
        coordinator.resume(Retired() if left is None else wire.unpack(left, Retired))


def retire(
    journal: MigrationJournal,
    coordinator: Coordinator,
    is_needed: Callable[[Migration], bool],
    kept: tuple[int, int] | None = None,
) -> set[str]:
    """Forget the oldest of many migrations that are over; return which. What is not journalled has not happened."""
    gone, retired = retirement(coordinator, *(kept or (KEPT, SLACK)), is_needed)
    if gone:
        journal.retire(gone, f"retired/{coordinator.stage}", wire.pack(retired))
        coordinator.retire(gone, retired)
    return {migration.move.id for migration in gone}
