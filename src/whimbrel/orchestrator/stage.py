"""One stage as the orchestrator sees it: routes, instances, known keys; and the interpretation of orders for it.

Nothing here is on the data path. The state of other roles is queried through their ports; the known keys and the read
positions of inboxes are read from the logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from whimbrel.core import balance
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.keys import BINS, EVERYTHING, Selection
from whimbrel.core.link import Link
from whimbrel.core.protocols.auto import Limits, Situation, choose
from whimbrel.orchestrator.decisions import RestoreOrder
from whimbrel.orchestrator.instances import Instances
from whimbrel.orchestrator.known_keys import KnownKeys
from whimbrel.orchestrator.ports import FlowStatus, GatewayPort, SitePort
from whimbrel.site.links import Pair
from whimbrel.site.status import InstanceStatus

BUDGET, LEAST_BUDGET = 8 << 20, 16 << 10
"""The most bytes of state that each part ships in a batch, unless given; and the value for the slowest link."""


class Shape(NamedTuple):
    """The number of parts of each instance of a stage, and the number of Spark tasks that process them."""

    groups: int
    partitions: int = 1


@dataclass
class Reach:
    """What the orchestrator has access to: the ports of the other roles, and the configured links."""

    sites: Mapping[str, SitePort]
    gateway: GatewayPort
    links: Mapping[Pair, Link]
    is_dead: Callable[[str], bool] = lambda site: False
    """Whether a site is considered dead."""
    shares_disk: bool = True
    """Whether the sites share a disk: else a checkpoint cannot be copied from one to another."""

    def link(self, origin: str, target: str) -> Link:
        """The link between two sites, which may be the same."""
        return self.links.get((origin, target), Link())

    def is_cut(self, origin: str, target: str) -> bool:
        """Whether the link between two sites is cut."""
        found = self.sites[origin].status().links.get(f"{origin}->{target}")
        return found is not None and found.cut


class StageControl:
    """One stage: which instance owns which keys, and how to move them elsewhere."""

    def __init__(
        self, coordinator: Coordinator, instances: Instances, shape: Shape, reach: Reach, keys: KnownKeys
    ) -> None:
        self.name, self.coordinator, self.instances = coordinator.stage, coordinator, instances
        self.shape, self._reach, self.keys = shape, reach, keys

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    def seen(self) -> dict[str, InstanceStatus]:
        """The status of each instance that runs or ran at its site."""
        places = dict(self.coordinator.sites)
        sites = {site: self._reach.sites[site].status().instances for site in {*places.values()}}
        return {name: sites[site][name] for name, site in places.items() if name in sites[site]}

    def flow(self) -> FlowStatus:
        """The flow of records through the stage."""
        return self._reach.gateway.status().stages.get(self.name, FlowStatus())

    def order_checkpoint(self) -> None:
        """Order an increment of everything that has changed. Raises `Refused` if there is no central store."""
        self._reach.gateway.order_checkpoint(self.name)

    def has_applied(self, instance: str) -> bool:
        """Whether everything now in an instance's inbox has been applied, and its results are written."""
        return self._reach.gateway.has_applied(self.name, instance)

    @property
    def is_drained(self) -> bool:
        """Whether all records sent have been applied and delivered, and every timer that is due has fired.

        And every leaving instance has been removed.
        """
        owners, sites = self.owners(), dict(self.coordinator.sites)
        # A dead instance without keys has no results that would count.
        awaited = [name for name, site in sites.items() if name in owners or not self._reach.is_dead(site)]
        return (
            not [name for name in self.instances.leaving if name in awaited]
            and all(map(self.has_applied, awaited))
            and self._reach.gateway.is_drained(self.name)
        )

    def owners(self) -> set[str]:
        """The instances that own keys."""
        return self.coordinator.table.owners.values()

    def see_off(self) -> None:
        """Remove the leaving instances whose inbox is applied and whose results are delivered."""
        idle = self.instances.idle()
        if idle and not self._reach.shares_disk and not all(site.is_idle() for site in self._reach.sites.values()):
            return  # what is in transit to or from it could be appended nowhere, and would hold up what is behind it
        if idle and self._reach.gateway.save(self.name):  # after `idle`: no replay will name them
            spoken = [name for name in idle if self.has_applied(name)]
            self.instances.see_off(*(n for n in spoken if self._reach.gateway.has_delivered(self.name, n)))

    def counts(self) -> Counter[str]:
        """By instance: how many of the known keys it owns."""
        return self.keys.counts(self.coordinator.table)

    def status(self, flow: FlowStatus) -> dict[str, Any]:
        """The status of the stage as plain data. `flow`: the flow of records through it."""
        counts, seen = self.counts(), self.seen()
        instances = {}
        for name, site in list(self.coordinator.sites.items()):
            found = seen.get(name)
            instances[name] = {
                "site": site,
                "keys": counts[name],
                "state_bytes": flow.state_bytes.get(name, 0),
                "running": found is not None and found.running,
                "batch_ms": round(found.batch_ms) if found is not None else None,
                "error": found.error if found is not None else None,
            }
        migrations = list(self.coordinator.migrations.values())
        return {
            "instances": instances,
            "migrations": {m.move.id: m.phase for m in migrations},
            "ordered_by": {m.move.id: m.ordered_by for m in migrations if not m.is_over},
            "lost": sorted(self.coordinator.losses.instances()),
            "error": flow.error,
            "store": msgspec.to_builtins(flow.store),
        }

    # ── Interpreting orders ──────────────────────────────────────────────────────────────────────────────────────

    def select(
        self,
        keys: Iterable[str] | None,
        bins: Iterable[int] | None,
        share: float | None,
        to: str,
        at: str | None,
    ) -> Selection:
        """The keys that an order selects. Raises if the arguments are invalid."""
        if sum(given is not None for given in (keys, bins, share)) > 1:
            raise Refused("give only one of keys, bins and share")
        if keys is not None:
            wanted = frozenset(map(str, [keys] if isinstance(keys, str) else keys))
            unknown = self.keys.unknown(wanted)
            if unknown:
                raise UnknownName("key", unknown[0], self.keys.now()[:10])
            return Selection(keys=wanted)
        if bins is not None:
            numbers = frozenset(bins)
            if not all(isinstance(bin, int) and 0 <= bin < BINS for bin in numbers):
                raise Refused(f"bins are numbers from 0 to {BINS - 1}")
            return Selection(bins=numbers)
        if share is None and at is None:
            return EVERYTHING
        if share is not None and not 0 < share <= 1:
            raise Refused(f"share must be > 0 and <= 1, got {share}")
        owners, sites = self.coordinator.table.owners, self.coordinator.sites
        parts = [owners.select(i) for i, site in list(sites.items()) if site != to and at in (None, site)]
        whole = Selection(*(frozenset().union(*(getattr(p, f) for p in parts)) for f in ("bins", "keys", "without")))
        if share is None:
            return whole
        return balance.select(_prefix(balance.weigh(whole, self.keys.now()), share), whole)

    def sources(self, selection: Selection, to: str) -> list[str]:
        """The instances that must give up keys of a selection so that it is at a site."""
        sites, lost = dict(self.coordinator.sites), self.coordinator.losses.instances()
        owners = self.coordinator.table.owners.values(selection)
        return sorted(name for name in owners if sites[name] != to or name in lost)

    def missing(self, selection: Selection, to: str) -> list[str]:
        """Those `sources` that cannot ship their keys: they are at a dead site, or already lost."""
        sites, lost = dict(self.coordinator.sites), self.coordinator.losses.instances()
        found = self.sources(selection, to)
        return [name for name in found if name in lost or self._reach.is_dead(sites[name])]

    def taking(self, site: str, lost: str) -> AbstractContextManager[list[str]]:
        """The instances at a site, at least one of which can own a lost one's keys: if none can, one is started."""
        here = [name for name in self.instances.at(site) if name not in self.instances.leaving]
        is_there = bool({*here} - {lost} - self.coordinator.losses.instances())
        return self.instances.staying(site, self.counts(), None if is_there else len(here) + 1)

    def restorations(
        self, lost: Sequence[str], to: Sequence[str], checkpoint: int | None, **options: Any
    ) -> list[RestoreOrder]:
        """The orders that restore all keys of each lost instance at one of the instances `to`, in turn."""
        counts = self.counts()
        fit = sorted(
            {*to} - {*lost} - self.coordinator.losses.instances(), key=lambda name: (counts[name], name)
        ) or list(to)
        return [
            RestoreOrder(self.name, name, fit[number % len(fit)], checkpoint, options)
            for number, name in enumerate(lost)
        ]

    def check_whole(self, lost: Sequence[str], selection: Selection) -> None:
        """Raise unless all keys of these instances are selected."""
        owners = self.coordinator.table.owners
        for name in lost:
            if owners.select(name, selection) != owners.select(name):
                raise Refused(
                    f"restore always takes all keys of {name}, but some of them were not selected; "
                    f"select all of them, for example with at={self.coordinator.sites[name]!r}"
                )

    def spread(
        self, selection: Selection, site: str, to: Sequence[str], without: Sequence[str] = ()
    ) -> list[tuple[Selection, str]]:
        """The keys of a selection that are elsewhere, but not at `without`, distributed over instances at a site."""
        here = {*self.instances.at(site), *without}
        elsewhere = {name: selection for name in list(self.coordinator.sites) if name not in here}
        return self._pairs(elsewhere | dict.fromkeys(to), to, balance.place)

    def level(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """The keys at a site, distributed over these instances there as evenly as possible, with the fewest moves."""
        return self._pairs(dict.fromkeys(self.instances.at(site)), to, balance.level)

    def clear(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """The keys at a site, distributed over these instances elsewhere."""
        return self._pairs(dict.fromkeys([*self.instances.at(site), *to]), to, balance.place)

    def empty(self, instance: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """The keys of an instance, distributed over these instances."""
        return self._pairs(dict.fromkeys([instance, *to]), to, balance.place)

    def _pairs(
        self, among: Mapping[str, Selection | None], to: Sequence[str], plan: Callable[..., balance.Transfers]
    ) -> list[tuple[Selection, str]]:
        known, owners = self.keys.now(), self.coordinator.table.owners
        parts = {name: owners.select(name, within) for name, within in among.items()}
        transfers = plan({name: balance.weigh(part, known) for name, part in parts.items()}, to)
        return [(balance.select(units, parts[source]), name) for (source, name), units in sorted(transfers.items())]

    def choose(self, selection: Selection, to: str, limits: Limits) -> tuple[str | None, str, list[str]]:
        """The choice of `auto` for moving a selection to a site: an existing standby, or else a protocol; and why."""
        owners, sites, counts = self.coordinator.table.owners, dict(self.coordinator.sites), self.counts()
        sources = [name for name in sorted({*owners.values(selection)}) if sites[name] != to]
        if not sources:
            return None, "live", []
        parts = {name: owners.select(name, selection) for name in sources}
        known = self.keys.now()
        moving = {name: sum(1 for key in known if key in part) for name, part in parts.items()}
        there = self.instances.at(to)
        pairs = [(parts[name], other) for name in sources for other in there]
        standbys = [found for pair in pairs if (found := self.coordinator.standby(*pair)) is not None]
        up = {name: found for name, found in self.seen().items() if found.running}
        running = [up[name] for name in sources if name in up]
        total = max(sum(counts.values()), 1)
        flow = self.flow()
        site = sites[max(sources, key=moving.__getitem__)]
        seen = Situation(
            keys=sum(moving.values()),
            state_bytes=sum(flow.state_bytes.get(n, 0) * moving[n] // max(counts[n], 1) for n in sources),
            rate=flow.rate * sum(moving.values()) / total,
            record_bytes=flow.record_bytes,
            backlog=max([found.backlog for found in running], default=0),
            capacity=max([found.max_records * 1000 / found.period_ms for found in running], default=1.0),
            batch_ms=max([found.period_ms for found in running], default=1000.0),
            link=self._reach.link(site, to),
            is_cut=any(self._reach.is_cut(sites[name], to) for name in sources),
            is_whole=all(parts[name] == owners.select(name) for name in sources),
            is_warm=len(sources) == 1 and len(standbys) == 1,
            source_runs=len(running) == len(sources),
            destination_runs=all(name in up for name in there),
            shares_disk=self._reach.shares_disk,
            unsaved=None if flow.store is None else flow.store.unsaved,
        )
        protocol, why = choose(seen, limits)
        taken = standbys[0].move.id if protocol == "replicate" and seen.is_warm else None
        return taken, protocol, why

    def budget(self, to: str, at: str | None) -> int:
        """How many bytes each part may ship in a batch, so that no queue builds up on a slow link.

        A source still serves the keys that it has not shipped yet, and may ship them in another order.
        """
        fitting, sites = [BUDGET], dict(self.coordinator.sites)
        for name, found in self.seen().items():
            if name in sites and at in (None, sites[name]):
                carried = self._reach.link(sites[name], to).bytes_in(round(found.period_ms * 1000))
                fitting += [] if carried is None else [carried // self.shape.groups]
        return max(min(fitting), LEAST_BUDGET)


def _prefix(weights: dict[balance.Unit, int], share: float) -> list[balance.Unit]:
    """The first bins and single keys that together hold a share of the keys; of the bins, if no key is known yet."""
    total = sum(weights.values())
    if not total or share == 1:
        return list(weights)[: round(len(weights) * share)]
    taken = 0
    chosen: list[balance.Unit] = []
    for bin, weight in weights.items():
        if taken >= share * total:
            break
        taken += weight
        chosen.append(bin)
    return chosen
