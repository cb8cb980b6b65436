"""The coordinator of one stage: holds its migrations, decides whether a new one may start, and applies events to them.

Has the stage's routes and the site of each instance. Pure: the orchestrator journals a migration after each event,
before it carries out the commands that `handle` returned; after a restart it carries out the commands of `adopt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from whimbrel.core.errors import Conflict, Refused, UnknownName
from whimbrel.core.keys import NAMED_BYTES, KeyMap, Selection
from whimbrel.core.losses import Losses
from whimbrel.core.options import RestartOptions
from whimbrel.core.protocols import PROTOCOLS, SIZES, check_options, machine, protocol_named
from whimbrel.core.protocols.fluid import FLUID, Turns, scheduled
from whimbrel.core.protocols.fluid import STEP as FLUID_STEP
from whimbrel.core.protocols.machine import ABORTED, DONE, ORDERED, Command, Event, Migration, Ordered, Protocol
from whimbrel.core.protocols.replicate import REPLICATE, gives_way, outlived
from whimbrel.core.protocols.restore import RESTORE
from whimbrel.core.record import Aborted, Move
from whimbrel.core.retired import Retired
from whimbrel.core.router import RouteTable


class Coordinator:
    """The migrations of one stage."""

    def __init__(self, stage: str, table: RouteTable, sites: dict[str, str], homes: KeyMap[str]) -> None:
        """`sites`: by instance, the site where it runs. `homes`: of every key, the router through which it comes: a
        move concerns the routers of its keys, and no others."""
        self.stage, self.table, self.sites, self.homes = stage, table, sites, homes
        self.retired = Retired()
        """The combined effect of removed migrations."""
        self.migrations: dict[str, Migration] = {}
        """All migrations that are kept, in the order in which they were ordered."""
        self.open: dict[str, Migration] = {}
        """Migrations that are running, or aborted but not yet cleaned up at their destination: events concern only
        these."""
        self.losses, self.turns = Losses(self), Turns()

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
        if self.losses.attempts:
            self.losses.check_present({*owners, destination})
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
                routers=self.routers(share),
                options=msgspec.structs.replace(rules.options, **chosen),
                **sizes,
            )
            self.check_free(move, self.open.values())
            if self.losses.attempts:
                self.losses.check_dropped(move)
            planned.append(Migration(move, self.sites[owner], site))
        return planned

    def routers(self, selection: Selection) -> frozenset[str]:
        """The routers of these keys; all, if there are no keys."""
        return frozenset(self.homes.values(selection) or self.homes.values())

    def _check_named(self, planned: Sequence[Migration]) -> None:
        """Raise if too many keys would be routed one by one. Whatever is selected by owner names only keys that are
        routed so: no later selection is too large either, and a restoration need not be refused."""
        every = (one.move.selection.named for one in (*planned, *self.open.values()))
        size = sum(len(key.encode()) for key in frozenset(self.table.owners.by_key).union(*every))
        if size > NAMED_BYTES and any(one.move.selection.named for one in planned):
            most = f"at most {NAMED_BYTES:,} are possible; move whole bins (bins=, share=)"
            raise Refused(f"{self.stage} would have single keys of {size:,} bytes together in its routes, and {most}")

    def check_free(self, move: Move, others: Iterable[Migration]) -> None:
        """Raise if one of these open migrations has keys of a move, or needs an instance that the move relocates."""
        for other in others:
            ends = {other.move.source, other.move.destination}
            whole = (move.relocates or other.move.relocates) and bool({move.source, move.destination} & ends)
            if other.is_over and other.move.destination != move.destination:
                continue
            if other.move.protocol == REPLICATE.name and gives_way(other, move) and not whole:
                continue
            if whole or other.move.selection.overlaps(move.selection):
                claim = "needs one of these instances" if whole else "has some of these keys"
                raise Conflict(f"migration {other.move.id} ({other.phase}) {claim}; wait for it or abort it")

    def _is_settled(self, migration: Migration) -> bool:
        if migration.phase != ABORTED or migration.move.relocates or migration.ended_by:
            return migration.is_over
        return not migration.has_begun or migration.has_received(Aborted, migration.move.destination)

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
        self.file(migration)
        if migration.move.replays:
            self.losses.add(migration)
        if migration.plan:
            self.turns.add(migration)

    def file(self, migration: Migration) -> None:
        """Update the index of open migrations."""
        if self._is_settled(migration):
            self.open.pop(migration.move.id, None)
        else:
            self.open[migration.move.id] = migration

    def withdraw(self, migration: Migration) -> None:
        """Remove a migration: it could not be journalled and so has not happened, or it is over."""
        for known in (self.migrations, self.open):
            known.pop(migration.move.id, None)
        if migration.move.replays:
            self.losses.remove(migration)
        if migration.plan:
            self.turns.remove(migration)

    def put_back(self, table: RouteTable, migrations: Sequence[Migration]) -> None:
        """Reset the routes and these migrations to their state before one that could not be journalled."""
        self.table = table
        for migration in migrations:
            machine.become(self.migrations[migration.move.id], migration)
            self.file(self.migrations[migration.move.id])

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
        if migration.move.replays and was == ORDERED and migration.has_begun:
            self.losses.claim(migration, now_us)
        if migration.phase == DONE and was != DONE:
            self._settle(migration)
        self.file(migration)

    def due(self) -> list[tuple[str, Event]]:
        """Events for migrations that must begin or abort now. Call it after each event, and after a restart."""
        found: list[tuple[str, Event]] = []
        if self.turns.plans:
            found += self.turns.due()
        if any(one.move.protocol == REPLICATE.name for one in self.open.values()):
            found += outlived(self.open.values(), self.table)
        if self.losses.attempts:
            found += self.losses.due()
        return found

    def _settle(self, migration: Migration) -> None:
        if migration.move.relocates:
            if migration.move.source in self.sites:  # else the instance has been removed by scaling
                self.sites[migration.move.source] = migration.to_site
        else:
            self.table.hand_over(migration.move)

    def resume(self, retired: Retired) -> None:
        """After a restart, before any `adopt`: load the combined effect of removed migrations."""
        self.retired = retired
        retired.restore(self.table)
        self.sites |= {name: site for name, site in retired.places.items() if name in self.sites}

    def adopt(self, migration: Migration) -> list[Command]:
        """After a restart: add a journalled migration again; return the commands to repeat.

        Migrations are adopted in the order in which they were ordered, so that the same routes result.
        """
        self._take_in(migration)
        is_compacted = migration.move.id in self.retired.folded
        if migration.move.replays and migration.has_begun and not is_compacted:
            self.losses.claim(migration)
        if migration.phase == DONE and not is_compacted:
            self._settle(migration)
        return machine.resume(PROTOCOLS[migration.move.protocol], migration)

    # ── Retention ────────────────────────────────────────────────────────────────────────────────────────────────

    def is_needed(self, migration: Migration) -> bool:
        """Whether a finished migration must be kept."""
        if migration.plan:
            return self.turns.need(migration)
        return migration.move.replays and self.losses.need(migration)

    def retire(self, gone: Sequence[Migration], retired: Retired) -> None:
        """Remove migrations, after the result of `retirement` has been journalled."""
        self.retired = retired
        for migration in gone:
            self.withdraw(migration)
