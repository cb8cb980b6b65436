"""A site as a process: the hosts of the instances that run there, the links that begin there.

It starts without instances: the orchestrator, when it receives the first heartbeat, starts those that are to run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from whimbrel.core.errors import Refused, Retry, UnknownName
from whimbrel.core.names import site_role
from whimbrel.deploy.deployment import agreed
from whimbrel.deploy.ending import end_all
from whimbrel.deploy.life import Heart, new_life, orchestrator_at
from whimbrel.host.contract import MICRO_BATCH, check_host
from whimbrel.log.durability import is_power
from whimbrel.log.folder import Logs
from whimbrel.log.lock import lock_role
from whimbrel.log.private import make_folder
from whimbrel.orchestrator.ports import SiteBeat, SitePort
from whimbrel.pipeline import Pipeline, common_schema
from whimbrel.roles.site import engine_of, host_maker, site_disk
from whimbrel.rpc.access import Credential, credential
from whimbrel.rpc.remote import bare, offer
from whimbrel.rpc.server import Server
from whimbrel.rpc.tls import Tls
from whimbrel.site.links import Links, Network, SpoolFolder
from whimbrel.site.site import Site


class SiteProcess:
    """`whimbrel site NAME`."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        data: Path,
        orchestrator: str | None = None,
        tls: Tls | None = None,
        host: str = MICRO_BATCH,
    ) -> None:
        """`host` must be the deployment's: it decides what a process loads before it can ask."""
        deployment = agreed(data, pipeline)
        if check_host(host) != deployment.host:
            raise Refused(
                f"the deployment at {data} runs its instances on the host {deployment.host!r}, not {host!r}: "
                f"start this site with --host {deployment.host}"
            )
        if name not in deployment.sites:
            raise UnknownName("site", name, deployment.sites)
        self._lock = lock_role(data, f"site-{name}")
        self._life, secret = new_life(), credential(data, site_role(name))
        self._orchestrator = orchestrator_at(data, secret, orchestrator, tls)
        durable = is_power(deployment.durability)
        self.logs = Logs(data / "logs", durable)
        spools = SpoolFolder(data / "logs", durable)
        self.links: Network = Links(deployment.sites, deployment.links, spools, self._site_of, self.logs.inbox, [name])
        self._compose(name, pipeline, data, host, deployment.trigger, deployment.reserve, durable)
        self._serve(secret, tls)

    def _compose(
        self, name: str, pipeline: Pipeline, data: Path, host: str, trigger: str, reserve: int, durable: bool
    ) -> None:
        """Make the site and its engine, over logs and links."""
        self.engine = engine_of(host, f"{pipeline.name}-{name}")
        first = common_schema([one.make() for one in pipeline.placed_sources()])
        schemas = {stage.name: stage.schema or first for stage in pipeline.stages}
        make = host_maker(pipeline, self.logs, self.engine, self.links, schemas, trigger)
        disk, folder = site_disk(name, data, reserve), make_folder(data / "sites") / name
        self.site = Site(name, folder, make, self.engine.saved, self.links, disk, durable)

    def _serve(self, secret: Credential, tls: Tls | None, host: str = "127.0.0.1", port: int = 0) -> None:
        """Offer the site to the orchestrator, and send it heartbeats, once it starts."""
        api = bare(f"whimbrel site {self.site.name}")
        offer(api, SitePort, self.site, secret)
        self.server = Server.between(api, tls, host, port)
        self._heart = Heart(self._beat)

    def start(self) -> None:
        """Start to send heartbeats and to serve calls."""
        self.links.start()
        self.site.open()
        self.server.start()
        self._heart.start()

    def _site_of(self, instance: str) -> str:
        # An instance that runs here is here, though the orchestrator may not have sent its placement yet.
        return self.site.name if instance in self.site.hosts else self.site.places.get(instance, self.site.name)

    def _beat(self) -> None:
        try:
            self.engine.check()
            self.site.check()
            status = self.site.status()
        except Retry as error:
            raise RuntimeError("the status of the site cannot be determined") from error
        self._orchestrator.beat(SiteBeat(self.site.name, self._life, self.server.url, status))

    @property
    def error(self) -> Exception | None:
        """Why the process had to end."""
        return self._heart.error

    def stop(self) -> None:
        """Stop; the instances here continue from their checkpoints at the next start."""
        end_all(self._ends())

    def _ends(self) -> Iterator[Callable[[], object]]:
        yield self._heart.stop
        yield self.server.stop
        yield self.site.close
        for instance in list(self.site.hosts):
            yield partial(self.site.stop, instance)
        yield self.links.stop
        yield self.engine.stop
        yield self.logs.close
        yield self._lock.close
