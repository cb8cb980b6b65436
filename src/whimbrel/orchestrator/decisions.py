"""The orchestrator's decisions: which migrations exist, how an event changes them, and which commands follow.

An event that is not journalled has not happened: it is applied to a draft, the draft is written, and only then does it
replace the migration and are its commands handed on. So if a write raises, nothing has changed.

This module has no thread and no clock of its own. `Orchestrator` provides both; the simulator drives it step by step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Conflict, Retry, UnknownName
from whimbrel.core.keys import Selection
from whimbrel.core.protocols import machine
from whimbrel.core.protocols.machine import Abandoned, Command, Event, Migration
from whimbrel.core.record import Move, Rejected, Report, Unreadable
from whimbrel.core.restoration import Renewal
from whimbrel.core.router import RouteTable
from whimbrel.orchestrator import retention
from whimbrel.orchestrator.journal import MigrationJournal
from whimbrel.orchestrator.orders import Request

ITSELF = "the process itself"
"""The sender of orders without a request."""
Place = tuple[str, str]
"""A stage, and the id of one of its migrations."""


class Commands(Protocol):
    """The pending commands of migrations: those of one migration in their order."""

    def add(self, place: Place, commands: Sequence[Command]) -> None:
        """Queue commands behind all that were added for this migration before."""

    def has(self, place: Place) -> bool:
        """Whether commands of a migration are pending."""


@dataclass(frozen=True)
class Order:
    """Selections of a stage's keys, each to be moved to its instance at a site."""

    stage: str
    wanted: Sequence[tuple[Selection, str]]
    site: str
    protocol: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RestoreOrder:
    """Everything that a lost, or presumed lost, instance of a stage owns or was to own, to be restored at another one:
    the newest versions in the store, or those of a checkpoint."""

    stage: str
    lost: str
    destination: str
    checkpoint: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Decisions:
    """The migrations of all stages."""

    def __init__(
        self,
        journal: MigrationJournal,
        commands: Commands,
        clock_us: Callable[[], int],
        uptime: Callable[[], float],
        needs: Callable[[Migration], bool] = lambda migration: False,
        kept: tuple[int, int] | None = None,
    ) -> None:
        """`uptime`: a monotonic clock in seconds. `needs`: whether something else needs a migration that is over.
        `kept`: how many of those are retained, and how many more until the oldest are dropped."""
        self.journal, self.now_us = journal, clock_us
        self._commands, self._uptime, self._needs, self._kept = commands, uptime, needs, kept
        self.stages: dict[str, Coordinator] = {}
        self.spoilt: set[str] = set()
        """Restorations that failed because the store could not be read."""
        self._changed = threading.Condition(threading.RLock())
        self._deadlines: dict[Place, float] = {}
        """When migrations that have begun are abandoned, as `uptime`."""
        self._overdue: set[str] = set()
        """Stages with a migration that is due to begin or end, which could not be journalled yet."""

    def recover(self) -> None:
        """Load the journal, and issue again the commands that may not have been carried out."""
        with self._changed:
            retention.resume(self.journal, self.stages.values())
            for migration in self.journal.migrations():
                self._queue(migration, self.stages[migration.move.stage].adopt(migration))
                self._note_deadline(migration, migration.left_s(self.now_us()))
            for stage in self.stages:
                self._handle_due(stage)

    def _note_deadline(self, migration: Migration, left: float | None) -> None:
        """Record the deadline of a migration that has begun: `left` seconds from now."""
        is_under_way = migration.phase != machine.ORDERED and not migration.is_over
        if left is not None and is_under_way and not migration.has_stood_by:
            self._deadlines[migration.move.stage, migration.move.id] = self._uptime() + left

    # ── Orders and events ────────────────────────────────────────────────────────────────────────────────────────

    def order(
        self,
        orders: Sequence[Order | RestoreOrder],
        deadline: float,
        why: Sequence[str] = (),
        request: Request | None = None,
    ) -> list[str]:
        """Order the migrations of all these orders, which have no key in common, or of none. Returns their ids, none if
        everything is there already. `why`: the first lines of their stories.

        `request`: the request for these orders; journalled with them as answered, so that a retry gets that answer.
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
                ended = [
                    other for m in planned if m.move.replays for other in self.stages[m.move.stage].losses.ended_by(m)
                ]
                if planned or request is not None:
                    answer = None if request is None else request.answered(ids, why)
                    self.journal.write(*ended, *planned, answer=answer)
            except BaseException:  # not journalled: undo it
                for migration in planned:
                    self.stages[migration.move.stage].withdraw(migration)
                for coordinator, table, changed in reversed(before):
                    coordinator.put_back(table, changed)
                raise
            for migration, todo in zip(planned, commands, strict=True):
                self._note_deadline(migration, deadline)
                self._queue(migration, todo)
            for order in orders:
                self._handle_due(order.stage)
            return ids

    def _remember(self, planned: Sequence[Migration]) -> list[tuple[Coordinator, RouteTable, list[Migration]]]:
        """Copies of what restorations are about to change: the routes, and the migrations that they end."""
        found = []
        for migration in planned:
            if migration.move.replays:
                coordinator = self.stages[migration.move.stage]
                ended = [machine.copied(other) for other in coordinator.losses.ended_by(migration)]
                found.append((coordinator, coordinator.table.copy(), ended))
        return found

    def _plan(self, orders: Sequence[Order | RestoreOrder], why: Sequence[str]) -> list[Migration]:
        """The migrations of some orders. Changes nothing; raises if one is impossible."""
        number = sum(len(one.migrations) + one.retired.count for one in self.stages.values()) + 1
        planned: list[Migration] = []
        for order in orders:
            coordinator, id = self.stages[order.stage], f"m{number + len(planned)}"
            if isinstance(order, Order):
                planned += coordinator.plan(order.wanted, order.site, order.protocol, id, **order.options)
                continue
            more = coordinator.losses.plan(order.lost, order.destination, id, order.checkpoint, **order.options)
            if any(m.move.stage == order.stage and m.move.selection.overlaps(more.move.selection) for m in planned):
                raise Conflict(f"{order.lost} and another lost instance had the same keys in a move; restore one first")
            planned.append(more)
        for migration in planned:
            migration.story += [machine.StoryLine(machine.ORDERED, line, self.now_us()) for line in why]
        return planned

    def receive(self, stage: str, notice: Report) -> None:
        """Handle a notice of an instance."""
        with self._changed:
            one = self.stages[stage]
            if notice.move in one.migrations or not (one.retired.count or isinstance(notice, Rejected | Unreadable)):
                self.handle(
                    stage, notice.move, notice
                )  # else it is forgotten; or what was refused did not name its move

    def handle(self, stage: str, id: str, event: Event) -> None:
        """Apply an event to a migration: journal the result, then queue its commands."""
        with self._changed:
            self._handle(stage, id, event)
            self._handle_due(stage)
            self._changed.notify_all()

    def _handle(self, stage: str, id: str, event: Event) -> None:
        coordinator, now_us = self.stages[stage], self.now_us()
        draft, commands = coordinator.decide(id, event, now_us)
        self.journal.write(draft)
        coordinator.accept(draft, now_us)
        if isinstance(event, machine.Ordered):
            self._note_deadline(draft, draft.deadline)
        self._queue(draft, commands)

    def _handle_due(self, stage: str) -> None:
        """Begin or end the migrations that are due. Earlier events stay applied, whether this succeeds or not: if it
        cannot be journalled now, the watch thread retries."""
        try:
            while due := self.stages[stage].due():
                for id, event in due:
                    self._handle(stage, id, event)
        except Retry:
            self._overdue.add(stage)
        else:
            self._overdue.discard(stage)

    def migration(self, stage: str, id: str) -> Migration:
        """The current state of a migration."""
        with self._changed:
            found = self.stages[stage].migrations
            if id not in found:
                raise UnknownName("migration", id, list(found))
            return found[id]

    def engaged(self, stage: str) -> tuple[set[str], set[str]]:
        """Which instances take part in a migration, and which own keys, read atomically."""
        with self._changed:
            coordinator = self.stages[stage]
            moves = [migration.move for migration in coordinator.open.values()]
            return {end for m in moves for end in (m.source, m.destination)}, coordinator.table.owners.values()

    def renewal(self, stage: str, instance: str) -> Renewal:
        """What an instance must know that starts without its state, read atomically."""
        with self._changed:
            return self.stages[stage].losses.renewal(instance)

    def is_relocating(self, stage: str, instance: str) -> bool:
        """Whether a migration decides where this instance runs: then nothing else may start it."""
        with self._changed:
            found = self.stages[stage].open.values()
            return any(m.move.relocates and m.move.source == instance and not m.is_over for m in found)

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        self._commands.add((migration.move.stage, migration.move.id), commands)

    # ── Periodically ─────────────────────────────────────────────────────────────────────────────────────────────

    def check_due(self) -> None:
        """Begin or end the migrations that are due and could not be journalled before."""
        if not self._overdue:
            return
        with self._changed:
            for stage in list(self._overdue):
                self._handle_due(stage)

    def retire(self) -> None:
        """Drop the oldest migrations that are over, beyond the retention limit."""
        with self._changed:
            for coordinator in self.stages.values():
                self.spoilt -= retention.retire(self.journal, coordinator, self._is_needed, self._kept)

    def _is_needed(self, migration: Migration) -> bool:
        place = migration.move.stage, migration.move.id
        return place in self._deadlines or self._commands.has(place) or self._needs(migration)

    def check_deadlines(self) -> None:
        """Abandon migrations whose deadline has passed, if they can still be aborted."""
        now = self._uptime()
        for (stage, id), deadline in list(self._deadlines.items()):
            if self.migration(stage, id).is_over or self.migration(stage, id).is_standby:
                del self._deadlines[stage, id]
            elif now >= deadline:
                del self._deadlines[stage, id]
                self.handle(stage, id, Abandoned("its deadline has passed"))

    def abandon(self, site: str, reason: str) -> None:
        """Abort migrations from or to a site that still can be aborted; a restoration needs only its destination."""
        self._abandon(lambda move, sites: site in (sites[1:] if move.replays else sites), reason)

    def _abandon(self, concerned: Callable[[Move, tuple[str, str]], bool], reason: str) -> None:
        for stage, coordinator in self.stages.items():
            for migration in list(coordinator.open.values()):
                if not migration.is_over and concerned(migration.move, (migration.from_site, migration.to_site)):
                    self.handle(stage, migration.move.id, Abandoned(reason))
