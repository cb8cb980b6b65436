"""The embedded application: a pipeline on one machine, every site a set of hosts in this process.

`run` composes the three roles in one process (ADR 15) and recovers each from the data directory: a run that was killed
continues where it stopped when it is started again with the same directory.

    <data>/journal.db                     the orchestrator's decisions
    <data>/gateway.db                     the gateway's positions
    <data>/logs/                          ingress, inbox and outbox logs, dead letters
    <data>/sites/<site>/<instance>/       checkpoints
    <data>/token, <data>/url              token and address of the API, if it is served
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Refused, Stale, Unavailable
from whimbrel.core.link import IDEAL
from whimbrel.core.names import check_name
from whimbrel.core.record import Report
from whimbrel.deploy.deployment import TRIGGER
from whimbrel.deploy.ending import end_all
from whimbrel.egress.outlet import Watch
from whimbrel.gateway.clock import wall_us
from whimbrel.gateway.dead_letters import DeadLetter
from whimbrel.host.contract import INLINE, MICRO_BATCH
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import PROCESS, is_power
from whimbrel.log.folder import Logs
from whimbrel.log.lock import lock_all
from whimbrel.log.private import make_folder
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.directory import claim_directory
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, Journal, JournalReader
from whimbrel.orchestrator.known_keys import keys_in
from whimbrel.orchestrator.stage import Shape
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import SAVE_EVERY, GatewayRole
from whimbrel.roles.site import check_stages, engine_of, host_maker, site_disk, stage_of
from whimbrel.site.links import Given, Links, SpoolFolder, links_of
from whimbrel.site.site import Site

if TYPE_CHECKING:
    from whimbrel.api.server import ApiServer


class App:
    """A running pipeline. Created by `run`.

    Has the orders of every user: `migrate`, `scale`, `drain`, `invoke`, `detach` (orchestrator/ordering.py), `abort`,
    `take_over`, `pause`, `resume`, `save`, `cut`, `mend`, `status`, `story` (orchestrator/control.py).
    """

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
        spark: Any = None,
        host: str = MICRO_BATCH,
        links: Given = IDEAL,
        store: str | None = None,
        save_every: float = SAVE_EVERY,
        reserve: int = RESERVE,
        durability: str = PROCESS,
        accept_loss: Collection[str] = (),
    ) -> None:
        durable = is_power(durability)
        self.pipeline, self.data, self._temporary = pipeline, data, temporary
        self._lock = lock_all(data)
        try:
            journal, self._places = Journal(data / JOURNAL), GatewayJournal(data / GATEWAY_JOURNAL, durable)
            claim_directory(data, journal, pipeline.name, [stage.name for stage in pipeline.stages], sites)
            self._logs = logs = Logs(data / "logs", durable)
            make_folder(data / "sites")
            self.gateway = GatewayRole(
                pipeline,
                logs,
                self._places,
                JournalReader(data / JOURNAL),
                self._notify,
                wall_us,
                keep=keep,
                max_backlog=max_backlog,
                watch=watch,
                store=store,
                save_every=save_every,
                reserve=reserve,
            )
        except BaseException:
            self._lock.close()
            raise
        self.first = self.gateway.first
        self.engine = engine_of(host, pipeline.name, spark)
        self.links = Links(sites, links, SpoolFolder(data / "logs", durable), self._site_of, logs.inbox)
        schemas = {name: flow.intake.schema for name, flow in self.gateway.flows.items()}
        make = host_maker(pipeline, logs, self.engine, self.links, schemas, trigger, self._wake)
        saved = self.engine.saved
        self.sites = {
            name: Site(name, data / "sites" / name, make, saved, self.links, site_disk(name, data, reserve), durable)
            for name in sites
        }
        shapes = {stage.name: Shape(stage.groups, stage.partitions) for stage in pipeline.stages}
        keys = keys_in(logs)
        control = Control(pipeline.name, shapes, data, journal, keys, self.sites, self.gateway, wall_us, links, saved)
        control.chores.accept_loss.update(accept_loss)
        self.control, orders = control, control.orders
        self.migrate, self.scale, self.drain = orders.migrate, orders.scale, orders.drain
        self.invoke, self.detach = orders.invoke, orders.detach
        self.abort, self.take_over, self.story = control.abort, control.take_over, control.story
        self.pause, self.resume, self.save = control.pause, control.resume, control.save
        self.cut, self.mend, self.status = control.cut, control.mend, control.status
        self._stopped, self._has_store = False, store is not None
        self._servers: list[ApiServer] = []

    # ── Start and stop ───────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> App:
        """Start everything, from the end of a record's path to its beginning; ingestion starts when all are warm."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        self.control.orchestrator.recover()
        self.control.chores.send_places()
        self.links.start()
        self.gateway.start()
        for name, site in self.sites.items():
            for instance in self.control.instances_at(name):
                self._start_instance(site, instance)
        with ThreadPoolExecutor(len(self.sites)) as pool:
            for _ in range(self.engine.warm_ups):
                list(pool.map(Site.wait, self.sites.values()))
        for site in self.sites.values():
            site.open()
        self.control.orchestrator.start()
        self.gateway.start_feeds()

    def _start_instance(self, site: Site, instance: str) -> None:
        """Start an instance. If its checkpoint is gone, that fails only without a store and with keys to lose."""
        try:
            site.start(instance, wait=False, anew=False)
        except Stale:
            if instance in self.control.chores.accept_loss:
                self.control.chores.renew(instance)
            elif not self._has_store and self.control.stages[stage_of(instance)].coordinator.losses.hangs_on(instance):
                raise

    def wait(self, timeout: float | None = None) -> None:
        """Block until the source has ended and all its results are delivered. Raises `Unavailable` on timeout (in
        seconds)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self.gateway.has_ended and self.control.is_settled()):
            self._raise_errors()
            if deadline is not None and time.monotonic() > deadline:
                raise Unavailable(f"not everything is delivered after {timeout} s; see app.status()")
            time.sleep(0.1)
        self._raise_errors()

    def _raise_errors(self) -> None:
        sites = [site.error for site in self.sites.values()]
        for error in filter(None, [self.control.orchestrator.error, self.links.error, *sites, *self.gateway.errors()]):
            raise error

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> ApiServer:
        """Serve status and orders over HTTP until the application stops: for `wb.connect`, or the command line.

        By default on a free port, for this machine only. With `certificate` and `key`, PEM files, it uses TLS. The
        token that a caller needs is in the file `token` of the data directory.
        """
        from whimbrel.api.server import ApiServer  # FastAPI is loaded only if the API is served

        server = ApiServer(self.control, self.data, host, port, certificate=certificate, key=key).start()
        self._servers.append(server)
        return server

    def stop(self) -> None:
        """Stop everything, in the order of a record's path. The content of the logs is delivered at the next start.

        If one component cannot be stopped, for example because its JVM is gone, the rest is; then its error is raised.
        """
        if self._stopped:
            return
        self._stopped = True
        end_all(self._ends())

    def _ends(self) -> Iterator[Callable[[], object]]:
        for server in self._servers:
            yield server.stop
        yield from self.gateway.ends()
        yield self.control.orchestrator.stop
        for site in self.sites.values():
            yield site.close
            for instance in list(site.hosts):
                yield partial(site.stop, instance)
        yield self.links.stop
        yield from self.gateway.outlet_ends()
        yield self._logs.close
        yield self._places.close
        yield self.control.journal.close
        yield self._lock.close
        yield self.engine.stop
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

    # ── Figures ──────────────────────────────────────────────────────────────────────────────────────────────────

    def batches(self) -> list[float]:
        """The durations of the batches of all instances, in milliseconds."""
        return [ms for site in self.sites.values() for ms in site.batches()]

    def dead_letters(self) -> list[DeadLetter]:
        """Everything that could not be ingested or applied, with the reason and the position."""
        return self.gateway.dead.read()

    def _site_of(self, instance: str) -> str:
        return self.control.stages[stage_of(instance)].coordinator.sites[instance]

    def _notify(self, stage: str, notice: Report) -> None:
        self.control.orchestrator.receive(stage, notice)

    def _wake(self, stage: str) -> None:
        self.gateway.flows[stage].outlet.wake()


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
    host: str = MICRO_BATCH,
    links: Given = IDEAL,
    store: str | Path | None = None,
    save_every: float = SAVE_EVERY,
    reserve: int = RESERVE,
    durability: str = PROCESS,
    accept_loss: Collection[str] = (),
) -> App:
    """Run a pipeline on this machine. All keys start at the first site.

    Use it as a context manager: leaving the block waits until the source has ended and everything is delivered, then
    stops. `data`: the directory from which a killed run can continue; a temporary one if not given. `trigger`: the
    minimum interval between batches of an instance. `keep`: never trim the ingress log. `host`: what runs the
    instances, "micro-batch" (Spark), or "inline" (threads of this process: no JVM, and no `prepare`). `spark`: your own
    SparkSession. `links`: the network between the sites, e.g. "delay=100ms,rate=20mbit", one for all or by pairs of
    sites. `store`: a directory or `s3://bucket/prefix`, where increments are saved every `save_every` seconds.
    `reserve`: while fewer bytes are free on a disk, the roles that write to it accept no input. `durability`:
    "process", or "power" if acknowledged data must survive a power failure. `accept_loss`: instances whose checkpoint
    is gone, and which may start from an empty one, without the state of their keys.
    """
    if not pipeline.stages:
        raise Refused("the pipeline has no stage; add one with pipeline.stage(name, operator)")
    if not sites or len(set(sites)) < len(sites):
        raise Refused("give at least one site, and no site name twice")
    for site in sites:
        check_name("site", site)
    links_of(sites, links)
    check_stages(pipeline, host)
    if host == INLINE and spark is not None:
        raise Refused(f"host={INLINE!r} runs without Spark: leave out spark=, or use host={MICRO_BATCH!r}")
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
            host=host,
            links=links,
            store=None if store is None else str(store),
            save_every=save_every,
            reserve=reserve,
            durability=durability,
            accept_loss=accept_loss,
        )
    except BaseException:
        if data is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return app.start()
