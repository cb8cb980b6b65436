"""The processes of a place: its gateway, with the port where other places append, and its site.

    <data>/                 of the place; no process of another place opens its files
      gateway.db            routers, outlets, and the placement of instances as the orchestrator has last sent it
      logs/                 inboxes and outboxes of the instances here, ingress logs of the keys at home here,
                            arrivals from instances elsewhere, spools to the other places
      sites/<place>/        checkpoints

Both processes know the layout from the deployment file, and work while the orchestrator is away: they start with the
placement that it has last sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from whimbrel.core import wire
from whimbrel.core.errors import Retry, Stale, Unavailable, UnknownName
from whimbrel.core.link import Link
from whimbrel.core.names import gateway_role, site_role
from whimbrel.deploy.deployment import TRIGGER
from whimbrel.deploy.ending import end_all
from whimbrel.deploy.layout import Layout, homes_of
from whimbrel.deploy.life import Heart, new_life
from whimbrel.gateway.clock import wall_us
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import is_power
from whimbrel.log.folder import Logs
from whimbrel.log.lock import lock_role
from whimbrel.log.private import make_folder
from whimbrel.orchestrator.directory import claim_directory
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, GatewayJournal, JournalReader
from whimbrel.orchestrator.ports import GatewayBeat, GatewayPort, OrchestratorPort, SiteBeat, SitePort, check_names
from whimbrel.pipeline import Pipeline, common_schema
from whimbrel.roles.gateway import GatewayRole
from whimbrel.roles.neighbourhood import Neighbourhood, Reception
from whimbrel.roles.site import engine_of, host_maker, site_disk
from whimbrel.rpc.access import credential
from whimbrel.rpc.remote import bare, offer, remote
from whimbrel.rpc.server import Server
from whimbrel.rpc.tls import Tls
from whimbrel.site.neighbours import Neighbours
from whimbrel.site.site import Site
from whimbrel.transport.connection import Connect
from whimbrel.transport.identity import Identity
from whimbrel.transport.receiver import Receiver
from whimbrel.transport.routes import Routes, spool_to
from whimbrel.transport.server import ReceiverServer
from whimbrel.transport.sockets import Dialer, EventLoop
from whimbrel.transport.spool import RECORDS, STATE, OutgoingSpool, Owner

MAX_BACKLOG = 200_000
"""Records in an inbox above which a place takes in nothing."""


class Place(NamedTuple):
    """A place of a deployment, as its own processes see it."""

    name: str
    layout: Layout
    pipeline: Pipeline
    data: Path
    keys: Path
    """The folder with its certificate and its credentials."""

    def check(self) -> None:
        """Raise `UnknownName` if the deployment has no such place."""
        if self.name not in self.layout.places:
            raise UnknownName("place", self.name, list(self.layout.places))

    @property
    def durable(self) -> bool:
        """Whether acknowledged data survives a power failure."""
        return is_power(self.layout.durability)

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where other places reach it: host and port."""
        return self.layout.places[self.name].endpoint

    @property
    def tls(self) -> Tls:
        """The files for calls to and from the orchestrator."""
        return Tls(self.keys / "certificate.pem", self.keys / "key.pem", self.keys / "ca.pem")

    def orchestrator(self, role: str) -> OrchestratorPort:
        """The orchestrator, for a role of this place."""
        url = f"https://{self.layout.orchestrator.address}"
        return remote(OrchestratorPort, lambda: url, credential(self.keys, role), tls=self.tls)

    def routes(self, kind: str, loop: EventLoop) -> Routes:
        """The ways from here to the other places, of one class."""
        identity, connect_to = Identity.of(self.keys), dict[str, Connect]()
        for there, entry in self.layout.places.items():
            if there != self.name:
                connect_to[there] = Dialer(loop, identity, there, *entry.endpoint).connect
        links = {there: Link.parse(self.layout.link(self.name, there)) for there in connect_to}
        deployment, folder = deployment_of(self.pipeline, self.keys), make_folder(self.data / "logs")
        return Routes(deployment, self.name, kind, folder, connect_to, links, self.durable)

    def spools(self, kind: str) -> dict[str, OutgoingSpool]:
        """By other place: the spool of a class, to look into it."""
        deployment, folder = deployment_of(self.pipeline, self.keys), make_folder(self.data / "logs")
        return {
            there: spool_to(Owner(deployment, self.name, there, kind), folder, self.durable)
            for there in self.layout.places
            if there != self.name
        }

    def server(self, offset: int, port: type, target: object, role: str, check: Callable[..., None] | None) -> Server:
        """The port on which a role of this place serves the orchestrator."""
        calls = bare(f"whimbrel {role}")
        offer(calls, port, target, credential(self.keys, role), *([check] if check else []))
        host, first = self.endpoint
        return Server.between(calls, self.tls, host, first + offset)


def deployment_of(pipeline: Pipeline, keys: Path) -> str:
    """The name of a deployment in its spools: that of the pipeline and of the authority."""
    return f"{pipeline.name}/{Identity.of(keys).authority()}"


