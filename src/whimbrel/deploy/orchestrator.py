"""The orchestrator as a process: `Control` over sites and a gateway in other processes.

It receives their heartbeats. It sends the placement of all instances to every process that has restarted, and starts
the instances of a restarted site. A site without heartbeats for too long is dead: migrations from or to it are aborted,
and, if there is a central store, its keys are restored elsewhere (orchestrator/policy.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from whimbrel.api.server import ApiServer
from whimbrel.core.errors import Refused, Retry, Stale, UnknownName
from whimbrel.core.keys import KeyMap
from whimbrel.core.names import GATEWAY, SUPERVISOR, check_name, gateway_role, site_role
from whimbrel.deploy.deployment import Deployment
from whimbrel.deploy.ending import end_all
from whimbrel.deploy.life import ADDRESS, address_in
from whimbrel.gateway.clock import wall_us
from whimbrel.log.durability import is_power
from whimbrel.log.folder import Logs
from whimbrel.log.lock import lock_role
from whimbrel.log.private import replace_text
from whimbrel.orchestrator.control import Control
from whimbrel.orchestrator.directory import claim_directory
from whimbrel.orchestrator.gateways import Gateways
from whimbrel.orchestrator.journal import JOURNAL, Journal
from whimbrel.orchestrator.known_keys import Follow, keys_in
from whimbrel.orchestrator.policy import Policy
from whimbrel.orchestrator.ports import GatewayBeat, GatewayPort, OrchestratorPort, SiteBeat, check_caller
from whimbrel.orchestrator.stage import Shape
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import store_at
from whimbrel.roles.site import check_stages, saved_by
from whimbrel.rpc.access import Credential, credential
from whimbrel.rpc.peers import DEAD, SUSPECT, RemoteGateway, RemoteSite
from whimbrel.rpc.remote import bare, offer, remote
from whimbrel.rpc.server import Server
from whimbrel.rpc.tls import Tls
from whimbrel.site.links import Given, links_of

PERIOD = 0.2


class Settled(Protocol):
    """The calls of the process that started the deployment."""

    def has_finished(self) -> bool:
        """Whether the source has ended, and everything that came from it is delivered."""

    def failure(self) -> str | None:
        """Why it can never finish: the source, a sink or the gateway has failed for good."""


def settled_in(data: Path, tls: Tls | None = None) -> Settled:
    """The orchestrator of a data directory, for the process that started it."""
    return remote(Settled, lambda: address_in(data), credential(data, SUPERVISOR), tls=tls)


def _one_home(stage: str) -> KeyMap[str]:
    return KeyMap("")


class RemoteControl(Control):
    """The control of a deployment whose sites and gateways are other processes."""

    sites: dict[str, RemoteSite]

    def __init__(
        self,
        pipeline: Pipeline,
        data: Path,
        deployment: Deployment,
        journal: Journal,
        credentials: Mapping[str, Credential],
        suspect: float,
        dead: float,
        restores: bool = True,
        restore_to: Sequence[str] = (),
        tls: Tls | None = None,
        accept_loss: Collection[str] = (),
        homes: Mapping[str, KeyMap[str]] | None = None,
        links: Given | None = None,
    ) -> None:
        """`credentials`: by role, the secret it shares with the orchestrator. `restores`: the keys of dead sites are
        restored automatically, at `restore_to`, or at any other site. `accept_loss`: instances that may start anew.
        `homes`: if every site is a place of its own, by stage the home of each key. `links`: if not those of the
        deployment."""
        there = {name: RemoteSite(name, credentials[site_role(name)], suspect, dead, tls) for name in deployment.sites}
        self.gateways = {
            place: RemoteGateway(credentials[gateway_role(place)], suspect, dead, tls, gateway_role(place))
            for place in ([""] if homes is None else deployment.sites)
        }
        self.gateway: GatewayPort = self.gateways.get("") or Gateways(
            self.gateways,
            lambda stage: (homes or {})[stage].by_bin[0],
            lambda instance: self.place_of(instance)[1],
        )
        self._greeted: dict[str, str | None] = {}
        """By name: the life in which it was last initialised."""
        self._seen: dict[str, str | None] = {}
        """The same of the gateways."""
        self._buried: set[str] = set()
        self._looked = time.monotonic()
        self._suspect = suspect
        self.policy: Policy | None = None
        shapes = {stage.name: Shape(stage.groups, stage.partitions) for stage in pipeline.stages}
        self.logs = Logs(data / "logs", is_power(deployment.durability))
        super().__init__(
            pipeline.name,
            shapes,
            data,
            journal,
            keys_in(self.logs) if homes is None else self._keys_at(homes),
            there,
            self.gateway,
            wall_us,
            links or deployment.links,
            saved_by(deployment.host),
            _one_home if homes is None else homes.__getitem__,
        )
        self.chores.accept_loss.update(accept_loss)
        if restores and deployment.store is not None:
            self.policy = Policy(self, restore_to or None, wall_us)

    def beat(self, beat: SiteBeat | GatewayBeat) -> None:
        """Receive a heartbeat."""
        if isinstance(beat, GatewayBeat):
            if beat.place not in self.gateways:
                raise UnknownName("place", beat.place, list(self.gateways))
            self.gateways[beat.place].note_beat(beat)
        elif beat.name in self.sites:
            self.sites[beat.name].note_beat(beat)
        else:
            raise UnknownName("site", beat.name, list(self.sites))

    def _keys_at(self, homes: Mapping[str, KeyMap[str]]) -> Callable[[str], Sequence[Follow]]:
        """The keys of a stage, as the gateways of their homes know them."""
        return lambda stage: [partial(self.gateways[place].keys, stage) for place in sorted(homes[stage].values())]

    def has_finished(self) -> bool:
        """Whether the source has ended, and everything that came from it is delivered."""
        return self.gateway.status().ended and self.is_settled()

    def failure(self) -> str | None:
        """Why it can never finish: the source, a sink or the gateway has failed for good."""
        status = self.gateway.status()
        outlets = (f"the outlet of {name}: {flow.error}" for name, flow in status.stages.items() if flow.error)
        return f"the gateway: {status.error}" if status.error else next(outlets, None)

    def status(self) -> dict[str, Any]:
        """The status, including the liveness of all processes."""
        peers = [*(one.peer for one in self.gateways.values()), *(one.peer for one in self.sites.values())]
        lives = {peer.name: {"state": peer.state, "silent_s": round(peer.silence, 1)} for peer in peers}
        waiting = {} if self.policy is None else self.policy.waiting
        return {
            **super().status(),
            "processes": lives,
            "restore": {"automatic": self.policy is not None, "waiting": waiting},
        }

    def _cut(self, one: str, other: str, is_cut: bool) -> None:
        super()._cut(one, other, is_cut)
        if "" not in self.gateways:  # each process of a place has its own connections
            self.gateways[one].cut(other, is_cut)
            self.gateways[other].cut(one, is_cut)

    def is_dead(self, site: str) -> bool:
        """Whether a site has sent no heartbeat for too long."""
        return self.sites[site].peer.state == "dead"

    # ── Supervision ──────────────────────────────────────────────────────────────────────────────────────────────

    def look_after(self) -> None:
        """Initialise restarted processes, and stop instances that run where they must not."""
        for gateway in self.gateways.values():
            if gateway.peer.life != self._seen.get(gateway.peer.name):
                self._seen[gateway.peer.name] = gateway.peer.life
                self.chores.forget_sent("")
        for name, site in self.sites.items():
            with suppress(Retry):  # it is unreachable now: retried in the next period
                if site.peer.life is not None and site.peer.life != self._greeted.get(name):
                    self._greet(name, site)
                self._stop_strays(name, site)

    def watch(self) -> None:
        """Abort the migrations of dead sites, and have their keys restored. Calls no site, so that none can block
        it."""
        away, self._looked = time.monotonic() - self._looked, time.monotonic()
        if away > self._suspect:  # this process was suspended, not those whose heartbeats are missing
            for site in self.sites.values():
                site.peer.forgive()
        for name, site in self.sites.items():
            if site.peer.state != "dead":
                self._buried.discard(name)
            elif name not in self._buried:
                self.orchestrator.abandon(name, f"site {name} is dead: no heartbeat for {site.peer.silence:.0f} s")
                self._buried.add(name)
        if self.policy is not None:
            states = {name: site.peer.state for name, site in self.sites.items()}
            gone = [name for name, site in self.sites.items() if site.peer.is_gone]
            self.policy.look(gone, [name for name, state in states.items() if state == "alive"], self.chores.stale())
        self._looked = time.monotonic()

    def _greet(self, name: str, site: RemoteSite) -> None:
        life = site.peer.life
        self.chores.forget_sent(name)
        self.chores.send_places()
        with site.starting:
            for instance in self.instances_at(name):
                with suppress(Stale):  # the site reports it
                    site.start(instance, wait=False)
        self._greeted[name] = life

    def _stop_strays(self, name: str, site: RemoteSite) -> None:
        """Stop instances that left while they were being started, or while their site was unreachable."""
        for instance in site.status().instances:
            # In this order: an instance that has just been relocated here is in the second list by then.
            if not self._is_relocating(instance) and instance not in self.instances_at(name):
                site.stop(instance)

    def _is_relocating(self, instance: str) -> bool:
        return any(self.orchestrator.is_relocating(stage, instance) for stage in self.stages)


class OrchestratorProcess:
    """`whimbrel orchestrator`."""

    def __init__(
        self,
        pipeline: Pipeline,
        data: Path,
        deployment: Deployment,
        *,
        port: int = 0,
        suspect: float = SUSPECT,
        dead: float = DEAD,
        restores: bool = True,
        restore_to: Sequence[str] = (),
        tls: Tls | None = None,
        accept_loss: Collection[str] = (),
        homes: Mapping[str, KeyMap[str]] | None = None,
        links: Given | None = None,
        keys: Path | None = None,
        endpoint: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        """`port`: for the orders of users. `tls`: for all its ports; users need no certificate of their own. If every
        site is a place of its own, `homes` has by stage the home of each key, `keys` is the folder with the credentials
        of all places, and `endpoint` is where they reach the orchestrator."""
        sites = deployment.sites
        for name in restore_to:
            if name not in sites:
                raise UnknownName("site", name, sites)
        if not sites or len(set(sites)) < len(sites):
            raise Refused("site names must be unique, and at least one site is needed")
        for name in sites:
            check_name("site", name)
        links_of(sites, links or deployment.links)
        store_at(deployment.store, deployment.save_every)
        is_power(deployment.durability)
        check_stages(pipeline, deployment.host)
        self._lock = lock_role(data, "orchestrator")
        self.data, self.journal = data, Journal(data / JOURNAL)
        claim_directory(data, self.journal, pipeline.name, [stage.name for stage in pipeline.stages], sites)
        deployment.save(self.journal)
        gateways = [GATEWAY] if homes is None else [*map(gateway_role, sites)]
        credentials = {role: credential(keys or data, role) for role in [*gateways, *map(site_role, sites)]}
        self.control = RemoteControl(
            pipeline,
            data,
            deployment,
            self.journal,
            credentials,
            suspect,
            dead,
            restores,
            restore_to,
            tls,
            accept_loss,
            homes,
            links,
        )
        calls = bare("whimbrel orchestrator")
        offer(calls, OrchestratorPort, self.control, credentials, check_caller)
        offer(calls, Settled, self.control, credential(data, SUPERVISOR))
        self.server = Server.between(calls, tls, *endpoint)
        self.api: ApiServer | None = None
        # Places are on other machines; users are on this one, unless a proxy with TLS lets in others.
        self._port, self._tls = port, tls if homes is None else None
        self.error = None
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(self.control.look_after,), name="carer", daemon=True),
            threading.Thread(target=self._repeat, args=(self.control.watch,), name="watcher", daemon=True),
        ]

    def start(self) -> None:
        """Begin to serve: resume what the journal has unfinished, receive heartbeats."""
        self.control.orchestrator.recover()
        self.server.start()
        replace_text(self.data / ADDRESS, self.server.url)
        self.control.orchestrator.start()
        for thread in self._threads:
            thread.start()
        tls = self._tls
        self.api = ApiServer(
            self.control, self.data, port=self._port, certificate=tls and tls.certificate, key=tls and tls.key
        ).start()

    def _repeat(self, duty: Callable[[], None]) -> None:
        while not self._stopping.wait(PERIOD):
            try:
                duty()
            except Retry:  # a process is unreachable now, or the journal is busy
                pass
            except Exception as error:  # it is reported, and the supervision continues
                self.control.orchestrator.fail("supervising the other processes", error)

    def stop(self) -> None:
        """Stop; unfinished migrations continue after the next start."""
        end_all(self._ends())

    def _ends(self) -> Iterator[Callable[[], object]]:
        yield self._stopping.set
        if self.api is not None:
            yield self.api.stop
        yield self.server.stop
        yield self.control.orchestrator.stop
        for thread in self._threads:
            if thread.is_alive():
                yield thread.join
        yield self.control.logs.close
        yield self.journal.close
        yield self._lock.close
