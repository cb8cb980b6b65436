"""The embedded application: a pipeline on one machine, every site a set of queries in one SparkSession.

`run` assembles what the picture in ARCHITECTURE.md shows, in the order of a record's way, and recovers each piece from
the data directory: a run that was killed goes on where it was when it is started again with the same directory.

    <data>/journal.db                     decisions, snapshots
    <data>/logs/                          ingress, inbox and outbox logs, dead letters
    <data>/sites/<site>/<instance>/       checkpoints
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from whimbrel.control.journal import Journal
from whimbrel.control.orchestrator import Orchestrator, StageControl
from whimbrel.core import wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, Unavailable, UnknownName
from whimbrel.core.keys import BINS, EVERYTHING, Selection, bin_of
from whimbrel.core.operator import uses_timers
from whimbrel.core.protocols import protocol_named
from whimbrel.core.protocols.machine import Abandoned, Migration
from whimbrel.core.record import Notice, Parked, Result
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.dead_letters import DeadLetter, DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog
from whimbrel.outlet.outlet import Outlet
from whimbrel.outlet.sinks import Sink, StageSink
from whimbrel.pipeline import Pipeline, Stage
from whimbrel.site.site import Site
from whimbrel.spark.query import InstanceSpec, StageQuery
from whimbrel.spark.session import session

PERIOD = 0.25
"""Seconds between snapshots of the routers, and between ticks."""

Watch = Callable[[list[Result], int], None]


class Handle:
    """An order to migrate: watch it, wait for it, call it off."""

    def __init__(self, app: App, stage: str, ids: list[str]) -> None:
        self._app, self.stage, self.ids = app, stage, ids

    @property
    def migrations(self) -> list[Migration]:
        """As they are now: one for each instance that had some of the keys."""
        return [self._app.orchestrator.migration(self.stage, id) for id in self.ids]

    @property
    def is_noop(self) -> bool:
        """Whether there was nothing to do: every key was there already."""
        return not self.ids

    @property
    def outcome(self) -> str:
        """`already there`, `done`, `aborted`, or the phase it is in."""
        phases = {migration.phase for migration in self.migrations}
        open_ones = sorted(phases - {"done", "aborted"})
        return (
            open_ones[0] if open_ones else "aborted" if "aborted" in phases else "done" if phases else "already there"
        )

    @property
    def progress(self) -> list[str]:
        """The story so far, a line for each thing that happened."""
        return [f"{m.move.id} {line.phase}: {line.event}" for m in self.migrations for line in m.story]

    def wait(self, timeout: float | None = None) -> Handle:
        """Until it is over. Raises `Unavailable` if the time runs out first; it goes on all the same."""
        if not self._app.orchestrator.wait(self.stage, self.ids, timeout):
            raise Unavailable(f"migration {', '.join(self.ids)} is still {self.outcome} after {timeout} s")
        return self

    def abort(self, reason: str = "called off") -> Handle:
        """Call it off. Too late after the point of no return: then it goes on to its end; see `outcome`."""
        for id in self.ids:
            self._app.orchestrator.tell(self.stage, id, Abandoned(reason))
        return self

    def __repr__(self) -> str:
        return f"<migration {', '.join(self.ids) or '-'} of {self.stage}: {self.outcome}>"


class StageRuntime:
    """All that one stage is made of, put together and recovered."""

    def __init__(self, app: App, stage: Stage, intake: Intake, sinks: list[Sink], watch: Watch) -> None:
        self.app, self.stage, self.intake = app, stage, intake
        self.inboxes: dict[str, EmbeddedLog] = {}
        self.outboxes: dict[str, EmbeddedLog] = {}
        placed = app.journal.load(f"instances/{stage.name}")
        sites = wire.unpack(placed, dict[str, str]) if placed else {}
        for site in app.sites:
            if site not in sites.values():
                sites[self._new_name(sites)] = site
        app.journal.save(f"instances/{stage.name}", wire.pack(sites))
        for instance in sites:
            self._open(instance)
        first = next(iter(sites))
        name = f"gateway-{stage.name}"
        self.gateway = Gateway(
            Router(name, RouteTable(first)),
            app.log(f"ingress-{stage.name}"),
            app.log(f"keys-{stage.name}"),
            self.inboxes.__getitem__,
            intake.schema,
            app.clock_us,
            keep=app.keep,
        )
        self.gateway.recover(app.journal.load(f"router/{stage.name}"))
        self.coordinator = Coordinator(stage.name, RouteTable(first), dict(sites), frozenset({name}))
        save = lambda blob: app.journal.save(f"outlet/{stage.name}", blob)  # noqa: E731
        self.outlet = Outlet(stage.name, self.outboxes, sinks, self._hear, save, app.clock_us, watch)
        self.control = StageControl(self.coordinator, [self.gateway], self.inboxes.__getitem__)
        self._ticks = self.gateway.ingress.counter("ticks") if uses_timers(stage.operator) else None

    def _new_name(self, sites: dict[str, str]) -> str:
        return f"{self.stage.name}-{len(sites) + 1}"

    def _open(self, instance: str) -> None:
        self.inboxes[instance] = self.app.log(f"inbox-{instance}")
        self.outboxes[instance] = self.app.log(f"outbox-{instance}")

    def instance_at(self, site: str) -> str:
        """The instance at a site; a new one if the last has been moved away."""
        sites = self.coordinator.sites
        for instance, place in sites.items():
            if place == site:
                return instance
        instance = self._new_name(sites)
        self._open(instance)
        sites[instance] = site
        self.app.journal.save(f"instances/{self.stage.name}", wire.pack(dict(sites)))
        self.app.sites[site].start(instance)
        return instance

    def make_query(self, instance: str, checkpoint: Path) -> StageQuery:
        """The query of an instance of this stage."""
        spec = InstanceSpec(
            name=instance,
            stage=self.stage.name,
            operator=self.stage.operator,
            schema=self.intake.schema,
            prepare=self.stage.prepare,
            groups=self.stage.groups,
            partitions=self.stage.partitions,
            trigger=self.app.trigger,
        )
        return StageQuery(
            self.app.spark,
            spec,
            inbox=self.app.log_path(f"inbox-{instance}"),
            outbox=self.outboxes[instance],
            inbox_of=self.inboxes.__getitem__,
            checkpoint=checkpoint,
            appended=self.outlet.wake,
        )

    def _hear(self, notice: Notice) -> None:
        if isinstance(notice, Parked):
            self.app.dead.park(notice)
        else:
            self.app.orchestrator.hear(self.stage.name, notice)

    def ingest(self, results: list[Result], number: int) -> None:
        """Take in the results of the stage before."""
        good = []
        for result, taken in zip(results, self.intake.take([result.values for result in results]), strict=True):
            if isinstance(taken, tuple):
                good.append(taken)
            else:
                self.app.dead.put(taken, f"results for {self.stage.name}", result.seq, result.values)
        if good:
            self.gateway.ingest(good, "stage before", number)

    def save(self) -> None:
        """A snapshot of the router, and a tick if the operator has timers."""
        if self._ticks is not None:
            self._ticks += 1
            self.gateway.tick(self._ticks)
        blob = self.gateway.save()
        if blob is not None:
            self.app.journal.save(f"router/{self.stage.name}", blob)
            self.gateway.saved(blob)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent has been applied and delivered."""
        for instance, site in self.coordinator.sites.items():
            query = self.app.sites[site].queries.get(instance)
            if query is None or not query.is_drained:
                return False
        return self.outlet.is_idle


