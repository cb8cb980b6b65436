"""The orchestrator: knows the stages, sites and migrations; decides, journals, and only then lets it be done.

Off the data path: if it dies, data keeps flowing, and whoever starts from its journal finishes what it had ordered.
One thread carries commands out, in order; events come in from any thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whimbrel.control.journal import Journal
from whimbrel.control.orders import Request
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Retry, Unavailable, UnknownName
from whimbrel.core.keys import EVERY_BIN, Selection
from whimbrel.core.protocols import machine
from whimbrel.core.protocols.machine import Abandoned, Command, Copied, Event, Failed, Migration, Started, Stopped
from whimbrel.core.record import Aborted, Kind, Left, Opened, Ready, Warm
from whimbrel.core.router import Abort, Begin, Cutover
from whimbrel.gateway.gateway import Gateway
from whimbrel.log import codec
from whimbrel.log.contract import Appendable, Lane
from whimbrel.site.site import Site

PERIOD = 0.2
RESTARTS = 3
PATIENCE = 300.0
"""An instance whose query dies more than so often within so many seconds is left alone."""
DEADLINE = 120.0
"""Seconds after which a migration that can still be undone is abandoned, unless its order says otherwise."""


@dataclass
class StageControl:
    """What the orchestrator can reach of one stage."""

    coordinator: Coordinator
    gateways: list[Gateway]
    inbox_of: Callable[[str, str], Appendable]
    """The way that posts of one instance go to another one's inbox."""
    failures: dict[str, list[float]] = field(default_factory=dict)
    """By instance: when its query has died, lately."""


@dataclass(frozen=True)
class Order:
    """Selections of a stage, each to its instance at a site."""

    stage: str
    wanted: Sequence[tuple[Selection, str]]
    site: str
    protocol: str
    options: Mapping[str, Any]


