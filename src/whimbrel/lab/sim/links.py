"""The sites' links: in some worlds, messages between instances take the product's own Links and Forwarders.

    one process     all sites share one `Links`, as in an embedded run
    a process each  every site has a `Links` of its own, as deployed; it may deliver what another site has appended

A process dies with everything in it: its links with all pieces in transit, and its instances.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from whimbrel.core.errors import Retry
from whimbrel.core.link import Link
from whimbrel.lab.sim.actors import Actor
from whimbrel.lab.sim.logs import SimLog
from whimbrel.log.contract import Appendable, Log
from whimbrel.site.links import Links, Pair

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

SHARE = 0.3
"""The share of worlds with links."""
STEP_US = 20_000
"""Microseconds of a link's time per unit of the world's, in which an actor of usual pace takes one step."""
LINKS = (
    Link(),
    Link(delay_us=60_000),
    Link(delay_us=40_000, jitter_us=40_000, rate=60_000),
    Link(rate=150_000, loss=0.05),
)
"""At the lowest rate a piece has one message."""


class ForwarderActor(Actor):
    """The links of one process: delivers what is due, is cut and mended."""

    kind = "forwarder"

    def __init__(self, world: World, network: Network, here: list[str]) -> None:
        super().__init__(world)
        self.network, self.here = network, here
        self.troubles = 10
        """How often it dies by itself, or is cut, at most: else a large message might never get through a slow link."""
        # An ideal link has messages in its spool only after a cut.
        self.cut_odds = 0.3 if network.given.is_ideal else 0.08
        self.places = dict(world.sites)
        """Which instance is at which site, as last sent by the orchestrator."""

    def revive(self) -> None:
        self.links = Links(
            self.network.sites,
            self.network.given,
            self.network,
            self._site_of,
            self.world.inboxes.__getitem__,
            self.here,
        )

    def die(self) -> None:
        super().die()
        self.troubles = max(self.troubles - 1, 0)
        self.revive()  # at once, so that nobody uses the dead object; it delivers when it is alive
        for instance in self.world.instances.values():
            if instance.site in self.here and instance.alive:
                instance.die()

    def _site_of(self, instance: str) -> str:
        actor = self.world.instances[instance]
        return actor.site if actor.running and actor.site in self.here else self.places[instance]

    def work(self) -> bool:
        world, rng = self.world, self.world.random
        if self.troubles:
            world.maybe_die(0.08)
        if world.coordinator.alive and rng.random() < 0.3:
            self.places = dict(world.coordinator.coordinator.sites)
        pair = (self.here[0], next(site for site in self.network.sites if site != self.here[0]))
        is_cut = self.links.is_cut(*pair)
        if world.chaos and (is_cut or self.troubles) and rng.random() < (0.2 if is_cut else self.cut_odds):
            self.links.cut(*pair, is_cut=not is_cut)
            self.troubles -= not is_cut
            world.tally["links cut"] += not is_cut
            if is_cut:  # mended: others may send before the forwarder's thread wakes up
                return True
        worked = not self.links.is_idle()
        try:
            self.links.step(int(world.now * STEP_US))
        except Retry:
            world.tally["forwarder stumbled"] += 1
        return worked


class LinkLog(SimLog):
    """The spool of a link: what is appended is often not acknowledged."""

    def appended(self, position: int | None, blob: Any, writer: str) -> None:
        if position is not None:
            self._world.maybe_err(0.05)


class Network:
    """All links of a world, and their spools."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self.sites = sorted({*world.sites.values()})
        self.given = rng.choice(LINKS)
        self._spools: dict[Pair, SimLog] = {}
        processes = [[site] for site in self.sites] if rng.random() < 0.5 else [self.sites]
        self.actors = [ForwarderActor(world, self, here) for here in processes]
        for actor in self.actors:
            actor.revive()

    def at(self, site: str) -> ForwarderActor:
        """The process of a site."""
        return next(actor for actor in self.actors if site in actor.here)

    def inbox(self, source: str, destination: str) -> Appendable:
        """The inbox of an instance, as another one writes to it."""
        return self.at(self._world.instances[source].site).links.inbox(source, destination)

    def look(self, instance: str, site: str) -> None:
        """An instance starts at a site."""
        self.at(site).links.look(instance)

    def has(self, pair: Pair) -> bool:
        return pair in self._spools

    def open(self, pair: Pair) -> Log:
        if pair not in self._spools:
            self._spools[pair] = LinkLog(self._world)
            self._spools[pair].reader = self.at(pair[0])
        return self._spools[pair]
