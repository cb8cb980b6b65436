"""The gateway's role: where records enter a pipeline and where results leave it, for all stages.

    source ──▶ feed ──▶ gateway ──▶ inboxes  ...  outboxes ──▶ outlet ──▶ gateway of the next stage ... ──▶ sinks

The gateway works without the other roles: it reads the instances from the journal until the orchestrator sends them,
measures the lag in their inboxes itself, and keeps reports for the orchestrator in a log until it is reachable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from whimbrel.checkpoints.restoring import Restoring, no_store
from whimbrel.core import wire
from whimbrel.core.errors import Refused, Retry, UnknownName
from whimbrel.core.names import router_of
from whimbrel.core.operator import uses_timers
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Checkpointed, Move, Parked, Report, Result, Unreadable
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore, Router, RouteTable
from whimbrel.egress.dispatch import Dispatcher
from whimbrel.egress.outlet import Letter, Watch
from whimbrel.egress.reports import FIRST, MOST, PAUSE, Reporter
from whimbrel.egress.sinks import Sink, StageSink, Unfit
from whimbrel.egress.threaded import ThreadedOutlet
from whimbrel.egress.ways import ToSinks
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog, Log
from whimbrel.log.backoff import Backoff, may_pass
from whimbrel.log.carrier import number as handed_on
from whimbrel.log.codec import ROWS, ArrowCodec
from whimbrel.log.contract import Appendable
from whimbrel.log.disk import RESERVE, Disk, is_full
from whimbrel.log.folder import Logs
from whimbrel.log.kept import kept
from whimbrel.log.readers import INSTANCE
from whimbrel.log.stepping import Stepper
from whimbrel.orchestrator.journal import GatewayJournal, JournalReader
from whimbrel.orchestrator.ports import FlowStatus, GatewayStatus
from whimbrel.pipeline import Pipeline, Stage
from whimbrel.roles.ages import check_messages, check_way_in, check_way_out
from whimbrel.site.status import described

if TYPE_CHECKING:
    from whimbrel.checkpoints.central import CentralStore
    from whimbrel.checkpoints.checkpointer import Checkpointer

LOGGER = logging.getLogger("whimbrel.roles")
Notify = Callable[[str, Report], None]
"""Sends a notice of a stage to the orchestrator; raises `Retry` if it is unreachable."""

PERIOD = 0.5
"""Seconds between snapshots of the routers, and between ticks."""
SMOOTH = 4
"""About how many samples the rate of records is averaged over."""
SAVE_EVERY = 5.0
"""Seconds between increments, unless configured."""


class StageFlow:
    """One stage: the gateway before its instances, and the outlet after them."""

    def __init__(
        self,
        role: GatewayRole,
        stage: Stage,
        intake: Intake,
        sinks: list[Sink],
        watch: Watch,
        following: Log | None = None,
    ) -> None:
        """`following`: the ingress log of the next stage, if there is one."""
        self.stage, self.intake, self._role, self._logs, self._journal = stage, intake, role, role.logs, role.journal
        placed = role.decided.load(f"instances/{stage.name}")
        self.instances = list(wire.unpack(placed, dict[str, str])) if placed else []
        self._outboxes: dict[str, EmbeddedLog] = {name: self._logs.outbox(name) for name in self.instances}
        self.gateway = Gateway(
            Router(router_of(stage.name), RouteTable(next(iter(self.instances), f"{stage.name}-1"))),
            self._logs.log(f"ingress-{stage.name}"),
            self._logs.log(f"keys-{stage.name}", durable=True),
            self._logs.inbox,
            ArrowCodec(intake.schema),
            role.clock_us,
            wall_clock=not intake.has_time,
            max_ahead_us=role.max_ahead_us if intake.has_time else None,
            keep=role.keep,
            stores=role.store is not None,
        )
        snapshot = role.journal.load(f"router/{stage.name}")
        inboxes = {name: self._logs.inbox(name) for name in self.instances}
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
        dispatcher = Dispatcher(ToSinks("", [""], [""], [""]), _nowhere, self.reporter, stores=role.store is not None)
        self.outlet = ThreadedOutlet(
            stage.name, self._outboxes, sinks, self._send, save, role.clock_us, watch, keep, dispatcher.dispatch
        )
        committed = role.journal.load(f"outlet/{stage.name}")
        self.outlet.check(committed)
        check_way_out(stage.name, committed, self._outboxes, following)
        for name, outbox in self._outboxes.items():
            check_messages(name, outbox, inboxes, self._logs.spools(), self._logs.increments(name).log)
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
            self.checkpointer.place(self.instances)
            self.checkpointer.start()

    def place(self, instances: list[str]) -> None:
        """Read the outboxes of these instances, and of no others."""
        for name in instances:
            if name not in self._outboxes:
                self._outboxes[name] = self._logs.outbox(name)
        for name in [*self._outboxes.keys() - set(instances)]:
            del self._outboxes[name]
            self._logs.forget(name)
        self.instances = instances
        if self.checkpointer is not None:
            self.checkpointer.place(instances)

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
        if self._ticks is not None and not (self._role.feed.ended.is_set() and self.gateway.has_sent_tick):
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
        """Whether more than `most` records wait in an inbox."""
        return any(self._logs.inbox(name).lag(INSTANCE) > most for name in self.instances)

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


class GatewayRole:
    """Feed, gateways and outlets of a pipeline; implements the gateway's port for the orchestrator."""

    def __init__(
        self,
        pipeline: Pipeline,
        logs: Logs,
        journal: GatewayJournal,
        decided: JournalReader,
        notify: Notify,
        clock_us: Callable[[], int],
        *,
        keep: bool,
        max_backlog: int,
        watch: Watch,
        store: str | None = None,
        save_every: float = SAVE_EVERY,
        reserve: int = RESERVE,
    ) -> None:
        """`decided`: the orchestrator's journal. `store`: the address of the central store, if there is one; increments
        are saved there every `save_every` seconds."""
        self.decided = decided
        self.store, self._save_every = store_at(store, save_every), save_every
        self.logs, self.journal, self.notify, self.clock_us, self.keep = logs, journal, notify, clock_us, keep
        self.error: Exception | None = None
        self._backoff = Backoff("saving router snapshots", LOGGER)
        """The back-off of snapshots and ticks."""
        self._disk = Disk("the gateway", [logs.folder], reserve)
        self._run = named(journal)
        self.max_ahead_us = None if pipeline.max_ahead is None else round(pipeline.max_ahead * 1e6)
        source = pipeline.make_source()
        intake = Intake(source.schema(), pipeline.key, pipeline.event_time, lenient=source.lenient)
        intakes = [intake, *(Intake(stage.schema, stage.key) for stage in pipeline.stages[1:])]
        # Durable: few are written, and nothing else would show that one is missing.
        self.dead = DeadLetters(logs.log("dead-letters", durable=True))
        flows: list[StageFlow] = []
        sinks = pipeline.make_sinks()
        for sink in sinks:
            sink.durable = logs.durable
        for number, stage in reversed(list(enumerate(pipeline.stages))):
            last = number == len(pipeline.stages) - 1
            following = None if last else flows[0].gateway.ingress
            flows.insert(0, StageFlow(self, stage, intakes[number], sinks, watch if last else _unseen, following))
            sinks = [StageSink(flows[0].ingest)]
        self.flows = {flow.stage.name: flow for flow in flows}
        self.first, self.last = flows[0], flows[-1]
        self.feed = Feed(source, intake, self.first.gateway, self.dead, partial(self._is_full, max_backlog))
        self._stopping = threading.Event()
        self._saver = threading.Thread(target=self._save_all, name="saver", daemon=True)

    # ── Start and stop ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start to deliver; ingestion starts with `feed`."""
        for flow in reversed(self.flows.values()):
            flow.start()
        self._saver.start()

    def ends(self) -> Iterator[Callable[[], object]]:
        """The calls that stop ingestion, in this order."""
        yield self.feed.stop
        for flow in self.flows.values():
            if flow.checkpointer is not None:
                yield flow.checkpointer.stop
        yield self._stopping.set
        if self._saver.is_alive():
            yield self._saver.join

    def outlet_ends(self) -> Iterator[Callable[[], object]]:
        """The calls that stop delivery, once no more results arrive."""
        for flow in self.flows.values():
            yield flow.outlet.stop
            yield flow.reporting.stop

    def _save_all(self) -> None:
        pause = PERIOD
        while not self._stopping.wait(pause):
            pause = PERIOD
            try:
                for flow in self.flows.values():
                    flow.tick()
                    flow.save()
                    flow.report_refused()
                self._backoff.succeeded()
            except Exception as error:
                if may_pass(error):
                    pause = self._backoff.failed(error)
                else:
                    self.error = kept(LOGGER, "saving router snapshots", error, self.error)

    def checkpointer(self, stage: Stage, gateway: Gateway) -> Checkpointer | None:
        """The checkpointer that saves a stage's increments to the store, if there is one."""
        if self.store is None:
            return None
        from whimbrel.checkpoints.checkpointer import Checkpointer

        return Checkpointer(
            stage.name,
            lambda instance: stage.groups,
            gateway,
            self.logs.increments,
            self.store,
            self._save_every,
            self.clock_us,
            self._run,
        )

    def errors(self) -> list[Exception]:
        """The permanent errors."""
        flows = [error for flow in self.flows.values() for error in (flow.outlet.error, flow.reporting.error)]
        return [error for error in (self.feed.error, self.error, *flows) if error is not None]

    # ── Calls of the orchestrator ────────────────────────────────────────────────────────────────────────────────

    def command(self, stage: str, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        """Append a command to a stage's ingress log, at a definite position between its records."""
        self._flow(stage).gateway.command(command)

    def check_restore(self, stage: str, checkpoint: int | None) -> None:
        """Raise if keys of a stage cannot be restored."""
        self._restoring(stage).since(checkpoint)

    def fence(self, stage: str, move: Move) -> None:
        """Refuse from now on all results of a lost instance for a move's keys."""
        self._restoring(stage).fence(move)

    def load(self, stage: str, move: Move, checkpoint: int | None) -> Loaded:
        """Put the stored state of a fenced move's keys into its destination's inbox."""
        return self._restoring(stage).load(move, checkpoint)

    def checkpoints(self, stage: str) -> list[int]:
        """The checkpoints that a stage's keys can be restored from, oldest first."""
        return self._restoring(stage).checkpoints()

    def place(self, stage: str, instances: list[str]) -> None:
        """Receive the names of all instances of a stage."""
        self._flow(stage).place(instances)

    def save(self, stage: str) -> bool:
        """Persist a snapshot of a stage's router; False if a migration is open."""
        return self._flow(stage).save()

    def order_checkpoint(self, stage: str) -> None:
        """Order an increment of everything that has changed in a stage. Raises `Refused` without a central store."""
        checkpointer = self._flow(stage).checkpointer
        if checkpointer is None:
            raise Refused(
                f"{stage} has no central store to save to; give one: wb.run(..., store=...), whimbrel up --store ..."
            )
        checkpointer.order()

    def has_delivered(self, stage: str, instance: str) -> bool:
        """Whether all results of an instance are delivered."""
        return self._flow(stage).outlet.has_delivered(instance)

    def is_drained(self, stage: str) -> bool:
        """Whether the instances of a stage have received the latest tick, and all their results are delivered."""
        return self._flow(stage).is_drained

    def status(self) -> GatewayStatus:
        """The status of the gateway."""
        return GatewayStatus(
            sent=self.first.gateway.sent,
            delivered=self.last.outlet.delivered,
            dead_letters=dict(self.dead.counts),
            ended=self.feed.ended.is_set(),
            error=described(self.feed.error or self.error),
            stages={name: flow.status() for name, flow in self.flows.items()},
            disk=self._disk.full or next(map(self._disk.message, filter(is_full, self._waited_for())), None),
            held_up={name: held for name, one in self._backoffs().items() if (held := one.status()) is not None},
        )

    def _is_full(self, most: int) -> bool:
        """Back-pressure: whether nothing may be ingested, because an inbox of the first stage or the disk is full."""
        return self._disk.full is not None or self.first.is_full(most)

    def _backoffs(self) -> dict[str, Backoff]:
        outlets = {f"outlet of {name}": flow.outlet.backoff for name, flow in self.flows.items()}
        reports = {f"reports of {name}": flow.reporting.backoff for name, flow in self.flows.items()}
        return {"source": self.feed.backoff, **outlets, **reports, "snapshots": self._backoff}

    def _waited_for(self) -> list[Exception]:
        """The errors that are being retried after a back-off."""
        return [error for one in self._backoffs().values() if (error := one.error) is not None]

    def _flow(self, stage: str) -> StageFlow:
        if stage not in self.flows:
            raise UnknownName("stage", stage, list(self.flows))
        return self.flows[stage]

    def _restoring(self, stage: str) -> Restoring:
        found = self._flow(stage).restoring
        if found is None:
            raise no_store()
        return found


def named(journal: GatewayJournal) -> str:
    """The unique name of a data directory: by it a store identifies the owner of its states."""
    found = journal.load("run")
    if found is None:
        found = uuid4().hex.encode()
        journal.save("run", found)
    return found.decode()


def store_at(url: str | None, save_every: float) -> CentralStore | None:
    """The central store at an address, if one is given. Raises `Refused` if `save_every` is invalid."""
    if url is None:
        return None
    if not save_every > 0:
        raise Refused(f"save_every must be > 0 s, got {save_every:g}; for example save_every=5")
    from whimbrel.checkpoints.central import CentralStore  # fsspec is loaded only if there is a store

    return CentralStore(url)


def _nowhere(place: str, instance: str) -> Appendable:
    raise UnknownName("place", place, [])


def _unseen(results: list[Result], now_us: int) -> None:
    pass
