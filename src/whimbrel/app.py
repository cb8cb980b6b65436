"""The embedded application: a pipeline on one machine, every site a set of queries in one SparkSession.

`run` assembles what the picture in ARCHITECTURE.md shows, in the order of a record's way, and recovers each piece from
the data directory: a run that was killed goes on where it was when it is started again with the same directory.

    <data>/journal.db                     decisions, snapshots
    <data>/logs/                          ingress, inbox and outbox logs, dead letters
    <data>/sites/<site>/<instance>/       checkpoints
    <data>/token, <data>/url              how those outside get in, if it is served
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from whimbrel.control.handle import Handle
from whimbrel.control.journal import Journal
from whimbrel.control.orchestrator import DEADLINE, Orchestrator
from whimbrel.control.orders import Request
from whimbrel.control.plan import read_plan
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.core.link import IDEAL
from whimbrel.core.protocols import protocol_named
from whimbrel.core.protocols.auto import Limits
from whimbrel.core.record import Result
from whimbrel.embedded import EmbeddedOrders, drained
from whimbrel.gateway.dead_letters import DeadLetter, DeadLetters
from whimbrel.gateway.feed import Feed
from whimbrel.gateway.intake import Intake
from whimbrel.log import EmbeddedLog
from whimbrel.outlet.outlet import Watch
from whimbrel.outlet.sinks import StageSink
from whimbrel.pipeline import Pipeline
from whimbrel.runtime import StageRuntime, told
from whimbrel.site.links import Given, Links, links_of
from whimbrel.site.site import Site
from whimbrel.spark.query import StageQuery
from whimbrel.spark.session import session

if TYPE_CHECKING:
    from whimbrel.control.server import ApiServer

TRIGGER = "500 milliseconds"
"""How often a site starts a micro-batch at most, unless told: as soon as possible, sites on few cores only get in each
other's way, and a site without records would ask for them all the time."""

WARM_UPS = 3
"""Batches that every site does before the first record comes in."""

