"""The orchestrator's decisions: which migrations there are, what an event means, and what is to be done then.

What is not journalled has not happened: an event is decided on a draft, the draft is written, and only then is it what
the migration is, and only then are its commands handed on. So whatever a write raises, all is as it was before.

It has no thread and no clock of its own. `Orchestrator` gives it both; the simulator drives it step by step.
"""

from __future__ import annotations

import copy
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
from whimbrel.core.router import RouteTable
from whimbrel.orchestrator import retention
from whimbrel.orchestrator.journal import MigrationJournal
from whimbrel.orchestrator.orders import Request

ITSELF = "the process itself"
"""The sender of orders that no request asks for."""
Place = tuple[str, str]
"""A stage, and the id of one of its migrations."""


class Commands(Protocol):
    """The commands of migrations that have not been carried out yet: those of one migration in their order."""

    def add(self, place: Place, commands: Sequence[Command]) -> None:
        """Carry these out behind all that was added for this migration before."""

    def has(self, place: Place) -> bool:
        """Whether something is to be done for a migration."""


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
        """`uptime`: seconds that only grow. `needs`: whether something else needs a migration that is over. `kept`: how
        many of those are remembered, and how many more until the others are forgotten."""
        self.journal, self.now_us = journal, clock_us
        self._commands, self._uptime, self._needs, self._kept = commands, uptime, needs, kept
        self.stages: dict[str, Coordinator] = {}
        self.spoilt: set[str] = set()
        """Restorations that have failed because the store could not be read."""
        self._changed = threading.Condition(threading.RLock())
        self._deadlines: dict[Place, float] = {}
        """By `uptime`: when migrations that have begun are abandoned."""
        self._overdue: set[str] = set()
        """Stages in which a migration's turn has come that could not be journalled yet."""

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
            self._deadlines[migration.move.stage, migration.move.id] = self._uptime() + left

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
            if migration.move.replays:
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
            migration.story += [machine.StoryLine(machine.ORDERED, line, self.now_us()) for line in why]
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
            moves = [migration.move for migration in coordinator.open.values()]
            return {end for m in moves for end in (m.source, m.destination)}, coordinator.table.owners.values()

    def is_relocating(self, stage: str, instance: str) -> bool:
        """Whether a migration decides where this instance runs: then nobody else may start it."""
        with self._changed:
            found = self.stages[stage].open.values()
            return any(m.move.relocates and m.move.source == instance and not m.is_over for m in found)

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        self._commands.add((migration.move.stage, migration.move.id), commands)

    # ── From time to time ────────────────────────────────────────────────────────────────────────────────────────

    def check_due(self) -> None:
        """Let those begin or end whose turn has come and could not be journalled."""
        with self._changed:
            for stage in list(self._overdue):
                self._tell_due(stage)

    def retire(self) -> None:
        """Forget the oldest of many migrations that are over."""
        with self._changed:
            for coordinator in self.stages.values():
                self.spoilt -= retention.retire(self.journal, coordinator, self._is_needed, self._kept)

    def _is_needed(self, migration: Migration) -> bool:
        place = migration.move.stage, migration.move.id
        return place in self._deadlines or self._commands.has(place) or self._needs(migration)

    def check_deadlines(self) -> None:
        """Abandon migrations whose time is over, as far as they can be."""
        now = self._uptime()
        for (stage, id), deadline in list(self._deadlines.items()):
            if self.migration(stage, id).is_over or self.migration(stage, id).is_standby:
                del self._deadlines[stage, id]
            elif now >= deadline:
                del self._deadlines[stage, id]
                self.tell(stage, id, Abandoned("its deadline has passed"))

    def abandon(self, site: str, reason: str) -> None:
        """Call off whatever moves from or to a site, as far as it can be; a restoration needs only where it goes."""
        self._abandon(lambda move, sites: site in (sites[1:] if move.replays else sites), reason)

    def _abandon(self, concerned: Callable[[Move, tuple[str, str]], bool], reason: str) -> None:
        for stage, coordinator in self.stages.items():
            for migration in list(coordinator.open.values()):
                if not migration.is_over and concerned(migration.move, (migration.from_site, migration.to_site)):
                    self.tell(stage, migration.move.id, Abandoned(reason))