class App:
    """A running pipeline. Made by `run`."""

    def __init__(
        self,
        pipeline: Pipeline,
        sites: Sequence[str],
        data: Path,
        *,
        temporary: bool,
        keep: bool,
        trigger: str,
        max_backlog: int,
        watch: Watch,
        spark: Any,
    ) -> None:
        self.pipeline, self.data, self.keep, self.trigger = pipeline, data, keep, trigger
        self.clock_us = lambda: time.time_ns() // 1000
        self._max_backlog, self._temporary = max_backlog, temporary
        self._logs: dict[str, EmbeddedLog] = {}
        self.journal = Journal(data / "journal.db")
        self.dead = DeadLetters(self.log("dead-letters"))
        source = pipeline.make_source()
        intake = Intake(source.schema(), pipeline.key, pipeline.event_time, lenient=source.lenient)
        self.spark = spark if spark is not None else session(pipeline.name)
        self._owns_spark = spark is None
        self.sites = {name: Site(name, data / "sites" / name, self._make_query) for name in sites}
        self.orchestrator = Orchestrator(self.journal, self.sites, self.clock_us)
        self.stages: dict[str, StageRuntime] = {}
        sinks = pipeline.make_sinks()
        for number, stage in reversed(list(enumerate(pipeline.stages))):
            inlet = intake if number == 0 else Intake(_given(stage), stage.key)
            last = number == len(pipeline.stages) - 1
            runtime = StageRuntime(self, stage, inlet, sinks, watch if last else _unseen)
            sinks = [StageSink(runtime.ingest)]
            self.stages[stage.name] = runtime
            self.orchestrator.stages[stage.name] = runtime.control
        self.first = self.stages[pipeline.stages[0].name]
        self.feed = Feed(source, intake, self.first.gateway, self.dead, self._is_full)
        self._stopping = threading.Event()
        self._saver = threading.Thread(target=self._save_all, name="saver", daemon=True)
        self._stopped = False

    # ── Life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> App:
        """Bring everything up, from the end of a record's way to its beginning."""
        self.orchestrator.recover()
        for runtime in self.stages.values():
            runtime.outlet.recover(self.journal.load(f"outlet/{runtime.stage.name}"))
            runtime.outlet.start()
            for instance, site in list(runtime.coordinator.sites.items()):
                self.sites[site].start(instance)
        self.orchestrator.start()
        self._saver.start()
        self.feed.start()
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Until the source has ended and everything that came from it is delivered."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self.feed.ended.is_set() and self._is_settled()):
            self._raise_errors()
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(f"not everything is delivered after {timeout} s; see app.status()")
            time.sleep(0.02)
        self._raise_errors()

    def stop(self) -> None:
        """Stop everything, in the order of a record's way. What is in the logs is delivered at the next start."""
        if self._stopped:
            return
        self._stopped = True
        self.feed.stop()
        self._stopping.set()
        self.orchestrator.stop()
        if self._saver.is_alive():
            self._saver.join()
        for site in self.sites.values():
            for instance in list(site.queries):
                site.stop(instance)
        for runtime in self.stages.values():
            runtime.outlet.stop()
        for log in self._logs.values():
            log.close()
        self.journal.close()
        if self._owns_spark:
            self.spark.stop()
        if self._temporary:
            shutil.rmtree(self.data, ignore_errors=True)

    def __enter__(self) -> App:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.stop()

    # ── What a user asks for ─────────────────────────────────────────────────────────────────────────────────────

    def migrate(
        self,
        stage: str,
        *,
        to: str,
        keys: Iterable[str] | None = None,
        bins: Iterable[int] | None = None,
        share: float | None = None,
        at: str | None = None,
        protocol: str = "live",
        deadline: float = 120.0,
        budget: int = 8 << 20,
    ) -> Handle:
        """Move keys of a stage to a site, while it runs.

        Which: these `keys`, these `bins`, a `share` (0 to 1) of what lies elsewhere, or everything; with `at`, only of
        what lies at that site. Returns at once; the handle waits, tells and aborts. Raises, and changes nothing, if a
        name is unknown, the request makes no sense, or another migration has some of the keys.
        """
        if stage not in self.stages:
            raise UnknownName("stage", stage, list(self.stages))
        for site in filter(None, (to, at)):
            if site not in self.sites:
                raise UnknownName("site", site, list(self.sites))
        protocol_named(protocol)
        runtime = self.stages[stage]
        selection = self._select(runtime, keys, bins, share, to, at)
        destination = runtime.instance_at(to)
        ids = self.orchestrator.migrate(stage, selection, to, destination, protocol, deadline, budget=budget)
        return Handle(self, stage, ids)

    def _select(
        self,
        runtime: StageRuntime,
        keys: Iterable[str] | None,
        bins: Iterable[int] | None,
        share: float | None,
        to: str,
        at: str | None,
    ) -> Selection:
        if sum(given is not None for given in (keys, bins, share)) > 1:
            raise Refused("give keys, or bins, or a share: one of them")
        if keys is not None:
            wanted = frozenset(map(str, [keys] if isinstance(keys, str) else keys))
            unknown = sorted(wanted - runtime.gateway.keys.keys())
            if unknown:
                raise UnknownName("key", unknown[0], list(runtime.gateway.keys)[:10])
            return Selection(keys=wanted)
        if bins is not None:
            numbers = frozenset(bins)
            if not all(isinstance(bin, int) and 0 <= bin < BINS for bin in numbers):
                raise Refused(f"bins are numbers from 0 to {BINS - 1}")
            return Selection(bins=numbers)
        owners, sites = runtime.coordinator.table.owners, runtime.coordinator.sites
        elsewhere = [i for i, site in sites.items() if site != to and at in (None, site)]
        if share is None:
            if at is None:
                return EVERYTHING
            parts = [owners.select(instance) for instance in elsewhere]
            return Selection(*(frozenset().union(*(getattr(p, f) for p in parts)) for f in ("bins", "keys", "without")))
        if not 0 < share <= 1:
            raise Refused(f"a share lies between 0 and 1, not {share}")
        mine = sorted(bin for instance in elsewhere for bin in owners.select(instance).bins)
        weights = dict.fromkeys(mine, 0)
        for key in runtime.gateway.keys:
            if bin_of(key) in weights and owners[key] in elsewhere:
                weights[bin_of(key)] += 1
        return Selection(bins=frozenset(_prefix(weights, share)))

    def status(self) -> dict[str, Any]:
        """How things are, as plain data: records, stages with their instances, migrations, dead letters."""
        return {
            "pipeline": self.pipeline.name,
            "records": {
                "sent": self.first.gateway.sent,
                "delivered": self.stages[self.pipeline.stages[-1].name].outlet.delivered,
                "refused": sum(runtime.outlet.gate.refused for runtime in self.stages.values()),
                "dead_lettered": sum(self.dead.counts.values()),
            },
            "dead_letters": dict(self.dead.counts),
            "source": {"ended": self.feed.ended.is_set(), "error": _told(self.feed.error)},
            "stages": {name: self._stage_status(runtime) for name, runtime in self.stages.items()},
            "error": _told(self.orchestrator.error),
        }

    def _stage_status(self, runtime: StageRuntime) -> dict[str, Any]:
        owners = runtime.coordinator.table.owners
        counts: dict[str, int] = dict.fromkeys(runtime.coordinator.sites, 0)
        for key in list(runtime.gateway.keys):
            counts[owners[key]] += 1
        instances = {}
        for instance, site in runtime.coordinator.sites.items():
            query = self.sites[site].queries.get(instance)
            instances[instance] = {
                "site": site,
                "keys": counts[instance],
                "running": query is not None and query.is_active,
                "batch_ms": round(query.batch_ms) if query is not None else None,
                "error": _told(query.exception) if query is not None else None,
            }
        return {
            "instances": instances,
            "migrations": {m.move.id: m.phase for m in runtime.coordinator.migrations.values()},
            "error": _told(runtime.outlet.error),
        }

    def story(self, id: str) -> list[str]:
        """What happened in a migration, a line each."""
        for runtime in self.stages.values():
            if id in runtime.coordinator.migrations:
                return Handle(self, runtime.stage.name, [id]).progress
        known = [id for runtime in self.stages.values() for id in runtime.coordinator.migrations]
        raise UnknownName("migration", id, known)

    def dead_letters(self) -> list[DeadLetter]:
        """Everything that could not be taken in or applied, with the reason and the position."""
        return self.dead.read()

    # ── Inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def log_path(self, name: str) -> Path:
        """Where a log lies."""
        return self.data / "logs" / f"{name}.db"

    def log(self, name: str) -> EmbeddedLog:
        """A log of this run, opened once."""
        if name not in self._logs:
            self._logs[name] = EmbeddedLog(self.log_path(name))
        return self._logs[name]

    def _make_query(self, instance: str, checkpoint: Path) -> StageQuery:
        for runtime in self.stages.values():
            if instance in runtime.inboxes:
                return runtime.make_query(instance, checkpoint)
        raise UnknownName("instance", instance, [])

    def _is_full(self) -> bool:
        return any(box.backlog(box.head()) > self._max_backlog for box in self.first.inboxes.values())

    def _is_settled(self) -> bool:
        moving = any(
            not migration.is_over
            for runtime in self.stages.values()
            for migration in list(runtime.coordinator.migrations.values())
        )
        return not moving and all(runtime.is_drained for runtime in self.stages.values())

    def _raise_errors(self) -> None:
        errors = [self.feed.error, self.orchestrator.error, *(r.outlet.error for r in self.stages.values())]
        for error in filter(None, errors):
            raise error

    def _save_all(self) -> None:
        while not self._stopping.wait(PERIOD):
            try:
                for runtime in self.stages.values():
                    runtime.save()
            except Unavailable as error:
                self.orchestrator.error = error


