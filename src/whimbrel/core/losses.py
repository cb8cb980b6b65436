"""The lost instances of a stage, and the attempts to restore their keys elsewhere.

Stands beside the coordinator, which asks it only when an instance is lost or a restoration has been ordered. An
instance is lost from the beginning of the first attempt until it has come back and dropped its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.options import RestoreOptions, number_of
from whimbrel.core.protocols import PROTOCOLS, check_options, machine
from whimbrel.core.protocols.machine import ABORTED, DONE, ORDERED, Abandoned, Event, Migration
from whimbrel.core.protocols.restore import RESTORE
from whimbrel.core.record import Aborted, Evicted, Move
from whimbrel.core.restoration import Renewal

if TYPE_CHECKING:
    from whimbrel.core.coordinator import Coordinator


class Losses:
    """The lost instances of one stage."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.attempts: dict[str, list[Migration]] = {}
        """By lost instance: the attempts to restore it, oldest first."""

    def add(self, restoration: Migration) -> None:
        """Add an attempt, as the last one."""
        self.attempts.setdefault(restoration.move.source, []).append(restoration)

    def remove(self, restoration: Migration) -> None:
        """Remove an attempt."""
        lost = restoration.move.source
        left = [one for one in self.attempts.pop(lost, ()) if one is not restoration]
        if left:
            self.attempts[lost] = left

    # ── Orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, lost: str, destination: str, id: str, checkpoint: int | None = None, **options: Any) -> Migration:
        """The migration that brings all keys that a lost instance had, was sending or was to receive, to another one.
        There may be none: then it only marks the instance as lost, and the moves that can be undone without it are.

        Raises, and changes nothing, if it cannot be done now: if several instances are lost, one may have to wait for
        another, whose moves conflict with it. Starting it ends the migrations that `ended_by` lists. `checkpoint`: the
        checkpoint to restore from, if not from the newest versions.
        """
        check_options(RESTORE, options)
        coordinator, sites = self._coordinator, self._coordinator.sites
        for name in (lost, destination):
            if name not in sites:
                raise UnknownName("instance", name, list(sites))
        if destination == lost or destination in self.instances():
            raise Refused(f"{destination} is lost: restore to another instance")
        ends = [other for other in coordinator.open.values() if self._needs(other, lost)]
        for other in ends:
            if other.move.replays and other.move.source == lost:
                raise Conflict(f"migration {other.move.id} ({other.phase}) restores {lost}; wait for it or abort it")
        selection = coordinator.table.owners.select(lost)
        for other in ends:
            selection = selection.union(other.move.selection)
        before = [other.move for other in self.attempts.get(lost, ()) if self._is_unconfirmed(other)]
        known = [coordinator.table.next_epoch(selection), *(other.move.epoch + 1 for other in ends)]
        move = Move(
            id=id,
            stage=coordinator.stage,
            protocol=RESTORE.name,
            source=lost,
            destination=destination,
            selection=selection,
            epoch=max(known),
            routers=coordinator.routers(selection),
            options=RestoreOptions(
                ends=frozenset({*(other.move.id for other in ends), *(id for move in before for id in move.ends)}),
                parties=frozenset({lost, *_parties(ends), *(name for move in before for name in move.parties)}),
                floor=_next_number(coordinator.migrations),
                open=frozenset(coordinator.open).difference(other.move.id for other in ends),
            ),
            **options,
        )
        coordinator.check_free(move, [other for other in coordinator.open.values() if not _is_ended(other, move)])
        return Migration(move, sites[lost], sites[destination], checkpoint=checkpoint)

    def check_present(self, instances: Set[str]) -> None:
        """Raise if one of these instances, which a move needs, is lost."""
        for name in self.instances() & instances:
            raise Refused(f"{name} is lost: restore its keys first, and wait until it is back")

    def check_dropped(self, move: Move) -> None:
        """Raise if the destination of a move may still hold some of its keys, which were restored elsewhere. New states
        would collide with the old ones there, because messages overtake the markers queued in its inbox, DISCARD among
        them."""
        here = move.destination
        for one in (one for attempts in list(self.attempts.values()) for one in attempts):
            is_held = one.phase == DONE and here in one.move.parties and not one.has_received(Evicted, here)
            if is_held and one.move.selection.overlaps(move.selection):
                raise Conflict(
                    f"{here} has not yet dropped what it had of these keys before {one.move.id} restored them "
                    "elsewhere; order it again when it has"
                )

    def _is_unconfirmed(self, restoration: Migration) -> bool:
        """Whether an attempt to restore an instance was aborted before all parties dropped its keys."""
        if restoration.phase != ABORTED or restoration.ended_by or not restoration.has_begun:
            return False
        return not all(restoration.has_received(Evicted, name) for name in restoration.move.parties)

    # ── Which instances are lost ─────────────────────────────────────────────────────────────────────────────────

    def instances(self) -> set[str]:
        """Instances that are being restored elsewhere, or have been and have not come back since."""
        # Only the last attempt counts: an earlier one may have been aborted before any party received it.
        last = self._last_attempts()
        away = {name for name, migration in last.items() if not migration.has_received(Evicted, name)}
        return away.union(self.interrupted())

    def interrupted(self) -> list[str]:
        """Lost instances whose keys are not being restored: the last attempt was aborted."""
        last = self._last_attempts()
        return [name for name, migration in last.items() if migration.phase == ABORTED and self._is_orphaned(migration)]

    def hangs_on(self, instance: str) -> bool:
        """Whether the loss of an instance would lose keys, or block a migration that cannot be undone without it."""
        coordinator = self._coordinator
        owns = instance in coordinator.table.owners.values()
        return owns or any(self._needs(migration, instance) for migration in list(coordinator.open.values()))

    def _needs(self, migration: Migration, instance: str) -> bool:
        """Whether a migration cannot finish without an instance: False if it can be undone without it."""
        if migration.is_over or migration.phase == ORDERED:
            return False
        if migration.move.source == instance:
            return True
        rule = PROTOCOLS[migration.move.protocol].table.get((migration.phase, Abandoned))
        return migration.move.destination == instance and rule is machine.stay and not _is_undoing(migration)

    def renewal(self, instance: str) -> Renewal:
        """What an instance must know that starts without its state."""
        known, open_ones = self._coordinator.migrations, self._coordinator.open
        undoing = [one.move for one in open_ones.values() if one.move.destination == instance and _is_undoing(one)]
        return Renewal(_next_number(known), frozenset(open_ones), undoing)

    def _last_attempts(self) -> dict[str, Migration]:
        """By lost instance: the last restoration that has begun."""
        return {lost: one for lost, found in list(self.attempts.items()) for one in found if one.has_begun}

    def _is_orphaned(self, restoration: Migration) -> bool:
        """Whether some of its keys are still assigned to the lost instance, in the epoch of this attempt."""
        move, table = restoration.move, self._coordinator.table
        return move.epoch in table.epochs.values(table.owners.select(move.source, move.selection))

    # ── What follows from a loss ─────────────────────────────────────────────────────────────────────────────────

    def claim(self, restoration: Migration, now_us: int = 0) -> None:
        """A restoration has begun: its keys stay assigned to the lost instance until it is done, and no other move may
        use them."""
        move = restoration.move
        self._coordinator.table.orphan(move, move.source)
        for other in self.ended_by(restoration):
            machine.end(other, move.id, now_us)
            self._coordinator.file(other)

    def ended_by(self, restoration: Migration) -> list[Migration]:
        """The migrations that a restoration ends."""
        known = self._coordinator.migrations
        return [known[id] for id in sorted(restoration.move.ends) if id in known]

    def due(self) -> list[tuple[str, Event]]:
        """Aborts of migrations to a lost instance that can still be undone, or that need one and have not begun."""
        lost = self.instances()
        found: list[tuple[str, Event]] = []
        for one in self._coordinator.open.values() if lost else ():
            ends = {one.move.destination} if one.has_begun else {one.move.source, one.move.destination}
            rule = PROTOCOLS[one.move.protocol].table.get((one.phase, Abandoned))
            if not one.is_over and rule is not machine.stay and ends & lost and not one.move.relocates:
                found.append((one.move.id, Abandoned(f"{min(ends & lost)} is lost")))
        return found

    def need(self, restoration: Migration) -> bool:
        """Whether a finished restoration must be kept: instances have not dropped the keys that it restores elsewhere,
        and no later attempt has ordered that again."""
        move = restoration.move
        is_last = self._last_attempts().get(move.source) is restoration
        if not (is_last or restoration.phase == DONE):
            return False
        sites = self._coordinator.sites
        is_confirmed = all(restoration.has_received(Evicted, name) for name in move.parties if name in sites)
        return not is_confirmed or (is_last and self._is_orphaned(restoration))


def _is_ended(migration: Migration, restoration: Move) -> bool:
    """Whether a restoration ends a migration, or prevents that it begins."""
    ends = {migration.move.source, migration.move.destination}
    return migration.move.id in restoration.ends or (not migration.has_begun and restoration.source in ends)


def _next_number(ids: Iterable[str]) -> int:
    """A number above those of some migrations."""
    return max(map(number_of, ids), default=-1) + 1


def _parties(migrations: Sequence[Migration]) -> set[str]:
    return {end for migration in migrations for end in (migration.move.source, migration.move.destination)}


def _is_undoing(migration: Migration) -> bool:
    """Whether it is being undone: its source answers, even if its destination fails."""
    return (migration.phase, Aborted) in PROTOCOLS[migration.move.protocol].table