class PlaceGateway:
    """`whimbrel gateway --place NAME`."""

    def __init__(self, place: Place) -> None:
        place.check()
        data, pipeline = make_folder(place.data), place.pipeline
        self._place, self._role, self._life = place, gateway_role(place.name), new_life()
        self._lock = lock_role(data, "gateway")
        self.journal = GatewayJournal(data / GATEWAY_JOURNAL, place.durable)
        stages, places = [stage.name for stage in pipeline.stages], list(place.layout.places)
        claim_directory(data, self.journal, pipeline.name, stages, places)
        self.logs, self._loop = Logs(make_folder(data / "logs"), place.durable), EventLoop()
        self._routes = place.routes(RECORDS, self._loop)
        self._messages = place.spools(STATE)
        self._orchestrator = place.orchestrator(self._role)
        self.role = GatewayRole(
            pipeline,
            self.logs,
            self.journal,
            self.journal,
            self._orchestrator.receive,
            wall_us,
            keep=False,
            max_backlog=MAX_BACKLOG,
            watch=lambda results, now_us: None,
            around=Neighbourhood(place.name, places, homes_of(pipeline, place.layout), self._routes, self._messages),
        )
        reception = Reception(place.name, self.role.flows, self.logs, lambda: self.role.is_full(MAX_BACKLOG))
        deployment = deployment_of(pipeline, place.keys)
        self._receiver = Receiver(place.name, deployment, reception.log_of, reception.may_append)
        self._port: ReceiverServer | None = None
        self.server = place.server(1, GatewayPort, self.role, self._role, check_names)
        self._heart = Heart(self._beat)

    def start(self) -> None:
        """Start to deliver, to accept what other places send, and to ingest."""
        self.role.start()
        identity = Identity.of(self._place.keys)
        self._port = ReceiverServer(self._loop, self._receiver, identity, *self._place.endpoint)
        self._routes.start()
        self.server.start()
        self._heart.start()
        self.role.start_feeds()

    def _beat(self) -> None:
        self._orchestrator.beat(GatewayBeat(self._life, self.server.url, self.role.status(), self._place.name))

    @property
    def error(self) -> Exception | None:
        """Why the process had to end."""
        return self._heart.error

    def stop(self) -> None:
        """Stop; the content of the logs is delivered at the next start."""
        end_all(self._ends())

    def _ends(self) -> Iterator[Callable[[], object]]:
        yield self._heart.stop
        yield self.server.stop
        if self._port is not None:
            yield self._port.close
        yield from self.role.ends()
        yield from self.role.outlet_ends()
        yield self._routes.stop
        for spool in self._messages.values():
            yield spool.close
        yield self._loop.close
        yield self.logs.close
        yield self.journal.close
        yield self._lock.close


class PlaceSite:
    """`whimbrel site NAME` of a place."""

    def __init__(self, place: Place) -> None:
        place.check()
        data, pipeline, name = make_folder(place.data), place.pipeline, place.name
        self._life, self._role = new_life(), site_role(name)
        self._lock = lock_role(data, f"site-{name}")
        self._decided = JournalReader(data / GATEWAY_JOURNAL)
        self._stages = [stage.name for stage in pipeline.stages]
        self.logs, self._loop = Logs(make_folder(data / "logs"), place.durable), EventLoop()
        self.links = Neighbours(place.routes(STATE, self._loop), self._place_of, self.logs.inbox)
        self._orchestrator = place.orchestrator(self._role)
        self.engine = engine_of(place.layout.host, f"{pipeline.name}-{name}")
        first = common_schema([one.make() for one in pipeline.placed_sources()])
        schemas = {stage.name: stage.schema or first for stage in pipeline.stages}
        trigger = place.layout.trigger or TRIGGER
        make = host_maker(pipeline, self.logs, self.engine, self.links, schemas, trigger)
        folder = make_folder(data / "sites") / name
        self.site = Site(
            name, folder, make, self.engine.saved, self.links, site_disk(name, data, RESERVE), place.durable
        )
        self.server = place.server(2, SitePort, self.site, self._role, None)
        self._heart = Heart(self._beat)

    def start(self) -> None:
        """Run what ran here, send heartbeats, serve calls."""
        self.site.place(self._remembered())
        self.links.start()
        self.site.open()
        self.server.start()
        self._heart.start()
        for instance in [name for name, place in self.site.places.items() if place == self.site.name]:
            with suppress(Retry, Stale):  # the site reports it, and the orchestrator starts it again
                self.site.start(instance, wait=False)

    def _remembered(self) -> dict[str, str]:
        """The placement that the orchestrator has last sent to this place."""
        found = {stage: self._decided.load(f"instances/{stage}") for stage in self._stages}
        return {
            name: place for blob in found.values() if blob for name, place in wire.unpack(blob, dict[str, str]).items()
        }

    def _place_of(self, instance: str) -> str:
        if instance in self.site.hosts:
            return self.site.name
        if instance not in self.site.places:
            raise Unavailable(f"{self.site.name} does not know yet where {instance} runs: the orchestrator will say it")
        return self.site.places[instance]

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
        yield self._loop.close
        yield self.engine.stop
        yield self.logs.close
        yield self._lock.close