class Orchestrator:
    """The migrations of all stages."""

    def __init__(
        self,
        journal: Journal,
        sites: dict[str, Site],
        clock_us: Callable[[], int],
        carry: Callable[[str, str, int, threading.Event], None] = lambda *way: None,
    ) -> None:
        """`carry`: lets a checkpoint of some size take the way between two sites."""
        self.journal, self.sites, self._clock_us, self._carry = journal, sites, clock_us, carry
        self.stages: dict[str, StageControl] = {}
        self.error: Exception | None = None
        self._changed = threading.Condition(threading.RLock())
        self._todo: queue.Queue[tuple[str, str, Command]] = queue.Queue()
        self._deadlines: dict[tuple[str, str], float] = {}
        self._patience: dict[tuple[str, str], float] = {}
        """How long migrations may take that have not begun."""
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._carry_out_all, name="orchestrator", daemon=True),
            threading.Thread(target=self._watch, name="orchestrator-watch", daemon=True),
        ]

    # ── Life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def recover(self) -> None:
        """Take in what the journal knows, and say again what may not have been heard."""
        with self._changed:
            for migration in self.journal.migrations():
                control = self.stages[migration.move.stage]
                self._queue(migration, control.coordinator.adopt(migration))
                self._note_deadline(migration)
            for stage in self.stages:
                self._tell_due(stage)

    def _note_deadline(self, migration: Migration) -> None:
        """A migration that has begun has so much time, and no more."""
        place = (migration.move.stage, migration.move.id)
        if migration.phase != machine.ORDERED and not migration.is_over:
            self._deadlines[place] = time.monotonic() + self._patience.pop(place, DEADLINE)

    def start(self) -> None:
        """Begin to carry commands out."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop; what is not finished goes on at the next start."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

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
        self, orders: Sequence[Order], deadline: float, why: Sequence[str] = (), request: Request | None = None
    ) -> list[str]:
        """Order the migrations of all these, which have no key in common, or of none.

        `request`: what asked for them; remembered with them as answered, so that it can be told if it comes again.
        """
        with self._changed:
            planned, commands = self._plan(orders, why)
            ids = [migration.move.id for migration in planned]
            try:
                if planned or request is not None:
                    answer = None if request is None else (request.name, wire.pack(request.answered(ids, why)))
                    self.journal.write(*planned, answer=answer)
            except Unavailable:  # what is not journalled has not happened
                for migration in planned:
                    del self.stages[migration.move.stage].coordinator.migrations[migration.move.id]
                raise
            for migration, todo in zip(planned, commands, strict=True):
                self._patience[migration.move.stage, migration.move.id] = deadline
                self._note_deadline(migration)
                self._queue(migration, todo)
            for stage in {migration.move.stage for migration in planned}:
                self._tell_due(stage)
            return ids

    def _plan(self, orders: Sequence[Order], why: Sequence[str]) -> tuple[list[Migration], list[list[Command]]]:
        """The migrations of some orders, taken in, and what each begins with. Changes nothing if one cannot be done."""
        number = sum(len(control.coordinator.migrations) for control in self.stages.values()) + 1
        planned: list[Migration] = []
        for order in orders:
            coordinator, id = self.stages[order.stage].coordinator, f"m{number + len(planned)}"
            planned += coordinator.plan(order.wanted, order.site, order.protocol, id, **order.options)
        for migration in planned:
            migration.story += [machine.Line(machine.ORDERED, line, self._clock_us()) for line in why]
        return planned, [self.stages[m.move.stage].coordinator.start(m, self._clock_us()) for m in planned]

    def hear(self, stage: str, notice: Ready | Warm | Left | Opened | Aborted) -> None:
        """A notice of an instance."""
        self.tell(stage, notice.move, notice)

    def tell(self, stage: str, id: str, event: Event) -> None:
        """Tell a migration an event: journal what it means, then let it be done."""
        with self._changed:
            self._tell(stage, id, event)
            self._tell_due(stage)
            self._changed.notify_all()

    def _tell(self, stage: str, id: str, event: Event) -> None:
        coordinator = self.stages[stage].coordinator
        commands = coordinator.handle(id, event, self._clock_us())
        migration = coordinator.migrations[id]
        self.journal.write(migration)
        if isinstance(event, machine.Ordered):
            self._note_deadline(migration)
        self._queue(migration, commands)

    def _tell_due(self, stage: str) -> None:
        while due := self.stages[stage].coordinator.due():
            for id, event in due:
                self._tell(stage, id, event)

    def migration(self, stage: str, id: str) -> Migration:
        """One migration, as it is now."""
        with self._changed:
            return self.stages[stage].coordinator.migrations[id]

    def engaged(self, stage: str) -> tuple[set[str], set[str]]:
        """Which instances take part in a migration, and which own keys, at one moment."""
        with self._changed:
            coordinator = self.stages[stage].coordinator
            moves = [migration.move for migration in coordinator.unsettled()]
            owners = coordinator.table.owners
            return {end for m in moves for end in (m.source, m.destination)}, {*owners.by_bin, *owners.by_key.values()}

    def is_relocating(self, stage: str, instance: str) -> bool:
        """Whether a migration decides where this instance runs: then nobody else may start it."""
        with self._changed:
            migrations = self.stages[stage].coordinator.migrations.values()
            return any(m.move.protocol == "restart" and m.move.source == instance and not m.is_over for m in migrations)

    def wait(self, stage: str, ids: list[str], timeout: float | None, *, warm: bool = False) -> bool:
        """Until all of these are over, or warm standbys; False if the time ran out first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not all(m.is_over or (warm and m.is_standby) for m in (self.migration(stage, id) for id in ids)):
                if self.error is not None:
                    raise self.error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(PERIOD if left is None else min(left, PERIOD))
        return True

    # ── Deeds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _queue(self, migration: Migration, commands: list[Command]) -> None:
        for command in commands:
            self._todo.put((migration.move.stage, migration.move.id, command))

    def _carry_out_all(self) -> None:
        while not self._stopping.is_set():
            try:
                stage, id, command = self._todo.get(timeout=PERIOD)
            except queue.Empty:
                continue
            try:
                self._carry_out(stage, id, command)
            except Retry as error:
                self._answer_failure(stage, id, command, error)
            except Exception as error:
                with self._changed:
                    self.error = error
                    self._changed.notify_all()

    def _carry_out(self, stage: str, id: str, command: Command) -> None:
        control = self.stages[stage]
        migration = self.migration(stage, id)
        match command:
            case Begin() | Cutover() | Abort():
                for gateway in control.gateways:
                    gateway.command(command)
            case machine.Announce(kind, move, instance):
                _post(control.inbox_of(instance, instance), kind, wire.pack(move), f"coordinator/{id}/{kind.name}")
            case machine.Forget(move) if move.destination in control.coordinator.sites:  # or it has been scaled away
                inbox = control.inbox_of(move.source, move.destination)  # behind all parcels that are under way
                _post(inbox, Kind.FORGET, wire.pack(move.id), f"coordinator/{id}")
            case machine.StopInstance(instance):
                self.sites[migration.from_site].stop(instance)
                self.tell(stage, id, Stopped())
            case machine.CopyCheckpoint(instance, site):
                size = self.sites[site].take(instance, self.sites[migration.from_site])
                self._carry(migration.from_site, site, size, self._stopping)
                self.tell(stage, id, Copied(size))
            case machine.StartInstance(instance, site):
                for other in self.sites.values():
                    if other.name != site:
                        other.stop(instance)
                self.sites[site].start(instance)
                self.tell(stage, id, Started(site))

    def _answer_failure(self, stage: str, id: str, command: Command, error: Retry) -> None:
        self._stopping.wait(PERIOD)
        nothing_happened = isinstance(error, Unavailable)
        if nothing_happened and isinstance(command, (machine.CopyCheckpoint, machine.StartInstance)):
            self.tell(stage, id, Failed(str(error)))
        else:  # a log that cannot be written now, an instance that ran there already: repeated until it works
            self._todo.put((stage, id, command))

    # ── Watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while not self._stopping.wait(PERIOD):
            try:
                self._check_deadlines()
                self._check_queries()
            except Exception as error:  # whatever it is, it must be told, and the watch goes on
                self.error = error

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for (stage, id), deadline in list(self._deadlines.items()):
            if self.migration(stage, id).is_over or self.migration(stage, id).is_standby:
                del self._deadlines[stage, id]
            elif now > deadline:
                del self._deadlines[stage, id]
                self.tell(stage, id, Abandoned("its deadline has passed"))

    def _check_queries(self) -> None:
        """A query that died is started again from its checkpoint; one that keeps dying is left, and said so."""
        for site in self.sites.values():
            for instance, query in list(site.queries.items()):
                if query.is_active or query.exception is None:  # first: one that was stopped may be nobody's by now
                    continue
                stage, control = self._stage_of(instance)
                if self.is_relocating(stage, instance):
                    continue
                now = time.monotonic()
                failures = [moment for moment in control.failures.get(instance, ()) if now - moment < PATIENCE]
                control.failures[instance] = [*failures, now]
                if len(failures) < RESTARTS:
                    site.start(instance, wait=False)
                else:
                    self._give_up(stage, control, instance, f"{instance} at {site.name} keeps failing")

    def _give_up(self, stage: str, control: StageControl, instance: str, reason: str) -> None:
        for migration in list(control.coordinator.migrations.values()):
            if not migration.is_over and migration.move.destination == instance:
                self.tell(stage, migration.move.id, Abandoned(reason))
        self.error = self.error or Unavailable(f"{reason}; see app.status()")

    def _stage_of(self, instance: str) -> tuple[str, StageControl]:
        for name, control in self.stages.items():
            if instance in control.coordinator.sites:
                return name, control
        raise UnknownName("instance", instance, [])


def _post(inbox: Appendable, kind: Kind, body: bytes, writer: str) -> None:
    """Tell all parts of an instance something, once."""
    inbox.append(codec.encode_posts([(kind, EVERY_BIN, body)]), count=1, writer=writer, counter=0, lane=Lane.CONTROL)
