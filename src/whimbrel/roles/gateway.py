"""The gateway's role: where records enter a pipeline and where results leave it, for all stages.

    source ──▶ feed ──▶ gateway ──▶ inboxes  ...  outboxes ──▶ outlet ──▶ gateway of the next stage ... ──▶ sinks

The gateway works without the other roles: it reads the instances from the journal until the orchestrator sends them,
measures the lag in their inboxes itself, and keeps reports for the orchestrator in a log until it is reachable.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from whimbrel.checkpoints.restoring import Restoring, no_store
from whimbrel.core import wire
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.names import router_of
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Move, Report, Result
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore
from whimbrel.egress.outlet import Watch
from whimbrel.egress.sinks import Sink, StageSink
from whimbrel.egress.ways import EACH, ToHomes, ToSinks
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.entrance import Entrance
from whimbrel.gateway.feed import Feed, WayIn
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log.backoff import Backoff, may_pass
from whimbrel.log.codec import ArrowCodec
from whimbrel.log.disk import RESERVE, Disk, is_full
from whimbrel.log.folder import Logs
from whimbrel.log.kept import kept
from whimbrel.log.private import below
from whimbrel.log.readers import is_drained
from whimbrel.orchestrator.journal import GatewayJournal, JournalReader
from whimbrel.orchestrator.known_keys import Seen, seen
from whimbrel.orchestrator.ports import GatewayStatus
from whimbrel.pipeline import Pipeline, Stage, common_schema
from whimbrel.roles.flow import StageFlow
from whimbrel.roles.surroundings import ALONE, Surroundings
from whimbrel.site.status import described

if TYPE_CHECKING:
    from whimbrel.checkpoints.central import CentralStore
    from whimbrel.checkpoints.checkpointer import Checkpointer

LOGGER = logging.getLogger("whimbrel.roles")
Notify = Callable[[str, Report], None]
"""Sends a notice of a stage to the orchestrator; raises `Retry` if it is unreachable."""

PERIOD = 0.5
"""Seconds between snapshots of the routers, and between ticks."""
SAVE_EVERY = 5.0
"""Seconds between increments, unless configured."""


class GatewayRole:
    """Feed, gateways and outlets of a pipeline; implements the gateway's port for the orchestrator."""

    def __init__(
        self,
        pipeline: Pipeline,
        logs: Logs,
        journal: GatewayJournal,
        decided: JournalReader | GatewayJournal,
        notify: Notify,
        clock_us: Callable[[], int],
        *,
        keep: bool,
        max_backlog: int,
        watch: Watch,
        store: str | None = None,
        save_every: float = SAVE_EVERY,
        reserve: int = RESERVE,
        around: Surroundings = ALONE,
    ) -> None:
        """`decided`: the journal that has the placement of instances: the orchestrator's, or, at a place of its own,
        this one. `store`: the address of the central store, if there is one; increments are saved there every
        `save_every` seconds. `around`: the other places."""
        self.decided, self.around = decided, around
        self.store, self._save_every = store_at(store, save_every), save_every
        self.logs, self.journal, self.notify, self.clock_us, self.keep = logs, journal, notify, clock_us, keep
        self.error: Exception | None = None
        self._backoff = Backoff("saving router snapshots", LOGGER)
        """The back-off of snapshots and ticks."""
        self._disk = Disk("the gateway", [logs.folder], reserve)
        self._run = named(journal)
        self.max_ahead_us = None if pipeline.max_ahead is None else round(pipeline.max_ahead * 1e6)
        check_places(pipeline, around)
        first = around.places[0]
        made = [(one.make(), one.at or first) for one in pipeline.placed_sources()]
        schema = common_schema([source for source, _ in made])
        intake = Intake(schema, pipeline.key, pipeline.event_time)
        # Durable: few are written, and nothing else would show that one is missing.
        self.dead = DeadLetters(logs.log("dead-letters", durable=True))
        placed = [(sink.make, sink.at or first) for sink in pipeline.placed_sinks()]
        sinks = [make() for make, at in placed if at in (around.here, EACH)]
        for sink in sinks:
            sink.durable = logs.durable
        flows: list[StageFlow] = []
        for number, stage in reversed(list(enumerate(pipeline.stages))):
            taken = Intake(stage.schema, stage.key) if number else intake
            if not flows:
                to = [at for _, at in placed] or [first]
                ends = ToSinks(around.here, to, self._routers(stage), around.places)
                flows = [StageFlow(self, stage, taken, ends, sinks, watch)]
                continue
            following = flows[0]
            key_of, homes = following.key_of, around.homes(following.stage.name)
            ways = ToHomes(around.here, homes, key_of, self._routers(stage))
            onwards: list[Sink] = [StageSink(following.ingest)]
            flows.insert(0, StageFlow(self, stage, taken, ways, onwards, _unseen, following.gateway.ingress))
        self.flows = {flow.stage.name: flow for flow in flows}
        self.first, self.last = flows[0], flows[-1]
        self.feeds = [
            Feed(
                source,
                Intake(schema, pipeline.key, pipeline.event_time, lenient=source.lenient),
                self._entrance(),
                self.dead,
                partial(self.is_full, max_backlog),
                "source" if len(made) == 1 else f"source-{number}",
            )
            for number, (source, at) in enumerate(made, 1)
            if at == around.here
        ]
        """Of the sources here."""
        self._stopping = threading.Event()
        self._saver = threading.Thread(target=self._save_all, name="saver", daemon=True)

    def _routers(self, stage: Stage) -> list[str]:
        return [router_of(stage.name, place) for place in sorted(self.around.homes(stage.name).values())]

    def _entrance(self) -> WayIn:
        """Where the sources here enter: the gateway, if every key is at home here."""
        flow, around = self.first, self.around
        homes = around.homes(flow.stage.name)
        if homes.values() == {around.here}:
            return flow.gateway
        door = f"door-{flow.stage.name}"
        codec = ArrowCodec(flow.intake.schema)
        return Entrance(
            around.here, homes, flow.gateway, lambda home: around.log_at(home, door), codec, self._row, self._save_row
        )

    def _row(self, writer: str) -> int:
        found = self.journal.load(f"entrance/{writer}")
        return -1 if found is None else int(found)

    def _save_row(self, writer: str, row: int) -> None:
        self.journal.save(f"entrance/{writer}", str(row).encode())

    # ── Start and stop ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start to deliver; ingestion starts with `start_feeds`."""
        for flow in reversed(self.flows.values()):
            flow.start()
        self._saver.start()

    def start_feeds(self) -> None:
        """Start to ingest."""
        for feed in self.feeds:
            feed.start()

    @property
    def has_ended(self) -> bool:
        """Whether the sources here have ended, and all their rows are taken in. Where there is none, rows may still
        come from other places."""
        return bool(self.feeds) and all(feed.ended.is_set() for feed in self.feeds)

    def ends(self) -> Iterator[Callable[[], object]]:
        """The calls that stop ingestion, in this order."""
        for feed in self.feeds:
            yield feed.stop
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
        feeds = [feed.error for feed in self.feeds]
        return [error for error in (*feeds, self.error, self.around.error(), *flows) if error is not None]

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

    def place(self, stage: str, instances: dict[str, str]) -> None:
        """Receive all instances of a stage, each with its site. A place of its own remembers them: it may have to start
        while the orchestrator is away."""
        flow = self._flow(stage)
        if self.around.here and instances != flow.instances:
            self.journal.save(f"instances/{stage}", wire.pack(instances))
        flow.place(instances)

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

    def has_applied(self, stage: str, instance: str) -> bool:
        """Whether everything now in the inbox of an instance here has been applied, and its output is written."""
        self._flow(stage)
        return is_drained(self.logs.inbox(instance))

    def keys(self, stage: str, start: int) -> Seen:
        """The keys of a stage that were first seen here, from a position on; at most a chunk."""
        return seen(self._flow(stage).gateway.known, start)

    def is_idle(self) -> bool:
        """Whether the other places have everything that was sent to them from here."""
        return self.around.is_idle

    def cut(self, other: str, is_cut: bool = True) -> None:
        """Cut the emulated link to another place, or mend it."""
        self.around.cut(other, is_cut)

    def remove(self, instance: str) -> None:
        """Remove the logs and checkpoints of an instance that has left."""
        self.logs.remove(instance)
        for site in self.logs.folder.parent.glob("sites/*"):
            shutil.rmtree(below(site, instance), ignore_errors=True)

    def is_drained(self, stage: str) -> bool:
        """Whether the instances of a stage have received the latest tick, and all their results are delivered."""
        return self._flow(stage).is_drained

    def status(self) -> GatewayStatus:
        """The status of the gateway."""
        return GatewayStatus(
            sent=self.first.gateway.sent,
            delivered=self.last.outlet.delivered,
            dead_letters=dict(self.dead.counts),
            ended=all(feed.ended.is_set() for feed in self.feeds),
            error=described(next((feed.error for feed in self.feeds if feed.error), None) or self.error),
            stages={name: flow.status() for name, flow in self.flows.items()},
            disk=self._disk.full or next(map(self._disk.message, filter(is_full, self._waited_for())), None),
            held_up={
                **{name: held for name, one in self._backoffs().items() if (held := one.status()) is not None},
                **self.around.held_up(),
            },
            links=dict(self.around.links()),
        )

    def is_full(self, most: int) -> bool:
        """Back-pressure: whether nothing may be ingested, because an inbox of the first stage or the disk is full."""
        return self._disk.full is not None or self.first.is_full(most)

    def _backoffs(self) -> dict[str, Backoff]:
        outlets = {f"outlet of {name}": flow.outlet.backoff for name, flow in self.flows.items()}
        reports = {f"reports of {name}": flow.reporting.backoff for name, flow in self.flows.items()}
        feeds = {feed.writer: feed.backoff for feed in self.feeds}
        return {**feeds, **outlets, **reports, "snapshots": self._backoff}

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


def check_places(pipeline: Pipeline, around: Surroundings) -> None:
    """Raise `UnknownName` if a source or sink is at a place that the deployment does not have."""
    asked = [
        *(one.at for one in pipeline.placed_sources()),
        *(one.at for one in pipeline.placed_sinks()),
        pipeline.home,
    ]
    for place in (name for name in asked if name not in (None, EACH, *around.places)):
        if not around.here:
            raise Refused(
                f"the job has something at the place {place!r}, and here all sites share one disk: start it with a "
                "deployment file, whimbrel up --deployment FILE, or leave at= and home= out"
            )
        raise UnknownName("place", str(place), list(around.places))


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


def _unseen(results: list[Result], now_us: int) -> None:
    pass