def run(
    pipeline: Pipeline,
    sites: Sequence[str] = ("cloud", "edge-1"),
    *,
    data: str | Path | None = None,
    keep: bool = False,
    trigger: str = "0 seconds",
    max_backlog: int = 200_000,
    watch: Watch = lambda results, now_us: None,
    spark: Any = None,
) -> App:
    """Run a pipeline on this machine. All keys begin at the first site.

    Use it as a context manager: leaving the block waits until the source has ended and everything is delivered, then
    stops. `data`: the directory that makes a run survive its death; a temporary one if not given. `trigger`: how often
    a site starts a micro-batch at most. `keep`: never trim the ingress log. `spark`: a SparkSession of your own.
    """
    if not pipeline.stages:
        raise Refused("the pipeline has no stage; add one with pipeline.stage(name, operator)")
    if not sites or len(set(sites)) < len(sites):
        raise Refused("sites need names of their own, and at least one is needed")
    return App(
        pipeline,
        sites,
        Path(tempfile.mkdtemp(prefix="whimbrel-")) if data is None else Path(data),
        temporary=data is None,
        keep=keep,
        trigger=trigger,
        max_backlog=max_backlog,
        watch=watch,
        spark=spark,
    ).start()


def _given(stage: Stage) -> Any:
    assert stage.schema is not None, "checked by Pipeline.stage"
    return stage.schema


def _prefix(weights: dict[int, int], share: float) -> Iterable[int]:
    """The first bins that together hold a share of the keys; of the bins, if no key is known yet."""
    total = sum(weights.values())
    if not total or share == 1:
        return list(weights)[: round(len(weights) * share)]
    taken, chosen = 0, []
    for bin, weight in weights.items():
        if taken >= share * total:
            break
        taken += weight
        chosen.append(bin)
    return chosen


def _told(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _unseen(results: list[Result], now_us: int) -> None:
    pass
