"""The coordinator of one stage: holds its migrations, decides whether a new one may start, and applies events to them.

Has the stage's routes and the site of each instance. Pure: the orchestrator journals a migration after each event,
before it carries out the commands that `handle` returned; after a restart it carries out the commands of `adopt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.keys import NAMED_BYTES, Selection
from whimbrel.core.options import RestartOptions, RestoreOptions, number_of
from whimbrel.core.protocols import PROTOCOLS, SIZES, check_options, machine, protocol_named
from whimbrel.core.protocols.fluid import FLUID, scheduled
from whimbrel.core.protocols.fluid import STEP as FLUID_STEP
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Command,
    Event,
    Migration,
    Ordered,
    Protocol,
)
from whimbrel.core.protocols.restore import RESTORE
from whimbrel.core.record import Aborted, Evicted, Move
from whimbrel.core.retired import Retired
from whimbrel.core.router import RouteTable


class Coordinator:
    """The migrations of one stage."""

    def __init__(self, stage: str, table: RouteTable, sites: dict[str, str], routers: frozenset[str]) -> None:
        self.stage, self.table, self.sites, self.routers = stage, table, sites, routers
        """`sites`: by instance, the site where it runs."""
        self.first = table.owners.by_bin[0]
        self.retired = Retired()
        """The combined effect of removed migrations."""
        self.migrations: dict[str, Migration] = {}
        """All migrations that are kept, in the order in which they were ordered."""
        self.open: dict[str, Migration] = {}
        """Migrations that are running, or aborted but not yet cleaned up at their destination: events concern only
        these."""
        self._restorations: dict[str, list[Migration]] = {}
        """By lost instance: the attempts to restore it, oldest first."""
        self._queued: list[Migration] = []
        """Later turns of plans."""
        self._plans: dict[str, list[Migration]] = {}
        """By plan that has queued turns: all its turns."""

    # ── Orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(
        self, wanted: Sequence[tuple[Selection, str]], site: str, protocol: str, id: str, **options: Any
    ) -> list[Migration]:
        """The migrations that bring each selection to its instance at a site: one per instance that owns some of it.

        Empty if all keys are there already. Raises, and changes nothing, if it cannot be done now. A restart brings
        whole instances to the site, and skips those that are already there. `options` are those that the protocol lets
        an order set: its own options, budget and chunk, and the plan of `fluid`.
        """
        rules = protocol_named(protocol)
        if rules is RESTORE:
            raise Refused("restore brings back what a lost instance had; move running ones with live, pause or others")
        check_options(rules, options)
        turns = {name: options.pop(name) for name in ("plan", "step") if rules is FLUID and name in options}
        planned: list[Migration] = []
        for place, (selection, destination) in enumerate(wanted, 1):
            name = id if len(wanted) == 1 else f"{id}.{place}"
            planned += self._plan(rules, selection, destination, site, name, options)
        self._check_named(planned)
        if rules is FLUID and planned:
            return scheduled(planned, turns.get("plan", "batched"), turns.get("step", FLUID_STEP), id)
        return planned

    def _plan(
        self, rules: Protocol, selection: Selection, destination: str, site: str, id: str, options: dict[str, Any]
    ) -> list[Migration]:
        relocates = isinstance(rules.options, RestartOptions)
        chosen = {name: value for name, value in options.items() if name in rules.options.__struct_fields__}
        sizes = {name: value for name, value in options.items() if name in SIZES}
        if destination not in self.sites:
            raise UnknownName("instance", destination, list(self.sites))
        if not relocates and self.sites[destination] != site:
            raise Refused(f"{destination} runs at {self.sites[destination]}, not at {site}")
        there = {name for name, place in self.sites.items() if place == site} if relocates else {destination}
        owners = sorted({*self.table.owners.values(selection)} - there)
        for name in self.lost() & {*owners, destination}:
            raise Refused(f"{name} is lost: restore its keys first, and wait until it is back")
        planned = []
        for number, owner in enumerate(owners):
            share = self.table.owners.select(owner, selection)
            if relocates and share != self.table.owners.select(owner):
                raise Refused(
                    f"restart moves a whole instance, and {owner} has keys that were not selected; "
                    "select all of its keys, or use another protocol"
                )
            move = Move(
                id=id if len(owners) == 1 else f"{id}.{number + 1}",
                stage=self.stage,
                protocol=rules.name,
                source=owner,
                destination=owner if relocates else destination,
                selection=share,
                epoch=self.table.next_epoch(share),
                routers=self.routers,
                options=msgspec.structs.replace(rules.options, **chosen),
                **sizes,
            )
            self._check_free(move)
            planned.append(Migration(move, self.sites[owner], site))
        return planned

    def _check_named(self, planned: Sequence[Migration]) -> None:
        """Raise if too many keys would be routed one by one. Whatever is selected by owner names only keys that are
        routed so: no later selection is too large either, and a restoration need not be refused."""
        every = (one.move.selection.named for one in (*planned, *self.open.values()))
        size = sum(len(key.encode()) for key in frozenset(self.table.owners.by_key).union(*every))
        if size > NAMED_BYTES and any(one.move.selection.named for one in planned):
            most = f"at most {NAMED_BYTES:,} are possible; move whole bins (bins=, share=)"
            raise Refused(f"{self.stage} would have single keys of {size:,} bytes together in its routes, and {most}")

    def plan_restore(
        self, lost: str, destination: str, id: str, checkpoint: int | None = None, **options: Any
    ) -> Migration:
        """The migration that brings all keys that a lost instance had, was sending or was to receive, to another one.
        There may be none: then it only marks the instance as lost, and the moves that can be undone without it are.

        Raises, and changes nothing, if it cannot be done now: if several instances are lost, one may have to wait for
        another, whose moves conflict with it. Starting it ends the migrations that `ended_by` lists. `checkpoint`: the
        checkpoint to restore from, if not from the newest versions.
        """
        check_options(RESTORE, options)
        for name in (lost, destination):
            if name not in self.sites:
                raise UnknownName("instance", name, list(self.sites))
        if destination == lost or destination in self.lost():
            raise Refused(f"{destination} is lost: restore to another instance")
        ends = [other for other in self.open.values() if self._needs(other, lost)]
        for other in ends:
            if other.move.replays and other.move.source == lost:
                raise Conflict(f"migration {other.move.id} ({other.phase}) restores {lost}; wait for it or abort it")
        selection = self.table.owners.select(lost)
        for other in ends:
            selection = selection.union(other.move.selection)
        before = [other.move for other in self.restorations(lost) if self._is_unheard(other)]
        known = [self.table.next_epoch(selection), *(other.move.epoch + 1 for other in ends)]
        move = Move(
            id=id,
            stage=self.stage,
            protocol=RESTORE.name,
            source=lost,
            destination=destination,
            selection=selection,
            epoch=max(known),
            routers=self.routers,
            options=RestoreOptions(
                ends=frozenset({*(other.move.id for other in ends), *(id for move in before for id in move.ends)}),
                parties=frozenset({lost, *_parties(ends), *(name for move in before for name in move.parties)}),
                floor=max(map(number_of, self.migrations), default=-1) + 1,
                open=frozenset(self.open).difference(other.move.id for other in ends),
            ),
            **options,
        )
        self._check_free(move)
        return Migration(move, self.sites[lost], self.sites[destination], checkpoint=checkpoint)

    def _needs(self, migration: Migration, instance: str) -> bool:
        """Whether a migration cannot finish without an instance: False if it can be undone without it."""
        if migration.is_over or migration.phase == ORDERED:
            return False
        if migration.move.source == instance:
            return True
        rule = PROTOCOLS[migration.move.protocol].table.get((migration.phase, Abandoned))
        return migration.move.destination == instance and rule is machine.stay and not _is_undoing(migration)

    def restorations(self, lost: str) -> list[Migration]:
        """The attempts to restore an instance, oldest first."""
        return list(self._restorations.get(lost, ()))

    def _is_unheard(self, restoration: Migration) -> bool:
        """Whether an attempt to restore an instance was aborted before all parties dropped its keys."""
        if restoration.phase != ABORTED or restoration.ended_by or not restoration.has_begun:
            return False
        return not all(restoration.has_heard(Evicted, name) for name in restoration.move.parties)

    def hangs_on(self, instance: str) -> bool:
        """Whether the loss of an instance would lose keys, or block a migration that cannot be undone without it."""
        owns = instance in self.table.owners.values()
        return owns or any(self._needs(migration, instance) for migration in list(self.open.values()))

    def lost(self) -> set[str]:
        """Instances that are being restored elsewhere, or have been and have not come back since."""
        # Only the last attempt counts: an earlier one may have been aborted before any party received it.
        last = self._last_attempts()
        away = {name for name, migration in last.items() if not migration.has_heard(Evicted, name)}
        return away.union(self.interrupted()) if last else away

    def interrupted(self) -> list[str]:
        """Lost instances whose keys are not being restored: the last attempt was aborted."""
        last = self._last_attempts()
        return [name for name, migration in last.items() if migration.phase == ABORTED and self._is_orphaned(migration)]

    def _last_attempts(self) -> dict[str, Migration]:
        """By lost instance: the last restoration that has begun."""
        return {lost: one for lost, found in list(self._restorations.items()) for one in found if one.has_begun}

    def _is_orphaned(self, restoration: Migration) -> bool:
        """Whether some of its keys are still assigned to the lost instance, in the epoch of this attempt."""
        move = restoration.move
        share = self.table.owners.select(move.source, move.selection)
        return move.epoch in self.table.epochs.values(share)

    def ended_by(self, migration: Migration) -> list[Migration]:
        """The migrations that a restoration ends."""
        return [self.migrations[id] for id in sorted(migration.move.ends) if id in self.migrations]

    def _check_free(self, move: Move) -> None:
        for other in self.open.values():
            ends = {other.move.source, other.move.destination}
            if other.move.id in move.ends or (move.replays and not other.has_begun and move.source in ends):
                continue  # the restoration ends it, or it never begins
            whole = (move.relocates or other.move.relocates) and bool({move.source, move.destination} & ends)
            if other.is_over and other.move.destination != move.destination:
                continue
            second = bool(PROTOCOLS[move.protocol].copies) and other.move.destination == move.destination
            if is_waiting_standby(other) and not whole and not second:
                continue
            if whole or other.move.selection.overlaps(move.selection):
                claim = "needs one of these instances" if whole else "has some of these keys"
                raise Conflict(f"migration {other.move.id} ({other.phase}) {claim}; wait for it or abort it")
        for restoration in () if move.replays else self._undropped_by(move.destination):
            if restoration.move.selection.overlaps(move.selection):
                raise Conflict(
                    f"{move.destination} has not yet dropped what it had of these keys before {restoration.move.id} "
                    "restored them elsewhere; order it again when it has"
                )

    def _undropped_by(self, instance: str) -> list[Migration]:
        """Restorations whose keys an instance may still hold. New states would collide with the old ones there, because
        messages overtake the markers queued in its inbox, DISCARD among them."""
        return [
            one
            for attempts in list(self._restorations.values())
            for one in attempts
            if one.phase == DONE and instance in one.move.parties and not one.has_heard(Evicted, instance)
        ]

    def _is_settled(self, migration: Migration) -> bool:
        if migration.phase != ABORTED or migration.move.relocates or migration.ended_by:
            return migration.is_over
        return not migration.has_begun or migration.has_heard(Aborted, migration.move.destination)

    # ── Life cycle ───────────────────────────────────────────────────────────────────────────────────────────────

    def standby(self, selection: Selection, destination: str) -> Migration | None:
        """The warm standby at an instance for just these keys, if there is one."""
        for migration in list(self.open.values()):
            move = migration.move
            if migration.is_standby and (move.selection, move.destination) == (selection, destination):
                return migration
        return None

    def start(self, migration: Migration, now_us: int = 0) -> list[Command]:
        """Add a planned migration, and begin it if it is its turn."""
        self._take_in(migration)
        return [] if migration.turn else self.handle(migration.move.id, Ordered(), now_us)

    def _take_in(self, migration: Migration) -> None:
        self.migrations[migration.move.id] = migration
        self._file(migration)
        if migration.move.replays:
            self._restorations.setdefault(migration.move.source, []).append(migration)
        if migration.plan:
            self._plans.setdefault(migration.plan, []).append(migration)
        if migration.turn and migration.phase == ORDERED:
            self._queued.append(migration)

    def _file(self, *migrations: Migration) -> None:
        """Update the index of open migrations."""
        for migration in migrations:
            if self._is_settled(migration):
                self.open.pop(migration.move.id, None)
            else:
                self.open[migration.move.id] = migration

    def withdraw(self, migration: Migration) -> None:
        """Remove a migration: it could not be journalled and so has not happened, or it is over."""
        id, lost = migration.move.id, migration.move.source
        for known in (self.migrations, self.open):
            known.pop(id, None)
        for found in (self._restorations.get(lost, []), self._plans.get(migration.plan, [])):
            found[:] = [one for one in found if one is not migration]

    def put_back(self, table: RouteTable, migrations: Sequence[Migration]) -> None:
        """Reset the routes and these migrations to their state before one that could not be journalled."""
        self.table = table
        for migration in migrations:
            machine.become(self.migrations[migration.move.id], migration)
            self._file(self.migrations[migration.move.id])

    def handle(self, id: str, event: Event, now_us: int = 0) -> list[Command]:
        """Apply an event to a migration and return the commands to carry out."""
        draft, commands = self.decide(id, event, now_us)
        self.accept(draft, now_us)
        return commands

    def decide(self, id: str, event: Event, now_us: int = 0) -> tuple[Migration, list[Command]]:
        """The migration after an event, as a draft, and the commands to carry out. Changes nothing: the event takes
        effect when the draft is journalled and then passed to `accept`."""
        if id not in self.migrations:
            raise UnknownName("migration", id, list(self.migrations))
        draft = machine.copied(self.migrations[id])
        return draft, machine.handle(PROTOCOLS[draft.move.protocol], draft, event, now_us)

    def accept(self, draft: Migration, now_us: int = 0) -> None:
        """Apply a journalled draft to its migration and to the routes."""
        migration = self.migrations[draft.move.id]
        was = migration.phase
        machine.become(migration, draft)
        if was == ORDERED and migration.has_begun:
            self._claim(migration, now_us)
        if migration.phase == DONE and was != DONE:
            self._settle(migration)
        self._file(migration)

    def due(self) -> list[tuple[str, Event]]:
        """Events for migrations that must begin or abort now. Call it after each event, and after a restart."""
        told: list[tuple[str, Event]] = []
        self._queued = [m for m in self._queued if m.phase == ORDERED and self.migrations.get(m.move.id) is m]
        waiting = {migration.plan for migration in self._queued}
        self._plans = {plan: turns for plan, turns in self._plans.items() if plan in waiting}
        aborted: dict[str, int] = {}
        undone: dict[str, int] = {}
        """By plan: the first turn of which something was aborted, and of which something is not done."""
        for other in (one for turns in self._plans.values() for one in turns):
            if other.phase == ABORTED:
                aborted[other.plan] = min(other.turn, aborted.get(other.plan, other.turn))
            if other.phase != DONE:
                undone[other.plan] = min(other.turn, undone.get(other.plan, other.turn))
        for migration in self._queued:
            if aborted.get(migration.plan, migration.turn) < migration.turn:
                told.append((migration.move.id, Abandoned("an earlier turn of its plan was aborted")))
            elif undone[migration.plan] == migration.turn:
                told.append((migration.move.id, Ordered()))
        return told + self._outlived() + self._hopeless()

    def _hopeless(self) -> list[tuple[str, Event]]:
        """Migrations to a lost instance that can still be undone, or that need one and have not begun."""
        lost = self.lost()
        found: list[tuple[str, Event]] = []
        for one in self.open.values() if lost else ():
            ends = {one.move.destination} if one.has_begun else {one.move.source, one.move.destination}
            rule = PROTOCOLS[one.move.protocol].table.get((one.phase, Abandoned))
            if not one.is_over and rule is not machine.stay and ends & lost and not one.move.relocates:
                found.append((one.move.id, Abandoned(f"{min(ends & lost)} is lost")))
        return found

    def _outlived(self) -> list[tuple[str, Event]]:
        """Standbys whose keys move in another way, or have already moved."""
        standbys = [one for one in self.open.values() if is_waiting_standby(one)]
        if not standbys:
            return []
        movers = [
            other.move.selection
            for other in self.open.values()
            if not other.is_over and not is_waiting_standby(other) and not other.move.relocates
        ]
        return [
            (one.move.id, Abandoned("its keys move in another way"))
            for one in standbys
            if {*self.table.owners.values(one.move.selection)} != {one.move.source}
            or any(selection.overlaps(one.move.selection) for selection in movers)
        ]

    def _claim(self, migration: Migration, now_us: int = 0) -> None:
        """A restoration has begun: its keys stay assigned to the lost instance until it is done, and no other move may
        use them."""
        if migration.move.replays:
            self.table.orphan(migration.move, migration.move.source)
            for other in self.ended_by(migration):
                machine.end(other, migration.move.id, now_us)
                self._file(other)

    def _settle(self, migration: Migration) -> None:
        if migration.move.relocates:
            if migration.move.source in self.sites:  # else the instance has been removed by scaling
                self.sites[migration.move.source] = migration.to_site
        else:
            self.table.hand_over(migration.move)

    def resume(self, retired: Retired) -> None:
        """After a restart, before any `adopt`: load the combined effect of removed migrations."""
        self.retired, self.table = retired, retired.table(self.first)
        self.sites |= {name: site for name, site in retired.places.items() if name in self.sites}

    def adopt(self, migration: Migration) -> list[Command]:
        """After a restart: add a journalled migration again; return the commands to repeat.

        Migrations are adopted in the order in which they were ordered, so that the same routes result.
        """
        self._take_in(migration)
        is_compacted = migration.move.id in self.retired.folded
        if migration.has_begun and not is_compacted:
            self._claim(migration)
        if migration.phase == DONE and not is_compacted:
            self._settle(migration)
        return machine.resume(PROTOCOLS[migration.move.protocol], migration)

    # ── Retention ────────────────────────────────────────────────────────────────────────────────────────────────

    def is_needed(self, migration: Migration) -> bool:
        """Whether a finished migration must be kept: for later turns of its plan, or because instances have not dropped
        the keys that it restores elsewhere, and no later attempt has ordered that again."""
        if any(one.plan == migration.plan for one in self._queued if one.plan):
            return True
        move = migration.move
        is_last = self._last_attempts().get(move.source) is migration
        if not move.replays or not (is_last or migration.phase == DONE):
            return False
        is_heard = all(migration.has_heard(Evicted, name) for name in move.parties if name in self.sites)
        return not is_heard or (is_last and self._is_orphaned(migration))

    def retire(self, gone: Sequence[Migration], retired: Retired) -> None:
        """Remove migrations, after the result of `retirement` has been journalled."""
        self.retired = retired
        for migration in gone:
            self.withdraw(migration)


def _parties(migrations: Sequence[Migration]) -> set[str]:
    return {end for migration in migrations for end in (migration.move.source, migration.move.destination)}


def _is_undoing(migration: Migration) -> bool:
    """Whether it is being undone: its source answers, even if its destination fails."""
    return (migration.phase, Aborted) in PROTOCOLS[migration.move.protocol].table


def is_waiting_standby(migration: Migration) -> bool:
    """Whether it is only a copy, which ends when its keys move in another way."""
    return migration.phase in PROTOCOLS[migration.move.protocol].copies
