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

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Retry, Stop, Unavailable, UnknownName
from whimbrel.core.link import Link
from whimbrel.core.names import gateway_role, site_role
from whimbrel.deploy.deployment import TRIGGER
from whimbrel.deploy.gateway import GatewayProcess
from whimbrel.deploy.layout import Layout, homes_of
from whimbrel.deploy.life import new_life
from whimbrel.deploy.site import SiteProcess
from whimbrel.gateway.clock import wall_us
from whimbrel.log.backoff import Backoff
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import is_power
from whimbrel.log.folder import Logs
from whimbrel.log.kept import kept
from whimbrel.log.lock import lock_role
from whimbrel.log.private import make_folder
from whimbrel.orchestrator.directory import claim_directory
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, GatewayJournal, JournalReader
from whimbrel.orchestrator.ports import OrchestratorPort
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import GatewayRole
from whimbrel.roles.neighbourhood import Neighbourhood, Reception
from whimbrel.rpc.access import credential
from whimbrel.rpc.remote import remote
from whimbrel.rpc.tls import Tls
from whimbrel.site.neighbours import Neighbours
from whimbrel.transport.connection import Connect
from whimbrel.transport.identity import Identity
from whimbrel.transport.receiver import Receiver
from whimbrel.transport.routes import Routes, spool_to
from whimbrel.transport.server import ReceiverServer
from whimbrel.transport.sockets import Dialer, EventLoop
from whimbrel.transport.spool import RECORDS, STATE, OutgoingSpool, Owner

LOGGER = logging.getLogger("whimbrel.deploy")
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
        return Tls.of(self.keys)

    @property
    def fixed(self) -> tuple[list[str], dict[str, Any]]:
        """What no start may change, and all places must agree on: the places, and by stage the homes of keys."""
        homes = homes_of(self.pipeline, self.layout)
        return list(self.layout.places), {stage: found.encode() for stage, found in sorted(homes.items())}

    @property
    def deployment(self) -> str:
        """The name of the deployment in spools and greetings: its pipeline, its authority, and what is fixed."""
        digest = crc32(wire.canonical(self.fixed))
        return f"{self.pipeline.name}/{Identity.of(self.keys).authority()}/{digest:08x}"

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
        folder = make_folder(self.data / "logs")
        return Routes(self.deployment, self.name, kind, folder, connect_to, links, self.durable)

    def spools(self, kind: str) -> dict[str, OutgoingSpool]:
        """By other place: the spool of a class, to look into it."""
        folder = make_folder(self.data / "logs")
        return {
            there: spool_to(Owner(self.deployment, self.name, there, kind), folder, self.durable)
            for there in self.layout.places
            if there != self.name
        }


def check_fixed(data: Path, journal: GatewayJournal, place: Place) -> None:
    """Raise `Refused` if a directory belongs to another place, or its deployment had other places or homes of keys at
    its first start: keys would lose their state, without an error."""
    now = wire.canonical((place.name, *place.fixed))
    before = journal.load("place")
    if before is None:
        journal.save("place", now)
    elif before != now:
        name, places, _ = wire.unpack(before, tuple[str, list[str], Any])
        raise Refused(
            f"{data} belongs to place {name!r} of a deployment of {', '.join(places)}, and not to place "
            f"{place.name!r} of {', '.join(place.layout.places)}: give each place its own directory"
            if (name, places) != (place.name, list(place.layout.places))
            else f"{data} was first started with other homes of keys: they are fixed; put the deployment file back, or "
            "start with new directories"
        )


class PlaceGateway(GatewayProcess):
    """The gateway of `whimbrel place NAME`."""

    def __init__(self, place: Place) -> None:
        place.check()
        data, pipeline = make_folder(place.data), place.pipeline
        self._place, self._life, role = place, new_life(), gateway_role(place.name)
        self._lock = lock_role(data, "gateway")
        self.journal = GatewayJournal(data / GATEWAY_JOURNAL, place.durable)
        stages, places = [stage.name for stage in pipeline.stages], list(place.layout.places)
        claim_directory(data, self.journal, pipeline.name, stages, places)
        check_fixed(data, self.journal, place)
        self.logs, self._loop = Logs(make_folder(data / "logs"), place.durable), EventLoop()
        self._routes = place.routes(RECORDS, self._loop)
        self._messages = place.spools(STATE)
        self._orchestrator = place.orchestrator(role)
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
        self._receiver = Receiver(place.name, place.deployment, reception.log_of, reception.may_append)
        self._port: ReceiverServer | None = None
        host, first = place.endpoint
        self._serve(credential(place.keys, role), place.tls, host, first + 1)

    def start(self) -> None:
        """Start to accept what other places send, to deliver and to ingest."""
        self._port = ReceiverServer(self._loop, self._receiver, Identity.of(self._place.keys), *self._place.endpoint)
        self._routes.start()
        super().start()

    def _ends(self) -> Iterator[Callable[[], object]]:
        if self._port is not None:
            yield self._port.close
        yield from super()._ends()

    def _ways_end(self) -> Iterator[Callable[[], object]]:
        yield self._routes.stop
        for spool in self._messages.values():
            yield spool.close
        yield self._loop.close


class PlaceSite(SiteProcess):
    """The site of `whimbrel place NAME`."""

    def __init__(self, place: Place) -> None:
        place.check()
        data, pipeline, name = make_folder(place.data), place.pipeline, place.name
        self._life, role = new_life(), site_role(name)
        self._lock = lock_role(data, f"site-{name}")
        self._decided = JournalReader(data / GATEWAY_JOURNAL)
        self._stopping = threading.Event()
        self._resuming = threading.Thread(target=self._resume, name="resuming", daemon=True)
        self._stages = [stage.name for stage in pipeline.stages]
        self.logs, self._loop = Logs(make_folder(data / "logs"), place.durable), EventLoop()
        self.links = Neighbours(place.routes(STATE, self._loop), self._place_of, self.logs.inbox)
        self._orchestrator = place.orchestrator(role)
        trigger = place.layout.trigger or TRIGGER
        self._compose(name, pipeline, data, place.layout.host, trigger, RESERVE, place.durable)
        host, first = place.endpoint
        self._serve(credential(place.keys, role), place.tls, host, first + 2)

    def start(self) -> None:
        """Run what ran here, send heartbeats, serve calls."""
        self.site.place(self._remembered())
        super().start()
        self._resuming.start()

    def _resume(self) -> None:
        """Start what ran here, each instance until it succeeds: the orchestrator may be away for long."""
        left = [name for name, place in self.site.places.items() if place == self.site.name]
        backoff = Backoff(f"starting the instances of {self.site.name}", LOGGER)
        while left and not self._stopping.is_set():
            try:
                self.site.start(left[0], wait=False)
                left.pop(0)
                backoff.succeeded()
            except Stop as error:  # the others start all the same
                kept(LOGGER, f"{left.pop(0)} at {self.site.name} cannot be started", error)
            except Retry as error:
                left.append(left.pop(0))
                self._stopping.wait(backoff.failed(error))

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

    def _ends(self) -> Iterator[Callable[[], object]]:
        yield self._stopping.set
        if self._resuming.is_alive():
            yield self._resuming.join
        yield from super()._ends()
        yield self._loop.close
