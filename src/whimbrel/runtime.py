"""One stage of a running application: logs, gateway, coordinator, queries and outlet, put together and recovered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whimbrel.control.orchestrator import StageControl
from whimbrel.core import balance
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.keys import BINS, EVERYTHING, Selection
from whimbrel.core.operator import uses_timers
from whimbrel.core.protocols.auto import Limits, Situation, choose
from whimbrel.core.record import Closed, Notice, Parked, Result
from whimbrel.core.router import Router, RouteTable
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake
from whimbrel.instances import Instances
from whimbrel.log.codec import ROWS
from whimbrel.outlet.outlet import Outlet, Watch
from whimbrel.outlet.sinks import Sink
from whimbrel.pipeline import Stage
from whimbrel.spark.query import InstanceSpec, StageQuery

if TYPE_CHECKING:
    from whimbrel.app import App


SMOOTH = 4
"""How many looks the rate of records is an average of, about."""

BUDGET, LEAST_BUDGET = 8 << 20, 16 << 10
"""Bytes of state that each part ships in a batch at most, unless told; and how many on the slowest link."""


class StageRuntime:
    """All that one stage is made of, put together and recovered."""

    def __init__(self, app: App, stage: Stage, intake: Intake, sinks: list[Sink], watch: Watch) -> None:
        self.app, self.stage, self.intake = app, stage, intake
        self.instances = Instances(app, stage.name)
        self.inboxes, self.outboxes, sites = self.instances.inboxes, self.instances.outboxes, self.instances.sites
        first = next(iter(sites))
        name = f"gateway-{stage.name}"
        self.gateway = Gateway(
            Router(name, RouteTable(first)),
            app.log(f"ingress-{stage.name}"),
            app.log(f"keys-{stage.name}"),
            self.inboxes.__getitem__,
            intake.schema,
            app.clock_us,
            wall_clock=not intake.has_time,
            keep=app.keep,
        )
        self.gateway.recover(app.journal.load(f"router/{stage.name}"))
        self.coordinator = Coordinator(stage.name, RouteTable(first), sites, frozenset({name}))
        save = lambda blob: app.journal.save(f"outlet/{stage.name}", blob)  # noqa: E731
        self.outlet = Outlet(stage.name, self.outboxes, sinks, self._hear, save, app.clock_us, watch)
        self.control = StageControl(self.coordinator, [self.gateway], app.links.inbox)
        self._rate, self._looked = 0.0, (time.monotonic(), 0)
        self._ticks = self.gateway.ingress.counter("ticks") if uses_timers(stage.operator) else None

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
            inbox_of=partial(self.app.links.inbox, instance),
            checkpoint=checkpoint,
            appended=self.outlet.wake,
        )

    def _hear(self, notice: Notice, outbox: str, place: int) -> None:
        if isinstance(notice, Parked):
            self.app.dead.park(notice, outbox, place)
        elif not isinstance(notice, Closed):
            self.app.orchestrator.hear(self.stage.name, notice)

    def ingest(self, results: list[Result], number: int) -> None:
        """Take in the results of the stage before."""
        good = []
        answers = self.intake.take([result.values for result in results])
        for place, (result, taken) in enumerate(zip(results, answers, strict=True), number * ROWS):
            if isinstance(taken, tuple):
                good.append(taken)
            else:  # known by its place among all that was handed on: seqs of different keys come in no order
                source = f"results for {self.stage.name}"
                self.app.dead.put(taken, source, result.seq, result.values, counter=place)
        if good:
            self.gateway.ingest(good, "stage before", number)

    def save(self) -> None:
        """A snapshot of the router, and a tick if the operator has timers."""
        now, received = time.monotonic(), self.gateway.received
        if now > self._looked[0]:
            self._rate += ((received - self._looked[1]) / (now - self._looked[0]) - self._rate) / SMOOTH
        self._looked = now, received
        if self._ticks is not None and not (self.app.feed.ended.is_set() and self.gateway.has_told_time):
            self._ticks += 1
            self.gateway.tick(self._ticks)
        idle = self.instances.idle()  # first: the snapshot, from which a replay starts, does not name them then
        blob = self.gateway.save()
        if blob is not None:
            self.app.journal.save(f"router/{self.stage.name}", blob)
            self.gateway.saved(blob)
            self.instances.see_off(*filter(self._has_spoken, idle))

    def _has_spoken(self, instance: str) -> bool:
        """Whether an instance has done everything in its inbox, and all it said about it is delivered."""
        query = self.query(instance)
        return (query is None or query.is_drained) and self.outlet.has_delivered(instance)

    def queries(self) -> list[StageQuery]:
        """The queries of the stage that run, wherever they do."""
        found = [self.query(instance) for instance in list(self.coordinator.sites)]
        return [query for query in found if query is not None]

    def query(self, instance: str) -> StageQuery | None:
        """The query of an instance, wherever it is, if there is one. An instance may leave while somebody looks."""
        site = self.coordinator.sites.get(instance)
        return None if site is None else self.app.sites[site].queries.get(instance)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was sent has been applied and delivered, and every timer that is due has fired.

        And whoever was to leave has left.
        """
        if self._ticks is not None and not self.gateway.has_told_time:
            return False
        if self.instances.leaving:
            return False
        for instance in list(self.coordinator.sites):
            query = self.query(instance)
            if query is None or not query.is_drained:
                return False
        return self.outlet.is_idle

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
            unknown = sorted(wanted - self.gateway.keys.keys())
            if unknown:
                raise UnknownName("key", unknown[0], list(self.gateway.keys)[:10])
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
        return balance.select(_prefix(balance.weigh(whole, list(self.gateway.keys)), share), whole)

    def spread(self, selection: Selection, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What of a selection lies elsewhere, dealt out to these instances at a site."""
        elsewhere = {name: selection for name in list(self.coordinator.sites) if name not in self.instances.at(site)}
        return self._pairs(elsewhere | dict.fromkeys(to), to, balance.place)

    def level(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What lies at a site, dealt out to these instances there as evenly as it goes, with as few moves."""
        return self._pairs(dict.fromkeys(self.instances.at(site)), to, balance.level)

    def clear(self, site: str, to: Sequence[str]) -> list[tuple[Selection, str]]:
        """What lies at a site, dealt out to these instances elsewhere."""
        return self._pairs(dict.fromkeys([*self.instances.at(site), *to]), to, balance.place)

    def _pairs(
        self, among: Mapping[str, Selection | None], to: Sequence[str], plan: Callable[..., balance.Transfers]
    ) -> list[tuple[Selection, str]]:
        known, owners = list(self.gateway.keys), self.coordinator.table.owners
        parts = {name: owners.select(name, within) for name, within in among.items()}
        transfers = plan({name: balance.weigh(part, known) for name, part in parts.items()}, to)
        return [(balance.select(units, parts[source]), name) for (source, name), units in sorted(transfers.items())]

    def counts(self) -> Counter[str]:
        """By instance: how many of the known keys it has."""
        owners = self.coordinator.table.owners
        return Counter(owners[key] for key in list(self.gateway.keys))

    def choose(self, selection: Selection, to: str, limits: Limits) -> tuple[str | None, str, list[str]]:
        """What `auto` takes to bring a selection to a site: a standby that is there, or else a protocol; and why."""
        owners, sites, counts = self.coordinator.table.owners, dict(self.coordinator.sites), self.counts()
        sources = [name for name in sorted({*owners.values(selection)}) if sites[name] != to]
        if not sources:
            return None, "live", []
        parts = {name: owners.select(name, selection) for name in sources}
        moving = {name: sum(1 for key in list(self.gateway.keys) if key in part) for name, part in parts.items()}
        there = self.instances.at(to)
        pairs = [(parts[name], other) for name in sources for other in there]
        standbys = [found for pair in pairs if (found := self.coordinator.standby(*pair)) is not None]
        running = [query for query in map(self.query, sources) if query is not None and query.is_active]
        total = max(sum(counts.values()), 1)
        period = max([query.period_ms for query in running], default=1000.0)
        site = sites[max(sources, key=moving.__getitem__)]
        seen = Situation(
            keys=sum(moving.values()),
            state_bytes=sum(self.state_bytes(name) * moving[name] // max(counts[name], 1) for name in sources),
            rate=self._rate * sum(moving.values()) / total,
            record_bytes=self.gateway.received_bytes // max(self.gateway.received, 1),
            backlog=max([query.backlog for query in running], default=0),
            capacity=max([query.spec.max_records * 1000 / query.period_ms for query in running], default=1.0),
            batch_ms=period,
            link=self.app.links.link(site, to),
            is_cut=any(self.app.links.is_cut(sites[name], to) for name in sources),
            is_whole=all(parts[name] == owners.select(name) for name in sources),
            is_warm=len(sources) == 1 and len(standbys) == 1,
            source_runs=len(running) == len(sources),
            destination_runs=not there or all(self._runs(name) for name in there),
        )
        protocol, why = choose(seen, limits)
        taken = standbys[0].move.id if protocol == "replicate" and seen.is_warm else None
        return taken, protocol, why

    def _runs(self, instance: str) -> bool:
        query = self.query(instance)
        return query is not None and query.is_active

    def state_bytes(self, instance: str) -> int:
        """How much state an instance has, as its parts last said."""
        return sum(size for (name, _), size in list(self.outlet.state_bytes.items()) if name == instance)

    def budget(self, to: str, at: str | None) -> int:
        """How many bytes each part may ship in a batch, so that no queue builds up in a slow link.

        What a source has not shipped yet it still serves, and may ship in another order.
        """
        fitting = [BUDGET]
        for instance, site in list(self.coordinator.sites.items()):
            query = self.query(instance)
            if query is not None and at in (None, site):
                carried = self.app.links.link(site, to).bytes_in(round(query.period_ms * 1000))
                fitting += [] if carried is None else [carried // self.stage.groups]
        return max(min(fitting), LEAST_BUDGET)

    def status(self) -> dict[str, Any]:
        """How the stage is, as plain data."""
        counts = self.counts()
        instances = {}
        for instance, site in list(self.coordinator.sites.items()):
            query = self.query(instance)
            instances[instance] = {
                "site": site,
                "keys": counts[instance],
                "state_bytes": self.state_bytes(instance),
                "running": query is not None and query.is_active,
                "batch_ms": round(query.batch_ms) if query is not None else None,
                "error": told(query.exception) if query is not None else None,
            }
        return {
            "instances": instances,
            "migrations": {m.move.id: m.phase for m in self.coordinator.migrations.values()},
            "error": told(self.outlet.error),
        }


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


def told(error: BaseException | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