PERIOD = 0.5
"""Seconds between snapshots of the routers, and between ticks."""


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
        links: Given = IDEAL,
    ) -> None:
        self.pipeline, self.data, self.keep, self.trigger = pipeline, data, keep, trigger
        self._max_backlog, self._temporary = max_backlog, temporary
        self._logs: dict[str, EmbeddedLog] = {}
        source = pipeline.make_source()
        intake = Intake(source.schema(), pipeline.key, pipeline.event_time, lenient=source.lenient)
        intakes = [intake, *(Intake(stage.schema, stage.key) for stage in pipeline.stages[1:])]
        self._lock = _locked(data)
        try:
            self.journal = Journal(data / "journal.db")
            self._check_directory(sites)
        except BaseException:
            self._lock.close()
            raise
        self.dead = DeadLetters(self.log("dead-letters"))
        self.spark = spark if spark is not None else session(pipeline.name)
        self._owns_spark = spark is None
        self.sites = {name: Site(name, data / "sites" / name, self._make_query) for name in sites}
        self.links = Links(sites, links, data / "logs", self._site_of, self._inbox_of)
        self.orchestrator = Orchestrator(self.journal, self.sites, self.clock_us, self.links.carry)
        self.stages: dict[str, StageRuntime] = {}
        sinks = pipeline.make_sinks()
        for number, stage in reversed(list(enumerate(pipeline.stages))):
            last = number == len(pipeline.stages) - 1
            runtime = StageRuntime(self, stage, intakes[number], sinks, watch if last else _unseen)
            sinks = [StageSink(runtime.ingest)]
            self.stages[stage.name] = runtime
            self.orchestrator.stages[stage.name] = runtime.control
        self.first = self.stages[pipeline.stages[0].name]
        self.feed = Feed(source, intake, self.first.gateway, self.dead, self._is_full)
        self._stopping = threading.Event()
        self._saver = threading.Thread(target=self._save_all, name="saver", daemon=True)
        self._stopped = False
        self._servers: list[ApiServer] = []

    @staticmethod
    def clock_us() -> int:
        """The wall clock, in microseconds."""
        return time.time_ns() // 1000

    # ── Life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> App:
        """Bring everything up, from the end of a record's way to its beginning; records come in when all are warm."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        self.orchestrator.recover()
        self.links.start()
        for runtime in self.stages.values():
            runtime.outlet.recover(self.journal.load(f"outlet/{runtime.stage.name}"))
            runtime.outlet.start()
            for instance, site in list(runtime.coordinator.sites.items()):
                if not self.orchestrator.is_relocating(runtime.stage.name, instance):
                    self.sites[site].start(instance, wait=False)
        # All at once, and more than once: when two sites first work together, Spark starts more Python workers.
        with ThreadPoolExecutor(len(self.sites)) as pool:
            for _ in range(WARM_UPS):
                list(pool.map(Site.wait, self.sites.values()))
        self.orchestrator.start()
        self._saver.start()
        self.feed.start()

    def wait(self, timeout: float | None = None) -> None:
        """Until the source has ended and everything that came from it is delivered."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self.feed.ended.is_set() and self._is_settled()):
            self._raise_errors()
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(f"not everything is delivered after {timeout} s; see app.status()")
            time.sleep(0.1)
        self._raise_errors()

    def stop(self) -> None:
        """Stop everything, in the order of a record's way. What is in the logs is delivered at the next start.

        What cannot be stopped, because its JVM is gone for instance, does not keep the rest; its error is raised then.
        """
        if self._stopped:
            return
        self._stopped = True
        errors = []
        for end in self._ends():
            try:
                end()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _ends(self) -> Iterator[Callable[[], object]]:
        for server in self._servers:
            yield server.stop
        yield self.feed.stop
        yield self._stopping.set
        yield self.orchestrator.stop
        if self._saver.is_alive():
            yield self._saver.join
        for site in self.sites.values():
            for instance in list(site.queries):
                yield partial(site.stop, instance)
        yield self.links.stop
        for runtime in self.stages.values():
            yield runtime.outlet.stop
        for log in self._logs.values():
            yield log.close
        yield self.journal.close
        yield self._lock.close
        if self._owns_spark:
            yield self.spark.stop
        if self._temporary:
            yield partial(shutil.rmtree, self.data, ignore_errors=True)

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
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> Handle:
        """Move keys of a stage to a site, while it runs.

        Which: these `keys`, these `bins`, a `share` (0 to 1) of what lies elsewhere, or everything; with `at`, only of
        what lies at that site. `options` are those of the protocol (docs/protocols). Returns at once; the handle waits,
        tells and aborts. Raises, and changes nothing, if a name is unknown, the request makes no sense, or another
        migration has some of the keys. `budget`: how many bytes of state each part of a source ships in one batch; if
        not given, no more than the link carries. `request`: journalled as answered, together with what it orders.
        """
        runtime = self.stage_for(stage, (to, at), protocol, deadline, budget)
        selection = runtime.select(keys, bins, share, to, at)
        why: list[str] = []
        if protocol == "auto":
            standby, protocol, why = runtime.choose(selection, to, _limits(options))
            if standby is not None:
                handle = Handle(self.orchestrator, stage, [standby], why).take_over()
                if request is not None:
                    self.journal.write(answer=(request.name, wire.pack(request.answered([standby], why))))
                return handle
        options = read_plan(options) | {"budget": runtime.budget(to, at) if budget is None else budget}
        with runtime.instances.staying(to, runtime.counts()) as there:
            wanted = [(selection, there[0])] if protocol == "restart" else runtime.spread(selection, to, there)
            ids = self.orchestrator.migrate(stage, wanted, to, protocol, deadline, why, request, **options)
        return Handle(self.orchestrator, stage, ids, why)

    def scale(
        self,
        stage: str,
        *,
        instances: int,
        at: str,
        protocol: str = "live",
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> Handle:
        """Let so many instances of a stage share the keys that lie at a site, while it runs.

        More than there are: new ones are started, which takes some seconds, and get their share. Fewer: those with the
        fewest keys give them to the others and are then stopped. As many: the keys are evened out. Returns when the
        moves are ordered; the handle is that of `migrate`. Raises, and changes nothing, as `migrate` does.
        """
        runtime = self.stage_for(stage, (at,), protocol, deadline, budget)
        options = read_plan(options) | {"budget": runtime.budget(at, at) if budget is None else budget}
        if instances < 1:
            raise Refused(
                f"the keys at {at} need an instance there, so {instances} are too few; "
                f"to empty the site, move them away: app.migrate({stage!r}, at={at!r}, to=...)"
            )
        if protocol in ("restart", "auto"):
            raise Refused(f"{protocol} does not share keys between instances of a site; use another protocol")
        here, owners = runtime.instances.at(at), runtime.coordinator.table.owners
        for migration in list(runtime.coordinator.migrations.values()):
            if not migration.is_over and {migration.move.source, migration.move.destination} & {*here}:
                raise Conflict(
                    f"migration {migration.move.id} ({migration.phase}) moves keys to or from {at}, "
                    "so it is open who will have how many; wait for it or abort it"
                )
        if instances > len(here) and not any(owners.select(name) for name in here):
            raise Refused(f"{stage} has no keys at {at} to share; bring some: app.migrate({stage!r}, to={at!r})")
        with runtime.instances.staying(at, runtime.counts(), instances) as staying:
            wanted = runtime.level(at, staying)
            ids = self.orchestrator.migrate(stage, wanted, at, protocol, deadline, request=request, **options)
        return Handle(self.orchestrator, stage, ids)

    def drain(
        self,
        site: str,
        *,
        to: Iterable[str] | None = None,
        protocol: str = "live",
        deadline: float = DEADLINE,
        budget: int | None = None,
        request: Request | None = None,
        **options: Any,
    ) -> dict[str, Handle]:
        """Move everything away from a site, while it runs: to these sites, or all others, each key to who has least.

        Returns a handle for each stage that has something there. Raises, and changes nothing, as `migrate` does, or if
        a migration brings keys to the site. The site's instances stay, with nothing.
        """
        orders = drained(self, site, to, protocol, deadline, budget, read_plan(options))
        ids = self.orchestrator.order(orders, deadline, request=request)
        stages = {order.stage: list[str]() for order in orders}
        for name, found in stages.items():
            found += [id for id in ids if id in self.stages[name].coordinator.migrations]
        return {name: Handle(self.orchestrator, name, found) for name, found in stages.items() if found}

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> ApiServer:
        """Let others look and give orders by HTTP, until the application stops: `wb.connect`, or the command line.

        On a free port of this machine alone, unless told. With `certificate` and `key`, PEM files, it speaks TLS. The
        token that a caller needs is in the file `token` of the data directory.
        """
        from whimbrel.control.server import ApiServer  # FastAPI is loaded where somebody serves, and nowhere else

        server = ApiServer(EmbeddedOrders(self), self.data, host, port, certificate=certificate, key=key).start()
        self._servers.append(server)
        return server

    def stage_for(
        self, stage: str, sites: Iterable[str | None], protocol: str, deadline: float, budget: int | None
    ) -> StageRuntime:
        """The stage of an order, if the order makes sense."""
        if stage not in self.stages:
            raise UnknownName("stage", stage, list(self.stages))
        for site in filter(None, sites):
            if site not in self.sites:
                raise UnknownName("site", site, list(self.sites))
        if protocol != "auto":
            protocol_named(protocol)
        if deadline <= 0 or (budget is not None and budget < 1):
            raise Refused(
                f"a deadline lies some seconds ahead, a budget is at least a byte: not {deadline} and {budget}"
            )
        return self.stages[stage]

    def cut(self, site: str, other: str) -> None:
        """Cut the link between two sites, in both directions: nothing is delivered until it is mended, nothing lost."""
        self.links.cut(site, other)

    def mend(self, site: str, other: str) -> None:
        """Mend the link between two sites: what could not be delivered goes on."""
        self.links.cut(site, other, is_cut=False)

    def status(self) -> dict[str, Any]:
        """How things are, as plain data: records, stages with their instances, migrations, links, dead letters."""
        return {
            "pipeline": self.pipeline.name,
            "records": {
                "sent": self.first.gateway.sent,
                "delivered": self.stages[self.pipeline.stages[-1].name].outlet.delivered,
                "refused": sum(runtime.outlet.gate.refused for runtime in self.stages.values()),
                "dead_lettered": sum(self.dead.counts.values()),
            },
            "dead_letters": dict(self.dead.counts),
            "source": {"ended": self.feed.ended.is_set(), "error": told(self.feed.error)},
            "stages": {name: runtime.status() for name, runtime in self.stages.items()},
            "links": self.links.status(),
            "error": told(self.orchestrator.error or self.links.error),
        }

    def story(self, id: str) -> list[str]:
        """What happened in a migration, a line each."""
        for runtime in self.stages.values():
            if id in runtime.coordinator.migrations:
                return Handle(self.orchestrator, runtime.stage.name, [id]).progress
        known = [id for runtime in self.stages.values() for id in runtime.coordinator.migrations]
        raise UnknownName("migration", id, known)

    def batches(self) -> list[float]:
        """How long the micro-batches of all instances took, in milliseconds."""
        return [ms for site in self.sites.values() for ms in site.batches()]

    def dead_letters(self) -> list[DeadLetter]:
        """Everything that could not be taken in or applied, with the reason and the position."""
        return self.dead.read()

    # ── Inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_directory(self, sites: Sequence[str]) -> None:
        """A data directory belongs to one pipeline: another one would not understand what lies there. Sites may be
        added to it, not taken away."""
        stages = [stage.name for stage in self.pipeline.stages]
        mine = wire.pack({"pipeline": self.pipeline.name, "stages": stages})
        found = self.journal.load("pipeline")
        if found is not None and found != mine:
            other = wire.unpack(found, dict[str, Any])
            raise Refused(
                f"{self.data} belongs to pipeline {other['pipeline']!r} with the stages {other['stages']}, "
                f"not to {self.pipeline.name!r} with {stages}; choose another directory"
            )
        for stage in stages:
            placed = self.journal.load(f"instances/{stage}")
            gone = set(wire.unpack(placed, dict[str, str]).values()) - set(sites) if placed else set()
            if gone:
                raise Refused(f"{self.data} has instances at {', '.join(sorted(gone))}; name all its sites again")
        self.journal.save("pipeline", mine)

    def log_path(self, name: str) -> Path:
        """Where a log lies."""
        return self.data / "logs" / f"{name}.db"

    def log(self, name: str) -> EmbeddedLog:
        """A log of this run, opened once."""
        if name not in self._logs:
            self._logs[name] = EmbeddedLog(self.log_path(name))
        return self._logs[name]

    def remove(self, instance: str) -> None:
        """Remove the files of an instance that has left, if it has some."""
        for log in (f"inbox-{instance}", f"outbox-{instance}"):
            for file in self.log_path(log).parent.glob(f"{log}.db*"):
                file.unlink()
        for site in self.sites.values():
            shutil.rmtree(site.checkpoint(instance), ignore_errors=True)

    def _make_query(self, instance: str, checkpoint: Path) -> StageQuery:
        return self._stage_of(instance).make_query(instance, checkpoint)

    def _site_of(self, instance: str) -> str:
        return self._stage_of(instance).coordinator.sites[instance]

    def _inbox_of(self, instance: str) -> EmbeddedLog:
        return self._stage_of(instance).inboxes[instance]

    def _stage_of(self, instance: str) -> StageRuntime:
        for runtime in self.stages.values():
            if instance in runtime.inboxes:
                return runtime
        raise UnknownName("instance", instance, [])

    def _is_full(self) -> bool:
        return any(query.backlog > self._max_backlog for query in self.first.queries())

    def _is_settled(self) -> bool:
        moving = any(
            not migration.is_over and not migration.is_standby
            for runtime in self.stages.values()
            for migration in list(runtime.coordinator.migrations.values())
        )
        # In the order of a record's way: what a link or a stage hands on, the next one, asked later, has got.
        return (
            not moving
            and self.links.is_idle
            and all(self.stages[stage.name].is_drained for stage in self.pipeline.stages)
        )

    def _raise_errors(self) -> None:
        errors = [self.feed.error, self.orchestrator.error, self.links.error]
        for error in filter(None, [*errors, *(r.outlet.error for r in self.stages.values())]):
            raise error

    def _save_all(self) -> None:
        while not self._stopping.wait(PERIOD):
            try:
                for runtime in self.stages.values():
                    runtime.save()
            except Exception as error:  # told by whoever waits
                self.orchestrator.error = error


def _limits(options: dict[str, Any]) -> Limits:
    """What `auto` must not exceed, taken out of the options; the rest is for the protocol it chooses."""
    known = {f"max_{name}": name for name in Limits.__struct_fields__}
    given = {name: options.pop(name) for name in list(options) if name in known}
    if options:
        raise UnknownName("option of auto", next(iter(options)), list(known))
    return Limits(**{known[name]: value for name, value in given.items()})


def run(
    pipeline: Pipeline,
    sites: Sequence[str] = ("cloud", "edge-1"),
    *,
    data: str | Path | None = None,
    keep: bool = False,
    trigger: str = TRIGGER,
    max_backlog: int = 200_000,
    watch: Watch = lambda results, now_us: None,
    spark: Any = None,
    links: Given = IDEAL,
) -> App:
    """Run a pipeline on this machine. All keys begin at the first site.

    Use it as a context manager: leaving the block waits until the source has ended and everything is delivered, then
    stops. `data`: the directory that makes a run survive its death; a temporary one if not given. `trigger`: how often
    a site starts a micro-batch at most. `keep`: never trim the ingress log. `spark`: a SparkSession of your own.
    `links`: what lies between the sites, e.g. "delay=100ms,rate=20mbit", one for all or by pairs of sites.
    """
    if not pipeline.stages:
        raise Refused("the pipeline has no stage; add one with pipeline.stage(name, operator)")
    if not sites or len(set(sites)) < len(sites):
        raise Refused("sites need names of their own, and at least one is needed")
    links_of(sites, links)
    folder = Path(tempfile.mkdtemp(prefix="whimbrel-")) if data is None else Path(data)
    try:
        app = App(
            pipeline,
            sites,
            folder,
            temporary=data is None,
            keep=keep,
            trigger=trigger,
            max_backlog=max_backlog,
            watch=watch,
            spark=spark,
            links=links,
        )
    except BaseException:
        if data is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return app.start()


def _locked(data: Path) -> IO[str]:
    """A lock on a data directory, for as long as the file is open: two runs in one directory would ruin it."""
    data.mkdir(parents=True, exist_ok=True)
    file = (data / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Conflict(f"another run uses {data}; stop it, or choose another directory") from error
    return file


def _unseen(results: list[Result], now_us: int) -> None:
    pass
