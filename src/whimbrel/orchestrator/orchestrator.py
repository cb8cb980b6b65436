"""The orchestrator: knows the stages, sites and migrations; decides, journals, and only then lets it be done.

Off the data path: if it dies, data keeps flowing, and whoever starts from its journal finishes what it had ordered.
Workers carry commands out, those of one migration in their order (workers.py); events come in from any thread.

What is not journalled has not happened: an event is decided on a draft, the draft is written, and only then is it what
the migration is, and only then are its commands carried out. So whatever a write raises, all is as it was before.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Refused, Retry, Stale, Stop, Unavailable, UnknownName, Unstarted
from whimbrel.core.keys import EVERY_BIN, Selection
from whimbrel.core.protocols import machine
from whimbrel.core.protocols.machine import (
    Abandoned,
    Command,
    Copied,
    Event,
    Failed,
    Fenced,
    Migration,
    Started,
    Stopped,
)
from whimbrel.core.protocols.restore import FENCING, LOADING
from whimbrel.core.record import Kind, Move, Rejected, Report, Unreadable
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore, RouteTable
from whimbrel.log import codec
from whimbrel.log.kept import kept
from whimbrel.orchestrator import retention
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.orders import Request
from whimbrel.orchestrator.ports import GatewayPort, SitePort
from whimbrel.orchestrator.workers import GRACE, Place, Workers

LOGGER = logging.getLogger("whimbrel.orchestrator")
PERIOD = 0.2
ITSELF = "the process itself"
"""Who orders what no request asks for."""
DEADLINE = 120.0
"""Seconds after which a migration that can still be undone is abandoned, unless its order says otherwise."""


@dataclass(frozen=True)
class Order:
    """Selections of a stage, each to its instance at a site."""

    stage: str
    wanted: Sequence[tuple[Selection, str]]
    site: str
    protocol: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RestoreOrder:
    """All that an instance of a stage has or was to have, lost or thought so, to another one: the newest versions that
    the store has, or those of a checkpoint."""

    stage: str
    lost: str
    destination: str
    checkpoint: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Orchestrator:
    """The migrations of all stages."""

    def __init__(
        self,
        journal: Journal,
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        clock_us: Callable[[], int],
        chores: Callable[[], None] = lambda: None,
        needs: Callable[[Migration], bool] = lambda migration: False,
    ) -> None:
        """`chores`: what else there is to do, several times a second. `needs`: whether a migration that is over must be
        known to do it."""
        self._needs = needs
        self.journal, self.sites, self.gateway, self.now_us, self._chores = journal, sites, gateway, clock_us, chores
        self.stages: dict[str, Coordinator] = {}
        self.error: Exception | None = None
        self.spoilt: set[str] = set()
        """Restorations that have failed because the store could not be read."""
        self._changed = threading.Condition(threading.RLock())
        self._workers = Workers(self._work)
        self._deadlines: dict[Place, float] = {}
        """By the monotonic clock: when migrations that have begun are abandoned."""
        self._overdue: set[str] = set()
        """Stages in which a migration's turn has come that could not be journalled yet."""
        self._complaint: Exception | None = None
        """What was last said of an instance that fails; forgotten when none does any more."""
        self._left: set[str] = set()
        """Instances that keep failing, about which the word is out."""
        self._stopping = threading.Event()
        self._has_ended = False
        self._watcher = threading.Thread(target=self._watch, name="orchestrator-watch", daemon=True)

    # ── Life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def recover(self) -> None:
        """Take in what the journal knows, and say again what may not have been heard."""
        with self._changed:
            retention.resume(self.journal, self.stages.values())
            for migration in self.journal.migrations():
                self._queue(migration, self.stages[migration.move.stage].adopt(migration))
                self._note_deadline(migration, migration.left_s(self.now_us()))
            for stage in self.stages:
                self._tell_due(stage)

    def _note_deadline(self, migration: Migration, left: float | None) -> None:
        """A migration that has begun has so many seconds left, and no more."""
        is_under_way = migration.phase != machine.ORDERED and not migration.is_over
        if left is not None and is_under_way and not migration.has_stood_by:
            self._deadlines[migration.move.stage, migration.move.id] = time.monotonic() + left

    def start(self) -> None:
        """Begin to carry commands out."""
        self._workers.start()
        self._watcher.start()

    def stop(self) -> None:
        """Stop; what is not finished goes on at the next start. A call that takes too long is not waited for, and what
        it answers is not listened to any more."""
        self._stopping.set()
        self._workers.stop()
        if self._watcher.is_alive():
            self._watcher.join(GRACE)
        with self._changed:
            self._has_ended = True

    # ── Orders and events ────────────────────────────────────────────────────────────────────────────────────────

    def migrate(
        self,
        stage: str,
        wanted: Sequence[tuple[Selection, str]],
        site: str,
        protocol: str,
        deadline: float,
        why: Sequence[str] = (),
        request: Request | None = None,
        **options: Any,
    ) -> list[str]:
        """Order the migrations that bring each selection to its instance at a site: all of them, or none.

        Returns their names, none if everything is there already. `why`: the first lines of their stories.
        """
        return self.order([Order(stage, wanted, site, protocol, options)], deadline, why, request)

    def order(
        self,
        orders: Sequence[Order | RestoreOrder],
        deadline: float,
        why: Sequence[str] = (),
        request: Request | None = None,
    ) -> list[str]:
        """Order the migrations of all these, which have no key in common, or of none.

        `request`: what asked for them; remembered with them as answered, so that it can be told if it comes again.
        """
        with self._changed:
            planned = self._plan(orders, why)
            for migration in planned:
                migration.ordered_by, migration.ordered_us = request.by if request else ITSELF, self.now_us()
            before = self._remember(planned)
            ids = [migration.move.id for migration in planned]
            try:
                for migration in planned:
                    migration.deadline = deadline
                commands = [self.stages[m.move.stage].start(m, self.now_us()) for m in planned]
                ended = [other for m in planned for other in self.stages[m.move.stage].ended_by(m)]
                if planned or request is not None:
                    answer = None if request is None else request.answered(ids, why)
                    self.journal.write(*ended, *planned, answer=answer)
            except BaseException:  # what is not journalled has not happened
                for migration in planned:
                    self.stages[migration.move.stage].withdraw(migration)
                for coordinator, table, changed in reversed(before):
                    coordinator.put_back(table, changed)
                raise
            for migration, todo in zip(planned, commands, strict=True):
                self._note_deadline(migration, deadline)
                self._queue(migration, todo)
            for order in orders:
                self._tell_due(order.stage)
            return ids

    def _remember(self, planned: Sequence[Migration]) -> list[tuple[Coordinator, RouteTable, list[Migration]]]:
        """What restorations are about to change of others: their routes, and the migrations that they end."""
        found = []
        for migration in planned:
            if migration.move.protocol == "restore":
                coordinator = self.stages[migration.move.stage]
                found.append((coordinator, *copy.deepcopy((coordinator.table, coordinator.ended_by(migration)))))
        return found

    def _plan(self, orders: Sequence[Order | RestoreOrder], why: Sequence[str]) -> list[Migration]:
        """The migrations of some orders. Changes nothing; raises if one cannot be done."""
        number = sum(len(one.migrations) + one.retired.count for one in self.stages.values()) + 1
        planned: list[Migration] = []
        for order in orders:
            coordinator, id = self.stages[order.stage], f"m{number + len(planned)}"
            if isinstance(order, Order):
                planned += coordinator.plan(order.wanted, order.site, order.protocol, id, **order.options)
                continue
            more = coordinator.plan_restore(order.lost, order.destination, id, order.checkpoint, **order.options)
            if any(m.move.stage == order.stage and m.move.selection.overlaps(more.move.selection) for m in planned):
                raise Conflict(f"{order.lost} and another lost instance had the same keys in a move; restore one first")
            planned.append(more)
        for migration in planned:
            migration.story += [machine.Line(machine.ORDERED, line, self.now_us()) for line in why]
        return planned

    def hear(self, stage: str, notice: Report) -> None:
        """A notice of an instance."""
        with self._changed:
            one = self.stages[stage]
            if notice.move in one.migrations or not (one.retired.count or isinstance(notice, Rejected | Unreadable)):
                self.tell(stage, notice.move, notice)  # else it is forgotten; or what was refused did not know its own

    def tell(self, stage: str, id: str, event: Event) -> None:
        """Tell a migration an event: journal what it means, then let it be done."""
        with self._changed:
            self._tell(stage, id, event)
            self._tell_due(stage)
            self._changed.notify_all()

    def _tell(self, stage: str, id: str, event: Event) -> None:
        coordinator, now_us = self.stages[stage], self.now_us()
        draft, commands = coordinator.decide(id, event, now_us)
        self.journal.write(draft)
        coordinator.accept(draft, now_us)
        if isinstance(event, machine.Ordered):
            self._note_deadline(draft, draft.deadline)
        self._queue(draft, commands)

    def _tell_due(self, stage: str) -> None:
        """Let those begin or end whose turn has come. What was told before has happened, whether this succeeds or not:
        if it cannot be journalled now, the watch tries again."""
        try:
            while due := self.stages[stage].due():
                for id, event in due:
                    self._tell(stage, id, event)
        except Retry:
            self._overdue.add(stage)
        else:
            self._overdue.discard(stage)

    def migration(self, stage: str, id: str) -> Migration:
        """One migration, as it is now."""
        with self._changed:
            found = self.stages[stage].migrations
            if id not in found:
                raise UnknownName("migration", id, list(found))
            return found[id]

    def engaged(self, stage: str) -> tuple[set[str], set[str]]:
        """Which instances take part in a migration, and which own keys, at one moment."""
        with self._changed:
            coordinator = self.stages[stage]
            moves = [migration.move for migration in coordinator.unsettled()]
            return {end for m in moves for end in (m.source, m.destination)}, coordinator.table.owners.values()

    def waiting_of(self, stage: str) -> dict[str, str]:
        """By migration of a stage: why a command of it has to be repeated."""
        return {id: why for (name, id), why in self._workers.waiting.items() if name == stage}

    def is_relocating(self, stage: str, instance: str) -> bool:
        """Whether a migration decides where this instance runs: then nobody else may start it."""
        with self._changed:
            found = self.stages[stage].open.values()
            return any(m.move.protocol == "restart" and m.move.source == instance and not m.is_over for m in found)

    def wait(self, stage: str, ids: list[str], timeout: float | None, *, warm: bool = False) -> bool:
        """Until all of these are over, or warm standbys; False if the time ran out first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            found = self.stages[stage].open  # one that is forgotten was over
            while any(not (m.is_over or (warm and m.is_standby)) for m in (found[id] for id in ids if id in found)):
                if self.error is not None:
                    raise self.error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(PERIOD if left is None else min(left, PERIOD))
        return True

    # ── Deeds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        self._workers.add((migration.move.stage, migration.move.id), commands)

    def _answer(self, stage: str, id: str, event: Event) -> None:
        """What came of a command. Too late after the end: a successor may have the journal."""
        with self._changed:
            if not self._has_ended:
                self.tell(stage, id, event)

    def _work(self, stage: str, id: str, command: Command) -> None:
        """Carry a command out. Called by a worker, which repeats it if it raises `Retry` or `Stale`."""
        try:
            try:
                self._carry_out(stage, id, command)
            except Unavailable as error:  # this call has done nothing
                # Whether an instance has run there is known there alone: a site that cannot be reached says nothing.
                fails = {machine.CopyCheckpoint: Unavailable, machine.StartInstance: Unstarted}.get(type(command))
                if fails is None or not isinstance(error, fails):
                    raise
                self._stopping.wait(PERIOD)
                self._answer(stage, id, Failed(str(error)))
        except (Retry, Stale):
            raise
        except Exception as error:
            with self._changed:
                if not self._has_ended:
                    self.fail(f"a command of migration {id} of {stage}", error)
                self._changed.notify_all()

    def _carry_out(self, stage: str, id: str, command: Command) -> None:
        migration = self.migration(stage, id)
        if migration.ended_by:
            return
        match command:
            case Begin() | Cutover() | Abort():
                self.gateway.command(stage, command)
            case Restore():
                self._replay(stage, id, command)
            case Fence(move) if migration.phase == FENCING:
                self.gateway.command(stage, command)
                self.gateway.fence(stage, move)
                self._answer(stage, id, Fenced())
            case machine.Load(move) if migration.phase == LOADING:
                self._load(stage, migration)
            case machine.Announce(kind, move, instance):
                self._post(stage, instance, instance, kind, wire.canonical(move), f"coordinator/{id}/{kind.name}")
            case machine.Forget(move) if move.destination in self.stages[stage].sites:  # or it has been scaled away
                # Behind all parcels that are under way.
                self._post(stage, move.source, move.destination, Kind.FORGET, wire.pack(move.id), f"coordinator/{id}")
            case machine.StopInstance(instance):
                self.sites[migration.from_site].stop(instance)
                self._answer(stage, id, Stopped())
            case machine.CopyCheckpoint(instance, site):
                size = self.sites[site].take(instance, migration.from_site)
                self._travel(stage, id, self.sites[migration.from_site].carry(site, size))
                self._answer(stage, id, Copied(size))
            case machine.StartInstance(instance, site):
                for other in {migration.from_site, migration.to_site} - {site}:
                    self.sites[other].stop(instance)
                self.sites[site].start(instance)
                self._answer(stage, id, Started(site))

    def _travel(self, stage: str, id: str, seconds: float) -> None:
        """Let the time pass that a checkpoint takes over a link; no longer than the migration waits for it."""
        phase, end = self.migration(stage, id).phase, time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.migration(stage, id).phase == phase:
            if self._stopping.wait(min(left, PERIOD)):
                return

    def _load(self, stage: str, migration: Migration) -> None:
        move = migration.move
        try:
            loaded = self.gateway.load(stage, move, migration.checkpoint)
        except (Stop, Refused) as error:  # again would be the same
            kept(LOGGER, f"what migration {move.id} of {stage} restores cannot be read", error)
            self.spoilt.add(move.id)
            self._answer(stage, move.id, Abandoned(f"the store cannot be read: {error}"))
        else:
            self._answer(stage, move.id, loaded)

    def _replay(self, stage: str, id: str, command: Restore) -> None:
        try:
            self.gateway.command(stage, command)
        except Stop as error:  # again would be the same: the log has less than it must have
            self._answer(stage, id, Unreadable(id, "", str(error)))

    def _post(self, stage: str, source: str, destination: str, kind: Kind, body: bytes, writer: str) -> None:
        """Tell all parts of an instance something, once, by the way that another one's posts take to it."""
        places = self.stages[stage].sites
        site = self.sites[places.get(source, places[destination])]
        site.post(source, destination, codec.encode_posts([(kind, EVERY_BIN, body)]), 1, writer, 0)

    # ── Watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while not self._stopping.wait(PERIOD):
            for duty in (self._check_due, self._check_deadlines, self._check_instances, self._retire, self._chores):
                try:
                    duty()
                except Retry:  # somebody is not there now
                    pass
                except Exception as error:  # whatever it is, it must be told, and the watch goes on
                    self.fail("the orchestrator's watch", error)

    def fail(self, what: str, error: Exception) -> None:
        """Keep what went wrong, for `status` and for those that wait."""
        self.error = kept(LOGGER, what, error, self.error)

    def _check_due(self) -> None:
        with self._changed:
            for stage in list(self._overdue):
                self._tell_due(stage)

    def _retire(self) -> None:
        """Forget the oldest of many migrations that are over."""
        with self._changed:
            for coordinator in self.stages.values():
                self.spoilt -= retention.retire(self.journal, coordinator, self._is_needed)

    def _is_needed(self, migration: Migration) -> bool:
        place = migration.move.stage, migration.move.id
        return place in self._deadlines or self._workers.has(place) or self._needs(migration)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for (stage, id), deadline in list(self._deadlines.items()):
            if self.migration(stage, id).is_over or self.migration(stage, id).is_standby:
                del self._deadlines[stage, id]
            elif now >= deadline:
                del self._deadlines[stage, id]
                self.tell(stage, id, Abandoned("its deadline has passed"))

    def _check_instances(self) -> None:
        """Moves to an instance that keeps dying are called off."""
        failed = {name: why for site in self.sites.values() for name, why in site.failed().items()}
        for name, why in failed.items():
            if name not in self._left:
                self._abandon(lambda move, _, to=name: move.destination == to, why)  # type: ignore[misc]
                LOGGER.error("moves to %s are called off: %s", name, why)
                self._complaint = Unavailable(f"{why}; see app.status()")
                self.error = self.error or self._complaint
        self._left = set(failed)
        if not failed and self.error is self._complaint:
            self.error = None

    def abandon(self, site: str, reason: str) -> None:
        """Call off whatever moves from or to a site, as far as it can be; a restoration needs only where it goes."""
        self._abandon(lambda move, sites: site in (sites if move.routing != "replay" else sites[1:]), reason)

    def _abandon(self, concerned: Callable[[Move, tuple[str, str]], bool], reason: str) -> None:
        for stage, coordinator in self.stages.items():
            for migration in list(coordinator.open.values()):
                if not migration.is_over and concerned(migration.move, (migration.from_site, migration.to_site)):
                    self.tell(stage, migration.move.id, Abandoned(reason))
