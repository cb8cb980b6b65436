"""Retention: the last finished migrations are kept; of the older ones, only their effect on the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.protocols.machine import Migration
from whimbrel.core.retired import Retired, retirement
from whimbrel.orchestrator.journal import MigrationJournal

KEPT, SLACK = 1_000, 100
"""How many finished migrations of a stage are retained: the last ones, plus some slack, so that the summary of the
older ones is not rewritten for each."""


def resume(journal: MigrationJournal, coordinators: Iterable[Coordinator]) -> None:
    """Initialise coordinators with the effect of dropped migrations."""
    for coordinator in coordinators:
        left = journal.load(f"retired/{coordinator.stage}")
        coordinator.resume(Retired() if left is None else wire.unpack(left, Retired))


def retire(
    journal: MigrationJournal,
    coordinator: Coordinator,
    is_needed: Callable[[Migration], bool],
    kept: tuple[int, int] | None = None,
) -> set[str]:
    """Drop the oldest finished migrations beyond the limit; return which. If the journal write fails, none is."""
    gone, retired = retirement(coordinator, *(kept or (KEPT, SLACK)), is_needed)
    if gone:
        journal.retire(gone, f"retired/{coordinator.stage}", wire.pack(retired))
        coordinator.retire(gone, retired)
    return {migration.move.id for migration in gone}
