"""The flow of one stage through a gateway: the way in before its instances, and the way out after them.

    gateway ──▶ inboxes  ...  outboxes, arrivals ──▶ outlet ──▶ next stage's gateway, or sinks

An inbox is here or, for an instance elsewhere, at its place. The outlet reads the outboxes of the instances here, and
dispatches what other places need; of an instance elsewhere it reads the arrivals: what that instance's place has
dispatched to this one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from whimbrel.checkpoints.restoring import Restoring
from whimbrel.core import wire
from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.names import router_of
from whimbrel.core.operator import uses_timers
from whimbrel.core.record import Checkpointed, Outgoing, Parked, Result, Unreadable
from whimbrel.core.router import Router, RouteTable
from whimbrel.egress.dispatch import Dispatcher, Ways
from whimbrel.egress.outlet import Letter, Watch
from whimbrel.egress.reports import FIRST, MOST, PAUSE, Reporter
from whimbrel.egress.sinks import Sink, Unfit
from whimbrel.egress.threaded import ThreadedOutlet
from whimbrel.gateway.entrance import Door
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog, Log
from whimbrel.log.carrier import number as handed_on
from whimbrel.log.codec import ROWS, ArrowCodec
from whimbrel.log.contract import Writable
from whimbrel.log.readers import INSTANCE
from whimbrel.log.stepping import Stepper
from whimbrel.orchestrator.ports import FlowStatus
from whimbrel.pipeline import Stage
from whimbrel.roles.ages import check_messages, check_reports, check_way_in, check_way_out
from whimbrel.site.status import described

if TYPE_CHECKING:
    from whimbrel.roles.gateway import GatewayRole

LOGGER = logging.getLogger("whimbrel.roles")
SMOOTH = 4
"""About how many samples the rate of records is averaged over."""


class StageFlow:
    """One stage: the gateway before its instances, and the outlet after them."""

    def __init__(
        self,
        role: GatewayRole,
        stage: Stage,
        intake: Intake,
        ways: Ways,
        sinks: list[Sink],
        watch: Watch,
        following: Log | None = None,
    ) -> None:
        """`ways`: where results go. `sinks`: those here. `following`: the ingress log of the next stage here, if there
        is one."""
        self.stage, self.intake, self._role, self._logs, self._journal = stage, intake, role, role.logs, role.journal
        self._around = role.around
        placed = role.decided.load(f"instances/{stage.name}")
        self.instances = wire.unpack(placed, dict[str, str]) if placed else {}
        """By instance: its site."""
        self._outboxes: dict[str, EmbeddedLog] = {name: self._outbox(name) for name in self.instances}
        codec = ArrowCodec(intake.schema)
        self.gateway = Gateway(
            Router(router_of(stage.name, self._around.here), RouteTable(self._first_owner())),
            self._logs.log(f"ingress-{stage.name}"),
            self._logs.log(f"keys-{stage.name}", durable=True),
            self.inbox,
            codec,
            role.clock_us,
            wall_clock=not intake.has_time,
            max_ahead_us=role.max_ahead_us if intake.has_time else None,
            keep=role.keep,
            stores=role.store is not None,
        )
        self.door = Door(self.gateway, codec)
        snapshot = role.journal.load(f"router/{stage.name}")
        inboxes = {name: self.inbox(name) for name in self.instances}
        check_way_in(self.gateway.name, snapshot, self.gateway.ingress, inboxes)
        self.gateway.recover(snapshot)
        self.checkpointer = role.checkpointer(stage, self.gateway)
        """None if there is no central store."""
        save = partial(role.journal.save, f"outlet/{stage.name}")
        keep = partial(role.journal.keep, f"outlet/{stage.name}") if self.checkpointer else None
        # Durable, like dead letters: few are written, and nothing else would show that one is missing.
        reports = self._logs.log(f"reports-{stage.name}", durable=True)
        self.reporter = Reporter(reports, partial(role.notify, stage.name))
        what = f"sending the reports of {stage.name}"
        self.reporting = Stepper(what, self.reporter.step, LOGGER, first=FIRST, most=MOST, pause=PAUSE)
        self.reporter.appended = self.reporting.wake
        self._dispatcher = Dispatcher(ways, self._arrivals_at, self.reporter, stores=role.store is not None)
        self.outlet = ThreadedOutlet(
            stage.name, self._outboxes, sinks, self._send, save, role.clock_us, watch, keep, self._dispatch
        )
        committed = role.journal.load(f"outlet/{stage.name}")
        self.outlet.check(committed)
        check_way_out(stage.name, committed, self._outboxes, following)
        messages = {
            name: inbox if self.is_here(name) else self._around.messages_at(self.place_of(name), f"inbox-{name}")
            for name, inbox in inboxes.items()
        }
        for name, outbox in self._outboxes.items():
            if self.is_here(name):
                check_reports(name, outbox, reports)
                check_messages(name, outbox, messages, self._logs.spools(), self._logs.increments(name).log)
        self._rate, self._looked = 0.0, (time.monotonic(), 0)
        self._ticks = self.gateway.ingress.counter("ticks") if uses_timers(stage.operator) else None
        self._saving = threading.Lock()
        self._reported: set[str] = set()
        self.restoring: Restoring | None = None
        if role.store is not None:
            self.restoring = Restoring(stage.name, self.gateway, self.outlet, self._logs.inbox, role.store)

    def start(self) -> None:
        """Start to deliver."""
        name = f"outlet/{self.stage.name}"
        self.outlet.recover(self._journal.load(name), self._journal.reached(name) if self.checkpointer else None)
        self.outlet.start()
        self.reporting.start()
        if self.checkpointer is not None:
            self.checkpointer.place(list(self.instances))
            self.checkpointer.start()

    # ── Instances, here and elsewhere ────────────────────────────────────────────────────────────────────────────

    def place(self, instances: dict[str, str]) -> None:
        """Read the output of these instances, and of no others. `instances`: each with its site."""
        self.instances = instances
        for name in instances:
            if name not in self._outboxes:
                self._outboxes[name] = self._outbox(name)
        for name in [*self._outboxes.keys() - instances.keys()]:
            del self._outboxes[name]
            self._logs.forget(name)
        if self.checkpointer is not None:
            self.checkpointer.place(list(instances))

    def is_here(self, instance: str) -> bool:
        """Whether an instance runs at this place. Raises `Unavailable` if its place is not known yet."""
        return self.place_of(instance) == self._around.here

    def place_of(self, instance: str) -> str:
        """The place of an instance. Raises `Unavailable` if it is not known yet."""
        if instance in self.instances:
            return self._around.place_of(self.instances[instance])
        if len(self._around.places) == 1 or instance == self._around.first_instance(self.stage.name):
            return self._around.here
        raise Unavailable(f"{self._around.here} does not know yet where {instance} runs: the orchestrator will say it")

    def inbox(self, instance: str) -> Writable:
        """The inbox of an instance, wherever it is."""
        place = self.place_of(instance)
        if place == self._around.here:
            return self._logs.inbox(instance)
        return self._around.log_at(place, f"inbox-{instance}")

    def _outbox(self, instance: str) -> EmbeddedLog:
        return self._logs.outbox(instance) if self.is_here(instance) else self._logs.arrivals(instance)

    def _first_owner(self) -> str:
        here = (name for name in self.instances if self.is_here(name))
        return next(here, self._around.first_instance(self.stage.name))

    def _arrivals_at(self, place: str, instance: str) -> Writable:
        return self._around.log_at(place, f"arrivals-{instance}")

    def _dispatch(self, name: str, position: int, parts: list[Outgoing]) -> list[Outgoing]:
        return self._dispatcher.dispatch(name, position, parts) if self.is_here(name) else parts

    # ── Letters ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, letter: Letter, number: int) -> None:
        writer = f"outlet/{self.stage.name}"
        if isinstance(letter, Parked):
            self._role.dead.park(letter, writer=writer, counter=number)
        elif isinstance(letter, Unfit):
            why = f"{letter.error}; key {letter.key!r}, seq {letter.seq}"
            self._role.dead.refuse(letter.sink, letter.seq, why, letter.values, writer=writer, counter=number)
        else:
            self._confirm(letter)

    def _confirm(self, saved: Checkpointed) -> None:
        """Confirm an increment. Also without a store at present: the part will not save these versions again."""
        if saved.instance in self.instances:
            self._logs.increments(saved.instance).confirm(saved, self._role.clock_us())
            if self.checkpointer is not None:
                self.checkpointer.wake()

    def key_of(self, result: Result) -> str | None:
        """The key of a result of the previous stage, as a record of this one."""
        return self.intake.key_of(result.values)

    def ingest(self, results: list[Result], number: int) -> bool:
        """Ingest the results of the previous stage; return whether any became a record."""
        good = []
        answers = self.intake.take([result.values for result in results])
        for place, (result, taken) in enumerate(zip(results, answers, strict=True), number * ROWS):
            if isinstance(taken, tuple):
                good.append(taken)
            else:  # identified by its place among all results handed on: seqs of different keys are unordered
                source = f"results for {self.stage.name}"
                self._role.dead.put(taken, source, result.seq, result.values, writer=source, counter=place)
        if good:
            self.gateway.ingest(good, "stage before", handed_on(number), partial(handed_on, number))
        return bool(good)

    def tick(self) -> None:
        """Sample the rate of incoming records, and send a tick with the event time if the operator has timers."""
        now, received = time.monotonic(), self.gateway.received
        if now > self._looked[0]:
            self._rate += ((received - self._looked[1]) / (now - self._looked[0]) - self._rate) / SMOOTH
        self._looked = now, received
        if self._ticks is not None and not (self._role.has_ended and self.gateway.has_sent_tick):
            self._ticks += 1
            self.gateway.tick(self._ticks)

    def report_refused(self) -> None:
        """Report restorations that cannot be replayed to the orchestrator, with retries until it has received them."""
        for id, reason in list(self.gateway.refused.items()):
            if id not in self._reported:
                with suppress(Retry):
                    self._role.notify(self.stage.name, Unreadable(id, self.gateway.name, reason))
                    self._reported.add(id)
                    LOGGER.error("restoration %s of %s cannot be replayed: %s", id, self.stage.name, reason)

    def save(self) -> bool:
        """Persist a snapshot of the router; False if a migration is open."""
        with self._saving:  # an older one must not replace a newer one, up to which the log is trimmed
            blob = self.gateway.save()
            if blob is None:
                return False
            self._journal.save(f"router/{self.stage.name}", blob)
            self.gateway.saved(blob)
            return True

    @property
    def is_drained(self) -> bool:
        """Whether the instances have received the latest tick, and all their results and reports are delivered."""
        is_idle = self.outlet.is_idle and self.reporter.is_idle  # in this order: an outlet makes reports
        return is_idle and (self._ticks is None or self.gateway.has_sent_tick)

    def is_full(self, most: int) -> bool:
        """Whether more than `most` records wait in an inbox here. An instance elsewhere is full when the spool to its
        place is: then appends raise."""
        return any(self._logs.inbox(name).lag(INSTANCE) > most for name in list(self.instances) if self.is_here(name))

    def status(self) -> FlowStatus:
        """The flow of records through the stage."""
        sizes: Counter[str] = Counter()
        for (name, _), size in list(self.outlet.state_bytes.items()):
            sizes[name] += size
        return FlowStatus(
            rate=self._rate,
            record_bytes=self.gateway.received_bytes // max(self.gateway.received, 1),
            state_bytes=dict(sizes),
            refused=self.outlet.gate.refused,
            error=described(self.outlet.error or self.reporting.error),
            store=None if self.checkpointer is None else self.checkpointer.status(),
        )
