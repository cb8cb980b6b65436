"""One stage as the orchestrator sees it: routes, instances, known keys; and what an order to it means.

Nothing here is on a record's way. What others know is asked through their ports; what lies in logs is read there: the
known keys, and how far inboxes have been read.
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
from whimbrel.log.folder import Logs
from whimbrel.log.readers import is_drained
from whimbrel.orchestrator.decisions import RestoreOrder
from whimbrel.orchestrator.instances import Instances
from whimbrel.orchestrator.known_keys import KnownKeys
from whimbrel.orchestrator.ports import FlowStatus, GatewayPort, SitePort
from whimbrel.site.links import Pair
from whimbrel.site.status import InstanceStatus

BUDGET, LEAST_BUDGET = 8 << 20, 16 << 10
"""Bytes of state that each part ships in a batch at most, unless told; and how many on the slowest link."""


class Shape(NamedTuple):
    """Into how many parts an instance of a stage is cut, and over how many tasks Spark spreads them."""

    groups: int
    partitions: int = 1


@dataclass
class Reach:
    """What the orchestrator reaches: the others, the logs, and what it was told of the links."""

    sites: Mapping[str, SitePort]
    gateway: GatewayPort
    logs: Logs
    links: Mapping[Pair, Link]
    is_dead: Callable[[str], bool] = lambda site: False
    """Whether a site is thought dead."""

    def link(self, origin: str, target: str) -> Link:
        """The link between two places, which may be the same."""
        return self.links.get((origin, target), Link())

    def is_cut(self, origin: str, target: str) -> bool:
        """Whether nothing gets through between two places."""
        found = self.sites[origin].status().links.get(f"{origin}->{target}")
        return found is not None and found.cut


class StageControl:
    """One stage: who has which keys, and how to bring them elsewhere."""

    def __init__(self, coordinator: Coordinator, instances: Instances, shape: Shape, reach: Reach) -> None:
        self.name, self.coordinator, self.instances = coordinator.stage, coordinator, instances
        self.shape, self._reach = shape, reach
        self.keys = KnownKeys(reach.logs.log(f"keys-{coordinator.stage}"))

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def seen(self) -> dict[str, InstanceStatus]:
        """How the instances are that run or ran, each at its site."""
        places = dict(self.coordinator.sites)
        sites = {site: self._reach.sites[site].status().instances for site in {*places.values()}}
        return {name: sites[site][name] for name, site in places.items() if name in sites[site]}

    def flow(self) -> FlowStatus:
        """How records flow through the stage."""
        return self._reach.gateway.status().stages.get(self.name, FlowStatus())

    def order_checkpoint(self) -> None:
        """Let everything that has changed be saved now. Raises `Refused` if there is no central store."""
        self._reach.gateway.order_checkpoint(self.name)

    def has_applied(self, instance: str) -> bool:
        """Whether everything that lies in an instance's inbox now has been applied, and what it said is written."""
        return is_drained(self._reach.logs.inbox(instance))

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent has been applied and delivered, and every timer that is due has fired.

        And whoever was to leave has left.
        """
        owners, sites = self.owners(), dict(self.coordinator.sites)
        # Whoever is dead and has no keys any more has nothing to say that would count.
        heard = [name for name, site in sites.items() if name in owners or not self._reach.is_dead(site)]
        return (
            not [name for name in self.instances.leaving if name in heard]
            and all(map(self.has_applied, heard))
            and self._reach.gateway.is_drained(self.name)
        )

    def owners(self) -> set[str]:
        """The instances that own keys."""
        return self.coordinator.table.owners.values()

    def see_off(self) -> None:
        """Let those leave who are to, and have nothing to do or to say any more."""
        idle = self.instances.idle()
        if idle and self._reach.gateway.save(self.name):  # behind `idle`: no replay will name them
            spoken = [name for name in idle if self.has_applied(name)]
            self.instances.see_off(*(n for n in spoken if self._reach.gateway.has_delivered(self.name, n)))

    def counts(self) -> Counter[str]:
        """By instance: how many of the known keys it has."""
        return self.keys.counts(self.coordinator.table)

    def status(self, flow: FlowStatus) -> dict[str, Any]:
        """How the stage is, as plain data. `flow`: how records flow through it."""
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
            "lost": sorted(self.coordinator.lost()),
            "error": flow.error,
            "store": msgspec.to_builtins(flow.store),
        }

    # ── What an order means ──────────────────────────────────────────────────────────────────────────────────────

    def select(
        self,
        keys: Iterable[str] | None,
        bins: Iterable[int] | None,
        share: float | None,
        to: str,
        at: str | None,
    ) -> Selection:
        """The keys that a user means. Raises if that makes no sense."""
        if sum(given is not None for given in (keys, bins, share)) > 1:
            raise Refused("give keys, or bins, or a share: one of them")
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
            raise Refused(f"a share lies between 0 and 1, not {share}")
        owners, sites = self.coordinator.table.owners, self.coordinator.sites
        parts = [owners.select(i) for i, site in list(sites.items()) if site != to and at in (None, site)]
        whole = Selection(*(frozenset().union(*(getattr(p, f) for p in parts)) for f in ("bins", "keys", "without")))
        if share is None:
            return whole
        return balance.select(_prefix(balance.weigh(whole, self.keys.now()), share), whole)

    def sources(self, selection: Selection, to: str) -> list[str]:
        """Who must give some of a selection that shall be at a site."""
        sites, lost = dict(self.coordinator.sites), self.coordinator.lost()
        owners = self.coordinator.table.owners.values(selection)
        return sorted(name for name in owners if sites[name] != to or name in lost)

    def missing(self, selection: Selection, to: str) -> list[str]:
        """Who of those cannot: is at a dead site, or lost already."""
        sites, lost = dict(self.coordinator.sites), self.coordinator.lost()
        found = self.sources(selection, to)
        return [name for name in found if name in lost or self._reach.is_dead(sites[name])]

    def taking(self, site: str, lost: str) -> AbstractContextManager[list[str]]:
        """Those at a site, among which one can have what a lost one had: if there is none, another one is started."""
        here = [name for name in self.instances.at(site) if name not in self.instances.leaving]
        is_there = bool({*here} - {lost} - self.coordinator.lost())
        return self.instances.staying(site, self.counts(), None if is_there else len(here) + 1)

    def restorations(
        self, lost: Sequence[str], to: Sequence[str], checkpoint: int | None, **options: Any
    ) -> list[RestoreOrder]:
        """The orders that restore all that some instances had, each at one of these, which share the work."""
        counts = self.counts()
        fit = sorted({*to} - {*lost} - self.coordinator.lost(), key=lambda name: (counts[name], name)) or list(to)
        return [
            RestoreOrder(self.name, name, fit[number % len(fit)], checkpoint, options)
            for number, name in enumerate(lost)
        ]

    def check_whole(self, lost: Sequence[str], selection: Selection) -> None:
        """Raise if not all that these have is selected."""
        owners = self.coordinator.table.owners
        for name in lost:
            if owners.select(name, selection) != owners.select(name):
                raise Refused(
                    f"restore brings back all that {name} had, and some of its keys were not selected; "
                    f"select all of them, with at={self.coordinator.sites[name]!r} for instance"
                )

    def spread(
        self, selection: Selection, site: str, to: Sequence[str], without: Sequence[str] = ()
    ) -> list[tuple[Selection, str]]:
        """What of a selection lies elsewhere, but not with some, dealt out to these instances at a site."""
        here = {*self.instances.at(site), *without}
        elsewhere = {name: selection for name in list(self.coordinator.sites) if name not in here}
        return self._pairs(elsewhere | dict.fromkeys(to), to, balance.place)

    def level(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What lies at a site, dealt out to these instances there as evenly as it goes, with as few moves."""
        return self._pairs(dict.fromkeys(self.instances.at(site)), to, balance.level)

    def clear(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What lies at a site, dealt out to these instances elsewhere."""
        return self._pairs(dict.fromkeys([*self.instances.at(site), *to]), to, balance.place)

    def empty(self, instance: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What an instance has, dealt out to these."""
        return self._pairs(dict.fromkeys([instance, *to]), to, balance.place)

    def _pairs(
        self, among: Mapping[str, Selection | None], to: Sequence[str], plan: Callable[..., balance.Transfers]
    ) -> list[tuple[Selection, str]]:
        known, owners = self.keys.now(), self.coordinator.table.owners
        parts = {name: owners.select(name, within) for name, within in among.items()}
        transfers = plan({name: balance.weigh(part, known) for name, part in parts.items()}, to)
        return [(balance.select(units, parts[source]), name) for (source, name), units in sorted(transfers.items())]

    def choose(self, selection: Selection, to: str, limits: Limits) -> tuple[str | None, str, list[str]]:
        """What `auto` takes to bring a selection to a site: a standby that is there, or else a protocol; and why."""
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
            unsaved=None if flow.store is None else flow.store.unsaved,
        )
        protocol, why = choose(seen, limits)
        taken = standbys[0].move.id if protocol == "replicate" and seen.is_warm else None
        return taken, protocol, why

    def budget(self, to: str, at: str | None) -> int:
        """How many bytes each part may ship in a batch, so that no queue builds up in a slow link.

        What a source has not shipped yet it still serves, and may ship in another order.
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
